"""Engines: the platform builds and serves a model, and the result is compared with ONNX Runtime on the CPU."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from gpu_check.findings import Finding, Table
from gpu_check.machine import CannotRun, Machine
from gpu_check.platform import Platform, up

_CHANNELS: Final = 32
_SIDE: Final = 32
_LAYERS: Final = 4
_ROWS: Final = 8
_NAME: Final = "gpu-check-net"
# Some virtual machines grow their memory on demand: the initial size does not limit what a build may use.
_BUILD_MEMORY: Final = "32Gi"
_SAMPLES: Final = 8
_ALLOWED_REL_L2: Final = 5e-3  # float32 stays far below this, tf32 below; the preset of fp16
_LEAST_COSINE: Final = {"fp32": 0.9999, "fp16": 0.9995, "int8": 0.99}  # the presets of gpufn, where it has one
_CUDA, _TENSORRT, _CPU = "onnxruntime-cuda", "tensorrt", "onnxruntime-cpu"


def onnxruntime_engine(machine: Machine) -> Finding:
    """Use CUDA if there is a GPU that ONNX Runtime supports, else the CPU."""
    for module in ("numpy", "onnx", "onnxruntime"):
        machine.need_module(module)
    if not machine.gpus or machine.pretended:
        return _built_and_served(machine, _CPU)
    import onnxruntime

    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        raise CannotRun(f"onnxruntime {onnxruntime.__version__} has no CUDA support: install onnxruntime-gpu")
    return _built_and_served(machine, _CUDA)


def tensorrt_engine(machine: Machine) -> Finding:
    machine.real_gpu()
    for module in ("numpy", "onnx", "onnxruntime", "tensorrt"):
        machine.need_module(module)
    return _built_and_served(machine, _TENSORRT)


def fp16_engine(machine: Machine) -> Finding:
    return _reduced(machine, "fp16")


def int8_engine(machine: Machine) -> Finding:
    return _reduced(machine, "int8")


def data_dependent(machine: Machine) -> Finding:
    """A model whose output has as many columns as its input has positive elements: NonZero after Relu."""
    import numpy as np

    for module in ("numpy", "onnx", "onnxruntime"):
        machine.need_module(module)
    on_gpu = bool(machine.gpus) and not machine.pretended
    where = ("--gpu", "any") if on_gpu else ()
    rows, wrong = [], []
    with tempfile.TemporaryDirectory() as name, up(machine, GPUFN_BUILD_MEMORY=_BUILD_MEMORY) as platform:
        model = Path(name) / "net.onnx"
        model.write_bytes(_positions())
        platform.gpufn("deploy", model, "--name", _NAME, "--idle-timeout", "60", *where)
        for count in (0, 1, _SIDE, 3):
            x = np.where(np.arange(_SIDE) < count, 1, -1).astype(np.float32)[None]
            answer = _call(platform, "x", x)[1]["outputs"][0]
            rows.append((count, str(answer["shape"])))
            if np.array(answer["data"]).reshape(answer["shape"]).tolist() != [list(each) for each in np.nonzero(x > 0)]:
                wrong.append(f"{count} positive elements: {answer}")
        served = next(iter(platform.get(f"/v1/models/{_NAME}")["engines"].values()))[0]["backend"]
    if "tensorrt" in machine.packages and on_gpu and served != _TENSORRT:
        wrong.append(f"{served} serves the model, and not TensorRT")
    return Finding(
        summary=f"{served} serves shapes {', '.join(shape for _, shape in rows)}",
        tables=[Table(("positive elements", "shape of the output"), rows)],
        wrong=wrong,
    )


def _reduced(machine: Machine, precision: str) -> Finding:
    """Use TensorRT if it is installed, else ONNX Runtime with CUDA; the CPU without a GPU."""
    for module in ("numpy", "onnx", "onnxruntime"):
        machine.need_module(module)
    if not machine.gpus or machine.pretended:
        return _built_and_served(machine, _CPU, precision)
    return _built_and_served(machine, _TENSORRT if "tensorrt" in machine.packages else _CUDA, precision)


def _built_and_served(machine: Machine, backend: str, precision: str = "fp32") -> Finding:
    import numpy as np

    on_gpu = backend != _CPU
    random = np.random.default_rng(0)
    images = random.standard_normal((_ROWS, 3, _SIDE, _SIDE)).astype(np.float32)
    with tempfile.TemporaryDirectory() as name, up(machine, GPUFN_BUILD_MEMORY=_BUILD_MEMORY) as platform:
        model = Path(name) / "net.onnx"
        model.write_bytes(_network())
        samples = Path(name) / "samples.npz"
        np.savez(samples, image=random.standard_normal((_SAMPLES, _ROWS, 3, _SIDE, _SIDE)).astype(np.float32))
        options = ("--max-batch", str(_ROWS), "--precision", precision, "--samples", samples)
        device = ("--device", machine.gpus[0].name) if on_gpu else ()
        started = time.perf_counter()
        report = _built(platform, model, Path(name) / "report.json", *options, *device)
        build_s = time.perf_counter() - started
        rows = {row["backend"]: row for row in report["candidates"]}
        candidate = rows.get(backend, {"reason": "the builder does not know this backend"})
        if candidate["reason"]:
            raise RuntimeError(f"{backend}: {candidate['reason']}\n{candidate.get('log', '')}")
        where = ("--gpu", "any") if on_gpu else ()
        platform.gpufn("deploy", model, "--name", _NAME, *options, "--idle-timeout", "60", *where)
        first_s, scores = _infer(platform, images)
        warm = sorted(_infer(platform, images)[0] for _ in range(50))
        served = platform.get(f"/v1/models/{_NAME}")["engines"]
    expected = _on_cpu(_network(), images)
    error = float(np.linalg.norm(scores - expected) / np.linalg.norm(expected))
    cosine = float(np.vdot(scores, expected) / np.linalg.norm(scores) / np.linalg.norm(expected))
    best = next(iter(served.values()))[0]["backend"] if served else ""
    figures = {
        "backend": backend,
        "precision": precision,
        "cosine": cosine,
        "build_s": build_s,
        "serves_with": best,
        "rel_l2_of_the_answer": error,
        "first_call_ms": first_s * 1e3,
        "warm_p50_ms": warm[len(warm) // 2] * 1e3,
        "candidates": list(rows.values()),
    }
    wrong = [] if cosine >= _LEAST_COSINE[precision] else [f"the result's cosine with the CPU's is {cosine:.4f}"]
    if precision != "int8" and error > _ALLOWED_REL_L2:
        wrong.append(f"the result differs from the CPU's by {error:.2g}")
    return Finding(
        summary=f"{precision}, {backend} built in {build_s:.0f} s, run p50 {_ms(candidate)}; {best} serves, "
        f"rel. L2 {error:.1e}",
        figures=figures,
        tables=[Table(("engine", "run p50", "rel. L2", "note"), [_row(row) for row in rows.values()])],
        wrong=wrong,
    )


def _built(platform: Platform, model: Path, report: Path, *options: str | Path) -> Any:
    platform.gpufn("build", model, "--report", report, *options)
    return json.loads(report.read_bytes())


def _infer(platform: Platform, images: Any) -> tuple[float, Any]:
    import numpy as np

    seconds, answer = _call(platform, "image", images)
    output = answer["outputs"][0]
    return seconds, np.array(output["data"], np.float32).reshape(output["shape"])


def _call(platform: Platform, name: str, array: Any) -> tuple[float, Any]:
    """Return the seconds of a call with one input, and its response."""
    head = {
        "name": name,
        "shape": array.shape,
        "datatype": "FP32",
        "parameters": {"binary_data_size": array.nbytes},
    }
    header = json.dumps({"inputs": [head], "parameters": {"binary_data_output": False}}).encode()
    started = time.perf_counter()
    answer = platform.post(
        f"/v2/models/{_NAME}/infer",
        header + array.tobytes(),
        {"Inference-Header-Content-Length": str(len(header)), "Content-Type": "application/octet-stream"},
    )
    return time.perf_counter() - started, answer


def _on_cpu(model: bytes, images: Any) -> Any:
    import onnxruntime

    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    return session.run(None, {"image": images})[0]


def _positions() -> bytes:
    """Return a model: x FP32 [1, 32] → positions INT64 [2, n] of its positive elements."""
    from onnx import TensorProto, helper

    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["positive"]), helper.make_node("NonZero", ["positive"], ["positions"])],
        "positions",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, _SIDE])],
        [helper.make_tensor_value_info("positions", TensorProto.INT64, [2, "n"])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    serialised: bytes = model.SerializeToString()
    return serialised


def _network() -> bytes:
    """Return a small convolutional network with shortcuts: image FP32 [n, 3, 32, 32] → scores FP32 [n, 10]."""
    import numpy as np
    from onnx import TensorProto, helper, numpy_helper

    random = np.random.default_rng(1)

    def weights(name: str, *shape: int) -> Any:
        fan_in = int(np.prod(shape[1:]))
        return numpy_helper.from_array((random.standard_normal(shape) * fan_in**-0.5).astype(np.float32), name)

    constants = [weights("k0", _CHANNELS, 3, 3, 3)]
    nodes = [helper.make_node("Conv", ["image", "k0"], ["h0"], pads=[1, 1, 1, 1])]
    for layer in range(1, _LAYERS + 1):
        constants.append(weights(f"k{layer}", _CHANNELS, _CHANNELS, 3, 3))
        nodes += [
            helper.make_node("Relu", [f"h{layer - 1}"], [f"r{layer}"]),
            helper.make_node("Conv", [f"r{layer}", f"k{layer}"], [f"c{layer}"], pads=[1, 1, 1, 1]),
            helper.make_node("Add", [f"c{layer}", f"h{layer - 1}"], [f"h{layer}"]),
        ]
    constants.append(weights("w", 10, _CHANNELS))
    nodes += [
        helper.make_node("GlobalAveragePool", [f"h{_LAYERS}"], ["pool"]),
        helper.make_node("Flatten", ["pool"], ["flat"]),
        helper.make_node("Gemm", ["flat", "w"], ["scores"], transB=1),
    ]
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["n", 3, _SIDE, _SIDE])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["n", 10])],
        constants,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    serialised: bytes = model.SerializeToString()
    return serialised


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    accuracy = row["accuracy"]
    return row["backend"], _ms(row), f"{accuracy['rel_l2']:.1e}" if accuracy else "", row["reason"]


def _ms(row: dict[str, Any]) -> str:
    return f"{row['latency']['p50_s'] * 1e3:.2f} ms" if row["latency"] else ""
