"""The work of a candidate's process, with a compiler that does nothing."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import cast

import numpy as np

from gpufn_builder import identity
from gpufn_builder.checks import golden
from gpufn_builder.compilers.base import Compiled, CompileJob, Compiler, Engine
from gpufn_builder.identity import Target
from gpufn_builder.onnx_model.tensors import Arrays
from gpufn_builder.processes.compile_process import make
from gpufn_builder.processes.process_messages import CandidateRequest, MeasurePlan
from gpufn_core.domain.devices.engine import Backend, BuildStage
from gpufn_core.spec.model_spec import ModelFile, ModelSpec, ShapeProfile, ShapeRange, TensorSpec, Tolerance

SPEC = ModelSpec(parameter="net", files=(ModelFile("m.onnx", "a" * 64, 1),))
PROFILE = ShapeProfile({"x": ShapeRange((1, 2), (4, 2), (4, 2))})


class Doubling:
    def compile(self, job: CompileJob, report_progress: object) -> Compiled:
        return Compiled(files=(), settings={})

    def load(self, job: CompileJob, compiled: Compiled) -> Engine:
        return cast("Engine", self)

    def run(self, inputs: Arrays) -> Arrays:
        return {"y": inputs["x"] * 2}

    def bind(self, inputs: Arrays) -> Callable[[], object]:
        return lambda: None

    def close(self) -> None: ...


def test_each_run_of_the_engine_is_progress(tmp_path: Path) -> None:
    """Regression: a measurement and the check of rows reported nothing, so a build with a shorter timeout ended."""
    x = np.arange(8, dtype=np.float32).reshape(4, 2)
    golden.save(tmp_path / "case.npz", {"x": x}, {"y": x * 2})
    golden.save(tmp_path / "measured.npz", {"x": x}, {})
    request = CandidateRequest(
        identity=identity.identity(SPEC, Target("cpu", ""), Backend.ORT_CPU, {}),
        model="m.onnx",
        inputs=(TensorSpec("x", "FP32", (-1, 2)),),
        outputs=(TensorSpec("y", "FP32", (-1, 2)),),
        profiles=(PROFILE,),
        tolerance=Tolerance(),
        batched=True,
        cases={"sample 0": str(tmp_path / "case.npz")},
        measured=str(tmp_path / "measured.npz"),
        folder=str(tmp_path / "engine"),
        caches=str(tmp_path / "caches"),
        measuring=MeasurePlan(warm_up_s=5, least_s=15, most_s=15),
    )
    reported: Counter[BuildStage] = Counter()
    seconds = itertools.count()
    result = make(
        request,
        cast("Compiler", Doubling()),
        lambda stage, progress, detail: reported.update([stage]),
        lambda: float(next(seconds)),
    )
    assert result.why_alone == ""
    assert reported[BuildStage.VERIFY] > len(request.cases) + len(x)
    assert reported[BuildStage.MEASURE] > 4
