"""The work of a build process, without processes of candidates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from onnx import ModelProto

from gpufn_builder import identity
from gpufn_builder.identity import Target
from gpufn_builder.pipeline import Pipeline
from gpufn_builder.processes.process_messages import (
    MODEL,
    SAMPLES,
    BuildRequest,
    CandidateRequest,
    CandidateResult,
    ProgressUpdate,
)
from gpufn_core.domain.engine import Backend, BuildStage
from gpufn_core.errors import BuildFailed
from gpufn_core.spec.model_spec import Precision
from tests.builder import models

L4 = Target("NVIDIA L4", "8.9", "GPU-1")


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
