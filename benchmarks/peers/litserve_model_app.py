"""LitServe with a model: one worker process, batching and fast queue on. The bytes of a row in and out.

FastAPI reads the body as the annotation says; LitServe's default, JSON, takes several times as long for tensors.
"""

import os
from typing import Annotated

import litserve
import numpy as np
from fastapi import Body, Response
from onnx_rows import MAX_BATCH, Rows


class Model(litserve.LitAPI):
    def setup(self, device: str) -> None:
        self.rows = Rows()

    def decode_request(self, request: Annotated[bytes, Body(media_type="application/octet-stream")]) -> np.ndarray:
        row = self.rows.read(request)
        return row if MAX_BATCH > 1 else row[None]

    def predict(self, x: np.ndarray) -> np.ndarray:
        return self.rows.run(x)

    def encode_response(self, output: np.ndarray) -> Response:
        return Response(output.tobytes(), media_type="application/octet-stream")


if __name__ == "__main__":
    api = Model(api_path="/infer", max_batch_size=MAX_BATCH, batch_timeout=float(os.environ.get("WAIT_S", "0")))
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1, fast_queue=True)
    server.run(port=int(os.environ["PORT"]), generate_client_file=False, log_level="error")
