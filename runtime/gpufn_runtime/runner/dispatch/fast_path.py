"""Runner's side of the fast path: gateways of this host offer calls, which take free slots without the bus.

An accepted call is a delivery like one from a queue, except for its settlement: the outcome goes back over the fast
path, and handing it back means refusing it.
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

OnDelivery = Callable[["DirectDelivery"], None]


class DirectDelivery:
    """A call from the fast path; see `gpufn_platform.queue.delivery.Delivery` for one from a queue."""

    is_direct = True
    delivered, seq = 1, 0
    settled_at = ""  # it can be settled only over its gateway's connection, which ends with this runner
    __slots__ = ("_gateway", "_has_replied", "body", "is_settled", "is_withdrawn", "message")

    def __init__(self, gateway: _Gateway, message: InvocationMessage, body: bytes) -> None:
        self._gateway = gateway
        self.message = message
        self.body = body
        self._has_replied = False
        self.is_withdrawn = False  # no caller waits for it any longer
        self.is_settled = False

    @property
    def subject(self) -> str:
        """The subject of the queue to which it would belong."""
        return subjects.sync_queue(self.message.function, self.message.revision, self.message.priority)

    @property
    def payload(self) -> bytes:
        return pack(self.message, self.body)

    def reply(self, reply: ResultReply, body: bytes) -> None:
        self._has_replied = True
        try:
            self._gateway.send(fast_path.Ended(reply), body)
        except PayloadTooLarge as error:
            self._gateway.send(fast_path.Ended(too_large(reply, error)))

    def nak(self, delay_s: float = 0, *, has_begun: bool = False) -> None:
        """Refuse the call."""
        self._settle()
        self._gateway.send(fast_path.Refused(self.message.id, has_begun))

    def starts_since(self, delivered: int = 0) -> int:
        """Always 0: a gateway offers a call once."""
        return 0

    def ack(self) -> None:
        """Settle: the reply was sent, or a retry is queued."""
        self._settle()
        if not self._has_replied:
            self._gateway.send(fast_path.Queued(self.message.id))

    def term(self, reason: str = "") -> None:
        """Settle without a reply."""
        self._settle()

    def touch(self) -> None:
        """Do nothing: the gateway sees the open connection, so there is no lease to extend."""

    def _settle(self) -> None:
        assert not self.is_settled, f"{self!r} was settled before"
        self.is_settled = True
        self._gateway.in_flight.pop(self.message.id, None)

    def __repr__(self) -> str:
        return f"DirectDelivery({self.message.function!r}, {self.message.id})"


class FastPathServer:
    """Server of the fast path. `on_offer(delivery)` accepts or refuses a call. `on_withdraw(delivery)` ends the
    attempt, whose caller has left. A second attempt of the invocation may run here by then, from the queue; its caller
    waits."""

    def __init__(self, path: Path, on_offer: OnDelivery, on_withdraw: OnDelivery) -> None:
        self._path = path
        self.on_offer = on_offer
        self.on_withdraw = on_withdraw
        self._limits: dict[RevisionKey, fast_path.Limit] = {}
        self.gateways: set[_Gateway] = set()
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Listen on the socket. Raises OSError."""
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._path.unlink(missing_ok=True)
        self._server = await asyncio.get_running_loop().create_unix_server(lambda: _Gateway(self), str(self._path))
        self._path.chmod(0o600)

    def close(self) -> None:
        """Close the connections. Gateways queue the calls in flight."""
        if self._server is not None:
            self._server.close()
        for gateway in list(self.gateways):
            gateway.transport.abort()
        self.gateways.clear()

    def set_limit(self, revision: Revision, calls: int) -> None:
        """Announce how many calls of the revision may be in flight at once; 0 closes the fast path for it."""
        key = revision.key
        known = self._limits.get(key)
        if (known.calls if known is not None else 0) == calls:
            return
        limit = fast_path.Limit(*key, revision.created_at, calls)
        if calls:
            self._limits[key] = limit
        else:
            del self._limits[key]
        for gateway in self.gateways:
            gateway.send(limit)

    def send_heartbeat(self) -> None:
        for gateway in self.gateways:
            gateway.send(fast_path.Heartbeat())

    # --- from the socket ----------------------------------------------------------------------------------------------

    def add(self, gateway: _Gateway) -> None:
        self.gateways.add(gateway)
        for limit in self._limits.values():
            gateway.send(limit)


class _Gateway(asyncio.Protocol):
    """Connection of one gateway."""

    transport: asyncio.Transport

    def __init__(self, fast_path_server: FastPathServer) -> None:
        self._fast_path = fast_path_server
        self._reader: frames.FrameReader[fast_path.GatewayFrame] = frames.FrameReader(fast_path.GatewayFrame)
        self.in_flight: dict[str, DirectDelivery] = {}

    def send(self, frame: fast_path.RunnerFrame, body: bytes = b"") -> None:
        self._out.write(frames.encode(frame, body))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's transports are not its subclasses
        self._out = Outbox(self.transport)
        uid = peer_uid(transport)
        if uid != os.getuid():
            log.warning("refused a fast-path connection of uid %d", uid)
            self.transport.abort()
            return
        self._fast_path.add(self)

    def data_received(self, data: bytes) -> None:
        try:
            for frame, body in self._reader.feed(data):
                if isinstance(frame, fast_path.Offer):
                    delivery = self.in_flight[frame.message.id] = DirectDelivery(self, frame.message, body)
                    self._fast_path.on_offer(delivery)
                else:
                    self._withdraw(frame.invocation)
        except ProtocolMismatch as error:
            log.warning("a gateway broke the fast-path protocol: %s", error)
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._fast_path.gateways.discard(self)
        for invocation in list(self.in_flight):
            self._withdraw(invocation)

    def _withdraw(self, invocation: str) -> None:
        delivery = self.in_flight.get(invocation)
        if delivery is not None:
            delivery.is_withdrawn = True
            self._fast_path.on_withdraw(delivery)


def too_large(reply: ResultReply, error: PayloadTooLarge) -> ResultReply:
    """Return the reply to send instead of a result that is too large."""
    info = ResultNotEncodable(f"the result is too large to send: {error.message}").info()
    return msgspec.structs.replace(reply, kind=OutcomeKind.RAISED, error=info, content_type="")
