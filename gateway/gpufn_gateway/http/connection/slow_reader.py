"""Detect clients that have stopped reading. Pure.

A client that sends a request and reads nothing would keep its response in memory forever: TCP has no timeout for that,
and a closed connection still waits for unread data. A client may read slowly, but it must make progress.
"""

from __future__ import annotations

from typing import Final

_STALL_TIMEOUT_S: Final = 60.0


class UnreadOutput:
    """The unread output of one connection, checked periodically."""

    __slots__ = ("_bytes", "_since")

    def __init__(self) -> None:
        self._bytes: tuple[int, int] | None = None
        self._since = 0.0

    def is_stalled(self, in_process: int, in_kernel: int, now: float) -> bool:
        """True if the amounts of unread bytes in this process and in the kernel have not changed for a minute.

        >>> output = UnreadOutput()
        >>> [output.is_stalled(9, in_kernel, now) for in_kernel, now in ((5, 0.0), (4, 59.0), (4, 118.0), (4, 120.0))]
        [False, False, False, True]
        """
        unread = (in_process, in_kernel) if in_process else None
        if unread is None or unread != self._bytes:
            self._bytes, self._since = unread, now
            return False
        return now - self._since > _STALL_TIMEOUT_S
