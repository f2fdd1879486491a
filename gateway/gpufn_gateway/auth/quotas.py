"""The state of one API key's limits. Pure; `now` is monotonic, in seconds.

rate          A token bucket of `burst` calls that fills by `rate` per second. Calls admitted by other gateways are
              subtracted when they report them, so the bucket may be negative.
concurrency   Calls that clients wait for: exact for this gateway, as last reported for the others.
queued        Submitted calls that have not ended. The bus counts them from time to time. New calls here are added to
              the last count, and ended ones are not noticed until the next count, so this is an upper bound.
run_s, gpu_s  The usage of the current UTC day, as read last.

A refusal includes the time to retry: the earliest time at which one more call may be admitted, if that is known.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from gpufn_core.domain.usage import Usage
from gpufn_core.errors import InvalidInput
from gpufn_core.protocol.records import KeyLimits
from gpufn_core.protocol.reports import KeyUse

MAX_CALLS: Final = 1_000_000
MIN_RATE: Final = 1e-6  # one call in 11 days; the seconds until a bucket is full still fit the 15 digits of a header
MAX_SECONDS: Final = 1_000_000_000
_DAY_S: Final = 86_400
_MIN_RETRY_S: Final = 1.0
_MAX_RETRY_S: Final = 60.0
_REPORT_TTL_S: Final = 3.5  # lifetime of another gateway's report; it reports every second
COUNT_TTL_S: Final = 1.0  # lifetime of a queue count: other gateways submit calls as well
_RECOUNT_INTERVAL_S: Final = 0.05  # minimum time between counts of a full queue
_COUNT_SHOWN_S: Final = 60.0  # ended calls are not noticed without a new call, so an older count is not shown
_MEAN_WEIGHT: Final = 0.1  # weight of the newest call in the mean duration
_ALMOST_ONE: Final = 1 - 1e-9


class Refusal(NamedTuple):
    message: str
    retry_after_s: float


def check(limits: KeyLimits) -> None:
    """Check that limits are valid. Raises InvalidInput."""
    if limits.rate is not None and not MIN_RATE <= limits.rate <= MAX_CALLS:
        raise InvalidInput(
            f"rate must be from {MIN_RATE:g} to {MAX_CALLS:,} calls per second, not {limits.rate:g}",
            field="limits.rate",
        )
    for name in ("burst", "concurrency", "queued"):
        value = getattr(limits, name)
        if value is not None and not 1 <= value <= MAX_CALLS:
            raise InvalidInput(
                f"{name} must be a number of calls from 1 to {MAX_CALLS:,}, not {value}", field=f"limits.{name}"
            )
    for name in ("run_s", "gpu_s"):
        value = getattr(limits, name)
        if value is not None and not 0 < value <= MAX_SECONDS:
            raise InvalidInput(
                f"{name} must be more than 0 and at most {MAX_SECONDS:,} seconds per day, not {value:g}",
                field=f"limits.{name}",
            )
    if limits.burst is not None and limits.rate is None:
        raise InvalidInput(
            "burst is the number of calls of a rate that may come at once: set rate as well", field="limits.burst"
        )


class Bucket:
    """Token bucket: `burst` calls at once, then `rate` per second.

    >>> bucket = Bucket(rate=2.0, burst=3, now=0.0)
    >>> [bucket.take(0.0) for _ in range(4)], bucket.wait_s(0.0), bucket.take(0.5)
    ([True, True, True, False], 0.5, True)
    """

    def __init__(self, rate: float, burst: int, now: float) -> None:
        self.rate = rate
        self.burst = burst
        self._available = float(burst)
        self._updated_at = now

    def available(self, now: float) -> float:
        """Return the number of calls available. Negative if other gateways admitted more than there were."""
        self._available = min(float(self.burst), self._available + max(0.0, now - self._updated_at) * self.rate)
        self._updated_at = max(self._updated_at, now)
        return self._available

    def take(self, now: float) -> bool:
        if self.available(now) < _ALMOST_ONE:
            return False
        self._available -= 1.0
        return True

    def take_remote(self, calls: int, now: float) -> None:
        self.available(now)
        self._available -= calls

    def wait_s(self, now: float) -> float:
        """Return the seconds until a call is available."""
        return max(0.0, 1.0 - self.available(now)) / self.rate

    def full_in_s(self, now: float) -> float:
        return (self.burst - self.available(now)) / self.rate


def _bucket(limits: KeyLimits, now: float) -> Bucket | None:
    if limits.rate is None:
        return None
    return Bucket(limits.rate, limits.burst or max(1, math.ceil(limits.rate)), now)


class KeyQuota:
    """The quota of one key at this gateway, or of all functions of a team. `holder` names it in messages."""

    def __init__(self, key: str, limits: KeyLimits, now: float, holder: str = "This key") -> None:
        self.key = key
        self._holder = holder
        self.limits = limits
        self._bucket = _bucket(limits, now)
        self._running = 0
        self._mean_s = 0.0  # mean duration of its calls
        self._remote_running: dict[str, tuple[int, float]] = {}  # gateway → its running calls, time of its report
        self._admitted = 0  # since the last report
        self._reported_running = 0  # running calls in the last report
        self._usage = Usage()
        self._day_ends = -math.inf
        self._queued = 0  # upper bound
        self._counted_at = -math.inf
        self.storing = 0  # queued calls that are being stored on the bus

    def change(self, limits: KeyLimits, now: float) -> None:
        """Apply new limits. Running, queued and used amounts stay; a changed rate starts with a full bucket."""
        if (limits.rate, limits.burst) != (self.limits.rate, self.limits.burst):
            self._bucket = _bucket(limits, now)
        self.limits = limits

    # --- rate ---------------------------------------------------------------------------------------------------------

    def admit(self, now: float) -> Refusal | None:
        """Count one call, or return the refusal."""
        if (refusal := self._check_usage(now)) is not None:
            return refusal
        if self._bucket is None or self._bucket.take(now):
            self._admitted += 1
            return None
        return Refusal(f"{self._holder} may make {_per_second(self._bucket.rate)}.", self._bucket.wait_s(now))

    # --- seconds per day ----------------------------------------------------------------------------------------------

    @property
    def has_daily_limits(self) -> bool:
        """True if the usage of the day must be known."""
        return self.limits.run_s is not None or self.limits.gpu_s is not None

    def set_usage(self, today: Usage, day_ends: float) -> None:
        self._usage, self._day_ends = today, day_ends

    def _check_usage(self, now: float) -> Refusal | None:
        if now >= self._day_ends:
            return None
        for unit, limit, used in self._seconds():
            if used >= limit:
                return Refusal(
                    f"{self._holder} may take {limit:,g} {unit} seconds per day (UTC).", self._day_ends - now
                )
        return None

    def _seconds(self) -> list[tuple[str, float, float]]:
        """Return the unit, the daily limit and the used seconds of each daily limit."""
        limits, usage = self.limits, self._usage
        both = (("run", limits.run_s, usage.run_s), ("GPU", limits.gpu_s, usage.gpu_s))
        return [(unit, limit, used) for unit, limit, used in both if limit is not None]

    # --- concurrency --------------------------------------------------------------------------------------------------

    def begin(self, now: float) -> Refusal | None:
        """Start a call that a client waits for, or return the refusal; `end` ends the call."""
        limit = self.limits.concurrency
        if limit is not None and self._running + self._remote_total(now) >= limit:
            retry_after_s = min(max(self._mean_s / limit, _MIN_RETRY_S), _MAX_RETRY_S)
            return Refusal(f"{self._holder} may have at most {limit:,} calls at a time.", retry_after_s)
        self._running += 1
        return None

    def end(self, duration_s: float) -> None:
        self._running -= 1
        self._mean_s += _MEAN_WEIGHT * (duration_s - self._mean_s)

    def _remote_total(self, now: float) -> int:
        return sum(running for running, at in self._remote_running.values() if now - at < _REPORT_TTL_S)

    # --- queue --------------------------------------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        """True if the queue limit is reached, according to the last count."""
        return self.limits.queued is not None and self._queued >= self.limits.queued

    def needs_count(self, since: float) -> bool:
        """True if this key has a queue limit and its calls were not counted after `since`."""
        return self.limits.queued is not None and self._counted_at < since

    def set_queued(self, stored: int, storing: int, started_at: float) -> None:
        """Set the count from the bus. `storing` calls were being stored when the count started; it may include them."""
        self._queued = stored + storing
        self._counted_at = started_at

    def start_storing(self, calls: int) -> str | None:
        """Start to store this many calls, or return why they may not be stored; `finish_storing` ends it.

        A chunk of a map is admitted if there is room for its first item: it is stored completely or not at all.
        """
        limit = self.limits.queued
        if limit is not None and self.is_full:
            queued = f"submitted calls that have not ended, and has {self._queued:,}"
            return f"{self._holder} may have at most {limit:,} {queued}."
        self._queued += calls
        self.storing += calls
        return None

    def finish_storing(self, calls: int) -> None:
        self.storing -= calls

    # --- between gateways, and for clients ----------------------------------------------------------------------------

    def take_report(self) -> KeyUse | None:
        """Return the usage that was not reported yet; None if there is none."""
        if not (self._admitted or self._running or self._reported_running):
            return None
        use = KeyUse(self.key, self._admitted, self._running)
        self._admitted, self._reported_running = 0, self._running
        return use

    def add_report(self, gateway: str, use: KeyUse, now: float) -> None:
        self._remote_running[gateway] = use.running, now
        if self._bucket is not None and use.admitted:
            self._bucket.take_remote(use.admitted, now)

    def used(self, now: float) -> dict[str, float]:
        """Return the used part of each limit but the rate, as far as it is known at this gateway."""
        parts: dict[str, float] = {}
        if (limit := self.limits.concurrency) is not None:
            parts["concurrency"] = (self._running + self._remote_total(now)) / limit
        if self.limits.queued is not None and now - self._counted_at < _COUNT_SHOWN_S:
            parts["queued"] = self._queued / self.limits.queued
        if now < self._day_ends:
            parts |= {f"{unit.lower()}_s": used_s / limit_s for unit, limit_s, used_s in self._seconds()}
        return parts

    def headers(self, now: float) -> list[tuple[bytes, bytes]]:
        """Return the RateLimit-Policy and RateLimit headers of draft-ietf-httpapi-ratelimit-headers."""
        policies, states = [], []
        if (bucket := self._bucket) is not None:
            window_s = max(1, math.ceil(bucket.burst / bucket.rate))
            policies.append(b'"rate";q=%d;w=%d' % (bucket.burst, window_s))
            available = max(0, math.floor(bucket.available(now) + 1e-9))
            states.append(b'"rate";r=%d;t=%d' % (available, math.ceil(bucket.full_in_s(now))))
        if (limit := self.limits.concurrency) is not None:
            policies.append(b'"concurrency";q=%d;qu="concurrent-requests"' % limit)
            states.append(b'"concurrency";r=%d' % max(0, limit - self._running - self._remote_total(now)))
        for unit, limit_s, used_s in self._seconds():
            name = f"{unit.lower()}-seconds".encode()
            policies.append(b'"%s";q=%d;w=%d' % (name, limit_s, _DAY_S))
            is_known = now < self._day_ends
            remaining_s = b";t=%d" % math.ceil(self._day_ends - now) if is_known else b""
            states.append(b'"%s";r=%d%s' % (name, max(0.0, limit_s - (used_s if is_known else 0.0)), remaining_s))
        if not policies:
            return []
        return [(b"ratelimit-policy", b", ".join(policies)), (b"ratelimit", b", ".join(states))]


def recount_at(now: float) -> float:
    """Return when to recount a queue that seems full, for all requests that arrived by `now`.

    By then the calls that these clients have seen end are out of the queue. Under any load there are at most 20 counts
    per second.

    >>> [round(recount_at(now), 2) for now in (1.01, 1.04, 1.06)]
    [1.1, 1.1, 1.15]
    """
    return (now // _RECOUNT_INTERVAL_S + 2) * _RECOUNT_INTERVAL_S


def _per_second(rate: float) -> str:
    if rate >= 1:
        return f"{rate:g} calls per second"
    return f"one call in {1 / rate:.4g} s"
