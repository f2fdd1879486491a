"""Signal a child process when its parent ends for any reason (PR_SET_PDEATHSIG).

The kernel tracks the parent *thread*: start such a child from a thread that lives as long as its process.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_libc = ctypes.CDLL(None)  # loaded before the fork, so that the child only makes the system call


def end_with_parent(signum: signal.Signals) -> Callable[[], None]:
    """Return a `preexec_fn` for `subprocess.Popen`. The setting survives exec, unless the program is setuid."""
    parent = os.getpid()

    def set_signal() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signum)
        if os.getppid() != parent:  # the parent ended before the line above
            os._exit(1)

    return set_signal
