from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import onnx.reference
import pytest
from onnx import TensorProto

from gpufn_builder.compilers.base import CompileJob
from gpufn_builder.processes.compile_process import compiler_for
from gpufn_core.domain.devices.engine import Backend
from gpufn_core.errors import BuildFailed
from gpufn_core.spec.model_spec import TensorSpec
from tests.builder import models

X, Y = TensorSpec("x", "FP32", (-1, 8)), TensorSpec("y", "FP32", (-1, 4))


def _job(folder: Path, proto: Any) -> CompileJob:
    models.put(proto, folder / "in")
    (folder / "out").mkdir()
    return CompileJob(
        model=folder / "in" / "model.onnx",
        inputs=(X,),
        outputs=(Y,),
        profiles=(),
        flags={"graph_optimization_level": "extended"},
        device="cpu",
        golden={"x": np.ones((2, 8), np.float32)},
        folder=folder / "out",
        caches=folder,
    )


def _ignore(progress: float, detail: str) -> None: ...


def test_the_engine_is_the_optimised_graph_with_the_same_results(tmp_path: Path) -> None:
    job = _job(tmp_path, models.mlp())
    compiled = compiler_for(Backend.ORT_CPU).compile(job, _ignore)
    saved = onnx.load(tmp_path / "out" / compiled.files[0])
    assert compiled.cpu_nodes == sum(compiled.nodes.values()) == len(saved.graph.node) < len(models.mlp().graph.node)
    with closing(compiler_for(Backend.ORT_CPU).load(job, compiled)) as engine:
        found = engine.run(job.golden)
        engine.bind(job.golden)()
    expected: Any = onnx.reference.ReferenceEvaluator(models.mlp()).run(None, job.golden)
    np.testing.assert_allclose(found["y"], expected[0], rtol=1e-5)


def test_weights_lie_beside_the_graph_in_a_file_of_the_engines_own(tmp_path: Path) -> None:
    proto = models.model(
        [models.node("MatMul", "x w", "h"), models.node("MatMul", "h v", "k"), models.node("Add", "k b", "y")],
        [models.value("x", ["N", 8])],
        [models.value("y", ["N", 4])],
        [models.weights("w", 8, 400), models.weights("v", 400, 4), models.weights("b", 4)],
    )
    expected: Any = onnx.reference.ReferenceEvaluator(proto).run(None, {"x": np.ones((2, 8), np.float32)})
    (tmp_path / "in").mkdir()
    models.externalise(proto, tmp_path / "in")
    job = _job(tmp_path, proto)
    compiled = compiler_for(Backend.ORT_CPU).compile(job, _ignore)
    assert compiled.files == ("model.onnx", "model.onnx.data")
    assert sorted(path.name for path in job.folder.iterdir()) == sorted(compiled.files)
    (tmp_path / "in" / "weights.bin").unlink()
    with closing(compiler_for(Backend.ORT_CPU).load(job, compiled)) as engine:
        np.testing.assert_allclose(engine.run(job.golden)["y"], expected[0], rtol=1e-4)


def test_products_of_integers_are_exact_on_every_processor(tmp_path: Path) -> None:
    job = msgspec.structs.replace(
        _job(tmp_path, models.products_of_integers()),
        inputs=(TensorSpec("x", "UINT8", (-1, 16)),),
        outputs=(TensorSpec("y", "INT32", (-1, 4)),),
        golden={"x": np.full((2, 16), 255, np.uint8)},
    )
    compiled = compiler_for(Backend.ORT_CPU).compile(job, _ignore)
    with closing(compiler_for(Backend.ORT_CPU).load(job, compiled)) as engine:
        assert engine.run(job.golden)["y"].tolist() == [[16 * 255 * 127] * 4] * 2
        loaded: Any = engine
        options = loaded._session.get_session_options()
    assert options.get_session_config_entry("session.x64quantprecision") == "1"


@pytest.mark.parametrize("block_size", [0, 32])
def test_floats_are_not_rounded_to_the_few_bits_of_the_weights(block_size: int, tmp_path: Path) -> None:
    proto = models.weights_of_few_bits(TensorProto.INT4, block_size)
    x = np.random.default_rng(1).standard_normal((2, 64)).astype(np.float32)
    job = msgspec.structs.replace(
        _job(tmp_path, proto),
        inputs=(TensorSpec("x", "FP32", (-1, 64)),),
        outputs=(TensorSpec("y", "FP32", (-1, 8)),),
        golden={"x": x},
    )
    compiled = compiler_for(Backend.ORT_CPU).compile(job, _ignore)
    with closing(compiler_for(Backend.ORT_CPU).load(job, compiled)) as engine:
        found = engine.run(job.golden)["y"]
    expected: Any = onnx.reference.ReferenceEvaluator(proto).run(None, {"x": x})
    assert np.linalg.norm(found - expected[0]) < 1e-5 * np.linalg.norm(expected[0])


def test_a_failed_run_is_reported_also_during_timing(tmp_path: Path) -> None:
    job = _job(tmp_path, models.mlp())
    compiled = compiler_for(Backend.ORT_CPU).compile(job, _ignore)
    with closing(compiler_for(Backend.ORT_CPU).load(job, compiled)) as engine:
        for run in (engine.run, lambda inputs: engine.bind(inputs)()):
            with pytest.raises(BuildFailed, match=r"invalid dimensions for input: x"):
                run({"x": np.ones((2, 9), np.float32)})


def test_a_provider_that_is_not_there_is_an_error_and_no_silent_cpu(tmp_path: Path) -> None:
    job = _job(tmp_path, models.mlp())
    job.flags["use_tf32"] = "0"  # type: ignore[index]
    with pytest.raises(BuildFailed, match="CUDAExecutionProvider"):
        compiler_for(Backend.ORT_CUDA).compile(job, _ignore)


def test_cudas_libraries_are_loaded_for_a_gpus_engine_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    monkeypatch.setattr("onnxruntime.preload_dlls", lambda: loaded.append("CUDA"))
    job = _job(tmp_path, models.mlp())
    compiler_for(Backend.ORT_CPU).compile(job, _ignore)
    assert loaded == []
    job.flags["use_tf32"] = "0"  # type: ignore[index]
    with pytest.raises(BuildFailed):
        compiler_for(Backend.ORT_CUDA).compile(job, _ignore)
    assert loaded == ["CUDA"]
