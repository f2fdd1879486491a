"""Limits of the submitted calls of teams, for calls that functions submit. The gateway does this for other callers.

The bus counts a team's calls once a second. This runner adds the calls that it accepts to the last count. It does not
know the calls that gateways and other runners accept within that second, so a team can exceed its limit by these.
"""

from __future__ import annotations

import asyncio
import math
from typing import Final

from gpufn_core.domain.team import Team
from gpufn_core.errors import RateLimited
from gpufn_core.protocol import subjects
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import streams
from gpufn_platform.process.clock import Clock
from gpufn_runtime.runner.directory import Directory

_COUNT_TTL_S: Final = 1.0


class TeamQueues:
    def __init__(self, bus: Bus, directory: Directory, clock: Clock) -> None:
        self._bus = bus
        self._directory = directory
        self._clock = clock
        self._counts: dict[str, tuple[int, float]] = {}  # team → its calls, and when they were counted
        self._lock = asyncio.Lock()

    async def admit(self, function: str) -> None:
        """Count one submitted call of a function. Raises RateLimited, BusUnavailable."""
        team = self._directory.team_of(function)
        if team is None or (limit := team.limits.queued) is None:
            return
        async with self._lock:
            now = self._clock.monotonic()
            queued, counted_at = self._counts.get(team.name, (0, -math.inf))
            if now - counted_at >= _COUNT_TTL_S:
                queued, counted_at = await self._count(team), now
            refused = queued >= limit
            self._counts[team.name] = queued + (not refused), counted_at
        if refused:
            raise RateLimited(
                f"The team {team.name} may have at most {limit:,} submitted calls that have not ended.",
                retry_after_s=_COUNT_TTL_S,
            )

    async def _count(self, team: Team) -> int:
        stored = await streams.messages_per_subject(self._bus, subjects.ASYNC, subjects.async_queues("*"))
        return sum(count for subject, count in stored.items() if team.has(subjects.queue_owner(subject)[0]))
