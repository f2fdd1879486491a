"""Callers that died, or wait no more: what runs for them is ended. A stream would wait for its reader, and hold a slot,
to its timeout.

A caller listens for the replies to all its calls; where nobody listens, the bus says so at once. So each caller whose
calls run here is asked now and then which of them he waits for: who gave one up has said so once, and a connection that
broke may have taken that along. One that is away for a while is gone: one that lost its connection to the bus has
another long before.

What comes again after its runner died is asked for before it begins: its caller may have been that runner.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping

import msgspec

from gpufn_core.errors import BusUnavailable
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import encode
from gpufn_core.protocol.messages import InvocationMessage, WaitedFor
from gpufn_platform.bus.connection import Bus, NoResponders
from gpufn_platform.process.clock import Clock
from gpufn_runtime.runner.attempts.attempt import Attempt

_EVERY_S = 5.0
_GONE_AFTER_S = 5.0
_AWAY_ANEW_S = 60.0  # who was away so long ago may have been back
_ANSWER_S = 0.5  # that nobody is there is said within a millisecond

_waited_for = msgspec.msgpack.Decoder(WaitedFor)


class Departed:
    """`running` are the attempts, by invocation; `cancel(invocation)` ends one."""

    def __init__(self, bus: Bus, running: Mapping[str, Attempt], cancel: Callable[[str], None], clock: Clock) -> None:
        self._bus = bus
        self._running = running
        self._cancel = cancel
        self._clock = clock
        self._away_since: dict[str, float] = {}  # caller → monotonic
        self._look_at = 0.0
        self._looking: asyncio.Task[None] | None = None

    def tick(self, now: float) -> None:
        if now >= self._look_at and self._bus.connected and (self._looking is None or self._looking.done()):
            self._look_at = now + _EVERY_S
            self._looking = asyncio.get_running_loop().create_task(self.look(), name="callers that died")

    async def look(self) -> None:
        """Ask each caller; end the calls that nobody waits for."""
        long_ago = self._clock.monotonic() - _AWAY_ANEW_S
        self._away_since = {caller: since for caller, since in self._away_since.items() if since > long_ago}
        calls: dict[str, list[str]] = {}
        for invocation, attempt in self._running.items():
            # The lane is a connection of its own, and tells.
            if attempt.message.reply and not attempt.is_direct:
                calls.setdefault(subjects.beside(attempt.message.reply), []).append(invocation)
        waited_for = await asyncio.gather(*(self._ask(caller, tuple(asked)) for caller, asked in calls.items()))
        for asked, wanted in zip(calls.values(), waited_for, strict=True):
            for invocation in asked:
                if wanted is not None and invocation not in wanted:
                    self._cancel(invocation)

    def was_away(self, message: InvocationMessage) -> bool:
        """Its caller, lately: what he left in the queue is asked for before it begins."""
        return bool(self._away_since) and subjects.beside(message.reply) in self._away_since

    async def is_waited_for(self, message: InvocationMessage) -> bool | None:
        """To be begun anew, if it has been begun. None: its caller is away, perhaps for a moment."""
        caller = subjects.beside(message.reply)
        wanted = await self._ask(caller, (message.id,), anew=True)
        return None if wanted is None else message.id in wanted

    async def _ask(self, caller: str, asked: tuple[str, ...], *, anew: bool = False) -> Collection[str] | None:
        """Which of these the caller waits for, as far as anybody knows; None while he has just gone."""
        try:
            answer = await self._bus.request(caller, encode(WaitedFor(asked, anew)), timeout_s=_ANSWER_S)
        except NoResponders:
            now = self._clock.monotonic()
            return () if now - self._away_since.setdefault(caller, now) >= _GONE_AFTER_S else None
        except BusUnavailable:  # he is busy, or we are cut off
            return asked
        self._away_since.pop(caller, None)
        return _waited_for.decode(answer.payload).invocations
