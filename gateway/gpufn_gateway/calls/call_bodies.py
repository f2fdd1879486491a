"""The bodies of calls, in memory or in a file that is written while a large body arrives.

inline   A small body travels inside its message.
shared   A large body of a call that a client waits for, if the runner is on this host. It travels as a file in shared
         memory (`gpufn_platform.shared_bodies.bodies`).
stored   A body that is too large for its message. It is stored beside it (`gpufn_gateway.calls.stored_bodies`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from gpufn_core.errors import PayloadTooLarge
from gpufn_core.protocol.limits import CHUNK_ITEMS, RECORD_BYTES
from gpufn_gateway.calls.shared_bodies import GatewaySharedBodies, SharedBody
from gpufn_gateway.http.body_reader import BodyReader, Receive, require_content_length
from gpufn_platform.shared_bodies.bodies import MIN_SHARED_BYTES

_FRAMING_BYTES = 4 * CHUNK_ITEMS  # for lengths or line ends, so that an item may be as large as a call's body


class CallBody(NamedTuple):
    """The body of one call. `shared` is the file that holds it; `data` is empty then.

    `exceeds_message`: the body is too large for a message and must be stored beside it.
    """

    data: bytes
    shared: SharedBody | None = None
    exceeds_message: bool = False

    @property
    def size(self) -> int:
        """Size in bytes."""
        return len(self.data) if self.shared is None else self.shared.size


class CallBodies:
    """Receives the bodies of calls. `inline` reads bodies that fit one message, `large` the others.

    `is_queued`: the call is submitted. Its message is stored on disk and read to list calls, so the body in it is
    limited to RECORD_BYTES, like a result in its record. `may_share`: a large body may become a shared body.
    """

    def __init__(self, inline: BodyReader, large: BodyReader, shared_bodies: GatewaySharedBodies | None) -> None:
        self._inline = inline
        self._large = large
        self._shared_bodies = shared_bodies
        self.limit_bytes = inline.limit_bytes  # the largest body that fits one message
        self.max_bytes = large.limit_bytes  # the largest body of any call
        self.max_queued_bytes = min(RECORD_BYTES, inline.limit_bytes)
        self._always_inline_bytes = min(MIN_SHARED_BYTES, self.max_queued_bytes)  # smaller bodies need no decision

    async def read(
        self, headers: Mapping[bytes, bytes], receive: Receive, *, may_share: bool, is_queued: bool = False
    ) -> bytes:
        """Read a whole body into memory to inspect it; then `wrap` it. Raises the exceptions of BodyReader.read."""
        size = _announced_length(headers)
        if size is None or size < self._always_inline_bytes:
            return await self._read_inline(headers, receive)
        if self._is_shared(size, may_share) or self._exceeds_message(size, is_queued):
            return await self._large.read(headers, receive)
        return await self._read_inline(headers, receive)

    async def receive_body(
        self, headers: Mapping[bytes, bytes], receive: Receive, *, may_share: bool, is_queued: bool = False
    ) -> CallBody:
        """Receive a body that the gateway does not decode. A large body is written to a file while it arrives.

        Raises the exceptions of BodyReader.read.
        """
        size = _announced_length(headers)
        is_shared = size is not None and self._is_shared(size, may_share)
        exceeds_message = not is_shared and size is not None and self._exceeds_message(size, is_queued)
        if is_shared or exceeds_message:
            return CallBody(b"", await self._receive(headers, receive, self.max_bytes), exceeds_message)
        return self.wrap(await self._read_inline(headers, receive), may_share=False, is_queued=is_queued)

    async def receive_chunk(self, headers: Mapping[bytes, bytes], receive: Receive) -> CallBody:
        """Receive items of a map; read them with `view`. Raises the exceptions of BodyReader.read."""
        size = _announced_length(headers)
        if size is None or not self._exceeds_message(size, is_queued=False):
            return CallBody(await self._read_inline(headers, receive))
        return CallBody(b"", await self._receive(headers, receive, self.max_bytes + _FRAMING_BYTES))

    async def _receive(self, headers: Mapping[bytes, bytes], receive: Receive, limit_bytes: int) -> SharedBody:
        assert self._shared_bodies is not None
        size = require_content_length(headers, limit_bytes, "a call's arguments")
        return await self._large.within_timeout(self._shared_bodies.receive(receive, size))

    async def _read_inline(self, headers: Mapping[bytes, bytes], receive: Receive) -> bytes:
        """Read a body that fits one message, or a chunked one, whose length is not known."""
        try:
            return await self._inline.read(headers, receive)
        except PayloadTooLarge as error:
            if self._shared_bodies is not None and b"content-length" not in headers:
                raise PayloadTooLarge(f"{error.message} For a larger body, send Content-Length.") from None
            raise

    def wrap(self, body: bytes, *, may_share: bool, is_queued: bool = False) -> CallBody:
        """Turn a body in memory into a CallBody."""
        if len(body) < self._always_inline_bytes:
            return CallBody(body)
        if self._shared_bodies is not None and self._is_shared(len(body), may_share):
            return CallBody(b"", self._shared_bodies.share(body))
        return CallBody(body, exceeds_message=self._exceeds_message(len(body), is_queued))

    def view(self, body: CallBody) -> bytes | memoryview:
        """Return the bytes of a body to inspect, valid until `discard`."""
        if body.shared is None or self._shared_bodies is None:
            return body.data
        return self._shared_bodies.view(body.shared)

    def discard(self, body: CallBody) -> None:
        """Release a body that is not used, or whose call has ended."""
        if body.shared is not None and self._shared_bodies is not None:
            self._shared_bodies.discard(body.shared)

    def _is_shared(self, size: int, may_share: bool) -> bool:
        return may_share and self._shared_bodies is not None and self._shared_bodies.is_shareable(size)

    def _exceeds_message(self, size: int, is_queued: bool) -> bool:
        return self._shared_bodies is not None and size > (self.max_queued_bytes if is_queued else self.limit_bytes)


def _announced_length(headers: Mapping[bytes, bytes]) -> int | None:
    """Return the Content-Length of a body; None if it is missing or invalid."""
    header = headers.get(b"content-length", b"")
    return int(header) if header.isdigit() and len(header) <= 18 else None
