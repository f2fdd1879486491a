"""Handmade engines: an ONNX graph of one or two nodes, run by ONNX Runtime on the CPU, in a folder as on a node."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
from onnx import TensorProto, helper

from gpufn_core.domain.devices.engine import Accuracy, Backend, EngineIdentity, EngineManifest
from gpufn_core.spec.model_spec import ModelFile, Precision, ShapeProfile, ShapeRange, TensorSpec
from gpufn_runtime.worker.engines.base import Array, Arrays

TYPES = {
    "FP32": TensorProto.FLOAT, "FP64": TensorProto.DOUBLE, "FP16": TensorProto.FLOAT16, "BF16": TensorProto.BFLOAT16,
    "BOOL": TensorProto.BOOL, "BYTES": TensorProto.STRING,
    **{f"{sign}INT{bits}": getattr(TensorProto, f"{sign}INT{bits}") for sign in ("", "U") for bits in (8, 16, 32, 64)},
}  # fmt: skip
EXACT = Accuracy(max_abs=0.0, rel_l2=0.0, cosine=1.0)


def tensor(name: str, datatype: str = "FP32", *shape: int) -> TensorSpec:
    return TensorSpec(name, datatype, shape or (-1, 2))


def profile(**shapes: tuple[Sequence[int], Sequence[int], Sequence[int]]) -> ShapeProfile:
    return ShapeProfile({name: ShapeRange(*map(tuple, bounds)) for name, bounds in shapes.items()})


def manifest(
    inputs: Sequence[TensorSpec] = (tensor("x"),),
    outputs: Sequence[TensorSpec] = (tensor("y"),),
    *,
    profiles: Sequence[ShapeProfile] = (),
    batched: bool = True,
    max_batch: int = 8,
    backend: Backend = Backend.ORT_CPU,
    recipe: Precision = Precision.FP32,
    accuracy: Accuracy | None = EXACT,
    files: Sequence[ModelFile] = (),
    settings: Mapping[str, int | str] | None = None,
) -> EngineManifest:
    identity = EngineIdentity(
        model="m", recipe=recipe, tools={}, profiles=tuple(profiles), max_batch=max_batch, samples="", flags={},
        backend=backend, versions={}, device="cpu", compute_capability="", os="linux", arch="x86_64",
    )  # fmt: skip
    return EngineManifest(
        key=identity.key, identity=identity, model="model.onnx", inputs=tuple(inputs), outputs=tuple(outputs),
        profiles=tuple(profiles), batched=batched, max_batch=max_batch, files=tuple(files),
        settings=dict(settings or {"intra_op_threads": 1}), accuracy=accuracy, latency=None, built_at=0.0,
        arithmetic=recipe,
    )  # fmt: skip


def onnx_model(nodes: Sequence[Any], inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> bytes:
    """`nodes` are (op, inputs, outputs), or an op that maps the first input to the first output."""

    def values(specs: Sequence[TensorSpec]) -> list[onnx.ValueInfoProto]:
        return [
            helper.make_tensor_value_info(
                spec.name, TYPES[spec.datatype], [None if size < 0 else size for size in spec.shape]
            )
            for spec in specs
        ]

    made = [
        helper.make_node(node, [inputs[0].name], [outputs[0].name])
        if isinstance(node, str)
        else helper.make_node(*node)
        for node in nodes
    ]
    graph = helper.make_graph(made, "g", values(inputs), values(outputs))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    return bytes(model.SerializeToString())


def write_engine(
    folder: Path,
    golden_in: Mapping[str, Any],
    golden_out: Mapping[str, Any],
    *,
    nodes: Sequence[Any] = ("Neg",),
    inputs: Sequence[TensorSpec] = (tensor("x"),),
    outputs: Sequence[TensorSpec] = (tensor("y"),),
    **fields: Any,
) -> Path:
    """Write an engine into `folder`; returns its path as in a WorkerConfig."""
    folder.mkdir(parents=True)
    (folder / "model.onnx").write_bytes(onnx_model(nodes, inputs, outputs))
    arrays = {f"in.{name}": array for name, array in golden_in.items()}
    arrays |= {f"out.{name}": array for name, array in golden_out.items()}
    np.savez(folder / "golden.npz", **arrays)
    files = [
        ModelFile(name, hashlib.sha256((folder / name).read_bytes()).hexdigest(), (folder / name).stat().st_size)
        for name in ("model.onnx", "golden.npz")
    ]
    made = manifest(inputs, outputs, files=files, **fields)
    (folder / "manifest.json").write_bytes(msgspec.json.encode(made))
    return folder


def write_negation(folder: Path, **fields: Any) -> Path:
    """y = -x, rows of two float32."""
    x = np.array([[1, -2], [3, 4]], np.float32)
    return write_engine(folder, {"x": x}, {"y": -x}, **fields)


class FakeEngine:
    """y = -x for every input; `runs` has the inputs of each run. `before` is called first, in the run's thread."""

    def __init__(self, made: EngineManifest | None = None, parallel: int = 1, before: Any = None) -> None:
        self.manifest = made or manifest()
        self.parallel = parallel
        self.runs: list[Arrays] = []
        self.parked_bytes = 0
        self._before = before

    def run(self, inputs: Arrays) -> Arrays:
        if self._before is not None:
            self._before(inputs)
        self.runs.append(inputs)
        pairs = zip(self.manifest.outputs, inputs.values(), strict=True)
        return {spec.name: -array for spec, array in pairs}

    def warm_up(self, inputs: Arrays) -> None:
        self.run(inputs)

    def park(self) -> None:
        pass

    def resume(self) -> None:
        pass

    def close(self) -> None:
        pass


def rows(*values: float) -> Array:
    """[[v, v], …] as float32."""
    return np.repeat(np.array(values, np.float32)[:, None], 2, axis=1)
