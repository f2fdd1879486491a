"""What calls took, added up: a record per day, Function, API key and node, in the bucket USAGE.

Each node's Runner writes its own records; who reads adds up those of the nodes. Days are those of UTC.
"""

from __future__ import annotations

import datetime
import functools
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

KEPT_S = 400 * 86_400.0
STORED_EACH_S = 10.0  # by a runner; who looks more often sees nothing new


class Usage(msgspec.Struct, frozen=True):
    """`calls` counts attempts that ended, `failed` those without a result. `run_s` is how long they ran;
    a run that several calls had together, as a batch, counts once.

    `gpu_s` are the GPU seconds that they are charged: the time in which they ran, shared by those that ran in their
    worker at the same time, times the worker's GPUs; under MPS times its part of one (`DeviceShare.gpu_part`).
    """

    calls: int = 0
    failed: int = 0
    run_s: float = 0.0
    gpu_s: float = 0.0

    def __add__(self, other: Usage) -> Usage:
        """
        >>> Usage(1, 0, 2.0) + Usage(1, 1, 0.5, 0.25)
        Usage(calls=2, failed=1, run_s=2.5, gpu_s=0.25)
        """
        return Usage(
            self.calls + other.calls, self.failed + other.failed, self.run_s + other.run_s, self.gpu_s + other.gpu_s
        )


class UsageKey(NamedTuple):
    """`key` is the id of the API key that made the calls, ``platform`` for those made without one."""

    day: str
    function: str
    key: str

    def record(self, node: str) -> str:
        """Its name in the bucket.

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


@functools.lru_cache(maxsize=4)  # each call that ends asks
def _day(number: int) -> str:
    return (datetime.date(1970, 1, 1) + datetime.timedelta(number)).isoformat()


def days(since: str, until: str) -> Iterator[str]:
    """All days from `since` to `until`, both included. ValueError at once for what is no date.

    >>> list(days("2026-11-30", "2026-12-01"))
    ['2026-11-30', '2026-12-01']
    """
    first, last = datetime.date.fromisoformat(since), datetime.date.fromisoformat(until)
    return ((first + datetime.timedelta(n)).isoformat() for n in range((last - first).days + 1))
