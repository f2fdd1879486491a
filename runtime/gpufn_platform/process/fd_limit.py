"""The process's limit of open file descriptors, which include connections.

Shells and service managers often set a soft limit of 1024, for programs that use select(2); the hard limit is far
higher. A gateway that reaches its limit silently drops new connections.
"""

from __future__ import annotations

import contextlib
import resource


def raise_to_hard_limit() -> int:
    """Raise the soft limit to the hard limit; returns the previous soft limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # on a system with an additional limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return soft


def set_soft_limit(count: int) -> None:
    """Set the soft limit to `count`, for code that may use select(2). It can be raised again."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
