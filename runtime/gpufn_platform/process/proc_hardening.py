"""Keep what a process of the platform was started with, credentials first of all, from the processes beside it.

Workers run user code as the platform's own user, and any process of a user can read `/proc/<pid>/environ` of another.
"""

from __future__ import annotations

import contextlib
import os

_PR_SET_DUMPABLE = 4


def hide_environment(*names: str) -> None:
    """Make this process opaque to others of its user; `os.environ` stays as it is.

    Root sees through that, so the values of `names` are overwritten as well where the kernel shows them from. A process
    that we start without an `env` of its own then finds them empty.
    """
    import ctypes  # noqa: PLC0415  5 ms that only processes of the platform need to spend

    with contextlib.suppress(OSError, AttributeError):  # no Linux: there is no /proc either
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
        libc.getenv.restype = ctypes.c_void_p
        for name in names:
            if (value := libc.getenv(os.fsencode(name))) is not None:
                ctypes.memset(value, 0, len(ctypes.string_at(value)))
