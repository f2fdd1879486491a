"""Attribution of costs: every second is paid for once."""

from __future__ import annotations

import pytest

from gpufn_core.domain.usage import Usage, UsageKey
from gpufn_gateway.costs.attribution import UNUSED, DayHeld, Held, UsageRow, costs
from gpufn_gateway.costs.prices import Rates

_DAY = "2026-11-21"
_RATES = {"cheap": Rates(1.0, 0.1, 400.0), "dear": Rates(3.0, 0.1, None)}
_FLEET = Rates(2.0, 0.1)


def row(function: str, key: str, node: str, gpu_s: float, joules: float | None = None) -> UsageRow:
    return UsageRow(UsageKey(_DAY, function, key), node, Usage(10, 0, gpu_s, gpu_s, joules, 10))


def test_used_seconds_cost_what_their_node_costs_and_known_energy_has_its_co2() -> None:
    rows = [row("f", "a", "cheap", 3600.0, 3.6e6), row("f", "a", "dear", 3600.0, 3.6e6), row("f", "b", "cheap", 1800.0)]
    found = costs(rows, {}, _RATES.__getitem__, _FLEET)
    first, second = found[UsageKey(_DAY, "f", "a")], found[UsageKey(_DAY, "f", "b")]
    assert (first.used, first.calls, first.joules, first.co2_g) == (4.0, 20, 7.2e6, 400.0)
    assert (second.used, second.joules, second.co2_g, second.total) == (0.5, None, None, 0.5)


def test_idle_seconds_are_shared_by_the_keys_of_the_function_at_its_own_mean_price() -> None:
    rows = [row("f", "a", "cheap", 900.0), row("f", "b", "cheap", 2700.0)]
    held = {_DAY: DayHeld({"f": Held(gpu_s=7200.0, cpu_s=36_000.0)}, capacity_gpu_s=7200.0)}
    found = costs(rows, held, _RATES.__getitem__, _FLEET)
    assert [round(found[UsageKey(_DAY, "f", key)].idle, 6) for key in "ab"] == [0.25, 0.75]
    assert [round(found[UsageKey(_DAY, "f", key)].cpu, 6) for key in "ab"] == [0.25, 0.75]
    assert sum(each.gpu_used_s + each.gpu_idle_s for each in found.values()) == 7200.0


def test_workers_without_any_call_are_paid_for_by_their_function() -> None:
    held = {_DAY: DayHeld({"waits": Held(gpu_s=3600.0)}, capacity_gpu_s=3600.0)}
    assert costs([], held, _RATES.__getitem__, _FLEET)[UsageKey(_DAY, "waits", "platform")].idle == 2.0


@pytest.mark.parametrize("shares_unused", [True, False])
def test_what_no_worker_held_is_a_row_of_its_own_or_shared_and_the_sum_is_the_same(shares_unused: bool) -> None:
    rows = [row("f", "a", "cheap", 3600.0), row("g", "a", "cheap", 1200.0)]
    held = {_DAY: DayHeld({"f": Held(3600.0), "g": Held(3600.0)}, capacity_gpu_s=10 * 3600.0)}
    found = costs(rows, held, _RATES.__getitem__, _FLEET, shares_unused=shares_unused)
    assert sum(each.unused for each in found.values()) == pytest.approx(16.0)
    assert (UsageKey(_DAY, UNUSED, UNUSED) in found) is not shares_unused
    if shares_unused:
        assert [found[UsageKey(_DAY, name, "a")].unused for name in "fg"] == [8.0, 8.0]


def test_more_used_than_held_is_not_negative_and_a_day_without_gpus_costs_nothing() -> None:
    found = costs([row("f", "a", "cheap", 100.0)], {_DAY: DayHeld({"f": Held(10.0)})}, _RATES.__getitem__, _FLEET)
    assert (found[UsageKey(_DAY, "f", "a")].idle, len(found)) == (0.0, 1)
