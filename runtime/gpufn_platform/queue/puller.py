"""The pull loop: receive exactly as many deliveries from a queue as there are free slots.

    pull = Pull(bus, stream, consumer, on_delivery)
    pull.grant(4)            # four slots are free: up to four deliveries may arrive, now or later
    ...                      # on_delivery(delivery) ... delivery.ack() ... pull.grant(1)

How credits become deliveries:

1. `grant` adds credits; the credits of one event loop iteration leave as one pull request, which is valid for 30 s
2. each delivery uses one credit and goes to the handler at once, on the event loop
3. an expired request reports its unused credits, which are requested again
4. a reconnect, a refusal, or silence for 2.2 heartbeats ends the *generation*: a new inbox, and one request for all
   credits. Messages that still arrive at the old inbox are handed back (NAK), so credits are never exceeded
5. a message that is redelivered while its first delivery is held goes to no handler; the first one settles it

Deliveries carry the subject of the queue and not of the request. So they are counted per generation, whose subscription
identifies them, and not per request; the server's notices carry the rest.
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
    """Pull from one consumer; see the module. The owner calls `tick` each second. `ledger` may also have deliveries
    that arrived another way.

    `on_empty(unused)`: a poll ended with unused credits. `on_missing()`: the consumer does not exist; create it, then
    call `retry` (`tick` retries anyway).
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
        self._owed = 0  # credits that no request at the server covers
        self._polling = 0  # unused credits of the poll in flight; with two polls, deliveries could not be attributed
        self._polls_due = 0
        self._is_blocked = False  # the consumer refused a request: wait for `tick` or `retry`
        self._is_withdrawn = False
        self._issue_is_due = False
        self._loop = asyncio.get_running_loop()
        self._is_alive = True
        self._silent_since: float | None = None
        self._generation = self._new_generation()
        self._ledger = ledger or Ledger()
        self._unregister_reconnect = bus.on_reconnect(self._on_reconnect)

    @property
    def credits(self) -> int:
        """Credits granted without a delivery yet, polls excluded."""
        return self._credits

    def grant(self, credits: int) -> None:  # noqa: A002
        if self._is_withdrawn:
            return
        self._credits += credits
        self._owed += credits
        self._issue_soon()

    def poll(self, credits: int = 1) -> None:  # noqa: A002
        """Request up to `credits` messages that are available now; `on_empty` reports unused credits."""
        if self._is_withdrawn:
            return
        self._polls_due += credits
        self._issue_soon()

    def retry(self) -> None:
        """Request again: the consumer exists."""
        self._is_blocked = False
        self._issue_soon()

    def limit(self, credits: int) -> None:  # noqa: A002
        """Reduce the outstanding credits to `credits`, because slots no longer exist. Excess deliveries are handed
        back."""
        if self._credits > credits and not self._is_withdrawn:
            self._credits = credits
            self._renew()

    def withdraw(self) -> None:
        """Stop pulling. Deliveries in flight are handed back."""
        self._is_withdrawn = True
        self._credits = self._owed = self._polling = self._polls_due = 0
        self._unregister_reconnect()
        self._generation.abandon()

    def tick(self, now: float) -> None:
        """Detect a silent server. `now` is a monotonic clock."""
        if self._is_withdrawn or not self._bus.connected:
            self._silent_since = None
            return
        if self._is_blocked:
            self.retry()
        is_waiting = self._credits > self._owed or self._polling
        if self._is_alive or not is_waiting or self._silent_since is None:
            self._is_alive, self._silent_since = False, now
        elif now - self._silent_since > _SILENCE_S:
            log.warning("no response from %s for %.0f s: requesting again", self._next, now - self._silent_since)
            self._renew()

    # internal

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
                self._generation.request(self._owed)
                self._owed = 0
            if self._polls_due and not self._polling:
                self._generation.poll(self._polls_due)
                self._polling, self._polls_due = self._polls_due, 0
        except BusUnavailable:
            return  # renewed at the reconnect

    def _on_reconnect(self) -> None:
        self._is_blocked = False
        self._renew()

    def _renew(self) -> None:
        """Abandon all requests and request all credits again."""
        self._generation.abandon()
        self._generation = self._new_generation()
        self._owed = self._credits
        self._is_alive, self._silent_since = True, None
        self._poll_ended(self._polling)
        self._issue_soon()

    def _on_standing(self, message: Message) -> None:
        self._is_alive = True
        status = message.status
        if not status:
            if self._credits <= self._owed:
                self._hand_back(message)
                return
            if not self._deliver(message):
                self._owed += 1
                self._issue_soon()
        elif status == 408 and (unused := _unused_credits(message)) is not None:
            self._owed += unused
            self._issue_soon()
        elif status != 100:
            self._on_refused(message)

    def _on_poll(self, message: Message) -> None:
        self._is_alive = True
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
            self._on_refused(message)
        elif status != 100:
            self._poll_ended(self._polling)

    def _poll_ended(self, unused: int) -> None:
        self._polling = 0
        if self._polls_due:
            self._issue_soon()
        if unused and self._on_empty is not None:
            self._on_empty(unused)

    def _on_refused(self, message: Message) -> None:
        """Handle an error status: no such consumer (503, or 409 once deleted), a new leader, a server shutdown, ..."""
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
        """Pass a message to the handler. Returns False for a repeat, which uses no credit."""
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
        """Return a message without a credit to the queue, unless it repeats a message that runs here."""
        if not message.reply or message.status:
            return
        delivery = Delivery(self._bus, message, self._ledger)
        if not delivery.is_repeat():
            self._ledger.handed_back(delivery.key, range(delivery.delivered, delivery.delivered + 1))
            self._bus.publish(message.reply, b"-NAK")


class _Generation:
    """The requests of one inbox. Messages that arrive after `abandon` go to `hand_back`."""

    def __init__(self, bus: Bus, subject: str, on_standing: Handler, on_poll: Handler, hand_back: Handler) -> None:
        self._bus = bus
        self._subject = subject
        self._on_standing = on_standing
        self._on_poll = on_poll
        self._hand_back = hand_back
        self._inbox = bus.new_inbox()
        # `abandon` replaces the handlers.
        self._standing = bus.subscribe(f"{self._inbox}.s", lambda message: self._on_standing(message))  # noqa: PLW0108
        self._polls = bus.subscribe(f"{self._inbox}.p", lambda message: self._on_poll(message))  # noqa: PLW0108

    def request(self, batch: int) -> None:
        body = b'{"batch":%d,"expires":%d,"idle_heartbeat":%d}' % (batch, _EXPIRES_S * _NANO, _HEARTBEAT_S * _NANO)
        self._bus.publish(self._subject, body, reply=f"{self._inbox}.s")

    def poll(self, batch: int) -> None:
        self._bus.publish(self._subject, b'{"batch":%d,"no_wait":true}' % batch, reply=f"{self._inbox}.p")

    def abandon(self) -> None:
        self._on_standing = self._on_poll = self._hand_back
        self._standing.drain()
        self._polls.drain()


def _unused_credits(message: Message) -> int | None:
    unused = (message.headers or {}).get("Nats-Pending-Messages", "")
    return int(unused) if unused.isdigit() else None
