from __future__ import annotations

import msgspec
import pytest

from gpufn_core.protocol.reports import WeightsFetch, WeightsReport
from gpufn_core.spec.resources import Resources
from gpufn_gateway.controller.limits import Limits
from gpufn_gateway.controller.placement.node_choice import Placement, place
from gpufn_gateway.controller.placement.request import Requirements
from gpufn_gateway.controller.placement.start_time import StartTimes
from gpufn_gateway.controller.state.leases import LeaseBook
from tests.gateway.controller.simulation import GIB, cpu, node

GB = 1_000_000_000
WANTED = StartTimes({"d": 100 * GB}, {}, 1.0)


@pytest.mark.parametrize(
    ("weights", "seconds"),
    [
        (WeightsReport(complete=("d",)), 1),
        (WeightsReport(), 501),
        (WeightsReport(bytes_per_s=1e9), 101),
        (WeightsReport(bytes_per_s=1e9, fetches=(WeightsFetch("d", "hf://o/m", 60 * GB, 100 * GB),)), 41),
        (WeightsReport(bytes_per_s=1e9, fetches=(WeightsFetch("e", "hf://o/n", 60 * GB, 100 * GB),)), 101),
        (WeightsReport(bytes_per_s=1e9, complete=("e",)), 101),
    ],
)
def test_a_start_takes_the_fetch_of_the_missing_weights(weights: WeightsReport, seconds: int) -> None:
    assert WANTED.on(msgspec.structs.replace(node(), weights=weights)) == seconds


def _chosen(starts: StartTimes | None, *, small_has: tuple[str, ...] = (), large_has: tuple[str, ...] = ()) -> str:
    """Return the chosen one of two nodes. The small one is the tighter fit."""
    small = msgspec.structs.replace(node("small", cpu(memory_bytes=2 * GIB)), weights=WeightsReport(complete=small_has))
    large = msgspec.structs.replace(
        node("large", cpu(memory_bytes=64 * GIB)), weights=WeightsReport(complete=large_has)
    )
    found = place(Requirements(Resources()), [small, large], LeaseBook(), Limits(), starts=starts)
    assert isinstance(found, Placement)
    return found.node


@pytest.mark.parametrize(
    ("starts", "small_has", "large_has", "chosen"),
    [
        (None, (), ("d",), "small"),
        (WANTED, (), ("d",), "large"),
        (WANTED, ("d",), ("d",), "small"),
        (WANTED, (), (), "small"),
        (StartTimes({}, {"small": 5.0, "large": 1.0}), (), (), "large"),
        (StartTimes({}, {"small": 1.4, "large": 0.6}), (), (), "small"),
        (StartTimes({}, {"small": 5.0}, 1.0), (), (), "large"),
    ],
)
def test_a_worker_goes_where_it_starts_sooner_then_to_the_tighter_fit(
    starts: StartTimes | None, small_has: tuple[str, ...], large_has: tuple[str, ...], chosen: str
) -> None:
    assert _chosen(starts, small_has=small_has, large_has=large_has) == chosen


def test_the_placement_names_the_expected_start() -> None:
    found = place(Requirements(Resources()), [node()], LeaseBook(), Limits(), starts=WANTED)
    assert isinstance(found, Placement)
    assert "501 s" in found.why
