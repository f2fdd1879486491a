"""What an answer to a webhook means, and when it is tried again."""

from __future__ import annotations

import enum
import itertools
from typing import Final

_GONE: Final = 410
# 5 s, 30 s, 2 min, 10 min, 30 min, 2 h, 5 h, 10 h: a receiver that was away for a night still hears of everything.
_DELAYS_S: Final = (5.0, 30.0, 120.0, 600.0, 1800.0, 7200.0, 18_000.0, 36_000.0)
_DUE_S: Final = tuple(itertools.accumulate(_DELAYS_S))


class Verdict(enum.Enum):
    DELIVERED = enum.auto()
    TRY_AGAIN = enum.auto()
    GIVE_UP = enum.auto()


def verdict(status: int) -> Verdict:
    """2xx: it has it. 410: it wants no more. Anything else, a redirect to another host among it, may pass."""
    if 200 <= status < 300:
        return Verdict.DELIVERED
    return Verdict.GIVE_UP if status == _GONE else Verdict.TRY_AGAIN


def delay_after(age_s: float) -> float | None:
    """Seconds until the next try of what has been due for so long; None: there is none.

    By time and not by count: what is handed over again, because a gateway died or the bus was away, was not tried.
    """
    return next((max(due_s - age_s, _DELAYS_S[0]) for due_s in _DUE_S if due_s > age_s), None)
