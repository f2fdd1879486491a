"""Sentence embeddings over HTTP, batched: concurrent calls share one pass through the model."""

from __future__ import annotations

from functools import cache

from gpufn import Batch, gpu_function
from minilm import MiniLM


@cache
def model() -> MiniLM:
    return MiniLM()


@gpu_function(batch=Batch(max_size=32, max_wait_ms=2), idle_timeout=30)
def embed(texts: list[list[str]]) -> list[list[list[float]]]:
    """Return unit vectors of 384 numbers, one per text: the closer the meaning, the larger the dot product.

    A caller sends one list of texts. With `batch`, the parameter holds one such list for each call of the batch.
    """
    vectors = iter(model().encode([text for call in texts for text in call]).tolist())
    return [[next(vectors) for _ in call] for call in texts]
