"""BentoML with a model: one worker, adaptive batching on. Rows as base64 in JSON, in and out.

BentoML sends numpy arrays as lists of numbers in JSON, which takes several times as long. Its pickle format is only for
calls between its own services.
"""

from __future__ import annotations

import os
import sys
from base64 import b64decode, b64encode

import bentoml
import numpy as np
from onnx_rows import MAX_BATCH, Rows


@bentoml.service(workers=1, traffic={"timeout": 60}, logging={"access": {"enabled": False}})
class Model:
    def __init__(self) -> None:
        self.rows = Rows()

    @bentoml.api(batchable=True, max_batch_size=MAX_BATCH, max_latency_ms=1000)
    def infer(self, rows: list[str]) -> list[str]:
        outputs = self.rows.run(np.stack([self.rows.read(b64decode(row)) for row in rows]))
        return [b64encode(output).decode() for output in outputs]


if __name__ == "__main__":
    os.chdir(os.path.dirname(os.path.abspath(__file__)))
    serve = [sys.executable, "-m", "bentoml", "serve", "bentoml_model_app:Model"]
    os.execv(sys.executable, [*serve, "--port", os.environ["PORT"], "--host", "127.0.0.1"])
