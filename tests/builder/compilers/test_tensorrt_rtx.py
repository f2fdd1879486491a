"""The TensorRT compiler with the real bindings and the parser and builder of TensorRT-RTX, which need no GPU.

The combination is unsupported, so it is used only in tests, if its parts are installed:
`pip install --no-deps tensorrt-cu13-bindings==11.4.0.106 onnxruntime-ep-nv-tensorrt-rtx-cu13==0.5.0`. Such an engine
cannot be loaded without a GPU, so every successful build ends with that error here.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import onnx
import pytest
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto

from gpufn_builder.checks.samples import Case
from gpufn_builder.onnx_model.tensors import Arrays
from gpufn_builder.precision.conversion import HALVES
from gpufn_builder.precision.first_difference import find_first_difference
from gpufn_core.errors import BuildFailed
from gpufn_core.spec.model_spec import TOLERANCES, Precision, ShapeProfile, ShapeRange, TensorSpec
from tests.builder import models
from tests.builder.precision.test_transform import Prepared

_HERE = Path(__file__).parent
_ROOT = Path(__file__).parents[3]
_PROFILE = ShapeProfile({"x": ShapeRange((1, 8), (4, 8), (8, 8))})


def _folder_of(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} is not installed")
    return Path(spec.origin).parent


@pytest.fixture(scope="module")
def environ(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A folder with RTX's libraries under the names that the bindings load."""
    bindings, rtx = _folder_of("tensorrt_bindings"), _folder_of("onnxruntime_ep_nv_tensorrt_rtx")
    if (compiler := shutil.which("gcc")) is None:
        pytest.skip("there is no gcc to make the nine functions with")
    folder = tmp_path_factory.mktemp("libraries")
    for name in ("libtensorrt_rtx.so.1", "libtensorrt_onnxparser_rtx.so.1"):
        (folder / name).symlink_to(next(rtx.glob(f"{name}*")))
    for name in ("nvinfer", "nvinfer_plugin", "nvonnxparser"):
        target = folder / f"lib{name}.so.11"
        subprocess.run([compiler, "-shared", "-fPIC", _HERE / "nine_functions.c", "-o", target, "-ldl"], check=True)
    search = [str(_ROOT), str(bindings.parent), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"LD_LIBRARY_PATH": str(folder), "PYTHONPATH": os.pathsep.join(search)}


def _compiled(folder: Path, environ: dict[str, str], proto: ModelProto, *profiles: ShapeProfile) -> Any:
    models.put(proto, folder)
    (folder / "profiles.json").write_bytes(msgspec.json.encode(profiles))
    command = [sys.executable, str(_HERE / "with_rtx.py"), str(folder)]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


def test_a_model_becomes_a_plan_with_progress_and_timings(environ: dict[str, str], tmp_path: Path) -> None:
    found = _compiled(tmp_path, environ, models.mlp(), _PROFILE)
    assert "cannot load" in found["message"].partition(": ")[0]
    assert (tmp_path / "engine.plan").stat().st_size > 1000
    assert found["progress_values"] == sorted(found["progress_values"])
    assert found["progress_values"][-1] > 0.5
    assert next(tmp_path.glob("*.timing")).stat().st_size > 0


def test_an_unsupported_node_is_reported(environ: dict[str, str], tmp_path: Path) -> None:
    found = _compiled(tmp_path, environ, models.texts())
    assert found["message"].split(": ")[1] == "UNSUPPORTED_NODE"


def test_an_unknown_operator_is_reported_with_its_node(environ: dict[str, str], tmp_path: Path) -> None:
    unknown = models.model([models.node("NoSuch", "x", "y")], [models.value("x", ["N", 8])], [models.value("y", None)])
    found = _compiled(tmp_path, environ, unknown, _PROFILE)
    assert "INVALID_NODE (NoSuch): " in found["message"]
    assert found["node"] == "y_node"


def test_dynamic_shapes_without_a_profile_are_reported(environ: dict[str, str], tmp_path: Path) -> None:
    found = _compiled(tmp_path, environ, models.mlp())
    assert "no optimization profile" in found["message"]
    assert not (tmp_path / "engine.plan").exists()


def test_a_profile_that_contradicts_the_model_is_reported(environ: dict[str, str], tmp_path: Path) -> None:
    wrong = ShapeProfile({"x": ShapeRange((1, 9), (4, 9), (8, 9))})
    found = _compiled(tmp_path, environ, models.mlp(), wrong)
    assert "could not build" in found["message"].partition(": ")[0]
    assert not (tmp_path / "engine.plan").exists()


