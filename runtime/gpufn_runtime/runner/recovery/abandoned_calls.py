"""Abandoned calls: ends calls whose caller has died or given up. A stream would otherwise hold a slot until its
timeout.

A caller subscribes to one subject for the replies to all its calls. If the subject has no subscriber, NATS reports that
at once. So the runner regularly queries each caller for the calls here that it still wants. A caller announces a
cancelled call only once, and a broken connection may have lost that. A caller that is silent for a while is considered
lost: a caller that only lost its connection reconnects much sooner.

A redelivered call of a dead runner is checked before it begins, because its caller may have been that runner.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping

import msgspec

from gpufn_core.errors import BusUnavailable
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import encode
from gpufn_core.protocol.messages import InvocationMessage, WaitCheck
from gpufn_platform.bus.connection import Bus, NoResponders
from gpufn_platform.process.clock import Clock
from gpufn_platform.process.tasks import Tasks
from gpufn_runtime.runner.core.attempt import Attempt

_EVERY_S = 5.0
_GONE_AFTER_S = 5.0
_FORGET_AFTER_S = 60.0  # a caller's absence that began longer ago may have ended
_ANSWER_TIMEOUT_S = 0.5  # "no responders" comes within a millisecond

_wait_check = msgspec.msgpack.Decoder(WaitCheck)


class AbandonedCalls:
    """Detects abandoned calls. `running` are the attempts, by invocation; `cancel(invocation)` ends one."""

    def __init__(self, bus: Bus, running: Mapping[str, Attempt], cancel: Callable[[str], None], clock: Clock) -> None:
        self._bus = bus
        self._running = running
        self._cancel = cancel
        self._clock = clock
        self._away_since: dict[str, float] = {}  # by caller; monotonic
        self._check_at = 0.0
        self._checks = Tasks("callers that died")

    def tick(self, now: float) -> None:
        if now >= self._check_at and self._bus.connected and not self._checks:
            self._check_at = now + _EVERY_S
            self._checks.start(self.check())

    async def check(self) -> None:
        """Query each caller, and cancel the calls that are no longer wanted."""
        oldest = self._clock.monotonic() - _FORGET_AFTER_S
        self._away_since = {caller: since for caller, since in self._away_since.items() if since > oldest}
        calls: dict[str, list[str]] = {}
        for invocation, attempt in self._running.items():
            # The fast path has its own connection, and detects lost callers.
            if attempt.message.reply and not attempt.is_direct:
                calls.setdefault(subjects.wait_check(attempt.message.reply), []).append(invocation)
        replies = await asyncio.gather(
            *(self._query(caller, tuple(invocations)) for caller, invocations in calls.items())
        )
        for invocations, waited_for in zip(calls.values(), replies, strict=True):
            for invocation in invocations:
                if waited_for is not None and invocation not in waited_for:
                    self._cancel(invocation)

    def was_caller_away(self, message: InvocationMessage) -> bool:
        """Return whether the caller was away recently: its queued calls are checked before they begin."""
        return bool(self._away_since) and subjects.wait_check(message.reply) in self._away_since

    async def is_waited_for(self, message: InvocationMessage) -> bool | None:
        """Return whether the caller waits for the call, which may be restarted. None if the caller is away, perhaps
        briefly."""
        caller = subjects.wait_check(message.reply)
        waited_for = await self._query(caller, (message.id,), is_restart=True)
        return None if waited_for is None else message.id in waited_for

    async def _query(
        self, caller: str, invocations: tuple[str, ...], *, is_restart: bool = False
    ) -> Collection[str] | None:
        """Return which invocations the caller waits for. None if the caller has been away for a short time only."""
        try:
            answer = await self._bus.request(
                caller, encode(WaitCheck(invocations, is_restart)), timeout_s=_ANSWER_TIMEOUT_S
            )
        except NoResponders:
            now = self._clock.monotonic()
            return () if now - self._away_since.setdefault(caller, now) >= _GONE_AFTER_S else None
        except BusUnavailable:  # the caller is busy, or this runner is cut off
            return invocations
        self._away_since.pop(caller, None)
        return _wait_check.decode(answer.payload).invocations
