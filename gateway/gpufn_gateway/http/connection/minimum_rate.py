"""The minimum rate of a client that sends, and how much of a rejected upload is read. Pure.

A client that sends one byte every few seconds would keep its connection open forever. The gateway checks each
connection about once a second, so the checks add no cost per request. `request` can be any object that identifies a
request.
"""

from __future__ import annotations

from typing import Final

HEAD_S: Final = 10.0  # from the first byte of a head to its end
FIRST_BYTE_S: Final = 30.0  # browsers open connections before they need them
_WINDOW_S: Final = 10.0
_WINDOW_BYTES: Final = 10 << 10  # in each window: 1 KiB/s
_DISCARD_S: Final = 30.0
_DISCARD_BYTES: Final = 256 << 20  # more than the largest body of a call, too little to keep a process busy

_NONE: Final = object()


class BodyPace:
    """The receive rate of one connection's request bodies."""

    __slots__ = ("_bytes", "_request", "_since")

    def __init__(self) -> None:
        self._request: object = _NONE
        self._since = 0.0
        self._bytes = 0

    def is_too_slow(self, request: object, received: int, now: float, *, is_paused: bool) -> bool:
        """True if less than 10 KiB arrived in 10 s. `received` is the connection's total bytes. `is_paused`: the
        gateway itself has paused reading, so the client is not slow.

        >>> pace = BodyPace()
        >>> [pace.is_too_slow(1, received, now, is_paused=False) for received, now in ((0, 0.0), (9, 9.0), (9, 11.0))]
        [False, False, True]
        """
        if request is not self._request or is_paused or received - self._bytes >= _WINDOW_BYTES:
            self._request, self._since, self._bytes = request, now, received
            return False
        return now - self._since > _WINDOW_S


class Discarding:
    """Limits how much of a rejected upload is read and discarded, so that the client can read the response."""

    __slots__ = ("_bytes", "_request", "_since")

    def __init__(self) -> None:
        self._request: object = _NONE
        self._since = 0.0
        self._bytes = 0

    def is_over(self, request: object, received: int, now: float) -> bool:
        """True after 30 s or 256 MiB.

        >>> discarding = Discarding()
        >>> [discarding.is_over(1, received, now) for received, now in ((7, 0.0), (8, 29.0), (9, 31.0))]
        [False, False, True]
        """
        if request is not self._request:
            self._request, self._since, self._bytes = request, now, received
        return now - self._since > _DISCARD_S or received - self._bytes > _DISCARD_BYTES
