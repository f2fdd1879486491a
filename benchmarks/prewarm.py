"""Pre-warming against a fixed keep-alive, simulated: cold starts at equal worker-seconds.

    python benchmarks/prewarm.py --seeds 5

One function with one worker receives the calls of a synthetic trace of six weeks. The history of arrivals, the forecast
and the scaling policy are the controller's own code, at one decision every 10 s. A call is cold if no worker is READY
when it arrives. Worker-seconds include starts. The history is empty at the start, so learning is included.

A fixed keep-alive follows from the gaps between calls: a call is cold if its gap is longer. Its timeout is chosen so
that it uses the same worker-seconds as pre-warming, or has as few cold starts.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from statistics import mean
from typing import Any, NamedTuple

import measure
from gpufn_core.spec.function_spec import ScalingPolicy
from gpufn_gateway.controller.decide.scaling import prewarm
from gpufn_gateway.controller.decide.scaling.policy import Demand, Workers, decide

_MINUTE, _HOUR, _DAY, _WEEK = 60.0, 3600.0, 86_400.0, 7 * 86_400.0
_MONDAY = 1_767_571_200.0  # 2026-01-05 00:00 UTC
_WEEKS = 6
_STEP_S = 10.0
_START_S = 20.0  # a cold start, as of a model of some GB
_IDLE_TIMEOUT_S = 60.0


class Run(NamedTuple):
    """`wait_s` is the mean wait of all calls for a worker."""

    cold: float
    worker_s: float
    wait_s: float


Trace = Callable[[random.Random], Iterator[float]]  # seconds since Monday


def _at(
    minutes: tuple[float, ...], *, hours: range = range(24), days: range = range(7), spread_s: float = 0.0
) -> Trace:
    """Calls at these minutes of these hours, with a normally distributed error."""

    def calls(rng: random.Random) -> Iterator[float]:
        for day in range(7 * _WEEKS):
            for hour in hours if day % 7 in days else ():
                for minute in minutes:
                    yield day * _DAY + hour * _HOUR + minute * _MINUTE + rng.gauss(1.0, spread_s)

    return calls


def _every(seconds: float) -> Trace:
    return lambda rng: (number * seconds for number in range(int(_WEEKS * _WEEK / seconds)))


def _moved(rng: random.Random) -> Iterator[float]:
    for at in _at((0.0,))(rng):
        yield at if at < 3 * _WEEK else at + 30 * _MINUTE


def _poisson(per_hour: Callable[[float], float], highest: float) -> Trace:
    """Poisson calls at a rate that changes with time, by thinning."""

    def calls(rng: random.Random) -> Iterator[float]:
        at = rng.expovariate(highest / _HOUR)
        while at < _WEEKS * _WEEK:
            if rng.random() < per_hour(at) / highest:
                yield at
            at += rng.expovariate(highest / _HOUR)

    return calls


def _constant(per_hour: float) -> Trace:
    return _poisson(lambda at: per_hour, per_hour)


def _diurnal(highest: float) -> Trace:
    """A sine from 8:00 to 20:00 on weekdays; a fiftieth of its maximum otherwise."""

    def per_hour(at: float) -> float:
        hour = at % _DAY / _HOUR
        is_day = at % _WEEK < 5 * _DAY and 8 <= hour < 20
        return highest * (math.sin((hour - 8) / 12 * math.pi) if is_day else 0.02)

    return _poisson(per_hour, highest)


def _bursts(per_day: float) -> Trace:
    """Bursts at random times: 20 calls within about five minutes each."""

    def calls(rng: random.Random) -> Iterator[float]:
        for begin in _constant(per_day / 24)(rng):
            at = begin
            for _ in range(20):
                yield at
                at += rng.expovariate(1 / 15)

    return calls


_TRACES: dict[str, Trace] = {
    "every hour at :00": _at((0.0,)),
    "every hour at :00, ± 1 min": _at((0.0,), spread_s=60),
    "every hour at :00, ± 5 min": _at((0.0,), spread_s=300),
    "weekdays 9-17, every hour": _at((0.0,), hours=range(9, 18), days=range(5)),
    "every day at 9:00": _at((0.0,), hours=range(9, 10)),
    "Mondays at 9:00": _at((0.0,), hours=range(9, 10), days=range(1)),
    "every hour, from week 4 on at :30": _moved,
    "every 10 minutes": _every(10 * _MINUTE),
    "every 37 minutes": _every(37 * _MINUTE),
    "diurnal, up to 4 an hour": _diurnal(4),
    "diurnal, up to 12 an hour": _diurnal(12),
    "diurnal, up to 30 an hour": _diurnal(30),
    "Poisson, 1 an hour": _constant(1),
    "Poisson, 6 an hour": _constant(6),
    "Poisson, 12 an hour": _constant(12),
    "bursts, 3 a day": _bursts(3),
}


def main() -> None:
    options = measure.arguments("Pre-warming against a fixed keep-alive.", seeds=5)
    about = measure.machine()
    seeds = range(1, options.seeds + 1)
    rows = [{"trace": name, **_compare(trace, seeds)} for name, trace in _TRACES.items()]
    measure.write("prewarm", {"seeds": options.seeds, "rows": rows}, _table(options.seeds, rows), about)


def _compare(trace: Trace, seeds: range) -> dict[str, float]:
    columns = [_one(trace, random.Random(seed)) for seed in seeds]
    return {key: round(mean(column[key] for column in columns), 2) for key in columns[0]}


def _one(trace: Trace, rng: random.Random) -> dict[str, float]:
    calls = sorted(_MONDAY + at for at in trace(rng) if at >= 0)
    short, learned = fixed(calls, _IDLE_TIMEOUT_S), prewarmed(calls)
    equal_timeout_s = _smallest(lambda timeout_s: fixed(calls, timeout_s).worker_s >= learned.worker_s)
    few_timeout_s = _smallest(lambda timeout_s: fixed(calls, timeout_s).cold <= learned.cold)
    equal, few = fixed(calls, equal_timeout_s), fixed(calls, few_timeout_s)
    return {
        "calls": len(calls),
        "cold_short": short.cold,
        "hours_short": short.worker_s / _HOUR,
        "cold": learned.cold,
        "hours": learned.worker_s / _HOUR,
        "wait_s": learned.wait_s,
        "equal_timeout_s": equal_timeout_s,
        "equal_cold": equal.cold,
        "equal_wait_s": equal.wait_s,
        "few_timeout_s": few_timeout_s,
        "few_hours": few.worker_s / _HOUR,
    }


def fixed(calls: list[float], timeout_s: float) -> Run:
    """Replay with a fixed keep-alive."""
    cold, worker_s, wait_s = 0, 0.0, 0.0
    ready_at = until = -math.inf
    for at in calls:
        if at > until:
            ready_at = at + _START_S
            worker_s += _START_S
            until = ready_at
        if at < ready_at:
            cold += 1
            wait_s += ready_at - at
        stops_at = max(at, ready_at) + timeout_s
        worker_s += max(0.0, stops_at - until)
        until = max(until, stops_at)
    return Run(cold, worker_s, wait_s / len(calls))


def prewarmed(calls: list[float]) -> Run:
    """Replay with the controller's policy and `prewarm`."""
    policy = ScalingPolicy(prewarm=True, idle_timeout_s=_IDLE_TIMEOUT_S)
    history = prewarm.ArrivalHistory()
    forecast = prewarm.forecast(history, 0)
    cold, worker_s, wait_s = 0, 0.0, 0.0
    ready_at: float | None = None
    last_call_at = -math.inf
    arriving = iter(calls)
    call = next(arriving, math.inf)
    now = _MONDAY
    while now < _MONDAY + _WEEKS * _WEEK:
        while call <= now:
            if ready_at is None:
                ready_at = call + _START_S
                worker_s += now - call  # until this step
            if ready_at > call:
                cold += 1
                wait_s += ready_at - call
            last_call_at = max(call, ready_at)
            history = history.record(prewarm.slot_of(call), is_call=True)
            call = next(arriving, math.inf)
        slot = prewarm.slot_of(now)
        history = history.record(slot, is_call=False)
        if forecast.slot != slot:
            forecast = prewarm.forecast(history, slot)
        is_ready = ready_at is not None and ready_at <= now
        workers = Workers(ready=is_ready, starting=ready_at is not None and not is_ready, idle=is_ready)
        idle_s = now - max(last_call_at, ready_at or 0.0) if is_ready else None
        expected = prewarm.expected_call(forecast, history, now, _START_S)
        demand = Demand(queued=0, running=0, idle_s=idle_s, expected=expected)
        count = decide(policy, demand, workers).count
        if count and ready_at is None:
            ready_at = now + _START_S
        elif not count:
            ready_at = None
        worker_s += _STEP_S * (ready_at is not None)
        now += _STEP_S
    return Run(cold, worker_s, wait_s / len(calls))


