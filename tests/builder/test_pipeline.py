"""The work of a build process, without processes of candidates."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

import numpy as np
import onnx
import pytest
from onnx import ModelProto, helper

from gpufn_builder import identity
from gpufn_builder.checks.cpu_session import CpuSession
from gpufn_builder.compilers.base import Compiled, CompileJob, Compiler, Engine
from gpufn_builder.identity import Target
from gpufn_builder.onnx_model.tensors import Arrays
from gpufn_builder.pipeline import Pipeline
from gpufn_builder.precision import engine_layers
from gpufn_builder.processes.compile_process import make
from gpufn_builder.processes.process_messages import (
    MODEL,
    SAMPLES,
    BuildRequest,
    BuildResult,
    CandidateRequest,
    CandidateResult,
    MeasurePlan,
    ProgressUpdate,
)
from gpufn_core.domain.devices.engine import Backend, BuildStage
from gpufn_core.errors import BuildFailed
from gpufn_core.spec.model_spec import Precision
from tests.builder import models

L4 = Target("NVIDIA L4", "8.9", "GPU-1")


class Kernels:
    """A compiler for a GPU with wrong half-precision kernels of the products with these outputs. With `fuses`, only the
    kernels of fused nodes are wrong, so an engine that returns intermediate values is right."""

    def __init__(self, *wrong: str, fuses: bool = False) -> None:
        self.wrong = wrong
        self.fuses = fuses

    def compile(self, job: CompileJob, report_progress: object) -> Compiled:
        proto = onnx.load(job.model)
        if not self.fuses or len(job.outputs) == 1:
            for index, node in reversed(list(enumerate(proto.graph.node))):
                if node.op_type == "MatMul" and node.output[0] in {f"{name}.fp16" for name in self.wrong}:
                    proto.graph.node.insert(
                        index + 1, helper.make_node("Mul", ["exact " + node.output[0], "1.1"], [node.output[0]])
                    )
                    node.output[0] = "exact " + node.output[0]
            proto.graph.initializer.append(models.constant("1.1", 1.1, np.float16))
        onnx.save(proto, job.folder / "engine.onnx")
        return Compiled(files=("engine.onnx",), settings={})

    def load(self, job: CompileJob, compiled: Compiled) -> Engine:
        session = CpuSession(job.folder / "engine.onnx", job.outputs, BuildStage.VERIFY)

        class Loaded:
            def run(self, inputs: Arrays) -> Arrays:
                return session.run(inputs)

            def bind(self, inputs: Arrays) -> Callable[[], object]:
                return lambda: self.run(inputs)

            def close(self) -> None: ...

        return Loaded()


def build_with(kernels: Kernels, folder: Path, precision: Precision = Precision.FP16) -> tuple[BuildResult, list[str]]:
    """Return the result of a build for a GPU, and the graph of each engine that was compiled: its products in fp32."""
    models.put(models.mlp(), folder / MODEL)
    (folder / SAMPLES).mkdir()
    spec = models.spec_of(folder / MODEL, precision=precision)
    compiled = []

    def run(request: CandidateRequest, *args: object, **options: object) -> CandidateResult:
        graph = onnx.load(request.model).graph
        exact = [node.output[0] for node in graph.node if node.op_type == "MatMul" and "fp16" not in node.output[0]]
        compiled.append(" ".join(exact) if len(graph.output) == 1 else "values")
        return make(request, cast("Compiler", kernels), lambda *progress: None, time.perf_counter)

    request = BuildRequest(
        build="build",
        spec=spec,
        target=L4,
        candidates=(identity.identity(spec, L4, Backend.TENSORRT, {}),),
        folder=str(folder),
        caches=str(folder / "caches"),
        timeout_s=600,
        measuring=MeasurePlan().scaled(0.003),
    )
    pipeline = Pipeline(
        request, lambda *progress: None, environ={}, clock=lambda: 0.0, now=lambda: 0.0, run_candidate=run
    )
    return pipeline.run(), compiled


class Scene:
    """A build for a GPU whose candidates all fail: their requests, and the steps of each stage."""

    def __init__(self, folder: Path, proto: ModelProto, precision: Precision) -> None:
        models.put(proto, folder / MODEL)
        (folder / SAMPLES).mkdir()
        spec = models.spec_of(folder / MODEL, precision=precision)
        backends = (Backend.ORT_CUDA, Backend.ORT_CPU)
        request = BuildRequest(
            build="build",
            spec=spec,
            target=L4,
            candidates=tuple(identity.identity(spec, L4, backend, {}) for backend in backends),
            folder=str(folder),
            caches=str(folder / "caches"),
            timeout_s=600,
        )
        self.requests: dict[Backend, CandidateRequest] = {}
        self.steps: list[tuple[BuildStage, str]] = []
        Pipeline(
            request,
            lambda stage, progress, detail: self.steps.append((stage, detail)),
            environ={},
            clock=lambda: 0.0,
            now=lambda: 0.0,
            run_candidate=self._run,
        ).run()

    def _run(
        self,
        request: CandidateRequest,
        folder: Path,
        environ: Mapping[str, str],
        *,
        timeout_s: float,
        on_progress: Callable[[ProgressUpdate], None],
    ) -> CandidateResult:
        self.requests[request.identity.backend] = request
        raise BuildFailed("not so")


def test_only_an_engine_on_a_gpu_draws_other_random_numbers_than_the_reference(tmp_path: Path) -> None:
    scene = Scene(tmp_path, models.noisy(), Precision.FP32)
    draws = {backend: request.draws_other_numbers for backend, request in scene.requests.items()}
    assert draws == {Backend.ORT_CUDA: True, Backend.ORT_CPU: False}


def test_runs_with_optimizations_are_progress_of_the_reference(tmp_path: Path) -> None:
    scene = Scene(tmp_path, models.mlp(), Precision.FP32)
    assert any(step.endswith("with optimizations") for stage, step in scene.steps if stage is BuildStage.REFERENCE)


def test_the_conversion_and_its_runs_are_progress_of_the_transform(tmp_path: Path) -> None:
    scene = Scene(tmp_path, models.mlp(), Precision.FP16)
    cases = list(next(iter(scene.requests.values())).cases)
    steps = [step for stage, step in scene.steps if stage is BuildStage.TRANSFORM]
    assert steps[:2] == ["", "conversion to fp16"]
    assert set(steps[2:]) == set(cases)


def test_a_layer_whose_kernel_in_the_engine_loses_its_accuracy_stays_in_fp32(tmp_path: Path) -> None:
    result, compiled = build_with(Kernels("h"), tmp_path)
    assert compiled == ["", "values", "h"]
    (engine,) = result.engines
    assert engine.manifest.remarks[0].startswith("kept in fp32 for this engine: h_node; the first node that differs")
    assert result.candidates[0].remarks == engine.manifest.remarks
    assert not list(tmp_path.rglob("values-*"))


def test_if_no_value_differs_the_products_before_the_output_stay_in_fp32(tmp_path: Path) -> None:
    result, compiled = build_with(Kernels("y", fuses=True), tmp_path)
    assert compiled == ["", "values", "y"]
    assert "y_node" in result.engines[0].manifest.remarks[0]


def test_an_engine_of_which_each_layer_differs_is_refused_with_the_first(tmp_path: Path) -> None:
    result, compiled = build_with(Kernels("h", "y"), tmp_path)
    assert compiled == ["", "values", "h", "values"]
    assert result.error is not None
    assert result.error.stage == BuildStage.VERIFY
    assert "h_node" in result.candidates[0].reason


def test_the_rounds_of_an_engine_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_layers, "MAX_ROUNDS", 0)
    result, compiled = build_with(Kernels("h"), tmp_path)
    assert (result.engines, compiled) == ((), [""])
