"""Arrivals, from runner reports to a worker that starts before the next call."""

from __future__ import annotations

import msgspec
import pytest

from gpufn_core.domain.revision import Revision
from gpufn_core.protocol.reports import RevisionTraffic
from gpufn_core.spec.function_spec import ScalingPolicy
from gpufn_core.spec.resources import Resources
from gpufn_gateway.controller.decide.actions import Drain, Start
from gpufn_gateway.controller.decide.plan import plan
from gpufn_gateway.controller.decide.scaling.prewarm import SLOT_S, ArrivalHistory, slot_of
from gpufn_gateway.controller.state.world import World
from tests.gateway.controller.known_worlds import tell, world
from tests.gateway.controller.simulation import GIB, function, revision

HOUR = 3600.0
MIDNIGHT = 1_767_571_200.0  # when the monotonic clock of these tests is 0
PREWARM = ScalingPolicy(prewarm=True)


def observed(scaling: ScalingPolicy = PREWARM) -> World:
    made = world(0, scaling)
    made.observe_arrivals(100.0, MIDNIGHT + 100.0)
    return made


def has_call(made: World, at: float) -> bool:
    return made.arrivals.histories["f"].has_call(slot_of(MIDNIGHT + at))


def test_a_call_counts_when_it_starts() -> None:
    made = observed()
    for now, started, ended, counts in ((2000.0, 0, 0, False), (4000.0, 1, 0, True), (6000.0, 1, 1, False)):
        tell(made, now, traffic=RevisionTraffic("f", 1, started, ended))
        assert has_call(made, now) is counts


def test_counts_of_a_runner_before_its_first_report_are_no_calls_now() -> None:
    made = World(100.0)
    made.on_revision(("f", 1), revision("f", 1, PREWARM))
    made.on_function("f", function("f"))
    made.observe_arrivals(100.0, MIDNIGHT + 100.0)
    tell(made, 101.0, traffic=RevisionTraffic("f", 1, 7, 7))
    assert not has_call(made, 101.0)


@pytest.mark.parametrize(
    ("record", "is_kept"),
    [(revision("f", 1, PREWARM), True), (None, True), (revision("f", 1, ScalingPolicy()), False)],
)
def test_only_functions_with_the_option_have_a_history(record: Revision | None, is_kept: bool) -> None:
    made = observed()
    made.on_revision(("f", 1), record)
    made.observe_arrivals(101.0, MIDNIGHT + 101.0)
    assert ("f" in made.arrivals.histories) is is_kept


def test_a_function_that_was_deleted_and_deployed_again_has_no_history() -> None:
    made = observed()
    tell(made, 101.0, traffic=RevisionTraffic("f", 1, 1))
    assert has_call(made, 101.0)
    made.on_function("f", None)
    made.observe_arrivals(102.0, MIDNIGHT + 102.0)
    made.on_function("f", function("f"))
    made.observe_arrivals(103.0, MIDNIGHT + 103.0)
    assert not has_call(made, 101.0)


@pytest.mark.parametrize(
    ("scaling", "starts"),
    [(PREWARM, 1), (ScalingPolicy(), 0), (msgspec.structs.replace(PREWARM, max_workers=0), 0)],
)
def test_a_worker_starts_before_the_expected_call(scaling: ScalingPolicy, starts: int) -> None:
    made = observed(scaling)
    for slot in range(1, 24):
        made.observe_arrivals(slot * SLOT_S, MIDNIGHT + slot * SLOT_S)
        if slot % 4 == 0:
            made.arrivals.record_call("f", slot * SLOT_S)
    for now, wanted in ((6 * HOUR - 600, 0), (6 * HOUR - 130, starts), (6 * HOUR + 900, 0)):
        made.observe_arrivals(now, MIDNIGHT + now)
        tell(made, now)
        made.on_depths({}, now, now)
        planned = plan(made, now)
        assert [type(action) for action in planned.actions] == [Start] * wanted
        if wanted:
            assert planned.statuses["f"].reason.startswith("a call is expected at 06:00 UTC")


@pytest.mark.parametrize(("with_call", "drained"), [(True, 1), (False, 0)])
def test_an_expected_call_uses_no_room_of_another_function(with_call: bool, drained: int) -> None:
    made = world(1)  # an idle worker of "f"
    made.on_revision(("g", 1), revision("g", 1, PREWARM, Resources(memory_bytes=8 * GIB)))  # the whole node
    made.on_function("g", function("g"))
    for slot in range(1, 25):
        made.observe_arrivals(slot * SLOT_S, MIDNIGHT + slot * SLOT_S)
        if slot % 4 == 0 and slot < 24:
            made.arrivals.record_call("g", slot * SLOT_S)
    now = 24.0 * SLOT_S
    tell(made, now, "w0", since=now - 5)
    made.on_depths({("g", 1): 1} if with_call else {}, now, now)
    planned = plan(made, now)
    assert planned.statuses["g"].wanted == 1
    assert sum(isinstance(action, Drain) for action in planned.actions) == drained


def test_a_stored_history_is_added_and_changes_the_forecast() -> None:
    made = observed()
    now = 6 * HOUR
    made.observe_arrivals(now, MIDNIGHT + now)
    assert not made.arrivals.expected("f", now, 0.0)
    stored = ArrivalHistory()
    for slot in range(1, 24):
        stored = stored.record(slot_of(MIDNIGHT + slot * SLOT_S), is_call=slot % 4 == 0)
    made.arrivals.merge("f", stored)
    made.arrivals.merge("unknown", stored)
    assert made.arrivals.expected("f", now, 0.0)
    assert made.arrivals.histories.keys() == {"f"}
