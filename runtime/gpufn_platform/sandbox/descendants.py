"""End of all processes that a process has started, also if they have left its process group.

The process goes on in a child. In a PID namespace the child's parent is process 1: when it ends, the kernel kills all
others at once, whatever they do. Without a namespace, the processes that outlive their parents become children of the
waiting process (a subreaper), which kills them in the end.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
from pathlib import Path
from typing import Final, NoReturn

from gpufn_core.protocol.launch import EXIT_SIGNALLED

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_libc: Final = ctypes.CDLL(None)


def go_on_in_child(*, is_in_namespace: bool) -> None:
    """Return in a new child process. The present one ends as the child does, after all that the child has started; it
    ends at SIGTERM too. `is_in_namespace`: it has entered a PID namespace, which the next child is process 1 of."""
    if not is_in_namespace:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    child = os.fork()
    if child:
        _outlive(child, is_in_namespace=is_in_namespace)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if is_in_namespace and (worker := os.fork()):
        os._exit(_wait(worker))
    # Otherwise the death of process 1 is enough.


def end_as(child: int) -> NoReturn:
    """Wait for the child, and end as it does."""
    _end(_wait(child))


def _outlive(child: int, *, is_in_namespace: bool) -> NoReturn:
    def end_others(*_: object) -> None:
        if is_in_namespace:
            os.kill(child, signal.SIGKILL)
        else:
            _kill_children()

    signal.signal(signal.SIGTERM, end_others)
    code = _wait(child)
    while not is_in_namespace and _kill_children():
        with contextlib.suppress(ChildProcessError):
            os.wait()
    _end(code)


def _end(code: int) -> NoReturn:
    """End with an exit code, or by the signal that it means."""
    with contextlib.suppress(OSError, ValueError):  # a core dump of the child is enough
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if code > EXIT_SIGNALLED:
        number = code - EXIT_SIGNALLED
        with contextlib.suppress(OSError, ValueError):
            if number not in (signal.SIGKILL, signal.SIGSTOP):
                signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
    os._exit(code)


def _wait(child: int) -> int:
    """Reap children until this process has ended. Return its exit code as a shell does."""
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return EXIT_SIGNALLED - code if code < 0 else code


def _kill_children() -> bool:
    """Kill our children; theirs become ours. Return whether there were any."""
    found = False
    for task in Path("/proc/self/task").iterdir():
        for pid in (task / "children").read_text().split():
            found = True
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(int(pid), signal.SIGKILL)
    return found
