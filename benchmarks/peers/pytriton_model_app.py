"""PyTriton with a model: Triton's dynamic batcher, the Open Inference Protocol with binary tensors."""

from __future__ import annotations

import os
import signal
import socket
import sys
import sysconfig

import numpy as np
from onnx_rows import MAX_BATCH, Rows
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main() -> None:
    # Triton's own processes load the first libpython that they find, which may belong to another interpreter.
    os.environ["LD_LIBRARY_PATH"] = sysconfig.get_config_var("LIBDIR")
    # Triton shuts down cleanly and releases its shared memory.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    rows = Rows()

    @batch
    def infer(**inputs: np.ndarray) -> dict[str, np.ndarray]:
        return {rows.output.name: rows.run(inputs[rows.input.name])}

    config = TritonConfig(
        http_address="127.0.0.1",
        http_port=int(os.environ["PORT"]),
        grpc_address="127.0.0.1",
        grpc_port=int(os.environ.get("GRPC_PORT") or free_port()),
        allow_metrics=False,
        exit_timeout_secs=5,
    )
    with Triton(config=config) as triton:
        triton.bind(
            model_name="model",
            infer_func=infer,
            inputs=[Tensor(name=rows.input.name, dtype=rows.dtype, shape=tuple(rows.shape))],
            outputs=[Tensor(name=rows.output.name, dtype=np.float32, shape=tuple(rows.output.shape[1:]))],
            config=ModelConfig(max_batch_size=MAX_BATCH, batching=True, batcher=DynamicBatcher()),
            strict=False,
        )
        triton.serve()


if __name__ == "__main__":
    main()
