"""Every TensorRT name in our code exists in the real bindings, and none of them was removed in 11.

The bindings can be imported without TensorRT's libraries if another library has the nine functions that they link to.
They are not a dependency: `pip install --no-deps tensorrt-cu13-bindings` enables these tests, and
`tensorrt-cu12-bindings==10.16.1.11` enables those that are not about 11.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[3]
_FILES = (
    _ROOT / "builder/gpufn_builder/compilers/tensorrt.py",
    _ROOT / "runtime/gpufn_runtime/worker/engines/tensorrt.py",
)
# The type of a variable or attribute of this name in these files.
_HOLDS = {
    "builder": "Builder",
    "network": "INetworkDefinition",
    "parser": "OnnxParser",
    "config": "IBuilderConfig",
    "made": "IOptimizationProfile",
    "engine": "ICudaEngine",
    "_engine": "ICudaEngine",
    "context": "IExecutionContext",
    "_context": "IExecutionContext",
    "_runtime": "Runtime",
    "timing_cache": "ITimingCache",
}
_LINKED = {
    "nvinfer": (
        "createInferBuilder_INTERNAL", "createInferRefitter_INTERNAL", "createInferRuntime_INTERNAL",
        "getBuilderPluginRegistry", "getPluginRegistry",
    ),
    "nvinfer_plugin": ("initLibNvInferPlugins",),
    "nvonnxparser": (
        "createNvOnnxParserRefitter_INTERNAL", "createNvOnnxParser_INTERNAL", "getNvOnnxParserVersion",
    ),
}  # fmt: skip
_REMOVED_IN_11 = {
    "IInt8Calibrator", "IInt8EntropyCalibrator", "IInt8EntropyCalibrator2", "IInt8LegacyCalibrator",
    "IInt8MinMaxCalibrator", "CalibrationAlgoType", "IAlgorithm", "IAlgorithmSelector", "QuantizationFlag",
    "IStreamReader", "SubGraphCollection",
    "BuilderFlag.FP16", "BuilderFlag.BF16", "BuilderFlag.INT8", "BuilderFlag.FP8", "BuilderFlag.INT4",
    "BuilderFlag.FP4", "BuilderFlag.OBEY_PRECISION_CONSTRAINTS", "BuilderFlag.PREFER_PRECISION_CONSTRAINTS",
    "BuilderFlag.REJECT_EMPTY_ALGORITHMS", "BuilderFlag.WEIGHTLESS",
    "NetworkDefinitionCreationFlag.EXPLICIT_BATCH",
    "TacticSource.CUBLAS", "TacticSource.CUBLAS_LT", "TacticSource.CUDNN", "PreviewFeature.PROFILE_SHARING_0806",
    "Builder.platform_has_fast_fp16", "Builder.platform_has_fast_int8", "Builder.platform_has_tf32",
    "IBuilderConfig.int8_calibrator", "IBuilderConfig.calibration_profile", "IBuilderConfig.quantization_flags",
    "IBuilderConfig.algorithm_selector",
    "ICudaEngine.device_memory_size", "ICudaEngine.get_device_memory_size_for_profile",
    "ICudaEngine.create_execution_context_without_device_memory", "ICudaEngine.has_implicit_batch_dimension",
    "ICudaEngine.weight_streaming_budget", "ICudaEngine.minimum_weight_streaming_budget",
    "IExecutionContext.all_shape_inputs_specified",
    "OnnxParser.supports_model", "OnnxParser.parse_with_weight_descriptors",
}  # fmt: skip
_LIST = """
import json, tensorrt_bindings as trt
names = {name: dir(getattr(trt, name)) for name in dir(trt)}
print(json.dumps(names | {"__version__": [trt.__version__]}))
"""


def _names(source: str) -> Iterator[str]:
    """Yield each `trt.X`, `trt.X.y`, and `X.y` where y is read from a variable of type X; not attributes that are only
    assigned on instances of our classes."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Attribute):
            continue
        owner = node.value
        if isinstance(owner, ast.Name) and owner.id == "trt":
            yield node.attr
        elif isinstance(owner, ast.Attribute) and isinstance(owner.value, ast.Name) and owner.value.id == "trt":
            yield f"{owner.attr}.{node.attr}"
        elif (held := _HOLDS.get(_last_name(owner))) is not None:
            yield f"{held}.{node.attr}"


def _last_name(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def _said() -> set[str]:
    return {name for file in _FILES for name in _names(file.read_text())}


def test_the_names_are_found_in_the_code() -> None:
    source = "def f(trt, network):\n  trt.Runtime(trt.BuilderFlag.TF32)\n  self._context.run(network.name)\n  other.x"
    assert sorted(_names(source)) == [
        "BuilderFlag", "BuilderFlag.TF32", "IExecutionContext.run", "INetworkDefinition.name", "Runtime",
    ]  # fmt: skip
    assert {"OnnxParser.parse_from_file", "IExecutionContext.execute_async_v3", "BuilderFlag.TF32"} <= _said()


def test_nothing_is_used_that_tensorrt_11_removed() -> None:
    assert _said() & _REMOVED_IN_11 == set()


@pytest.fixture(scope="module")
def bindings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The names of the real bindings, with their attributes."""
    spec = importlib.util.find_spec("tensorrt_bindings")
    if spec is None or spec.origin is None:
        pytest.skip("tensorrt-cu13-bindings is not installed")
    if (compiler := shutil.which("gcc")) is None:
        pytest.skip("there is no gcc to make libraries of nine functions with")
    folder = tmp_path_factory.mktemp("libraries")
    for library, functions in _LINKED.items():
        code = "".join(f"void *{name}(void) {{ return 0; }}\n" for name in functions)
        for release in ("10", "11"):
            command = [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", str(folder / f"lib{library}.so.{release}")]
            subprocess.run(command, input=code.encode(), check=True)
    search = os.pathsep.join([str(Path(spec.origin).parents[1]), os.environ.get("PYTHONPATH", "")])
    environ = os.environ | {"LD_LIBRARY_PATH": str(folder), "PYTHONPATH": search}
    listed = subprocess.run([sys.executable, "-c", _LIST], env=environ, capture_output=True, check=True)
    found: dict[str, list[str]] = json.loads(listed.stdout)
    return found


def test_every_name_is_in_the_real_bindings(bindings: dict[str, list[str]]) -> None:
    known = set(bindings) | {f"{name}.{attribute}" for name, attributes in bindings.items() for attribute in attributes}
    assert _said() - known == set()
    assert len(bindings) > 200


def test_removed_names_are_absent(bindings: dict[str, list[str]]) -> None:
    if bindings["__version__"][0].startswith("10."):
        pytest.skip("these bindings are of TensorRT 10")
    known = set(bindings) | {f"{name}.{attribute}" for name, attributes in bindings.items() for attribute in attributes}
    assert known & _REMOVED_IN_11 == set()
