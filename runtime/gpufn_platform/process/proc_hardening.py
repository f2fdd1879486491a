"""Hide the environment of platform processes, above all credentials, from other processes of the same user.

Workers run user code as the platform's own user, and a process can read `/proc/<pid>/environ` of its user's processes.
"""

from __future__ import annotations

import contextlib
import os

_PR_SET_DUMPABLE = 4


def hide_environment(*names: str) -> None:
    """Make this process undumpable, which hides its `/proc` entries; `os.environ` does not change.

    Root can read them anyway, so the values of `names` are also overwritten in the memory that the kernel shows. Child
    processes that are started without an explicit `env` then see empty values.
    """
    import ctypes  # noqa: PLC0415  takes 5 ms, which only platform processes need to spend

    with contextlib.suppress(OSError, AttributeError):  # not Linux: no /proc either
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
        libc.getenv.restype = ctypes.c_void_p
        for name in names:
            if (value := libc.getenv(os.fsencode(name))) is not None:
                ctypes.memset(value, 0, len(ctypes.string_at(value)))
