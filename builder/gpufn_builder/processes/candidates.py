"""Execution of candidates: each compiles an engine of one backend in its own process, which may crash, hang or run out
of memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Protocol

from gpufn_builder.processes.process import ChildProcess
from gpufn_builder.processes.process_messages import CandidateRequest, CandidateResult, ProgressUpdate

PROCESS: Final = "gpufn_builder.processes.compile_process"


class RunCandidate(Protocol):
    """The interface of `run_candidate` and its test doubles."""

    def __call__(
        self,
        request: CandidateRequest,
        folder: Path,
        environ: Mapping[str, str],
        *,
        timeout_s: float,
        on_progress: Callable[[ProgressUpdate], None],
    ) -> CandidateResult: ...


def run_candidate(
    request: CandidateRequest,
    folder: Path,
    environ: Mapping[str, str],
    *,
    timeout_s: float,
    on_progress: Callable[[ProgressUpdate], None],
    process: str = PROCESS,
) -> CandidateResult:
    """Run a candidate's process; `folder` is for its request and output. Raises BuildFailed with the stage that it was
    in and the last lines of its output."""
    name = str(request.identity.backend)
    work = ChildProcess(process, request, folder, environ, name=name, leads_group=False)
    return work.wait(on_progress, CandidateResult, timeout_s)
