"""Retry policy of webhooks: the meaning of a response status, and the time of the next retry. Pure."""

from __future__ import annotations

import enum
import itertools
from typing import Final

_GONE: Final = 410
# 5 s, 30 s, 2 min, 10 min, 30 min, 2 h, 5 h, 10 h: a receiver that is down for a night still gets every webhook.
_DELAYS_S: Final = (5.0, 30.0, 120.0, 600.0, 1800.0, 7200.0, 18_000.0, 36_000.0)
_DUE_S: Final = tuple(itertools.accumulate(_DELAYS_S))


class Verdict(enum.Enum):
    DELIVERED = enum.auto()
    RETRY = enum.auto()
    GIVE_UP = enum.auto()


def verdict(status: int) -> Verdict:
    """2xx: delivered. 410: the receiver wants no further deliveries. Anything else may pass, even a redirect to another
    host."""
    if 200 <= status < 300:
        return Verdict.DELIVERED
    return Verdict.GIVE_UP if status == _GONE else Verdict.RETRY


def delay_after(age_s: float) -> float | None:
    """Return the seconds until the next attempt of a webhook that has been due for `age_s`; None after the last one.

    By age and not by count: a redelivery after a dead gateway or a lost bus is not a failed attempt.
    """
    return next((max(due_s - age_s, _DELAYS_S[0]) for due_s in _DUE_S if due_s > age_s), None)
