"""Which calls this runner has: told to whoever asks, and of one that begins to those who have to hear of it.

A submitted call's record is written when it is queued, tried again, and ends; in between nobody else knows who runs it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping

import msgspec

from gpufn_core.errors import BusUnavailable
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import encode, pack
from gpufn_core.protocol.messages import BegunReply, HeldBy, WhereIs
from gpufn_platform.bus.connection import Bus, Message
from gpufn_runtime.runner.attempts.attempt import Arrived, Attempt, AwaitsTurn

_where = msgspec.msgpack.Decoder(WhereIs)


class Whereabouts:
    """`running` are the attempts, by invocation; `unsettled` those that have ended, and their records do not say so.
    `tell_again(invocation)` repeats the end of one that somebody looks for and that does not run here."""

    def __init__(
        self,
        bus: Bus,
        node: str,
        running: Mapping[str, Attempt],
        unsettled: Mapping[str, Attempt],
        tell_again: Callable[[str], None],
    ) -> None:
        self._bus = bus
        self._node = node
        self._running = running
        self._unsettled = unsettled
        self._tell_again = tell_again

    def start(self) -> None:
        self._bus.subscribe(subjects.WHEREABOUTS, self._on_where)

    def tell_start(self, attempt: Attempt) -> None:
        """Who follows this call's events hears of it, or who would end it for having waited; without the bus nobody
        can."""
        message = attempt.message
        with contextlib.suppress(BusUnavailable):
            if message.reply:
                self._bus.publish(message.reply, pack(BegunReply(message.id)))
            else:
                self._bus.publish(subjects.call_started(message.id), encode(self._held(attempt)))

    def _on_where(self, message: Message) -> None:
        wanted = _where.decode(message.payload).invocation
        if not wanted and message.reply:
            for each in {**self._unsettled, **self._running}.values():
                if each.is_submitted and not isinstance(each.phase, Arrived):
                    self._bus.publish(message.reply, encode(self._held(each)))
            return
        attempt = self._running.get(wanted) or self._unsettled.get(wanted)
        if attempt is None:
            self._tell_again(wanted)
        elif not isinstance(attempt.phase, Arrived) and message.reply:
            self._bus.publish(message.reply, encode(self._held(attempt)))

    def _held(self, attempt: Attempt) -> HeldBy:
        message, worker = attempt.message, attempt.link.worker
        match attempt.phase:
            case AwaitsTurn(gpu):
                return HeldBy(message.id, worker, self._node, message.attempt, 0.0, waits_on=gpu)
            case _:
                run = attempt.run
                return HeldBy(message.id, worker, self._node, message.attempt, run.started_at, run.progress)
