"""Steps, one after the other, each in a process of its own: one that hangs, crashes or spoils its CUDA context does so
alone.

    1. the step's process writes its Result into a file; what it prints goes into a log
    2. at its limit it is told to end, so that it stops what it started; a little later it is killed with all below it
    3. when the time of the whole check is over, the steps that are left are skipped
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

_GRACE_S = 15.0  # to stop a platform in order takes up to ten
_GONE_S = 5.0  # a process that waits for a driver may not even go when it is killed
_LEAST_S = 5.0  # with less time than this left a step is not begun
_SHOWN_BYTES = 40_000  # of what a step printed: pytest's failures, one after the other
_fork = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Step:
    """`check` returns what it found, or raises CannotRun."""

    name: str
    title: str
    limit_s: float
    check: Callable[[Machine], Finding]


class OutOfTime(BaseException):
    """The step's limit was reached; no `except Exception` stops it."""


def run(steps: Sequence[Step], machine: Machine, *, total_s: float, grace_s: float = _GRACE_S) -> Iterator[Result]:
    """The Result of each step, as soon as it has one. All of it takes `total_s` and one `grace_s` at most."""
    give_up = time.monotonic() + total_s
    for step in steps:
        left_s = give_up - time.monotonic()
        if left_s < min(_LEAST_S, step.limit_s):
            why = f"no time was left of {total_s:.0f} s"
            yield Result(step=step.name, state=State.SKIPPED, reason=why, is_left=True)
        else:
            result = perform(step, machine, limit_s=min(step.limit_s, left_s), grace_s=grace_s)
            was_cut = result.state is State.TIMED_OUT and left_s < step.limit_s
            yield msgspec.structs.replace(result, is_left=was_cut)


def perform(step: Step, machine: Machine, *, limit_s: float, grace_s: float = _GRACE_S) -> Result:
    """One step, in a process that is gone afterwards, with everything below it."""
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as name:
        folder = Path(name)
        began = time.monotonic()
        # A fork, so that what a step is need not be importable; nothing here has touched CUDA or started a thread.
        process = _fork.Process(target=_in_process, args=(step, machine, folder))
        process.start()
        assert process.pid is not None
        is_over = False
        below: list[int] = []
        try:
            process.join(limit_s)
            is_over = process.is_alive()
        finally:
            if process.is_alive():  # its time is over, or somebody pressed Ctrl-C
                below = descendants(process.pid)
                process.terminate()
                process.join(grace_s)
            _kill(below)
            process.join()
        return msgspec.structs.replace(
            _read(step, folder, process.exitcode or 0, limit_s if is_over else None),
            seconds=round(time.monotonic() - began, 2),
        )


def _read(step: Step, folder: Path, exit_code: int, limit_s: float | None) -> Result:
    printed = _end_of(folder / "log")
    try:
        result = msgspec.json.decode((folder / "result").read_bytes(), type=Result)
    except (OSError, msgspec.DecodeError):
        result = Result(step=step.name, state=State.FAILED, reason=f"its process ended with {_exit(exit_code)}")
    if limit_s is not None:
        result = msgspec.structs.replace(
            result, state=State.TIMED_OUT, reason=f"it was not done after {limit_s:.0f} s", finding=None
        )
    if result.state in (State.FAILED, State.TIMED_OUT) and printed:
        result = msgspec.structs.replace(result, detail=f"{result.detail}\n--- printed\n{printed}".lstrip())
    return result


def _in_process(step: Step, machine: Machine, folder: Path) -> None:
    os.setsid()  # Ctrl-C is for whoever started the check, who then tells us
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdout = sys.stderr = (folder / "log").open("w", buffering=1)
    os.dup2(sys.stdout.fileno(), 1)
    os.dup2(sys.stdout.fileno(), 2)
    for name in [name for name in os.environ if name.startswith("GPUFN_")]:
        del os.environ[name]  # an operator's consent to change his GPU's settings is not meant for us
    result = _result(step, machine)
    partial = folder / "partial"
    partial.write_bytes(msgspec.json.encode(result))
    partial.rename(folder / "result")
    sys.stdout.flush()
    os._exit(0)  # no step's leftover thread keeps the process


def _result(step: Step, machine: Machine) -> Result:
    try:
        finding = step.check(machine)
    except CannotRun as error:
        return Result(step=step.name, state=State.SKIPPED, reason=str(error))
    except OutOfTime as error:
        return Result(step=step.name, state=State.TIMED_OUT, detail=_told(error))
    except Exception as error:
        first = next(iter(str(error).splitlines()), "")
        reason = f"{type(error).__name__}: {first}" if first else type(error).__name__
        return Result(step=step.name, state=State.FAILED, reason=reason, detail=_told(error))
    if finding.wrong:
        return Result(step=step.name, state=State.FAILED, reason="; ".join(finding.wrong), finding=finding)
    return Result(step=step.name, state=State.PASSED, finding=finding)


def _end(_signum: int, _frame: FrameType | None) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise OutOfTime


def _told(error: BaseException) -> str:
    """The traceback, with the notes that were added to it on its way."""
    return "".join(traceback.format_exception(error))


def _end_of(log: Path) -> str:
    try:
        return log.read_bytes()[-_SHOWN_BYTES:].decode(errors="replace").strip()
    except OSError:
        return ""


def _exit(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _kill(pids: Sequence[int]) -> None:
    """Returns when they are gone, for the next step measures on the same machine; or soon, when one does not go."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    give_up = time.monotonic() + _GONE_S
    while any(map(is_running, pids)) and time.monotonic() < give_up:
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    """A process that nobody has reaped yet is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
