"""The bodies of calls: in memory, or, when they are large and the runner is on this host, as parcels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from gpufn.errors import PayloadTooLarge
from gpufn_gateway.bodies import BodyReader, Receive, announced_length
from gpufn_gateway.parcels import GatewayParcels, Parcel


class CallBody(NamedTuple):
    """`parcel` is the body when it is one, and `data` is empty then."""

    data: bytes
    parcel: Parcel | None = None

    @property
    def size(self) -> int:
        """In bytes."""
        return len(self.data) if self.parcel is None else self.parcel.size


class CallBodies:
    """`inline` reads what fits one message, `large` what may be a parcel; they differ in their limits."""

    def __init__(self, inline: BodyReader, large: BodyReader, parcels: GatewayParcels | None) -> None:
        self._inline = inline
        self._large = large
        self._parcels = parcels

    @property
    def limit_bytes(self) -> int:
        """What any call may have."""
        return self._inline.limit_bytes

    async def read(self, headers: Mapping[bytes, bytes], receive: Receive, *, may_be_parcel: bool) -> bytes:
        """All of it, to be looked into; `wrap` it then. Raises as BodyReader does."""
        if may_be_parcel and self._parcel_of(headers) is not None:
            return await self._large.read(headers, receive)
        return await self._read_inline(headers, receive, may_be_parcel=may_be_parcel)

    async def take(
        self, headers: Mapping[bytes, bytes], receive: Receive, *, function: str, may_be_parcel: bool
    ) -> CallBody:
        """One that only `function` looks into: a parcel is written while it arrives. Raises as BodyReader does."""
        parcels = self._parcel_of(headers) if may_be_parcel else None
        if parcels is None:
            return CallBody(await self._read_inline(headers, receive, may_be_parcel=may_be_parcel))
        size = announced_length(headers, self._large.limit_bytes, "a call's arguments")
        return CallBody(b"", await self._large.in_time(parcels.receive(receive, size, function=function)))

    async def _read_inline(self, headers: Mapping[bytes, bytes], receive: Receive, *, may_be_parcel: bool) -> bytes:
        """What is sent in chunks, too, for nobody knows whether it will be large."""
        try:
            return await self._inline.read(headers, receive)
        except PayloadTooLarge as error:
            is_unknown = may_be_parcel and b"content-length" not in headers
            if is_unknown and self._parcels is not None and self._parcels.is_for(self.limit_bytes + 1):
                raise PayloadTooLarge(f"{error.message} A larger one needs a length: send Content-Length.") from None
            raise

    def wrap(self, body: bytes, *, function: str, may_be_parcel: bool) -> CallBody:
        if may_be_parcel and self._parcels is not None and self._parcels.is_for(len(body)):
            return CallBody(b"", self._parcels.keep(body, function=function))
        return CallBody(body)

    def discard(self, body: CallBody) -> None:
        """It is not going to be a call's, or its call has ended."""
        if body.parcel is not None and self._parcels is not None:
            self._parcels.discard(body.parcel)

    def _parcel_of(self, headers: Mapping[bytes, bytes]) -> GatewayParcels | None:
        claimed = headers.get(b"content-length", b"")
        if self._parcels is None or not claimed.isdigit() or len(claimed) > 18:
            return None
        return self._parcels if self._parcels.is_for(int(claimed)) else None
