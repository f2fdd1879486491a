"""A web session: one HTTP request or WebSocket connection that a worker's application serves. Pure.

A session is a call with input. Its body is a `WebRequest` and the first part of the request's body. The worker sends
`Down` events as the items of a stream, and the gateway sends `Up` events as the input of the attempt. Every event is
packed by `codec.pack`: a header, then bytes.

Both directions are limited by credits. Down: items and DOWN_WINDOW_BYTES. Up: UP_WINDOW_BYTES, counted by `size_of`.
Bodies and messages travel in parts of at most PART_BYTES. The last part has `more=False`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from gpufn_core.protocol.codec import Unpacker

CONTENT_TYPE: Final = "application/vnd.gpufn.web"
PART_BYTES: Final = 64 << 10
UP_WINDOW_BYTES: Final = 512 << 10  # sent to the worker, and not yet taken by the application
DOWN_WINDOW_BYTES: Final = 1 << 20  # sent to the gateway, and not yet passed on to the client
MAX_MESSAGE_BYTES: Final = 4 << 20  # of a WebSocket, in both directions
CREDIT_REPEATED_S: Final = 2.0  # a waiting worker repeats its credit, in case the bus lost it
_EVENT_BYTES: Final = 512  # an empty message costs memory and time too

# Close codes of RFC 6455 that the platform uses.
NORMAL_CLOSE: Final = 1000
ABNORMAL_CLOSE: Final = 1006
INTERNAL_ERROR: Final = 1011
SERVICE_RESTART: Final = 1012

Headers = tuple[tuple[bytes, bytes], ...]


class WebRequest(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The head of a request, as an ASGI scope has it. `has_more`: the rest of the body follows as input."""

    is_socket: bool
    method: str
    scheme: str
    http_version: str
    path: str
    raw_path: bytes
    root_path: str
    query: bytes
    headers: Headers
    client: tuple[str, int] | None
    server: tuple[str, int | None] | None
    subprotocols: tuple[str, ...] = ()
    has_more: bool = False


class BodyPart(msgspec.Struct, tag=1, frozen=True, array_like=True, gc=False):
    more: bool


class MessagePart(msgspec.Struct, tag=2, frozen=True, array_like=True, gc=False):
    """A part of a WebSocket message. A text is UTF-8."""

    is_text: bool
    more: bool


class Disconnect(msgspec.Struct, tag=3, frozen=True, array_like=True, gc=False):
    """The client has disconnected, or has closed its WebSocket."""

    code: int
    reason: str = ""


class ResponseStart(msgspec.Struct, tag=4, frozen=True, array_like=True, gc=False):
    """The status of a response, and the first part of its body. An application refuses a WebSocket with it."""

    status: int
    headers: Headers
    more: bool


class Accept(msgspec.Struct, tag=5, frozen=True, array_like=True, gc=False):
    subprotocol: str | None
    headers: Headers


class Close(msgspec.Struct, tag=6, frozen=True, array_like=True, gc=False):
    """The application closes its WebSocket, or refuses it with 403 if it has not accepted it."""

    code: int
    reason: str = ""


Up = BodyPart | MessagePart | Disconnect
Down = ResponseStart | BodyPart | Accept | MessagePart | Close

unpack_request: Unpacker[WebRequest] = Unpacker(WebRequest)
unpack_up: Unpacker[Up] = Unpacker(Up)
unpack_down: Unpacker[Down] = Unpacker(Down)


def size_of(payload: bytes) -> int:
    """Return how much of a window a packed event uses."""
    return len(payload) + _EVENT_BYTES


def parts_of(data: bytes) -> Iterator[tuple[bytes, bool]]:
    """Split data into parts. Yield each with True if another follows.

    >>> [(len(part), more) for part, more in parts_of(bytes(PART_BYTES + 1))], list(parts_of(b""))
    ([(65536, True), (1, False)], [(b'', False)])
    """
    if len(data) <= PART_BYTES:
        yield data, False
        return
    view = memoryview(data)
    for start in range(0, len(data), PART_BYTES):
        yield bytes(view[start : start + PART_BYTES]), start + PART_BYTES < len(data)
