"""Refused requests for the audit log, bounded: equal refusals within a minute are one record with a count. Pure.

A client that sends a thousand wrong keys per second must not fill the log. The first refusal of its kind is recorded at
once, the others are counted until the minute ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

WINDOW_S: Final = 60.0
MAX_KINDS: Final = 1000  # kinds that are counted separately at the same time; further kinds are counted together


class Refused(msgspec.Struct, frozen=True):
    """A kind of refusal: equal ones are counted together."""

    principal: str
    label: str
    address: str
    action: str
    status: int
    code: str


OTHERS: Final = Refused("", "", "various", "various", 403, "")


class Refusals:
    def __init__(self) -> None:
        self._counts: dict[Refused, int] = {}
        self._ends: dict[Refused, float] = {}

    def add(self, refused: Refused, now: float) -> bool:
        """Count a refusal. Return whether it is to be recorded now, as the first of its kind."""
        if refused not in self._ends and len(self._ends) >= MAX_KINDS:
            refused = OTHERS
        if refused not in self._ends:
            self._ends[refused] = now + WINDOW_S
            return True
        self._counts[refused] = self._counts.get(refused, 0) + 1
        return False

    def ended(self, now: float) -> Iterator[tuple[Refused, int]]:
        """Yield the kinds whose minute has ended and that were refused again, with their counts."""
        for refused in [refused for refused, end in self._ends.items() if end <= now]:
            del self._ends[refused]
            if count := self._counts.pop(refused, 0):
                yield refused, count
