"""Deliveries of queued messages. A delivery is settled once; a redelivered message gets the settlement that it had."""

from __future__ import annotations

from gpufn_platform.bus.connection import Bus, Message
from gpufn_platform.bus.nats_protocol import ack_tokens

_NANO = 1_000_000_000
_MAX_REMEMBERED = 4096  # settled deliveries; a killed server loses far fewer acknowledgements

Key = tuple[int, float]  # sequence and store time, which identify a stored message even across restarts


class AlreadySettled(AssertionError):
    """A delivery was settled twice."""


class Ledger:
    """The deliveries of a Pull, to detect redelivered messages.

    A server that is killed loses deliveries and acknowledgements that it had not written to disk, and redelivers
    messages that are running here or done. A server whose clock is set forward redelivers every running call, since
    `ack_wait` seems to be over.
    """

    def __init__(self) -> None:
        self.held: dict[Key, Delivery] = {}
        self.done: dict[Key, bytes] = {}  # settlements of the newest messages that must not be redelivered
        self._unstarted: dict[Key, set[int]] = {}  # delivery counts that were handed back without starting anything

    def knows(self, delivery: Delivery) -> bool:
        """Return whether this message was delivered to us before."""
        return delivery.key in self.held or delivery.key in self.done

    def hold(self, delivery: Delivery) -> None:
        self.held[delivery.key] = delivery
        if (unstarted := self._unstarted.get(delivery.key)) is not None:
            unstarted.discard(delivery.delivered)  # a server that was killed reuses this delivery count

    def handed_back(self, key: Key, delivered: range) -> None:
        """Record that these deliveries of the message started nothing."""
        self._unstarted.setdefault(key, set()).update(delivered)
        if len(self._unstarted) > _MAX_REMEMBERED:
            del self._unstarted[next(iter(self._unstarted))]

    def starts_between(self, key: Key, after: int, before: int) -> int:
        """Return how many deliveries with a count between the two may have started something."""
        unstarted = self._unstarted.get(key, ())
        return sum(delivered not in unstarted for delivered in range(after + 1, before))

    def settled(self, key: Key, settlement: bytes) -> None:
        self.held.pop(key, None)
        if not settlement.startswith(b"-NAK"):
            self.done[key] = settlement
            self._unstarted.pop(key, None)
            if len(self.done) > _MAX_REMEMBERED:
                del self.done[next(iter(self.done))]


class Delivery:
    """One delivery of a stored message; settle it once with `ack`, `nak` or `term`.

    `delivered` counts deliveries of this message from 1. `pending`: messages behind it in the queue. `stored_at`: in
    unix seconds. `settled_at`: the acknowledgement subject. While the bus is unavailable settling raises
    BusUnavailable; the settlement still holds and is sent when the message is redelivered.
    """

    __slots__ = (
        "_bus",
        "_ledger",
        "delivered",
        "headers",
        "is_settled",
        "key",
        "payload",
        "pending",
        "seq",
        "settled_at",
        "stored_at",
        "subject",
    )

    is_direct = is_withdrawn = False  # deliveries of the fast path are DirectDelivery

    def __init__(self, bus: Bus, message: Message, ledger: Ledger) -> None:
        self._bus = bus
        self.settled_at = message.reply
        self.subject = message.subject
        self.payload = message.payload
        self.headers = message.headers
        self.delivered, self.seq, _, self.stored_at, self.pending = ack_tokens(message.reply)
        # A memory stream counts from 1 again after a restart, so the sequence alone does not identify a message.
        self.key = (self.seq, self.stored_at)
        self._ledger = ledger
        self.is_settled = False

    @property
    def counted(self) -> int:
        """The server's current delivery count of this message; it grows when the server redelivers meanwhile."""
        return ack_tokens(self.settled_at)[0]

    def starts_since(self, delivered: int = 0) -> int:
        """Return how many deliveries after `delivered` and before this one may have started something. An upper bound:
        only deliveries that this process handed back are known to have started nothing."""
        return self._ledger.starts_between(self.key, delivered, self.delivered)

    def ack(self) -> None:
        """Acknowledge: remove the message."""
        self._settle(b"+ACK")

    def nak(self, delay_s: float = 0, *, has_begun: bool = False) -> None:
        """Request redelivery after `delay_s`. `has_begun`: something was started for this delivery."""
        if not has_begun:
            self._ledger.handed_back(self.key, range(self.delivered, self.counted + 1))
        self._settle(b'-NAK {"delay":%d}' % int(delay_s * _NANO) if delay_s > 0 else b"-NAK")

    def term(self, reason: str = "") -> None:
        """Terminate: never redeliver the message."""
        self._settle(f"+TERM {reason}".rstrip().encode())

    def touch(self) -> None:
        """Acknowledge progress, which restarts `ack_wait`. Does nothing after the settlement."""
        if not self.is_settled:
            self._bus.publish(self.settled_at, b"+WPI")

    def _settle(self, settlement: bytes) -> None:
        if self.is_settled:
            raise AlreadySettled(f"{self.subject} seq {self.seq} was settled before {settlement.decode()}")
        # Decide first, then send: if the server misses the acknowledgement, it redelivers and gets the same one.
        self.is_settled = True
        self._ledger.settled(self.key, settlement)
        self._bus.publish(self.settled_at, settlement)

    def is_repeat(self) -> bool:
        """Return whether this message was delivered to us before. If so, it is answered as the earlier delivery was."""
        if (earlier := self._ledger.held.get(self.key)) is not None:
            earlier.settled_at = self.settled_at
            earlier.touch()
            return True
        if (settlement := self._ledger.done.get(self.key)) is not None:
            self._bus.publish(self.settled_at, settlement)
            return True
        return False

    def __repr__(self) -> str:
        return f"Delivery({self.subject!r}, seq={self.seq}, delivered={self.delivered})"
