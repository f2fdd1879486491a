"""A peer's model: the same ONNX file, threads and wait settings as gpufn's engine, from MODEL, THREADS and SESSION."""

from __future__ import annotations

import json
import os

import numpy as np
import onnxruntime

MAX_BATCH = int(os.environ["MAX_BATCH"])
_DTYPES = {"tensor(float)": np.float32, "tensor(int64)": np.int64}


class Rows:
    """An ONNX model with one input and one output, both with a free first dimension."""

    def __init__(self) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = int(os.environ["THREADS"])
        for entry, value in json.loads(os.environ["SESSION"]).items():
            options.add_session_config_entry(entry, value)
        self._session = onnxruntime.InferenceSession(os.environ["MODEL"], options, providers=["CPUExecutionProvider"])
        self.input, self.output = self._session.get_inputs()[0], self._session.get_outputs()[0]
        self.dtype = _DTYPES[self.input.type]
        self.shape = self.input.shape[1:]  # of a row

    def read(self, body: bytes) -> np.ndarray:
        """Return one row from its raw bytes."""
        return np.frombuffer(body, self.dtype).reshape(self.shape)

    def run(self, rows: np.ndarray) -> np.ndarray:
        return self._session.run([self.output.name], {self.input.name: rows})[0]
