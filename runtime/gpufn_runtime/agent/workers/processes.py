"""Processes identified by pid and start time, because pids are reused.

An agent adopts processes that an earlier agent started, so it may not be their parent. A pidfd reports the end of any
process; exit statuses are available for own children only. Forked workers become our children because the agent is
their nearest subreaper.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

from gpufn_core.errors import PlatformError

_PR_SET_CHILD_SUBREAPER = 36
_PAGE = os.sysconf("SC_PAGE_SIZE")
_PARENT, _SESSION = 1, 3  # fields of `_stat`


class Process(msgspec.Struct, frozen=True):
    pid: int
    start_time: int  # clock ticks since boot, as in /proc/<pid>/stat


class Handle(NamedTuple):
    """A process and an open pidfd, which identifies the process even after it has ended."""

    process: Process
    pidfd: int


def become_subreaper() -> None:
    """Make orphaned descendants our children instead of init's."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise PlatformError(f"prctl(PR_SET_CHILD_SUBREAPER) failed: {os.strerror(ctypes.get_errno())}.")


def identify(pid: int) -> Process | None:
    """Return the process of a pid, or None if there is none. A process that has ended but is not reaped still
    counts."""
    fields = _stat(pid)
    return Process(pid, int(fields[19])) if fields else None


def is_running(process: Process) -> bool:
    fields = _stat(process.pid)
    return bool(fields) and int(fields[19]) == process.start_time and fields[0] not in ("Z", "X")


def open_pidfd(process: Process) -> int | None:
    """Return a descriptor that becomes readable when the process ends, or None if it has already ended."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    if identify(process.pid) != process:
        os.close(descriptor)
        return None
    return descriptor


def open_handle(pid: int) -> Handle | None:
    """Open a handle. Returns None if the process has ended."""
    process = identify(pid)
    pidfd = open_pidfd(process) if process is not None else None
    return Handle(process, pidfd) if process is not None and pidfd is not None else None


def reap(pid: int) -> tuple[int | None, int | None]:
    """Return exit code and signal of an ended child; (None, None) if it is not our child or still runs."""
    try:
        status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)
    except ChildProcessError:
        return None, None
    if status is None:
        return None, None
    return (status.si_status, None) if status.si_code == os.CLD_EXITED else (None, status.si_status)


def signal_group(process: Process, signum: signal.Signals, pidfd: int | None = None) -> None:
    """Signal the process, and its group if it leads one. An ended process is not an error: its pid is not reused while
    members of its group exist, and a new process with the pid is not signaled. If `pidfd` is given and the process
    exists, no file is opened for the check: no descriptors may be left."""
    current = process if pidfd is not None and _exists(pidfd) else identify(process.pid)
    if current not in (None, process):
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signum)
        return
    if current is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, signum)


def kill(process: Process) -> None:
    """Send SIGKILL through a pidfd. An ended process is not an error, and a new process with its pid is not killed."""
    descriptor = open_pidfd(process)
    if descriptor is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        os.close(descriptor)


def kill_each(pids: Iterable[int]) -> None:
    """Kill pids that were just read from the kernel."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def resident_bytes(pid: int) -> int:
    """Return the resident memory, or 0 if the process has ended."""
    with contextlib.suppress(OSError, IndexError, ValueError), open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * _PAGE
    return 0


def children(parent: int | None = None) -> list[int]:
    """Return the children of this process, or of the process `parent`. Children that wait to be reaped are included."""
    parent = parent or os.getpid()
    with contextlib.suppress(OSError):
        pids: list[int] = []
        for task in os.listdir(f"/proc/{parent}/task"):
            pids += map(int, Path(f"/proc/{parent}/task/{task}/children").read_text().split())
        return pids
    return []


def children_of(process: Process) -> list[int]:
    """Return the children, or an empty list if the process has ended, its pid was reused, or no descriptors are
    left."""
    with contextlib.suppress(OSError):
        return children(process.pid) if identify(process.pid) == process else []
    return []


def descends_from(pid: int, ancestors: Collection[int]) -> bool:
    """Return whether `pid`, an ancestor or the leader of its session is one of `ancestors`. True if the process `pid`
    has ended."""
    while pid > 1:
        if pid in ancestors:
            return True
        if not (stat := _stat(pid)):
            return True
        if int(stat[_SESSION]) in ancestors:
            return True
        pid = int(stat[_PARENT])
    return False


def writing_to(output: Path) -> list[Process]:
    """Return the processes whose standard output or error is the FIFO `output`."""
    return _select(functools.partial(_writes_to, os.fspath(output)))


def of_worker(output: Path, scratch: Path) -> list[Process]:
    """Return all processes of a worker, in any session: processes that write to its `output`, and processes whose
    initial environment has a variable with the value `scratch`."""
    variable, path = b"=%b\0" % os.fsencode(scratch), os.fspath(output)
    return _select(lambda pid: _writes_to(path, pid) or _has_variable(variable, pid))


def kill_writers(output: Path) -> None:
    for process in writing_to(output):
        kill(process)


def kill_worker(output: Path, scratch: Path) -> bool:
    """Kill all processes of a worker. Return whether there were any."""
    targets = of_worker(output, scratch)
    for process in targets:
        kill(process)
    return bool(targets)


def _select(matches: Callable[[str], bool]) -> list[Process]:
    """Return all other processes whose pid `matches`."""
    selected = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid() and matches(name):
            process = identify(int(name))
            if process is not None and matches(name):  # again: the pid may have been reused before `identify`
                selected.append(process)
    return selected


def _exists(pidfd: int) -> bool:
    """Return whether the process runs or waits to be reaped."""
    with contextlib.suppress(PermissionError):
        try:
            signal.pidfd_send_signal(pidfd, 0)
        except ProcessLookupError:
            return False
    return True


def _writes_to(path: str, pid: str) -> bool:
    """Compare the ends of the paths, which have the worker's id: in a sandbox the files are mounted one by one, and the
    link has the path in its mount."""
    end = path.split("/")[-2:]
    for descriptor in ("1", "2"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{pid}/fd/{descriptor}").removesuffix(" (deleted)").split("/")[-2:] == end:
                return True
    return False


def _has_variable(value: bytes, pid: str) -> bool:
    with contextlib.suppress(OSError):  # the process has ended or belongs to another user
        return value in Path(f"/proc/{pid}/environ").read_bytes()
    return False


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat after the name, which may contain spaces and parentheses."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
