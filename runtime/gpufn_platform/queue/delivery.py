"""One hand-over of a message by its queue. It is settled once; a message that comes again gets the settlement that it
had.
"""

from __future__ import annotations

from gpufn_platform.bus.connection import Bus, Message
from gpufn_platform.bus.nats_protocol import ack_tokens

_NANO = 1_000_000_000
_REMEMBERED = 4096  # settled deliveries; a killed server forgets far fewer

Key = tuple[int, float]  # sequence and time stored: what identifies a stored message, also across restarts


class AlreadySettled(AssertionError):
    """A delivery is settled once."""


class Ledger:
    """What a Pull's server handed over, so that a second hand-over of the same message is noticed.

    A server that is killed forgets hand-overs and acknowledgements it had not written down yet, and starts again
    with messages that run here or are done. One whose clock is set forward finds `ack_wait` over for all that runs.
    """

    def __init__(self) -> None:
        self.held: dict[Key, Delivery] = {}
        self.done: dict[Key, bytes] = {}  # how the newest ones that must not come back were settled
        self._unstarted: dict[Key, set[int]] = {}  # hand-overs, by their count, that were handed back as they came

    def knows(self, delivery: Delivery) -> bool:
        """This message was handed to us before."""
        return delivery.key in self.held or delivery.key in self.done

    def hold(self, delivery: Delivery) -> None:
        self.held[delivery.key] = delivery
        if (unstarted := self._unstarted.get(delivery.key)) is not None:
            unstarted.discard(delivery.delivered)  # a server that was killed counts this hand-over again

    def handed_back(self, key: Key, delivered: range) -> None:
        """These hand-overs of the message started nothing."""
        self._unstarted.setdefault(key, set()).update(delivered)
        if len(self._unstarted) > _REMEMBERED:
            del self._unstarted[next(iter(self._unstarted))]

    def starts_between(self, key: Key, after: int, before: int) -> int:
        """How many hand-overs with a count between these two may have started something."""
        unstarted = self._unstarted.get(key, ())
        return sum(delivered not in unstarted for delivered in range(after + 1, before))

    def settled(self, key: Key, word: bytes) -> None:
        self.held.pop(key, None)
        if not word.startswith(b"-NAK"):
            self.done[key] = word
            self._unstarted.pop(key, None)
            if len(self.done) > _REMEMBERED:
                del self.done[next(iter(self.done))]


class Delivery:
    """One hand-over of a stored message; settle it once with `ack`, `nak` or `term`.

    `delivered` counts hand-overs of this message from 1; `pending` is how many more wait behind it. It was stored at
    `stored_at`, in unix seconds.
    When the bus is away settling raises BusUnavailable; it holds all the same, and is said at the next hand-over.
    """

    __slots__ = (
        "_ack_subject",
        "_bus",
        "_ledger",
        "delivered",
        "headers",
        "is_settled",
        "key",
        "payload",
        "pending",
        "seq",
        "stored_at",
        "subject",
    )

    def __init__(self, bus: Bus, message: Message, ledger: Ledger) -> None:
        self._bus = bus
        self._ack_subject = message.reply
        self.subject = message.subject
        self.payload = message.payload
        self.headers = message.headers
        self.delivered, self.seq, _, self.stored_at, self.pending = ack_tokens(message.reply)
        # A queue in memory counts from 1 again after a restart, so the sequence alone does not identify a message.
        self.key = (self.seq, self.stored_at)
        self._ledger = ledger
        self.is_settled = False

    @property
    def settled_at(self) -> str:
        """The subject on the bus where it is settled: whoever publishes there does it."""
        return self._ack_subject

    @property
    def counted(self) -> int:
        """The bus's own count of this hand-over, which is higher when the bus has repeated it meanwhile."""
        return ack_tokens(self._ack_subject)[0]

    def starts_since(self, delivered: int = 0) -> int:
        """How many hand-overs after that one and before this one may have started something: never too few. Those that
        this process handed back are known to have started nothing."""
        return self._ledger.starts_between(self.key, delivered, self.delivered)

    def ack(self) -> None:
        """Done: remove the message."""
        self._settle(b"+ACK")

    def nak(self, delay_s: float = 0, *, has_begun: bool = False) -> None:
        """Have it delivered again, not before `delay_s`. `has_begun`: something was started for it."""
        if not has_begun:
            self._ledger.handed_back(self.key, range(self.delivered, self.counted + 1))
        self._settle(b'-NAK {"delay":%d}' % int(delay_s * _NANO) if delay_s > 0 else b"-NAK")

    def term(self, reason: str = "") -> None:
        """Never deliver it again."""
        self._settle(f"+TERM {reason}".rstrip().encode())

    def touch(self) -> None:
        """Still working: start `ack_wait` again. After the settlement, nothing."""
        if not self.is_settled:
            self._bus.publish(self._ack_subject, b"+WPI")

    def _settle(self, word: bytes) -> None:
        if self.is_settled:
            raise AlreadySettled(f"{self.subject} seq {self.seq} was settled before {word.decode()}")
        # Decided first, then said: a message whose answer the bus did not hear comes again, and gets the same one.
        self.is_settled = True
        self._ledger.settled(self.key, word)
        self._bus.publish(self._ack_subject, word)

    def is_repeat(self) -> bool:
        """Whether this message was handed to us before; then that delivery answers for this one."""
        if (before := self._ledger.held.get(self.key)) is not None:
            before._ack_subject = self._ack_subject
            before.touch()
            return True
        if (word := self._ledger.done.get(self.key)) is not None:
            self._bus.publish(self._ack_subject, word)
            return True
        return False

    def __repr__(self) -> str:
        return f"Delivery({self.subject!r}, seq={self.seq}, delivered={self.delivered})"
