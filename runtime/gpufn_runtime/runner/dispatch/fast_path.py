"""The runner's end of the lane: gateways of this host offer calls, which take free slots without the bus.

A call that was taken is a delivery like one from the queue, but for its settlement: its end goes back on the lane, and
handing it back is refusing it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import cast

import msgspec

from gpufn_core.domain.invocation import OutcomeKind
from gpufn_core.domain.revision import Revision, RevisionKey
from gpufn_core.errors import PayloadTooLarge, ProtocolMismatch, ResultNotEncodable
from gpufn_core.protocol import fast_path, frames, subjects
from gpufn_core.protocol.codec import pack
from gpufn_core.protocol.messages import InvocationMessage, ResultReply
from gpufn_platform.process.unix_sockets import Outbox, peer_uid

log = logging.getLogger(__name__)

Take = Callable[["DirectDelivery"], None]


class DirectDelivery:
    """A call that came by the lane; see `gpufn_platform.queue.delivery.Delivery` for one from a queue."""

    delivered, seq = 1, 0
    settled_at = ""  # only over its gateway's connection, which goes with us
    __slots__ = ("_gateway", "_is_told", "body", "is_settled", "is_withdrawn", "message")

    def __init__(self, gateway: _Gateway, message: InvocationMessage, body: bytes) -> None:
        self._gateway = gateway
        self.message = message
        self.body = body
        self._is_told = False
        self.is_withdrawn = False  # nobody waits for it any more
        self.is_settled = False

    @property
    def subject(self) -> str:
        """The queue that it would be in."""
        return subjects.sync_queue(self.message.function, self.message.revision, self.message.priority)

    @property
    def payload(self) -> bytes:
        return pack(self.message, self.body)

    def reply(self, reply: ResultReply, body: bytes) -> None:
        self._is_told = True
        self._gateway.ended(reply, body)

    def nak(self, delay_s: float = 0, *, has_begun: bool = False) -> None:
        """Not here, not now."""
        self._settle()
        self._gateway.send(fast_path.Refused(self.message.id, has_begun))

    def starts_since(self, delivered: int = 0) -> int:
        """The gateway offers a call once."""
        return 0

    def ack(self) -> None:
        """Its end was told, or its retry is queued."""
        self._settle()
        if not self._is_told:
            self._gateway.send(fast_path.Queued(self.message.id))

    def term(self, reason: str = "") -> None:
        """Nobody is to hear of it."""
        self._settle()

    def touch(self) -> None:
        """The gateway sees our socket: there is nothing to prolong."""

    def _settle(self) -> None:
        assert not self.is_settled, f"{self!r} was settled before"
        self.is_settled = True
        self._gateway.under_way.pop(self.message.id, None)

    def __repr__(self) -> str:
        return f"DirectDelivery({self.message.function!r}, {self.message.id})"


class Lane:
    """`take(delivery)` takes a call or refuses it; `cancel(delivery)` ends the attempt that nobody waits for. Its
    invocation may run here a second time by then, from the queue: that one somebody waits for."""

    def __init__(self, path: Path, take: Take, cancel: Take) -> None:
        self._path = path
        self.take = take
        self.cancel = cancel
        self._rooms: dict[RevisionKey, fast_path.Room] = {}
        self._gateways: set[_Gateway] = set()
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Raises OSError."""
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._path.unlink(missing_ok=True)
        self._server = await asyncio.get_running_loop().create_unix_server(lambda: _Gateway(self), str(self._path))
        self._path.chmod(0o600)

    def close(self) -> None:
        """Gateways queue what was under way."""
        if self._server is not None:
            self._server.close()
        for gateway in list(self._gateways):
            gateway.transport.abort()
        self._gateways.clear()

    def room(self, revision: Revision, calls: int) -> None:
        """So many calls of this revision may be under way at a time; 0 closes the lane for it."""
        key = revision.key
        known = self._rooms.get(key)
        if (known.calls if known is not None else 0) == calls:
            return
        room = fast_path.Room(*key, revision.created_at, calls)
        if calls:
            self._rooms[key] = room
        else:
            del self._rooms[key]
        for gateway in self._gateways:
            gateway.send(room)

    def beat(self) -> None:
        for gateway in self._gateways:
            gateway.send(fast_path.Beat())

    # --- from the socket ----------------------------------------------------------------------------------------------

    def connected(self, gateway: _Gateway) -> None:
        self._gateways.add(gateway)
        for room in self._rooms.values():
            gateway.send(room)

    def lost(self, gateway: _Gateway) -> None:
        self._gateways.discard(gateway)


class _Gateway(asyncio.Protocol):
    """One gateway's connection."""

    transport: asyncio.Transport

    def __init__(self, owner: Lane) -> None:
        self._lane = owner
        self._reader: frames.FrameReader[fast_path.GatewayFrame] = frames.FrameReader(fast_path.GatewayFrame)
        self.under_way: dict[str, DirectDelivery] = {}

    def send(self, frame: fast_path.RunnerFrame, body: bytes = b"") -> None:
        self._out.write(frames.encode(frame, body))

    def ended(self, reply: ResultReply, body: bytes) -> None:
        try:
            self.send(fast_path.Ended(reply), body)
        except PayloadTooLarge as error:
            self.send(fast_path.Ended(too_large(reply, error)))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's transports are not its subclasses
        self._out = Outbox(self.transport)
        uid = peer_uid(transport)
        if uid != os.getuid():
            log.warning("refused a connection of uid %d to the lane", uid)
            self.transport.abort()
            return
        self._lane.connected(self)

    def data_received(self, data: bytes) -> None:
        try:
            for frame, body in self._reader.feed(data):
                if isinstance(frame, fast_path.Offer):
                    delivery = self.under_way[frame.message.id] = DirectDelivery(self, frame.message, body)
                    self._lane.take(delivery)
                else:
                    self._withdraw(frame.invocation)
        except ProtocolMismatch as error:
            log.warning("a gateway broke the lane's protocol: %s", error)
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lane.lost(self)
        for invocation in list(self.under_way):
            self._withdraw(invocation)

    def _withdraw(self, invocation: str) -> None:
        delivery = self.under_way.get(invocation)
        if delivery is not None:
            delivery.is_withdrawn = True
            self._lane.cancel(delivery)


def too_large(reply: ResultReply, error: PayloadTooLarge) -> ResultReply:
    """What is told in place of a result that cannot be sent."""
    info = ResultNotEncodable(f"the result is too large to send: {error.message}").info()
    return msgspec.structs.replace(reply, kind=OutcomeKind.RAISED, error=info, content_type="")
