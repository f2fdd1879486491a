"""One function, two models: the second model searches for the vector that the first makes of a text."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpufn import Model, gpu_function
from words import CITIES, trigrams


@gpu_function(
    models={"encoder": Model("encoder.onnx", max_batch=64), "index": Model("index.onnx", max_batch=64)},
    concurrency=8,
    idle_timeout=30,
)
def find(names: list[str], encoder: Any, index: Any) -> list[list[dict[str, Any]]]:
    """Return, for each name, the three cities with the most similar spelling, best match first."""
    vectors = encoder(np.array([trigrams(name) for name in names]))
    matches = index(vectors)
    return [
        [{"city": CITIES[place], "score": round(float(score), 3)} for place, score in zip(*row, strict=True)]
        for row in zip(matches.places, matches.scores, strict=True)
    ]
