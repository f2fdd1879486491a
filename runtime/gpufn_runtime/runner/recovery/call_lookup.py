"""Call lookup: answers which runner has a call, and announces calls that start.

A submitted call's record is written when it is queued, retried or ended. In between, only its runner knows about it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from gpufn_core.errors import BusUnavailable
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import encode, pack
from gpufn_core.protocol.messages import CallLocation, LocateCall, StartedReply
from gpufn_platform.bus.connection import Bus, Message
from gpufn_runtime.runner.core.attempt import Attempt, AttemptState

_locate = msgspec.msgpack.Decoder(LocateCall)


@dataclass(eq=False, repr=False)
class CallLookup:
    """Answers lookups. `running` are the attempts, by invocation. `unsettled` are ended attempts whose records are not
    stored yet. `repeat_reply(invocation)` resends the reply of a call that does not run here."""

    bus: Bus
    node: str
    running: Mapping[str, Attempt]
    unsettled: Mapping[str, Attempt]
    repeat_reply: Callable[[str], None]

    def start(self) -> None:
        self.bus.subscribe(subjects.WHEREABOUTS, self._on_locate)

    def announce_start(self, attempt: Attempt) -> None:
        """Announce a start to clients that follow the call, and to the gateway, which would otherwise expire it.
        Without the bus, none of them can act."""
        message = attempt.message
        with contextlib.suppress(BusUnavailable):
            if message.reply:
                self.bus.publish(message.reply, pack(StartedReply(message.id)))
            else:
                self.bus.publish(subjects.call_started(message.id), encode(self._holder(attempt)))

    def _on_locate(self, message: Message) -> None:
        invocation = _locate.decode(message.payload).invocation
        if not invocation and message.reply:
            for candidate in {**self.unsettled, **self.running}.values():
                if candidate.is_submitted and _is_held(candidate):
                    self.bus.publish(message.reply, encode(self._holder(candidate)))
            return
        attempt = self.running.get(invocation) or self.unsettled.get(invocation)
        if attempt is None:
            self.repeat_reply(invocation)
        elif _is_held(attempt) and message.reply:
            self.bus.publish(message.reply, encode(self._holder(attempt)))

    def _holder(self, attempt: Attempt) -> CallLocation:
        message, worker = attempt.message, attempt.worker.id
        if attempt.state is AttemptState.WAITING:
            return CallLocation(message.id, worker, self.node, message.attempt, 0.0, waits_on=attempt.worker.gpu)
        run = attempt.run
        return CallLocation(message.id, worker, self.node, message.attempt, run.started_at, run.progress)


def _is_held(attempt: Attempt) -> bool:
    """Whether this runner has the call for good. A call that it looks up itself may turn out to be elsewhere."""
    return attempt.state not in (AttemptState.PREPARING, AttemptState.CHECKING)
