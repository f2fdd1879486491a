"""Measurement of the latency of an engine, by trtexec's method.

1. Warm-up runs for `warm_up_s`.
2. Windows of a third of `least_s` each, until the medians of the last three agree within 10 %, or `most_s` are over.
3. The result is computed from the last three windows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import msgspec

from gpufn_builder.processes.process_messages import MeasurePlan
from gpufn_core.domain.devices.engine import Latency

_WINDOWS: Final = 3
_AGREE: Final = 0.10
_QUANTILES: Final = 100


class Measurement(msgspec.Struct, frozen=True):
    latency: Latency
    quantiles_s: tuple[float, ...]  # of the run times, evenly spaced from the fastest to the slowest


def measure(
    run: Callable[[], object],
    plan: MeasurePlan,
    clock: Callable[[], float],
    on_progress: Callable[[], object] = lambda: None,
) -> Measurement:
    """Measure `run()`, which returns when the run is done. `clock()` returns seconds. `on_progress()` is called before
    each run."""
    time_window = partial(_window, run, clock=clock, on_progress=on_progress)
    time_window(plan.warm_up_s)
    began = clock()
    windows: list[list[float]] = []
    settled = False
    while not settled and (len(windows) < _WINDOWS or clock() - began < plan.most_s):
        windows.append(time_window(plan.least_s / _WINDOWS))
        settled = len(windows) >= _WINDOWS and _agree([_quantile(window, 0.5) for window in windows[-_WINDOWS:]])
    counted = sorted(seconds for window in windows[-_WINDOWS:] for seconds in window)
    latency = Latency(
        p50_s=_quantile(counted, 0.50),
        p90_s=_quantile(counted, 0.90),
        p99_s=_quantile(counted, 0.99),
        per_s=len(counted) / sum(counted) if sum(counted) else 0.0,
        settled=settled,
    )
    return Measurement(latency, tuple(_quantile(counted, part / _QUANTILES) for part in range(_QUANTILES + 1)))


def _window(
    run: Callable[[], object], window_s: float, *, clock: Callable[[], float], on_progress: Callable[[], object]
) -> list[float]:
    """Return the sorted seconds of each run, of at least one run."""
    times: list[float] = []
    end = clock() + window_s
    while not times or clock() < end:
        on_progress()
        began = clock()
        run()
        times.append(clock() - began)
    return sorted(times)


def _agree(values: list[float]) -> bool:
    return max(values) <= min(values) * (1 + _AGREE)


def _quantile(ordered: list[float], part: float) -> float:
    """
    >>> _quantile([1.0, 2.0, 3.0], 0.5), _quantile([1.0], 0.99)
    (2.0, 1.0)
    """
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]
