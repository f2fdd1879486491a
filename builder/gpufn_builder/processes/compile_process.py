"""The process of one candidate: compile, verify, measure. `candidates` starts it.

1. The compiler produces the engine's files.
2. The engine runs every case and is compared with the reference. `row_independence` decides whether calls may share
   runs.
3. The engine is measured at the shapes that it is tuned for, while no other build of this builder measures.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from gpufn_builder.checks import golden, row_independence, verify
from gpufn_builder.checks.measure import Measurement, measure
from gpufn_builder.checks.verify import Comparison
from gpufn_builder.compilers.base import CompileJob, Compiler, Engine
from gpufn_builder.onnx_model.tensors import Arrays
from gpufn_builder.processes.measure_lock import measuring_alone
from gpufn_builder.processes.process import ReportProgress, serve
from gpufn_builder.processes.process_messages import THOROUGH, WAITS_TO_MEASURE, CandidateRequest, CandidateResult
from gpufn_core.domain.devices.engine import GOLDEN_FILE, Backend, BuildStage

# Progress of a candidate at the start of each stage.
_BEGIN = {BuildStage.COMPILE: 0.0, BuildStage.VERIFY: 0.5, BuildStage.MEASURE: 0.6}


def make(
    request: CandidateRequest, compiler: Compiler, report_progress: ReportProgress, clock: Callable[[], float]
) -> CandidateResult:
    """Compile, verify and measure. Raises BuildFailed with the stage."""
    expected = request.outputs if request.tolerance is not None else ()
    cases = {name: golden.load(Path(file), request.inputs, expected) for name, file in request.cases.items()}
    measured, _ = golden.load(Path(request.measured), request.inputs, ())
    seconds: dict[BuildStage, float] = {}
    job = _job(request, measured)
    job.folder.mkdir(parents=True, exist_ok=True)
    began = clock()

    def done(stage: BuildStage) -> None:
        nonlocal began
        began, seconds[stage] = clock(), clock() - began

    report_progress(BuildStage.COMPILE, _BEGIN[BuildStage.COMPILE], "")
    span = _BEGIN[BuildStage.VERIFY]
    compiled = compiler.compile(job, lambda part, detail: report_progress(BuildStage.COMPILE, part * span, detail))
    done(BuildStage.COMPILE)
    with contextlib.closing(compiler.load(job, compiled)) as engine:
        verified = _verify(
            engine, request, cases, measured, on_step=lambda detail: report_progress(BuildStage.VERIFY, span, detail)
        )
        done(BuildStage.VERIFY)
        speed = _measure(engine, measured, request, report_progress, clock)
        done(BuildStage.MEASURE)
    sample, _ = next(iter(cases.values()))
    golden.save(job.folder / GOLDEN_FILE, sample, verified.first)
    comparison = verified.comparison
    return CandidateResult(
        files=(*compiled.files, GOLDEN_FILE),
        settings=compiled.settings,
        why_alone=verified.why_alone,
        accuracy=comparison.worst_accuracy if comparison else None,
        outputs=comparison.outputs if comparison else (),
        latency=speed.latency if speed else None,
        quantiles_s=speed.quantiles_s if speed else (),
        gpu_nodes=compiled.gpu_nodes,
        cpu_nodes=compiled.cpu_nodes,
        nodes=compiled.nodes,
        notes=compiled.notes,
        seconds=seconds,
    )


def _job(request: CandidateRequest, measured: Arrays) -> CompileJob:
    return CompileJob(
        model=Path(request.model),
        inputs=request.inputs,
        outputs=request.outputs,
        profiles=request.profiles,
        flags=request.identity.flags,
        device=request.identity.device,
        golden=measured,
        folder=Path(request.folder),
        caches=Path(request.caches),
        trial_s=(request.measuring or THOROUGH).trial_s,
    )


class _Verified(NamedTuple):
    """`first` are the outputs for the first case. `comparison` is None if nothing is compared."""

    first: Arrays
    comparison: Comparison | None
    why_alone: str


def _verify(
    engine: Engine,
    request: CandidateRequest,
    cases: Mapping[str, tuple[Arrays, Arrays]],
    measured: Arrays,
    *,
    on_step: Callable[[str], None],
) -> _Verified:
    """Run all cases, compare their outputs with the reference, and find out whether rows are independent."""
    count = f"{len(cases)} case{'s' if len(cases) > 1 else ''}"
    outputs = []
    for name, (case, _) in cases.items():
        on_step(f"{count}: {name}")
        outputs.append(engine.run(case))
    comparison = None
    if request.tolerance is not None:
        reference = [outputs_of_case for _, outputs_of_case in cases.values()]
        comparison = verify.compare(
            list(cases), reference, outputs, request.tolerance, rounding_floors=request.rounding_floors
        )
        verify.check(comparison, request.tolerance, draws_other_numbers=request.draws_other_numbers)
    if not request.batched:
        return _Verified(outputs[0], comparison, row_independence.NO_ROWS)

    def run_rows(rows: Arrays) -> Arrays:
        on_step("independence of rows")
        return engine.run(rows)

    inputs = [inputs for inputs, _ in cases.values()]
    why_alone = row_independence.why_alone(run_rows, inputs, measured, request.profiles, request.tolerance)
    return _Verified(outputs[0], comparison, why_alone)


def _measure(
    engine: Engine,
    inputs: Arrays,
    request: CandidateRequest,
    report_progress: ReportProgress,
    clock: Callable[[], float],
) -> Measurement | None:
    if (plan := request.measuring) is None:
        return None

    def report(detail: str = "") -> None:
        report_progress(BuildStage.MEASURE, _BEGIN[BuildStage.MEASURE], detail)

    with measuring_alone(Path(request.caches), lambda: report(WAITS_TO_MEASURE)):
        report()
        return measure(engine.bind(inputs), plan, clock, report)


def compiler_for(backend: Backend) -> Compiler:
    """Import the library of a backend, in the process of a candidate."""
    if backend is Backend.TENSORRT:
        from gpufn_builder.compilers.tensorrt import TensorRT  # noqa: PLC0415

        return TensorRT()
    from gpufn_builder.compilers.onnxruntime import OnnxRuntime  # noqa: PLC0415

    return OnnxRuntime(backend)


def main() -> int:
    return serve(
        CandidateRequest,
        lambda request, report_progress: make(
            request, compiler_for(request.identity.backend), report_progress, time.perf_counter
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
