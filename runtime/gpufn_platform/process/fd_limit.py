"""How many files a process may have open, connections among them.

What a shell or a service manager allows at first is often 1024, for the sake of programs that use select(2), and far
more to who asks. A gateway at its limit hangs up on who comes next, without a word.
"""

from __future__ import annotations

import contextlib
import resource


def allow_all() -> int:
    """As many as this process may have; how many it was allowed at first."""
    first, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # a system that has another limit beside this one
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return first


def allow(count: int) -> None:
    """So many, until this process asks for more: for code that may use select(2)."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, most))
