"""LitServe: one worker process."""

from __future__ import annotations

import os

import litserve


class Echo(litserve.LitAPI):
    def setup(self, device: str) -> None:
        pass

    def decode_request(self, request: dict[str, int]) -> int:
        return request["x"]

    def predict(self, x: int) -> int:
        return x

    def encode_response(self, output: int) -> dict[str, int]:
        return {"x": output}


if __name__ == "__main__":
    server = litserve.LitServer(Echo(api_path="/echo"), accelerator="cpu", workers_per_device=1)
    server.run(port=int(os.environ["PORT"]), generate_client_file=False, log_level="error")
