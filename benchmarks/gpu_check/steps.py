"""Run the steps one after the other, each in its own process, so that a hang, a crash or a corrupted CUDA context
stays in one step.

    1. the step's process writes its Result to a file; its output goes to a log
    2. at its time limit it gets SIGTERM, so that it stops what it started; a little later it is killed with all
       its descendants
    3. when the time of the whole check is over, the remaining steps are skipped
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

import msgspec

from gpu_check.findings import Finding, Result, State
from gpu_check.machine import CannotRun, Machine
from measure import descendants

_GRACE_S = 15.0  # stopping a platform cleanly takes up to ten seconds
_GONE_S = 5.0  # a process that waits for a driver may not even end when killed
_LEAST_S = 5.0  # with less time than this remaining, no step is started
_SHOWN_BYTES = 40_000  # of a step's output: enough for pytest's failures
_fork = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Step:
    """`check` returns its finding, or raises CannotRun."""

    name: str
    title: str
    limit_s: float
    check: Callable[[Machine], Finding]


class OutOfTime(BaseException):
    """The step's limit was reached. Not an Exception, so that `except Exception` does not stop it."""


def run(steps: Sequence[Step], machine: Machine, *, total_s: float, grace_s: float = _GRACE_S) -> Iterator[Result]:
    """Yield each step's Result as soon as it is known. Takes at most `total_s` plus one `grace_s`."""
    deadline = time.monotonic() + total_s
    for step in steps:
        remaining_s = deadline - time.monotonic()
        if remaining_s < min(_LEAST_S, step.limit_s):
            why = f"no time remained of {total_s:.0f} s"
            yield Result(step=step.name, state=State.SKIPPED, reason=why, is_left=True)
        else:
            result = perform(step, machine, limit_s=min(step.limit_s, remaining_s), grace_s=grace_s)
            was_cut = result.state is State.TIMED_OUT and remaining_s < step.limit_s
            yield msgspec.structs.replace(result, is_left=was_cut)


def perform(step: Step, machine: Machine, *, limit_s: float, grace_s: float = _GRACE_S) -> Result:
    """Run one step in a process that is gone afterwards, with all its descendants."""
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as name:
        folder = Path(name)
        started = time.monotonic()
        # Fork, so that a step need not be importable; this process has not used CUDA or started a thread.
        process = _fork.Process(target=_in_process, args=(step, machine, folder))
        process.start()
        assert process.pid is not None
        timed_out = False
        pids: list[int] = []
        try:
            process.join(limit_s)
            timed_out = process.is_alive()
        finally:
            if process.is_alive():  # it timed out, or Ctrl-C was pressed
                pids = descendants(process.pid)
                process.terminate()
                process.join(grace_s)
            _kill(pids)
            process.join()
        return msgspec.structs.replace(
            _read(step, folder, process.exitcode or 0, limit_s if timed_out else None),
            seconds=round(time.monotonic() - started, 2),
        )


def _read(step: Step, folder: Path, exit_code: int, limit_s: float | None) -> Result:
    printed = _end_of(folder / "log")
    try:
        result = msgspec.json.decode((folder / "result").read_bytes(), type=Result)
    except (OSError, msgspec.DecodeError):
        result = Result(step=step.name, state=State.FAILED, reason=f"its process ended with {_exit(exit_code)}")
    if limit_s is not None:
        result = msgspec.structs.replace(
            result, state=State.TIMED_OUT, reason=f"not finished after {limit_s:.0f} s", finding=None
        )
    if result.state in (State.FAILED, State.TIMED_OUT) and printed:
        result = msgspec.structs.replace(result, detail=f"{result.detail}\n--- output\n{printed}".lstrip())
    return result


def _in_process(step: Step, machine: Machine, folder: Path) -> None:
    os.setsid()  # Ctrl-C goes to the parent, which then terminates this process
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdout = sys.stderr = (folder / "log").open("w", buffering=1)
    os.dup2(sys.stdout.fileno(), 1)
    os.dup2(sys.stdout.fileno(), 2)
    for name in [name for name in os.environ if name.startswith("GPUFN_")]:
        del os.environ[name]  # the operator's settings, such as consent to change the GPU, must not apply here
    result = _result(step, machine)
    partial = folder / "partial"
    partial.write_bytes(msgspec.json.encode(result))
    partial.rename(folder / "result")
    sys.stdout.flush()
    os._exit(0)  # a leftover thread of the step must not keep the process alive


def _result(step: Step, machine: Machine) -> Result:
    try:
        finding = step.check(machine)
    except CannotRun as error:
        return Result(step=step.name, state=State.SKIPPED, reason=str(error))
    except OutOfTime as error:
        return Result(step=step.name, state=State.TIMED_OUT, detail=_traceback(error))
    except Exception as error:
        first = next(iter(str(error).splitlines()), "")
        reason = f"{type(error).__name__}: {first}" if first else type(error).__name__
        return Result(step=step.name, state=State.FAILED, reason=reason, detail=_traceback(error))
    if finding.wrong:
        return Result(step=step.name, state=State.FAILED, reason="; ".join(finding.wrong), finding=finding)
    return Result(step=step.name, state=State.PASSED, finding=finding)


def _end(_signum: int, _frame: FrameType | None) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise OutOfTime


def _traceback(error: BaseException) -> str:
    """Return the traceback with its notes."""
    return "".join(traceback.format_exception(error))


def _end_of(log: Path) -> str:
    try:
        return log.read_bytes()[-_SHOWN_BYTES:].decode(errors="replace").strip()
    except OSError:
        return ""


def _exit(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _kill(pids: Sequence[int]) -> None:
    """Kill the processes and wait until they are gone, because the next step measures on the same machine. Give up
    after `_GONE_S`."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + _GONE_S
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
