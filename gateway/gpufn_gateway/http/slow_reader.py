"""Whether a client reads what has been written for it. Pure.

A client that asks and then reads nothing would keep its answer here for ever: TCP has no end for that, and a connection
that is closed still waits for what is unread. How fast it reads is its own affair, as long as it does.
"""

from __future__ import annotations

from typing import Final

_PATIENCE_S: Final = 60.0


class Unread:
    """Of one connection, looked at now and then."""

    __slots__ = ("_bytes", "_since")

    def __init__(self) -> None:
        self._bytes: tuple[int, int] | None = None
        self._since = 0.0

    def is_left(self, here: int, in_kernel: int, now: float) -> bool:
        """True when the same bytes have been waiting for a minute: `here`, and those that the kernel has of ours.

        >>> unread = Unread()
        >>> [unread.is_left(9, in_kernel, now) for in_kernel, now in ((5, 0.0), (4, 59.0), (4, 118.0), (4, 120.0))]
        [False, False, False, True]
        """
        bytes_ = (here, in_kernel) if here else None
        if bytes_ is None or bytes_ != self._bytes:
            self._bytes, self._since = bytes_, now
            return False
        return now - self._since > _PATIENCE_S
