"""A child process that the kernel signals when its parent ends, however the parent ends (PR_SET_PDEATHSIG).

The kernel means the parent's *thread*: start such a child from a thread that lives as long as its process does.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_libc = ctypes.CDLL(None)  # loaded before a fork: the child only makes the system call


def end_with_parent(signum: signal.Signals) -> Callable[[], None]:
    """A `preexec_fn` for `subprocess.Popen`. `signum` holds across exec, unless the program is setuid."""
    parent = os.getpid()

    def ask_kernel() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signum)
        if os.getppid() != parent:  # it ended before the line above
            os._exit(1)

    return ask_kernel
