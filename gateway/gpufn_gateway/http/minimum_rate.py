"""How slowly a client may send, and how much of a refused upload is read. Pure.

A client that sends one byte every few seconds would keep its connection for ever. The gateway checks each connection
about once a second, so that a request costs nothing. `request` is any object that identifies a request.
"""

from __future__ import annotations

from typing import Final

HEAD_S: Final = 10.0  # a head must be complete so long after its first byte
FIRST_BYTE_S: Final = 30.0  # browsers connect ahead of need
_WINDOW_S: Final = 10.0
_WINDOW_BYTES: Final = 10 << 10  # in each window: 1 KiB/s
_DISCARD_S: Final = 30.0
_DISCARD_BYTES: Final = 256 << 20  # more than the largest body of a call, less than would keep a process busy

_NONE: Final = object()


class BodyPace:
    """The rate of one connection's request bodies."""

    __slots__ = ("_bytes", "_request", "_since")

    def __init__(self) -> None:
        self._request: object = _NONE
        self._since = 0.0
        self._bytes = 0

    def is_too_slow(self, request: object, received: int, now: float, *, is_paused: bool) -> bool:
        """True when 10 s brought less than 10 KiB. `received` counts the connection's bytes. `is_paused`: the gateway
        does not read, which is no fault of the client.

        >>> pace = BodyPace()
        >>> [pace.is_too_slow(1, received, now, is_paused=False) for received, now in ((0, 0.0), (9, 9.0), (9, 11.0))]
        [False, False, True]
        """
        if request is not self._request or is_paused or received - self._bytes >= _WINDOW_BYTES:
            self._request, self._since, self._bytes = request, now, received
            return False
        return now - self._since > _WINDOW_S


class Discarding:
    """The part of a refused upload that is read so that its client reads the answer."""

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
