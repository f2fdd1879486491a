"""Compile the model in a folder with the TensorRT compiler and print the outcome as JSON.

A separate process, because it replaces TensorRT by the parts that test_tensorrt_rtx.py put together.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import msgspec

from gpufn_builder.compilers.base import CompileJob
from gpufn_core.errors import BuildFailed
from gpufn_core.spec.model_spec import ShapeProfile


def main(folder: Path) -> None:
    sys.modules["tensorrt"] = importlib.import_module("tensorrt_bindings")
    compiler = importlib.import_module("gpufn_builder.compilers.tensorrt").TensorRT()
    job = CompileJob(
        model=folder / "model.onnx",
        inputs=(),
        outputs=(),
        profiles=msgspec.json.decode((folder / "profiles.json").read_bytes(), type=tuple[ShapeProfile, ...]),
        flags={"builder_optimization_level": "3", "tf32": "0", "workspace_bytes": str(1 << 30)},
        device="NVIDIA L4",
        golden={},
        folder=folder,
        caches=folder,
    )
    progress_values: list[float] = []
    message = node = ""
    try:
        compiler.compile(job, lambda progress, detail: progress_values.append(progress))
    except BuildFailed as failure:
        message, node = failure.message, failure.node
    print(json.dumps({"message": message, "node": node, "progress_values": progress_values}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
