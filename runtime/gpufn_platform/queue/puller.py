"""The pull loop: take from a queue exactly as many deliveries as there are free slots.

    pull = Pull(bus, stream, consumer, on_delivery)
    pull.grant(4)            # four slots are free: four deliveries may come, whenever there are some
    ...                      # on_delivery(delivery) ... delivery.ack() ... pull.grant(1)

How credits become deliveries:

1. `grant` adds credits; those of one turn of the loop leave as one pull request that stands for 30 s
2. each delivery uses up a credit and goes to the handler at once, on the loop
3. a request that expires names what it has left, and that is asked for again
4. a reconnect, a refusal, or 2.2 heartbeats of silence end the *generation*: a new inbox, and one request for all
   credits. What still arrives for the old inbox is handed back (NAK), so credits are never exceeded
5. a message that comes again while its first delivery is held is not delivered: that one is settled in its place

Deliveries carry the queue's subject, not the request's, so they are counted per generation (its subscription tells
them apart) and not per request; the server's notices carry the rest.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from gpufn_core.errors import BusUnavailable
from gpufn_platform.bus import jetstream
from gpufn_platform.bus.connection import Bus, Message
from gpufn_platform.bus.tcp_connection import Handler
from gpufn_platform.queue.delivery import Delivery, Ledger

log = logging.getLogger(__name__)

_EXPIRES_S = 30
_HEARTBEAT_S = 5
_SILENCE_S = 2.2 * _HEARTBEAT_S
_NANO = 1_000_000_000
_HANDLER_FAILED_DELAY_S = 1.0


class Pull:
    """See the module. The owner calls `tick` each second; in `ledger` there may be deliveries that came otherwise.

    `on_empty(unused)`: a poll ended with so many credits unused. `on_missing()`: the consumer does not exist; create
    it, then call `retry` (`tick` tries again anyway).
    """

    def __init__(
        self,
        bus: Bus,
        stream: str,
        consumer: str,
        handler: Callable[[Delivery], None],
        *,
        ledger: Ledger | None = None,
        on_empty: Callable[[int], None] | None = None,
        on_missing: Callable[[], None] | None = None,
    ) -> None:
        self._bus = bus
        self._next = f"{jetstream.API}CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._handler = handler
        self._on_empty = on_empty
        self._on_missing = on_missing
        self._credits = 0
        self._owed = 0  # the part of the credits that no request at the server stands for
        self._polling = 0  # what is left of the one poll in flight; a second would blur whose the deliveries are
        self._polls_due = 0
        self._is_blocked = False  # the consumer refused us: wait for `tick` or `retry`
        self._is_withdrawn = False
        self._issue_is_due = False
        self._loop = asyncio.get_running_loop()
        self._heard = True
        self._silent_since: float | None = None
        self._generation = self._new_generation()
        self._ledger = ledger or Ledger()
        self._forget_reconnects = bus.on_reconnect(self._on_reconnect)

    @property
    def credits(self) -> int:
        """Deliveries granted and not yet arrived; polls not counted."""
        return self._credits

    def grant(self, credits: int) -> None:  # noqa: A002
        if self._is_withdrawn:
            return
        self._credits += credits
        self._owed += credits
        self._issue_soon()

    def poll(self, credits: int = 1) -> None:  # noqa: A002
        """Up to `credits` deliveries that wait right now; `on_empty` tells what is not used. Polls are run in turn."""
        if self._is_withdrawn:
            return
        self._polls_due += credits
        self._issue_soon()

    def retry(self) -> None:
        """The consumer exists (again)."""
        self._is_blocked = False
        self._issue_soon()

    def limit(self, credits: int) -> None:  # noqa: A002
        """Have no more than `credits` outstanding: slots are gone. What comes for the rest is handed back."""
        if self._credits > credits and not self._is_withdrawn:
            self._credits = credits
            self._renew()

    def withdraw(self) -> None:
        """Take nothing more. What is on its way is handed back."""
        self._is_withdrawn = True
        self._credits = self._owed = self._polling = self._polls_due = 0
        self._forget_reconnects()
        self._generation.abandon()

    def tick(self, now: float) -> None:
        """The watchdog; `now` is any clock that goes on."""
        if self._is_withdrawn or not self._bus.connected:
            self._silent_since = None
            return
        if self._is_blocked:
            self.retry()
        waits = self._credits > self._owed or self._polling
        if self._heard or not waits or self._silent_since is None:
            self._heard, self._silent_since = False, now
        elif now - self._silent_since > _SILENCE_S:
            log.warning("no sign of %s for %.0f s: asking again", self._next, now - self._silent_since)
            self._renew()

    # inside

    def _new_generation(self) -> _Generation:
        return _Generation(self._bus, self._next, self._on_standing, self._on_poll, self._hand_back)

    def _issue_soon(self) -> None:
        if not self._issue_is_due:
            self._issue_is_due = True
            self._loop.call_soon(self._issue)

    def _issue(self) -> None:
        self._issue_is_due = False
        if self._is_blocked or self._is_withdrawn:
            return
        try:
            if self._owed:
                self._generation.ask(self._owed)
                self._owed = 0
            if self._polls_due and not self._polling:
                self._generation.poll(self._polls_due)
                self._polling, self._polls_due = self._polls_due, 0
        except BusUnavailable:
            return  # the reconnect renews

    def _on_reconnect(self) -> None:
        self._is_blocked = False
        self._renew()

    def _renew(self) -> None:
        """Forget all requests and ask anew."""
        self._generation.abandon()
        self._generation = self._new_generation()
        self._owed = self._credits
        self._heard, self._silent_since = True, None
        self._poll_ended(self._polling)
        self._issue_soon()

    def _on_standing(self, message: Message) -> None:
        self._heard = True
        status = message.status
        if not status:
            if self._credits <= self._owed:
                self._hand_back(message)
                return
            if not self._deliver(message):
                self._owed += 1
                self._issue_soon()
        elif status == 408 and (left := _left(message)) is not None:
            self._owed += left
            self._issue_soon()
        elif status != 100:
            self._refused(message)

    def _on_poll(self, message: Message) -> None:
        self._heard = True
        status = message.status
        if not status:
            if self._polling <= 0:
                self._hand_back(message)
                return
            self._polling -= 1
            if not self._polling and self._polls_due:
                self._issue_soon()
            if not self._deliver(message, polled=True) and self._on_empty is not None:
                self._on_empty(1)
        elif status == 503:
            self._refused(message)
        elif status != 100:
            self._poll_ended(self._polling)

    def _poll_ended(self, unused: int) -> None:
        self._polling = 0
        if self._polls_due:
            self._issue_soon()
        if unused and self._on_empty is not None:
            self._on_empty(unused)

    def _refused(self, message: Message) -> None:
        """No such consumer (503, or 409 once it is deleted), a new leader, a server that shuts down ..."""
        is_missing = message.status == 503 or "Consumer Deleted" in message.description
        log.log(
            logging.DEBUG if is_missing else logging.INFO,
            "%s refused a pull: %s %s", self._next, message.status, message.description,
        )  # fmt: skip
        was_blocked, self._is_blocked = self._is_blocked, True
        self._renew()
        if is_missing and not was_blocked and self._on_missing is not None:
            self._on_missing()

    def _deliver(self, message: Message, *, polled: bool = False) -> bool:
        """False for a repeat, which uses up no credit."""
        delivery = Delivery(self._bus, message, self._ledger)
        if delivery.is_repeat():
            return False
        self._ledger.hold(delivery)
        if not polled:
            self._credits -= 1
        try:
            self._handler(delivery)
        except Exception:
            log.exception("the handler of %r failed", delivery)
            if not delivery.is_settled:
                delivery.nak(_HANDLER_FAILED_DELAY_S)
        return True

    def _hand_back(self, message: Message) -> None:
        """There is no credit for it, so to somebody else; but not what runs here."""
        if not message.reply or message.status:
            return
        delivery = Delivery(self._bus, message, self._ledger)
        if not delivery.is_repeat():
            self._ledger.handed_back(delivery.key, range(delivery.delivered, delivery.delivered + 1))
            self._bus.publish(message.reply, b"-NAK")


class _Generation:
    """The requests of one inbox; what comes there once it is abandoned is for `hand_back`."""

    def __init__(self, bus: Bus, subject: str, on_standing: Handler, on_poll: Handler, hand_back: Handler) -> None:
        self._bus = bus
        self._subject = subject
        self._on_standing = on_standing
        self._on_poll = on_poll
        self._hand_back = hand_back
        self._is_abandoned = False
        self._inbox = bus.new_inbox()
        self._standing = bus.subscribe(f"{self._inbox}.s", self._take_standing)
        self._polls = bus.subscribe(f"{self._inbox}.p", self._take_poll)

    def ask(self, batch: int) -> None:
        body = b'{"batch":%d,"expires":%d,"idle_heartbeat":%d}' % (batch, _EXPIRES_S * _NANO, _HEARTBEAT_S * _NANO)
        self._bus.publish(self._subject, body, reply=f"{self._inbox}.s")

    def poll(self, batch: int) -> None:
        self._bus.publish(self._subject, b'{"batch":%d,"no_wait":true}' % batch, reply=f"{self._inbox}.p")

    def abandon(self) -> None:
        if not self._is_abandoned:
            self._is_abandoned = True
            self._standing.drain()
            self._polls.drain()

    def _take_standing(self, message: Message) -> None:
        (self._hand_back if self._is_abandoned else self._on_standing)(message)

    def _take_poll(self, message: Message) -> None:
        (self._hand_back if self._is_abandoned else self._on_poll)(message)


def _left(message: Message) -> int | None:
    left = (message.headers or {}).get("Nats-Pending-Messages", "")
    return int(left) if left.isdigit() else None
