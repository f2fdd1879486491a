"""Sentence embeddings over HTTP, batched: concurrent calls share one pass through the model."""

from __future__ import annotations

from functools import cache

from gpufn import Batch, gpu_function
from minilm import MiniLM


@cache
def model() -> MiniLM:
    return MiniLM()


def encode(calls: list[list[str]]) -> list[list[list[float]]]:
    vectors = iter(model().encode([text for call in calls for text in call]).tolist())
    return [[next(vectors) for _ in call] for call in calls]


@gpu_function(batch=Batch(max_size=32, max_wait_ms=2), idle_timeout=30)
def embed(texts: list[list[str]]) -> list[list[list[float]]]:
    """Return unit vectors of 384 numbers, one per text: the closer the meaning, the larger the dot product.

    A caller sends one list of texts. With `batch`, the parameter holds one such list for each call of the batch.
    """
    return encode(texts)


@gpu_function(name="all-minilm-l6-v2", serves="openai-embeddings", batch=Batch(max_size=32, max_wait_ms=2))
def openai_embeddings(input: list[list[str]]) -> list[list[list[float]]]:  # noqa: A002  as OpenAI names it
    """The same for OpenAI's clients: `client.embeddings.create(model="all-minilm-l6-v2", input=[...])`."""
    return encode(input)
