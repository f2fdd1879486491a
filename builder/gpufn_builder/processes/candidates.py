"""Candidates: each makes an engine of one backend in a process of its own, which may crash, hang or eat all memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Protocol

from gpufn_builder.processes.process import Work
from gpufn_builder.processes.process_messages import CandidateRequest, CandidateResult, Told

PROCESS: Final = "gpufn_builder.processes.compile_process"


class RunCandidate(Protocol):
    """What makes the engine of one candidate: `run_candidate`, or what shall take its place."""

    def __call__(
        self,
        request: CandidateRequest,
        folder: Path,
        environ: Mapping[str, str],
        *,
        timeout_s: float,
        on_told: Callable[[Told], None],
    ) -> CandidateResult: ...


def run_candidate(
    request: CandidateRequest,
    folder: Path,
    environ: Mapping[str, str],
    *,
    timeout_s: float,
    on_told: Callable[[Told], None],
    process: str = PROCESS,
) -> CandidateResult:
    """`folder` takes what the process is told and says. Raises BuildFailed with the stage that it was in, and the last
    lines of what it said, whatever became of it."""
    name = str(request.identity.backend)
    work = Work.start(process, request, folder, environ, name=name, leads=False)
    return work.wait(on_told, CandidateResult, timeout_s)
