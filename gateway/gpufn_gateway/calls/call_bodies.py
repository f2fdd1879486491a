"""The bodies of calls: in memory, in a file that the gateway writes while a large one arrives, or both one after the
other.

small       travels inside its message
parcel      a large one of a call that somebody waits for, when the runner is on this host (`gpufn_platform.shared_bodies.bodies`)
reference   one that is too large for its message: it is stored beside it (`gpufn_gateway.calls.stored_bodies`)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from gpufn_core.errors import PayloadTooLarge
from gpufn_core.protocol.limits import CHUNK_ITEMS, RECORD_BYTES
from gpufn_gateway.calls.shared_bodies import GatewayParcels, Parcel
from gpufn_gateway.http.body_reader import BodyReader, Receive, announced_length

_FRAMING_BYTES = 4 * CHUNK_ITEMS  # lengths or line ends in a chunk, so that an item may be as large as a call's body


class CallBody(NamedTuple):
    """`parcel` is the file that has the body, and `data` is empty then. `by_reference`: it is too large for a message,
    and is to be stored beside it."""

    data: bytes
    parcel: Parcel | None = None
    by_reference: bool = False

    @property
    def size(self) -> int:
        """In bytes."""
        return len(self.data) if self.parcel is None else self.parcel.size


class CallBodies:
    """`inline` reads what fits one message, `large` what does not; they differ in their limits.

    `is_queued`: the call is submitted. Its message is stored on disk and is read to list calls, so its body has
    RECORD_BYTES at most, as a result has in its record.
    """

    def __init__(self, inline: BodyReader, large: BodyReader, parcels: GatewayParcels | None) -> None:
        self._inline = inline
        self._large = large
        self._parcels = parcels
        self.queued_bytes = min(RECORD_BYTES, inline.limit_bytes)

    @property
    def limit_bytes(self) -> int:
        """What fits one message."""
        return self._inline.limit_bytes

    @property
    def largest_bytes(self) -> int:
        """What any call may have."""
        return self._large.limit_bytes

    async def read(
        self, headers: Mapping[bytes, bytes], receive: Receive, *, may_be_parcel: bool, is_queued: bool = False
    ) -> bytes:
        """All of it, to be looked into; `wrap` it then. Raises as BodyReader does."""
        size = _claimed(headers)
        if size is not None and (self._is_parcel(size, may_be_parcel) or self._is_reference(size, is_queued)):
            return await self._large.read(headers, receive)
        return await self._read_inline(headers, receive)

    async def take(
        self,
        headers: Mapping[bytes, bytes],
        receive: Receive,
        *,
        function: str,
        may_be_parcel: bool,
        is_queued: bool = False,
    ) -> CallBody:
        """A body that the gateway does not decode. The file of a large one, for `function`, is written while the body
        arrives. Raises as BodyReader does."""
        size = _claimed(headers)
        is_parcel = size is not None and self._is_parcel(size, may_be_parcel)
        by_reference = not is_parcel and size is not None and self._is_reference(size, is_queued)
        if is_parcel or by_reference:
            return CallBody(b"", await self._receive(headers, receive, function, self._large.limit_bytes), by_reference)
        return self.wrap(
            await self._read_inline(headers, receive), function=function, may_be_parcel=False, is_queued=is_queued
        )

    async def take_chunk(self, headers: Mapping[bytes, bytes], receive: Receive, *, function: str) -> CallBody:
        """Items of a map, which are looked into by `view`. Raises as BodyReader does."""
        size = _claimed(headers)
        if size is None or not self._is_reference(size, is_queued=False):
            return CallBody(await self._read_inline(headers, receive))
        limit = self._large.limit_bytes + _FRAMING_BYTES
        return CallBody(b"", await self._receive(headers, receive, function, limit))

    async def _receive(
        self, headers: Mapping[bytes, bytes], receive: Receive, function: str, limit_bytes: int
    ) -> Parcel:
        assert self._parcels is not None
        size = announced_length(headers, limit_bytes, "a call's arguments")
        return await self._large.in_time(self._parcels.receive(receive, size, function=function))

    async def _read_inline(self, headers: Mapping[bytes, bytes], receive: Receive) -> bytes:
        """What is sent in chunks, too, for nobody knows whether it will be large."""
        try:
            return await self._inline.read(headers, receive)
        except PayloadTooLarge as error:
            if self._parcels is not None and b"content-length" not in headers:
                raise PayloadTooLarge(f"{error.message} A larger one needs a length: send Content-Length.") from None
            raise

    def wrap(self, body: bytes, *, function: str, may_be_parcel: bool, is_queued: bool = False) -> CallBody:
        if self._parcels is not None and self._is_parcel(len(body), may_be_parcel):
            return CallBody(b"", self._parcels.keep(body, function=function))
        return CallBody(body, by_reference=self._is_reference(len(body), is_queued))

    def view(self, body: CallBody) -> bytes | memoryview:
        """The bytes of a body that this gateway looks into; until it is discarded."""
        if body.parcel is None or self._parcels is None:
            return body.data
        return self._parcels.view(body.parcel)

    def discard(self, body: CallBody) -> None:
        """It is not going to be a call's, or its call has ended."""
        if body.parcel is not None and self._parcels is not None:
            self._parcels.discard(body.parcel)

    def _is_parcel(self, size: int, may_be_parcel: bool) -> bool:
        return may_be_parcel and self._parcels is not None and self._parcels.is_for(size)

    def _is_reference(self, size: int, is_queued: bool) -> bool:
        return self._parcels is not None and size > (self.queued_bytes if is_queued else self._inline.limit_bytes)


def _claimed(headers: Mapping[bytes, bytes]) -> int | None:
    """The announced length of a body; None without one that can be read."""
    claimed = headers.get(b"content-length", b"")
    return int(claimed) if claimed.isdigit() and len(claimed) <= 18 else None
