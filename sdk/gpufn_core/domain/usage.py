"""Usage of calls: a record per day, function, API key and node, in the bucket USAGE.

Each node's runner writes its own records; readers sum the records of all nodes. Days are UTC days.
"""

from __future__ import annotations

import datetime
import functools
from collections.abc import Iterator

import msgspec

USAGE_RETENTION_S = 400 * 86_400.0
STORE_INTERVAL_S = 10.0  # how often a runner stores its records; reading more often shows nothing new


class Usage(msgspec.Struct):
    """`calls` counts attempts that ended, `failed` those without a result. `run_s` is their run time; a batch of
    several calls counts once.

    `gpu_s` are the GPU seconds charged for them: the run time, divided among the calls that run in the same worker at
    the same time, multiplied by the worker's GPUs. Under MPS it is multiplied by the worker's part of one GPU
    (`DeviceShare.gpu_part`).

    `joules` is the energy of the `joules_calls` calls whose energy is known; None if there are none.
    """

    calls: int = 0
    failed: int = 0
    run_s: float = 0.0
    gpu_s: float = 0.0
    joules: float | None = None
    joules_calls: int = 0

    def __add__(self, other: Usage) -> Usage:
        """
        >>> Usage(1, 0, 2.0) + Usage(1, 1, 0.5, 0.25, 60.0, 1)
        Usage(calls=2, failed=1, run_s=2.5, gpu_s=0.25, joules=60.0, joules_calls=1)
        """
        return Usage(
            self.calls + other.calls,
            self.failed + other.failed,
            self.run_s + other.run_s,
            self.gpu_s + other.gpu_s,
            other.joules if self.joules is None else self.joules + (other.joules or 0.0),
            self.joules_calls + other.joules_calls,
        )

    @property
    def joules_per_call(self) -> float | None:
        """
        >>> Usage(3, joules=60.0, joules_calls=2).joules_per_call
        30.0
        """
        return None if self.joules is None or not self.joules_calls else self.joules / self.joules_calls


class UsageKey(msgspec.Struct, frozen=True, order=True):
    """`key` is the id of the API key that made the calls, or ``platform`` for calls without one."""

    day: str
    function: str
    key: str

    def record(self, node: str) -> str:
        """Return the record's name in the bucket.

        >>> UsageKey("2026-11-21", "f", "platform").record("a.example")
        '2026-11-21.f.platform.a.example'
        """
        return f"{self.day}.{self.function}.{self.key}.{node}"

    @classmethod
    def of_record(cls, name: str) -> UsageKey:
        day, function, key, _ = name.split(".", 3)
        return cls(day, function, key)


def day_of(at: float) -> str:
    """
    >>> day_of(1_795_219_200.0)
    '2026-11-21'
    """
    return _day(int(at // 86_400))


@functools.lru_cache(maxsize=4)  # called for each call that ends
def _day(number: int) -> str:
    return (datetime.date(1970, 1, 1) + datetime.timedelta(number)).isoformat()


def days(since: str, until: str) -> Iterator[str]:
    """Return all days from `since` to `until`, inclusive. Raises ValueError at once for an invalid date.

    >>> list(days("2026-11-30", "2026-12-01"))
    ['2026-11-30', '2026-12-01']
    """
    first, last = datetime.date.fromisoformat(since), datetime.date.fromisoformat(until)
    return ((first + datetime.timedelta(n)).isoformat() for n in range((last - first).days + 1))
