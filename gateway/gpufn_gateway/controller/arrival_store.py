"""The leader's store of arrival histories: a record of 850 bytes per function with `prewarm`.

A record is written at most once per quarter hour, and once per hour without calls. A new leader reads the records. The
record of a function that was deleted, or that no longer has `prewarm`, is deleted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

import msgspec

from gpufn_gateway.background_loop import log_failures
from gpufn_gateway.controller.decide.scaling.prewarm import ArrivalHistory
from gpufn_gateway.controller.state.arrivals import Arrivals
from gpufn_platform.bus.storage.key_value import KeyValue

log = logging.getLogger(__name__)

_EVERY_S: Final = 2.0
_QUIET_SLOTS: Final = 4


class ArrivalStore:
    def __init__(self, bucket: KeyValue, arrivals: Arrivals, leads: Callable[[], bool]) -> None:
        self._bucket = bucket
        self._arrivals = arrivals
        self._leads = leads
        self._stored: dict[str, ArrivalHistory] | None = None  # None until this leader has read the records

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            with log_failures("storing the history of arrivals"):
                await self.step()
            await asyncio.sleep(_EVERY_S)

    async def step(self) -> None:
        if not self._leads():
            self._stored = None
            return
        if self._stored is None:
            self._stored = await self._read()
        for name in self._stored.keys() - self._arrivals.histories.keys():
            await self._bucket.delete(name)
            del self._stored[name]
        for name, history in list(self._arrivals.histories.items()):
            if is_due(history, self._stored.get(name)):
                await self._bucket.put(name, history.encode())
                self._stored[name] = history

    async def _read(self) -> dict[str, ArrivalHistory]:
        stored = {}
        for entry in await self._bucket.entries():
            try:
                stored[entry.key] = ArrivalHistory.decode(entry.value)
            except msgspec.MsgspecError as error:
                log.warning("the history of arrivals of %s is unreadable and starts anew: %s", entry.key, error)
                stored[entry.key] = ArrivalHistory()
            self._arrivals.merge(entry.key, stored[entry.key])
        return stored


def is_due(history: ArrivalHistory, stored: ArrivalHistory | None) -> bool:
    """Return whether to write `history`. `stored` is the record; None if there is none."""
    if stored is None or history.last < stored.last:  # stored while the clock was ahead
        return history.called > 0
    slots = history.last - stored.last
    return slots >= _QUIET_SLOTS or (slots > 0 and history.called != stored.at(history.last).called)
