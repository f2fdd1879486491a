"""What one API key has used of its limits, and whether there is more. Pure; `now` is monotonic, in seconds.

rate          a bucket of `burst` calls that fills by `rate` a second. Calls that other gateways let pass are taken out
              when they tell of them, so it may be empty by more than all
concurrency   calls that are waited for: here exactly, and at other gateways as they told last
queued        submitted calls that have not ended. The bus has counted them at some time; what came here since is added
              and what ended is not noticed until the next count, so that they are never more than that

run_s, gpu_s  what its calls took on this day, as it was looked up last

A refusal says when to come back: as soon as one more call may be made, as far as that is known.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from gpufn_core.domain.metering import Usage
from gpufn_core.errors import InvalidInput
from gpufn_core.protocol.records import KeyLimits
from gpufn_core.protocol.reports import KeyUse

MOST_CALLS: Final = 1_000_000
LEAST_RATE: Final = 1e-6  # a call in 11 days; the seconds until a bucket is full still have 15 digits, as a header may
MOST_SECONDS: Final = 1_000_000_000
_DAY_S: Final = 86_400
_SHORTEST_RETRY_S: Final = 1.0
_LONGEST_RETRY_S: Final = 60.0
_TOLD_S: Final = 3.5  # what another gateway told holds for so long; it tells each second
COUNT_HOLDS_S: Final = 1.0  # others submit as well
_COUNT_AGAIN_S: Final = 0.05  # sooner than this a full queue is not counted again
_WEIGHT: Final = 0.1  # of the newest call in the mean
_ALMOST_ONE: Final = 1 - 1e-9


class Refusal(NamedTuple):
    message: str
    retry_after_s: float


def check(limits: KeyLimits) -> None:
    """Raises InvalidInput."""
    if limits.rate is not None and not LEAST_RATE <= limits.rate <= MOST_CALLS:
        raise InvalidInput(
            f"a rate is from {LEAST_RATE:g} to {MOST_CALLS:,} calls per second, not {limits.rate:g}",
            field="limits.rate",
        )
    for name in ("burst", "concurrency", "queued"):
        value = getattr(limits, name)
        if value is not None and not 1 <= value <= MOST_CALLS:
            raise InvalidInput(
                f"{name} is a number of calls from 1 to {MOST_CALLS:,}, not {value}", field=f"limits.{name}"
            )
    for name in ("run_s", "gpu_s"):
        value = getattr(limits, name)
        if value is not None and not 0 < value <= MOST_SECONDS:
            raise InvalidInput(
                f"{name} is more than 0 and at most {MOST_SECONDS:,} seconds per day, not {value:g}",
                field=f"limits.{name}",
            )
    if limits.burst is not None and limits.rate is None:
        raise InvalidInput(
            "a burst is how many calls may come at once of a rate: give a rate, too", field="limits.burst"
        )


class Bucket:
    """Calls that may be made: `burst` at once, and `rate` a second from then on.

    >>> bucket = Bucket(rate=2.0, burst=3, now=0.0)
    >>> [bucket.take(0.0) for _ in range(4)], bucket.wait_s(0.0), bucket.take(0.5)
    ([True, True, True, False], 0.5, True)
    """

    def __init__(self, rate: float, burst: int, now: float) -> None:
        self.rate = rate
        self.burst = burst
        self._left = float(burst)
        self._at = now

    def left(self, now: float) -> float:
        """Below 0 when others took more than there was."""
        self._left = min(float(self.burst), self._left + max(0.0, now - self._at) * self.rate)
        self._at = max(self._at, now)
        return self._left

    def take(self, now: float) -> bool:
        if self.left(now) < _ALMOST_ONE:
            return False
        self._left -= 1.0
        return True

    def taken_elsewhere(self, calls: int, now: float) -> None:
        self.left(now)
        self._left -= calls

    def wait_s(self, now: float) -> float:
        """Until there is one."""
        return max(0.0, 1.0 - self.left(now)) / self.rate

    def full_in_s(self, now: float) -> float:
        return (self.burst - self.left(now)) / self.rate


def _bucket(limits: KeyLimits, now: float) -> Bucket | None:
    if limits.rate is None:
        return None
    return Bucket(limits.rate, limits.burst or max(1, math.ceil(limits.rate)), now)


class Use:
    """Of one key, at this gateway."""

    def __init__(self, key: str, limits: KeyLimits, now: float) -> None:
        self.key = key
        self.limits = limits
        self._bucket = _bucket(limits, now)
        self._running = 0
        self._mean_s = 0.0  # what its calls take
        self._elsewhere: dict[str, tuple[int, float]] = {}  # gateway → its running calls, and when it said so
        self._admitted = 0  # since they were told
        self._told = 0  # running, as others know
        self._spent = Usage()
        self._day_ends = -math.inf
        self._queued = 0  # at most
        self._counted_at = -math.inf
        self.storing = 0  # of these, on their way to the bus

    def change(self, limits: KeyLimits, now: float) -> None:
        """What it has running, queued and spent stays its own; another rate begins with all of its burst."""
        if (limits.rate, limits.burst) != (self.limits.rate, self.limits.burst):
            self._bucket = _bucket(limits, now)
        self.limits = limits

    # --- rate ---------------------------------------------------------------------------------------------------------

    def admit(self, now: float) -> Refusal | None:
        """One call is made, unless it is refused."""
        if (refusal := self._overspent(now)) is not None:
            return refusal
        if self._bucket is None or self._bucket.take(now):
            self._admitted += 1
            return None
        return Refusal(f"This key may make {_per_second(self._bucket.rate)}.", self._bucket.wait_s(now))

    # --- seconds per day ----------------------------------------------------------------------------------------------

    @property
    def is_by_day(self) -> bool:
        """What its calls took must be looked up."""
        return self.limits.run_s is not None or self.limits.gpu_s is not None

    def spent(self, today: Usage, day_ends: float) -> None:
        self._spent, self._day_ends = today, day_ends

    def _overspent(self, now: float) -> Refusal | None:
        if now >= self._day_ends:
            return None
        for what, most, spent in self._seconds():
            if spent >= most:
                return Refusal(f"This key may take {most:,g} {what} seconds per day (UTC).", self._day_ends - now)
        return None

    def _seconds(self) -> list[tuple[str, float, float]]:
        """What is limited, how much of it there is in a day, and how much of that is spent."""
        limits, spent = self.limits, self._spent
        both = (("run", limits.run_s, spent.run_s), ("GPU", limits.gpu_s, spent.gpu_s))
        return [(what, most, used) for what, most, used in both if most is not None]

    # --- concurrency --------------------------------------------------------------------------------------------------

    def begin(self, now: float) -> Refusal | None:
        """A call that is waited for begins, unless it is refused; `end` ends it."""
        most = self.limits.concurrency
        if most is not None and self._running + self._running_elsewhere(now) >= most:
            retry_after_s = min(max(self._mean_s / most, _SHORTEST_RETRY_S), _LONGEST_RETRY_S)
            return Refusal(f"This key may have {most:,} calls at a time.", retry_after_s)
        self._running += 1
        return None

    def end(self, took_s: float) -> None:
        self._running -= 1
        self._mean_s += _WEIGHT * (took_s - self._mean_s)

    def _running_elsewhere(self, now: float) -> int:
        return sum(running for running, at in self._elsewhere.values() if now - at < _TOLD_S)

    # --- queue --------------------------------------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        """As far as is known."""
        return self.limits.queued is not None and self._queued >= self.limits.queued

    def needs_count(self, since: float) -> bool:
        """What the bus has of this key's calls matters, and has not been counted since then."""
        return self.limits.queued is not None and self._counted_at < since

    def counted(self, stored: int, storing: int, began: float) -> None:
        """`storing` were on their way when the count began: they may be among the `stored` or not."""
        self._queued = stored + storing
        self._counted_at = began

    def queue(self, calls: int) -> str | None:
        """So many calls are being queued, until `stored`; or why they may not be. Of a chunk of a map the first counts:
        it is stored whole or not at all."""
        most = self.limits.queued
        if most is not None and self.is_full:
            return f"This key may have {most:,} submitted calls that have not ended, and has {self._queued:,}."
        self._queued += calls
        self.storing += calls
        return None

    def stored(self, calls: int) -> None:
        self.storing -= calls

    # --- between gateways, and for clients ----------------------------------------------------------------------------

    def tell(self) -> KeyUse | None:
        """What others have not heard; None when there is nothing."""
        if not (self._admitted or self._running or self._told):
            return None
        use = KeyUse(self.key, self._admitted, self._running)
        self._admitted, self._told = 0, self._running
        return use

    def heard(self, gateway: str, use: KeyUse, now: float) -> None:
        self._elsewhere[gateway] = use.running, now
        if self._bucket is not None and use.admitted:
            self._bucket.taken_elsewhere(use.admitted, now)

    def headers(self, now: float) -> list[tuple[bytes, bytes]]:
        """RateLimit-Policy and RateLimit, as draft-ietf-httpapi-ratelimit-headers has them."""
        policies, states = [], []
        if (bucket := self._bucket) is not None:
            window_s = max(1, math.ceil(bucket.burst / bucket.rate))
            policies.append(b'"rate";q=%d;w=%d' % (bucket.burst, window_s))
            left = max(0, math.floor(bucket.left(now) + 1e-9))
            states.append(b'"rate";r=%d;t=%d' % (left, math.ceil(bucket.full_in_s(now))))
        if (most := self.limits.concurrency) is not None:
            policies.append(b'"concurrency";q=%d;qu="concurrent-requests"' % most)
            states.append(b'"concurrency";r=%d' % max(0, most - self._running - self._running_elsewhere(now)))
        for what, a_day, spent in self._seconds():
            name = f"{what.lower()}-seconds".encode()
            policies.append(b'"%s";q=%d;w=%d' % (name, a_day, _DAY_S))
            is_known = now < self._day_ends
            left_s = b";t=%d" % math.ceil(self._day_ends - now) if is_known else b""
            states.append(b'"%s";r=%d%s' % (name, max(0.0, a_day - (spent if is_known else 0.0)), left_s))
        if not policies:
            return []
        return [(b"ratelimit-policy", b", ".join(policies)), (b"ratelimit", b", ".join(states))]


def count_again_at(now: float) -> float:
    """When the queue of a key that seems full is counted for all who came by `now`. What they have seen the end of has
    left it by then; and however many come, it is counted 20 times a second.

    >>> [round(count_again_at(now), 2) for now in (1.01, 1.04, 1.06)]
    [1.1, 1.1, 1.15]
    """
    return (now // _COUNT_AGAIN_S + 2) * _COUNT_AGAIN_S


def _per_second(rate: float) -> str:
    if rate >= 1:
        return f"{rate:g} calls per second"
    return f"one call in {1 / rate:.4g} s"
