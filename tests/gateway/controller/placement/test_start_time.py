from __future__ import annotations

import math

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
WANTED = {"d": 100 * GB}


@pytest.mark.parametrize(
    ("weights", "seconds"),
    [
        (WeightsReport(complete=("d",)), 1),
        (WeightsReport(), 501),
        (WeightsReport(bytes_per_s=1e9), 101),
        (WeightsReport(bytes_per_s=1e9, fetches=(WeightsFetch("d", "hf://o/m", 60 * GB, 100 * GB),)), 41),
        (WeightsReport(bytes_per_s=1e9, fetches=(WeightsFetch("e", "hf://o/n", 60 * GB, 100 * GB),)), 101),
        (WeightsReport(bytes_per_s=1e9, complete=("e",)), 101),
        # A node may report anything.
        (WeightsReport(bytes_per_s=1e-300), 501),
        (WeightsReport(bytes_per_s=-5.0), 501),
        (WeightsReport(bytes_per_s=math.nan), 501),
        (WeightsReport(bytes_per_s=math.inf), 501),
        (WeightsReport(bytes_per_s=1.0), 86_400),
        (WeightsReport(bytes_per_s=1e9, fetches=(WeightsFetch("d", "hf://o/m", -GB, 100 * GB),)), 101),
    ],
)
def test_a_start_includes_the_fetch_of_the_missing_weights(weights: WeightsReport, seconds: int) -> None:
    assert StartTimes(WANTED, {"a": weights}, {}, 1.0).on("a") == seconds


def _chosen(starts: StartTimes | None) -> str:
    """Return the chosen one of two nodes. The small one is the tighter fit."""
    nodes = [node("small", cpu(memory_bytes=2 * GIB)), node("large", cpu(memory_bytes=64 * GIB))]
    found = place(Requirements(Resources()), nodes, LeaseBook(), Limits(), starts=starts)
    assert isinstance(found, Placement)
    return found.node


HAS = WeightsReport(complete=("d",))


@pytest.mark.parametrize(
    ("starts", "chosen"),
    [
        (None, "small"),
        (StartTimes(WANTED, {"large": HAS}), "large"),
        (StartTimes(WANTED, {"large": HAS, "small": HAS}), "small"),
        (StartTimes(WANTED), "small"),
        (StartTimes(by_node={"small": 5.0, "large": 1.0}), "large"),
        (StartTimes(by_node={"small": 1.4, "large": 0.6}), "small"),
        (StartTimes(by_node={"small": 5.0}, typical_s=1.0), "large"),
        (StartTimes(by_node={"small": 1e308}, typical_s=1.0), "large"),
    ],
)
def test_a_worker_is_placed_where_it_starts_sooner_then_by_the_tighter_fit(
    starts: StartTimes | None, chosen: str
) -> None:
    assert _chosen(starts) == chosen


def test_the_placement_names_the_expected_start() -> None:
    found = place(Requirements(Resources()), [node()], LeaseBook(), Limits(), starts=StartTimes(WANTED))
    assert isinstance(found, Placement)
    assert "500 s" in found.why
