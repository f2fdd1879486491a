"""What an answer to a webhook means, and when it is tried again."""

from __future__ import annotations

import enum
from typing import Final

_GONE: Final = 410
# 5 s, 30 s, 2 min, 10 min, 30 min, 2 h, 5 h, 10 h: a receiver that was away for a night still hears of everything.
_DELAYS_S: Final = (5.0, 30.0, 120.0, 600.0, 1800.0, 7200.0, 18_000.0, 36_000.0)
MOST: Final = len(_DELAYS_S) + 1


class Verdict(enum.Enum):
    DELIVERED = enum.auto()
    TRY_AGAIN = enum.auto()
    GIVE_UP = enum.auto()


def verdict(status: int) -> Verdict:
    """2xx: it has it. 410: it wants no more. Anything else, a redirect to another host among it, may pass."""
    if 200 <= status < 300:
        return Verdict.DELIVERED
    return Verdict.GIVE_UP if status == _GONE else Verdict.TRY_AGAIN


def delay_after(tried: int) -> float | None:
    """Seconds until the next try, after so many; None: there is none."""
    return _DELAYS_S[tried - 1] if tried <= len(_DELAYS_S) else None
