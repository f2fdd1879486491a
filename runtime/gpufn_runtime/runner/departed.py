"""Callers that died: what runs for them is ended. A stream would wait for its reader, and hold a slot, to its timeout.

A caller listens for the replies to all its calls; where nobody listens, the bus says so at once. So each caller whose
calls run here is asked now and then. One that is away twice in a row is gone: one that lost its connection to the bus
has another long before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from gpufn.bus.connection import Bus, NoResponders
from gpufn.errors import BusUnavailable
from gpufn.protocol import subjects
from gpufn_runtime.runner.attempt import Attempt

_EVERY_S = 5.0
_ANSWER_S = 0.5  # that nobody is there is said within a millisecond


class Departed:
    """`running` are the attempts, by invocation; `cancel(invocation)` ends one."""

    def __init__(self, bus: Bus, running: Mapping[str, Attempt], cancel: Callable[[str], None]) -> None:
        self._bus = bus
        self._running = running
        self._cancel = cancel
        self._away: set[str] = set()
        self._look_at = 0.0
        self._looking: asyncio.Task[None] | None = None

    def tick(self, now: float) -> None:
        if now >= self._look_at and self._bus.connected and (self._looking is None or self._looking.done()):
            self._look_at = now + _EVERY_S
            self._looking = asyncio.get_running_loop().create_task(self.look(), name="callers that died")

    async def look(self) -> None:
        """Ask each caller; end the calls of those that were away before, too."""
        calls: dict[str, list[str]] = {}
        for invocation, attempt in self._running.items():
            # The lane is a connection of its own, and tells.
            if attempt.message.reply and not attempt.is_direct:
                calls.setdefault(subjects.beside(attempt.message.reply), []).append(invocation)
        were_away, self._away = self._away, set()
        here = await asyncio.gather(*map(self._is_here, calls))
        for (caller, invocations), is_here in zip(calls.items(), here, strict=True):
            if not is_here:
                self._away.add(caller)
                for invocation in invocations if caller in were_away else ():
                    self._cancel(invocation)

    async def _is_here(self, caller: str) -> bool:
        try:
            await self._bus.request(caller, timeout_s=_ANSWER_S)
        except NoResponders:
            return False
        except BusUnavailable:  # who is here does not answer
            pass
        return True
