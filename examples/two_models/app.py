"""One function, two models: what the first makes of a text is what the second looks for."""

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
    """For each name the three cities that are spelled most like it, the nearest first."""
    vectors = encoder(np.array([trigrams(name) for name in names]))
    found = index(vectors)
    return [
        [{"city": CITIES[place], "score": round(float(score), 3)} for place, score in zip(*row, strict=True)]
        for row in zip(found.places, found.scores, strict=True)
    ]
