"""A page as server-sent events: a snapshot, then the changes of each interval.

The next snapshot is made when the client has taken the last change, so a slow client gets fewer changes, and costs no
memory. A client that takes nothing for a minute is disconnected (`gpufn_gateway.http.sse.pump`).
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Hashable
from typing import Any, Final

import msgspec

from gpufn_core.errors import CapacityError, GpufnError
from gpufn_gateway import problems
from gpufn_gateway.console.live.delta import delta

INTERVAL_S: Final = 1.0
MAX_STREAMS: Final = 200  # of one gateway
MAX_OF_SENDER: Final = 20
_QUIET: Final = 15  # intervals without a change, after which the client is told that all is as it was
_REST: Final = 4  # a page that takes 20 ms is followed by 80 ms in which none is made: calls need the event loop
_MAX_SHARED: Final = 100  # pages

Snapshot = Callable[[], Any]


class Streams:
    """`now` returns monotonic seconds. Streams with the same key show the same page to principals with the same rights:
    it is made once for them."""

    def __init__(
        self, now: Callable[[], float], limit: int = MAX_STREAMS, limit_of_sender: int = MAX_OF_SENDER
    ) -> None:
        self._now = now
        self._limit = limit
        self._limit_of_sender = limit_of_sender
        self._shared: dict[Hashable, tuple[float, Any]] = {}  # made at, and snapshot
        self._making = asyncio.Lock()
        self.open: Counter[str] = Counter()  # by sender

    def follow(self, sender: str, key: Hashable, snapshot: Snapshot) -> AsyncIterator[bytes]:
        """Return the events of a page. Raises CapacityError if too many are open, of this sender or of all."""
        if self.open[sender] >= self._limit_of_sender or self.open.total() >= self._limit:
            raise CapacityError("Too many pages of the console are open at this gateway.", retry_after_s=5.0)
        return self._events(sender, key, snapshot)

    async def _events(self, sender: str, key: Hashable, snapshot: Snapshot) -> AsyncIterator[bytes]:
        self.open[sender] += 1
        try:
            shown = await self._made(key, snapshot)
            yield _event(b"snapshot", shown)
            quiet = 0
            while True:
                await asyncio.sleep(INTERVAL_S)
                current = await self._made(key, snapshot)
                changes = delta(shown, current)
                quiet = 0 if changes else quiet + 1
                if changes or quiet >= _QUIET:
                    quiet = 0
                    yield _event(b"delta", changes)
                shown = current
        except GpufnError as error:
            yield b"event: error\ndata: %b\n\n" % problems.problem_of(error).body()
        finally:
            self.open[sender] -= 1
            if not self.open[sender]:
                del self.open[sender]

    async def _made(self, key: Hashable, snapshot: Snapshot) -> Any:
        """Return a snapshot of at most half an interval ago."""
        async with self._making:
            made_at, page = self._shared.get(key, (-math.inf, None))
            if self._now() - made_at < INTERVAL_S / 2:
                return page
            since = self._now()
            page = msgspec.to_builtins(snapshot())
            self._shared.pop(key, None)
            self._shared[key] = since, page
            if len(self._shared) > _MAX_SHARED:
                self._shared.pop(next(iter(self._shared)))
            await asyncio.sleep(_REST * (self._now() - since))
            return page


def _event(name: bytes, value: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name, msgspec.json.encode(value))
