"""Processes by identity: a pid together with its start time, for pids are used again.

An agent adopts processes that an earlier one started, so it cannot rely on being their parent: pidfds tell the end of
anybody's process, and an exit status is had only from one's own children. Forked workers become our children because
the agent is their nearest subreaper.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

from gpufn_core.errors import PlatformError

_PR_SET_CHILD_SUBREAPER = 36
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Process(msgspec.Struct, frozen=True):
    pid: int
    start_time: int  # clock ticks since boot, as in /proc/<pid>/stat


class Handle(NamedTuple):
    """A process and an open pidfd of it, which names it also after it has ended."""

    process: Process
    pidfd: int


def become_subreaper() -> None:
    """Orphaned descendants become our children instead of init's."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise PlatformError(f"prctl(PR_SET_CHILD_SUBREAPER) failed: {os.strerror(ctypes.get_errno())}.")


def identify(pid: int) -> Process | None:
    """None when there is no such process. One that has ended but is not reaped yet is still there."""
    fields = _stat(pid)
    return Process(pid, int(fields[19])) if fields else None


def is_running(process: Process) -> bool:
    fields = _stat(process.pid)
    return bool(fields) and int(fields[19]) == process.start_time and fields[0] not in ("Z", "X")


def open_pidfd(process: Process) -> int | None:
    """A descriptor that becomes readable when the process ends; None when it is gone already."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    if identify(process.pid) != process:
        os.close(descriptor)
        return None
    return descriptor


def open_handle(pid: int) -> Handle | None:
    """None when the process is gone."""
    process = identify(pid)
    pidfd = open_pidfd(process) if process is not None else None
    return Handle(process, pidfd) if process is not None and pidfd is not None else None


def reap(pid: int) -> tuple[int | None, int | None]:
    """Exit code and signal of a child that has ended; (None, None) when it is not ours, or still runs."""
    try:
        status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)
    except ChildProcessError:
        return None, None
    if status is None:
        return None, None
    return (status.si_status, None) if status.si_code == os.CLD_EXITED else (None, status.si_status)


def signal_group(process: Process, signum: signal.Signals, pidfd: int | None = None) -> None:
    """Signal the process and its group, when it leads one. It may be gone: while any of its group are there, nobody
    else gets its pid; and whoever has got it is not signalled. While it is there, and `pidfd` is of it, no file is
    opened for that: there may be none left."""
    found = process if pidfd is not None and _is_there(pidfd) else identify(process.pid)
    if found not in (None, process):
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signum)
        return
    if found is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, signum)


def kill(process: Process) -> None:
    """SIGKILL, by a descriptor of it. It may be gone, and its pid another's."""
    descriptor = open_pidfd(process)
    if descriptor is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        os.close(descriptor)


def kill_each(pids: Iterable[int]) -> None:
    """Those that the kernel has just named."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def resident_bytes(pid: int) -> int:
    """0 when it is gone."""
    with contextlib.suppress(OSError, IndexError, ValueError), open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * _PAGE
    return 0


def children(own: int | None = None) -> list[int]:
    """Ours, or those of the process `own`, whether they run or wait to be reaped."""
    own = own or os.getpid()
    with contextlib.suppress(OSError):
        found: list[int] = []
        for task in os.listdir(f"/proc/{own}/task"):
            found += map(int, Path(f"/proc/{own}/task/{task}/children").read_text().split())
        return found
    return []


def children_of(process: Process) -> list[int]:
    """Empty when it is gone, whoever has its pid by now, and when that cannot be told for want of a file."""
    with contextlib.suppress(OSError):
        return children(process.pid) if identify(process.pid) == process else []
    return []


def writing_to(output: Path) -> list[Process]:
    """Processes whose standard output or error is the FIFO `output`."""
    return _those(functools.partial(_writes_to, os.fspath(output)))


def of_worker(output: Path, scratch: Path) -> list[Process]:
    """A worker's, whatever session they fled to: they write to its `output`, or its `scratch` was in the environment
    that their program was started with, as it is in its own."""
    given, path = b"=%b\0" % os.fsencode(scratch), os.fspath(output)
    return _those(lambda pid: _writes_to(path, pid) or _was_given(given, pid))


def kill_writers(output: Path) -> None:
    for process in writing_to(output):
        kill(process)


def kill_worker(output: Path, scratch: Path) -> bool:
    """All of `of_worker`; whether there were any."""
    found = of_worker(output, scratch)
    for process in found:
        kill(process)
    return bool(found)


def _those(are: Callable[[str], bool]) -> list[Process]:
    """Not us, but of all others those whose pid `are` is true of."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid() and are(name):
            process = identify(int(name))
            if process is not None and are(name):  # still: it is the one that was
                found.append(process)
    return found


def _is_there(pidfd: int) -> bool:
    """Running, or not reaped yet."""
    with contextlib.suppress(PermissionError):
        try:
            signal.pidfd_send_signal(pidfd, 0)
        except ProcessLookupError:
            return False
    return True


def _writes_to(path: str, pid: str) -> bool:
    for descriptor in ("1", "2"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{pid}/fd/{descriptor}").removesuffix(" (deleted)") == path:
                return True
    return False


def _was_given(value: bytes, pid: str) -> bool:
    with contextlib.suppress(OSError):  # gone, or another user's
        return value in Path(f"/proc/{pid}/environ").read_bytes()
    return False


def _stat(pid: int) -> list[str]:
    """The fields of /proc/<pid>/stat from the state on; the name before them may hold spaces and parentheses."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
