"""The builder's engines for a GPU, through a platform: built, compared with the CPU, served."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from gpufn_core.domain.devices.engine import Backend
from tests.conftest import Platform

pytestmark = [pytest.mark.gpu, pytest.mark.e2e]

_ALLOWED_REL_L2 = 1e-3


def _need(backend: Backend) -> None:
    import onnxruntime

    if backend is Backend.TENSORRT and find_spec("tensorrt") is None:
        pytest.skip("tensorrt is not installed")
    if backend is Backend.ORT_CUDA and "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        pytest.skip("onnxruntime has no CUDA: onnxruntime-gpu is not installed")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for module in ("numpy", "onnx", "onnxruntime"):
        if find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    from tests.builder import models

    path = tmp_path_factory.mktemp("model") / "cnn.onnx"
    path.write_bytes(models.cnn().SerializeToString())
    return path


@pytest.mark.parametrize("backend", [Backend.ORT_CUDA, Backend.TENSORRT])
def test_an_engine_of_the_gpu_is_built_and_equals_the_cpu(
    device_kind: str, platform: Platform, model: Path, tmp_path: Path, backend: Backend
) -> None:
    _need(backend)
    report = tmp_path / "report.json"
    platform.gpufn("build", model, "--max-batch", "8", "--device", device_kind, "--report", report)
    candidates = {each["backend"]: each for each in json.loads(report.read_bytes())["candidates"]}
    made = candidates[str(backend)]
    assert made["reason"] == "", made["log"]
    assert made["gpu_nodes"] > 0
    assert made["accuracy"]["rel_l2"] <= _ALLOWED_REL_L2


@pytest.mark.parametrize("backend", [Backend.ORT_CUDA, Backend.TENSORRT])
def test_a_worker_loads_the_engine_and_matches_the_results_of_the_cpu(
    nvml: Any, platform: Platform, model: Path, backend: Backend
) -> None:
    """The best engine that there is serves; with TensorRT installed that is TensorRT's."""
    import numpy as np
    import onnxruntime

    _need(backend)
    if backend is Backend.ORT_CUDA and find_spec("tensorrt") is not None:
        pytest.skip("TensorRT's engine is served before that of ONNX Runtime")
    name = f"on-{backend}"
    platform.gpufn("deploy", model, "--name", name, "--max-batch", "8", "--gpu", "any")
    images = np.random.default_rng(0).standard_normal((4, 3, 8, 8)).astype(np.float32)
    tensor = {"name": "image", "datatype": "FP32", "shape": images.shape, "data": images.ravel().tolist()}
    answer = platform.client.post(f"/v2/models/{name}/infer", json={"inputs": [tensor]})
    assert answer.status_code == 200, answer.text
    (output,) = answer.json()["outputs"]
    session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(
        np.array(output["data"], np.float32).reshape(output["shape"]),
        session.run(None, {"image": images})[0],
        rtol=_ALLOWED_REL_L2,
        atol=_ALLOWED_REL_L2,
    )
    described = platform.client.get(f"/v1/models/{name}").json()
    assert [engines[0]["backend"] for engines in described["engines"].values()] == [str(backend)]
