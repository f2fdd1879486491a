"""One process that builds the engines of many cases: `python -m tests.conformance.build_all FOLDER`.

The process runs the stages of a build itself and skips the measurements, because two new processes for each of a
thousand models would take most of the time. For each case that bare ONNX Runtime passes, it prints an Outcome to
standard output, as a line of JSON. FOLDER/<case> contains the engine and the case.
"""

from __future__ import annotations

import os
import pickle
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from gpufn_builder import identity
from gpufn_builder.build_job import TIMEOUT_S
from gpufn_builder.pipeline import Pipeline
from gpufn_builder.processes import compile_process
from gpufn_builder.processes.compile_process import compiler_for
from gpufn_builder.processes.process_messages import (
    MODEL,
    SAMPLES,
    BuildRequest,
    CandidateRequest,
    CandidateResult,
    MeasurePlan,
    ProgressUpdate,
)
from gpufn_core.domain.devices.engine import MANIFEST_FILE, Backend
from gpufn_core.ids import digest_of
from gpufn_core.spec.model_spec import ModelFile, ModelSpec
from tests.conformance import suite
from tests.conformance.exceptions import why_refused

CASE = "case.pickle"  # saves `serve_all` from loading all cases again
_UNMEASURED = MeasurePlan(warm_up_s=0, least_s=0, most_s=0, trial_s=0)


class Outcome(msgspec.Struct, frozen=True):
    """The result of a case. `stage` and `reason` describe its failure; an empty `reason` means that it passed so far.

    `refusal` is text that the reason of an expected refusal contains.
    """

    case: str
    stage: str = ""
    reason: str = ""
    refusal: str = ""


def build(case: suite.Case, engine: Path) -> Outcome:
    """Build the engine of `case` into a new folder `engine`, as on a node."""
    folder = engine.with_name(f"{engine.name}.build")
    try:
        result = Pipeline(
            _request(case, folder),
            lambda stage, progress, detail: None,
            environ=os.environ,
            clock=time.monotonic,
            now=time.time,
            run_candidate=_run_here,
        ).run()
        if result.error is not None:
            return Outcome(case.name, result.error.stage or "", result.error.message)
        [made] = result.engines
        (Path(made.folder) / MANIFEST_FILE).write_bytes(msgspec.json.encode(made.manifest))
        (Path(made.folder) / CASE).write_bytes(pickle.dumps(case))
        Path(made.folder).rename(engine)
        return Outcome(case.name)
    finally:
        shutil.rmtree(folder)


def _request(case: suite.Case, folder: Path) -> BuildRequest:
    model, samples = suite.write(case, folder)
    spec = ModelSpec(
        parameter="net",
        files=(_moved(model, folder / MODEL),),
        samples=_moved(samples, folder / SAMPLES) if samples else None,
        max_batch=suite.max_batch(case),
    )
    target = identity.cpu_target()
    versions = identity.installed()[Backend.ORT_CPU]
    return BuildRequest(
        build=case.name,
        spec=spec,
        target=target,
        candidates=(identity.identity(spec, target, Backend.ORT_CPU, versions),),
        folder=str(folder),
        caches=str(folder / "caches"),
        timeout_s=TIMEOUT_S,
        measuring=_UNMEASURED,
    )


def _moved(file: Path, folder: Path) -> ModelFile:
    folder.mkdir()
    moved = file.rename(folder / file.name)
    return ModelFile(moved.name, digest_of(moved.read_bytes()), moved.stat().st_size)


def _run_here(
    request: CandidateRequest,
    folder: Path,
    environ: Mapping[str, str],
    *,
    timeout_s: float,
    on_progress: Callable[[ProgressUpdate], None],
) -> CandidateResult:
    compiler = compiler_for(request.identity.backend)
    return compile_process.make(request, compiler, lambda stage, progress, detail: None, time.perf_counter)


def main() -> None:
    folder = Path(sys.argv[1])
    for case in filter(suite.passes_bare, suite.one_of_each_kind()):
        outcome = msgspec.structs.replace(build(case, folder / case.name), refusal=why_refused(case))
        print(msgspec.json.encode(outcome).decode(), flush=True)


if __name__ == "__main__":
    main()
