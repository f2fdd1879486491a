"""The index of ended calls of a gateway, which is filled while someone searches calls.

Without the index, a search for a few of a million records takes half a minute. A background task fills it, with breaks,
because it shares the event loop with calls. A minute after the last search the task rests. The next search wakes it,
and the task first adds the calls that ended meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from gpufn_core.errors import PlatformError
from gpufn_platform.bus.connection import Bus
from gpufn_platform.process.clock import Clock
from gpufn_platform.queue.records.call_index import CallIndex
from gpufn_platform.queue.records.call_index_fill import fill

log = logging.getLogger(__name__)

_AFTER_SEARCH_S: Final = 60.0
_BREAK: Final = 2.0  # times as long as a range took to read
_MIN_BREAK_S: Final = 0.02
_COMPLETE_BREAK_S: Final = 1.0  # then new calls are added


class CallIndexing:
    def __init__(self, bus: Bus, clock: Clock) -> None:
        self.index = CallIndex()
        self._bus = bus
        self._clock = clock
        self._searched = asyncio.Event()
        self._until = 0.0

    @property
    def is_active(self) -> bool:
        return self._searched.is_set()

    def searched(self) -> None:
        """Report a search that the index makes shorter."""
        self._until = self._clock.monotonic() + _AFTER_SEARCH_S
        self._searched.set()

    async def run(self) -> None:
        while True:
            await self._searched.wait()
            await asyncio.sleep(await self._fill())
            if self._clock.monotonic() >= self._until:
                self._searched.clear()

    async def _fill(self) -> float:
        """Add a range of records. Return how long to wait before the next one."""
        since = self._clock.monotonic()
        try:
            if await fill(self._bus, self.index):
                return max(_MIN_BREAK_S, _BREAK * (self._clock.monotonic() - since))
        except PlatformError as error:
            log.info("the index of calls is not filled now: %s", error)
        except Exception:
            log.exception("the index of calls could not be filled")
        return _COMPLETE_BREAK_S