def _conv(*inputs: str, output: str, **attributes: Any) -> NodeProto:
    return models.node("Conv", " ".join(inputs), output, pads=[1, 1, 1, 1], **attributes)


def _image(name: str, channels: int) -> ValueInfoProto:
    return models.value(name, ["N", channels, 8, 8])


_INT8_MODELS = {
    "conv, relu": models.model(
        [_conv("x", "k", "b", output="h"), models.node("Relu", "h", "y")],
        [_image("x", 3)], [_image("y", 4)], [models.weights("k", 4, 3, 3, 3), models.weights("b", 4)],
    ),
    "conv, add, relu": models.model(
        [_conv("x", "k", "b", output="h"), models.node("Relu", "h", "r"), _conv("r", "l", "c", output="i"),
         models.node("Add", "i x", "a"), models.node("Relu", "a", "y")],
        [_image("x", 4)], [_image("y", 4)],
        [models.weights("k", 4, 4, 3, 3), models.weights("b", 4), models.weights("l", 4, 4, 3, 3),
         models.weights("c", 4)],
    ),
    "gemm": models.model(
        [models.node("Gemm", "x w b", "h", transB=1), models.node("Relu", "h", "r"), models.node("Gemm", "r v c", "y")],
        [models.value("x", ["N", 8])], [models.value("y", ["N", 5])],
        [models.weights("w", 16, 8), models.weights("b", 16), models.weights("v", 16, 5), models.weights("c", 5)],
    ),
    "matmul chain": models.model(
        [models.node("MatMul", "x w", "h"), models.node("Add", "h b", "a"), models.node("Relu", "a", "r"),
         models.node("MatMul", "r v", "y")],
        [models.value("x", ["N", 8])], [models.value("y", ["N", 5])],
        [models.weights("w", 8, 16), models.weights("b", 16), models.weights("v", 16, 5)],
    ),
    "depthwise": models.model(
        [_conv("x", "k", "b", output="h", group=4), models.node("Relu", "h", "r"), _conv("r", "l", "c", output="y")],
        [_image("x", 4)], [_image("y", 6)],
        [models.weights("k", 4, 1, 3, 3), models.weights("b", 4), models.weights("l", 6, 4, 3, 3),
         models.weights("c", 6)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", _INT8_MODELS)
def test_the_real_parser_and_builder_accept_int8(name: str, environ: dict[str, str], tmp_path: Path) -> None:
    """Regression: all of these but the chain of MatMuls were rejected for their quantized biases."""
    made = Prepared(_INT8_MODELS[name], tmp_path).into_precision(Precision.INT8)
    proto = onnx.load(made.path)
    shape = tuple(each.dim_value for each in proto.graph.input[0].type.tensor_type.shape.dim)[1:]
    profile = ShapeProfile({"x": ShapeRange((1, *shape), (4, *shape), (8, *shape))})
    (tmp_path / "engine").mkdir()
    result = _compiled(tmp_path / "engine", environ, proto, profile)
    assert result["message"].startswith("TensorRT cannot load the engine that it built: "), result
    assert (tmp_path / "engine" / "engine.plan").stat().st_size > 1000


@pytest.mark.parametrize("precision", [Precision.FP16, Precision.BF16, Precision.INT8])
@pytest.mark.parametrize("make", [models.mlp, models.cnn])
def test_the_real_parser_and_builder_accept_all_values_as_outputs(
    make: Callable[[], ModelProto], precision: Precision, environ: dict[str, str], tmp_path: Path
) -> None:
    """The graph that shows the first node of an engine that differs."""
    prepared = Prepared(make(), tmp_path)
    made = prepared.into_precision(precision)
    assert made.conversion is not None
    results = []

    def compile_only(path: Path, outputs: Sequence[TensorSpec], case: Case) -> Arrays:
        proto = onnx.load(path)
        shape = tuple(each.dim_value for each in proto.graph.input[0].type.tensor_type.shape.dim)[1:]
        profile = ShapeProfile({proto.graph.input[0].name: ShapeRange((1, *shape), (4, *shape), (8, *shape))})
        results.append(_compiled(tmp_path / "engine", environ, proto, profile))
        raise BuildFailed("no GPU")

    (tmp_path / "engine").mkdir()
    with pytest.raises(BuildFailed, match="no GPU"):
        find_first_difference(
            prepared.normal,
            made.path,
            made.conversion.values,
            HALVES.get(precision, TensorProto.FLOAT),
            case=prepared.cases[0],
            limits=[TOLERANCES[precision]],
            run_converted=compile_only,
        )
    (result,) = results
    assert result["message"].startswith("TensorRT cannot load the engine that it built: "), result
