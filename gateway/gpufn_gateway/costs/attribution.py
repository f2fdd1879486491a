"""Division of GPU and CPU time among functions and keys: used time by the records of calls, the rest by share. Pure.

used     GPU seconds that the runners charged to calls
idle     GPU seconds that a function's workers held without a call; its keys share them by what they used
cpu      seconds of the cores that a function's workers held; its keys share them by their run time
unused   GPU seconds that no worker held: nobody's, or shared by what everybody used and held
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import msgspec

from gpufn_core.domain.usage import Usage, UsageKey
from gpufn_core.protocol.subjects import PLATFORM
from gpufn_gateway.costs.prices import Rates

UNUSED: Final = ""  # instead of a function: GPUs that no worker held
_HOUR_S: Final = 3600.0
_KWH_J: Final = 3.6e6


class Held(msgspec.Struct, frozen=True):
    """GPU seconds and core seconds that the workers of a function held on one day."""

    gpu_s: float = 0.0
    cpu_s: float = 0.0


class DayHeld(msgspec.Struct, frozen=True):
    """The time that functions held on one day, and the GPU seconds of all GPUs."""

    functions: dict[str, Held] = {}
    capacity_gpu_s: float = 0.0


class Cost(msgspec.Struct):
    """Costs of one function, key and day. `joules` and `co2_g` are None if no energy is known."""

    calls: int = 0
    gpu_used_s: float = 0.0
    gpu_idle_s: float = 0.0
    cpu_s: float = 0.0
    used: float = 0.0
    idle: float = 0.0
    cpu: float = 0.0
    unused: float = 0.0
    joules: float | None = None
    co2_g: float | None = None

    @property
    def total(self) -> float:
        return self.used + self.idle + self.cpu + self.unused

    def add(self, other: Cost) -> None:
        for name in self.__struct_fields__:
            mine, theirs = getattr(self, name), getattr(other, name)
            setattr(self, name, mine if theirs is None else theirs if mine is None else mine + theirs)


class UsageRow(msgspec.Struct, frozen=True):
    key: UsageKey
    node: str
    usage: Usage


def costs(
    rows: Iterable[UsageRow],
    held: Mapping[str, DayHeld],
    rates_of: Callable[[str], Rates],
    fleet: Rates,
    *,
    shares_unused: bool = False,
) -> dict[UsageKey, Cost]:
    """Return the costs by day, function and key. `held` is by day. `fleet` has the mean rates of the live nodes, for
    what cannot be assigned to a node."""
    found: defaultdict[UsageKey, Cost] = defaultdict(Cost)
    run_s: defaultdict[UsageKey, float] = defaultdict(float)
    for row in rows:
        found[row.key].add(_of_calls(row, rates_of(row.node)))
        run_s[row.key] += row.usage.run_s
    of_function: defaultdict[tuple[str, str], list[UsageKey]] = defaultdict(list)
    for key in found:
        of_function[key.day, key.function].append(key)
    for day, each in held.items():
        for function, holding in each.functions.items():
            keys = of_function.get((day, function)) or [UsageKey(day, function, PLATFORM)]
            _add_held(found, keys, holding, run_s, fleet)
        _add_unused(found, day, each, fleet, is_shared=shares_unused)
    return dict(found)


def _of_calls(row: UsageRow, rates: Rates) -> Cost:
    usage, co2_g = row.usage, None
    if usage.joules is not None and rates.co2_g_per_kwh is not None:
        co2_g = usage.joules / _KWH_J * rates.co2_g_per_kwh
    used = usage.gpu_s / _HOUR_S * rates.gpu_hour
    return Cost(calls=usage.calls, gpu_used_s=usage.gpu_s, used=used, joules=usage.joules, co2_g=co2_g)


def _add_held(
    found: defaultdict[UsageKey, Cost],
    keys: Sequence[UsageKey],
    holding: Held,
    run_s: Mapping[UsageKey, float],
    fleet: Rates,
) -> None:
    used_s = sum(found[key].gpu_used_s for key in keys)
    used = sum(found[key].used for key in keys)
    gpu_hour = used / used_s * _HOUR_S if used_s else fleet.gpu_hour
    idle_s = max(0.0, holding.gpu_s - used_s)
    by_gpu = _shares([found[key].gpu_used_s for key in keys])
    by_run = _shares([run_s.get(key, 0.0) for key in keys])
    for key, of_gpu, of_run in zip(keys, by_gpu if used_s else by_run, by_run, strict=True):
        found[key].add(
            Cost(
                gpu_idle_s=idle_s * of_gpu,
                idle=idle_s * of_gpu / _HOUR_S * gpu_hour,
                cpu_s=holding.cpu_s * of_run,
                cpu=holding.cpu_s * of_run / _HOUR_S * fleet.cpu_hour,
            )
        )


def _add_unused(found: defaultdict[UsageKey, Cost], day: str, held: DayHeld, fleet: Rates, *, is_shared: bool) -> None:
    unused_s = max(0.0, held.capacity_gpu_s - sum(each.gpu_s for each in held.functions.values()))
    if not unused_s:
        return
    amount = unused_s / _HOUR_S * fleet.gpu_hour
    keys = [key for key, cost in found.items() if key.day == day and cost.gpu_used_s + cost.gpu_idle_s > 0]
    if not (is_shared and keys):
        found[UsageKey(day, UNUSED, UNUSED)].add(Cost(gpu_idle_s=unused_s, unused=amount))
        return
    for key, share in zip(keys, _shares([found[key].gpu_used_s + found[key].gpu_idle_s for key in keys]), strict=True):
        found[key].unused += amount * share


def _shares(parts: Sequence[float]) -> list[float]:
    """
    >>> _shares([1.0, 3.0]), _shares([0.0, 0.0])
    ([0.25, 0.75], [0.5, 0.5])
    """
    total = sum(parts)
    return [part / total for part in parts] if total else [1 / len(parts)] * len(parts)