def _smallest(holds: Callable[[float], bool]) -> float:
    """Return the smallest timeout in whole seconds for which a condition holds, at most a week."""
    low, high = 0, int(_WEEK)
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return float(low)


def _table(seeds: int, rows: list[dict[str, Any]]) -> str:
    columns = {
        "trace": "calls",
        "calls": "number",
        "cold_short": "cold, 60 s",
        "hours_short": "hours, 60 s",
        "cold": "cold, prewarm",
        "hours": "hours, prewarm",
        "equal_cold": "cold, fixed at equal hours",
        "equal_timeout_s": "its timeout, s",
        "few_hours": "hours, fixed with as few cold",
        "few_timeout_s": "its timeout, s",
    }
    shown = [[row[key] if key == "trace" else f"{row[key]:,.0f}" for key in columns] for row in rows]
    text = (
        f"Simulated; means over the seeds 1 to {seeds}. {_WEEKS} weeks, one worker, a cold start of {_START_S:g} s. "
        f"Hours are worker-hours. `prewarm` has `idle_timeout={_IDLE_TIMEOUT_S:g}`. A worker that never stops takes "
        f"{_WEEKS * 168:,} hours.\n\n"
    )
    return text + measure.table(list(columns.values()), shown)


if __name__ == "__main__":
    main()
