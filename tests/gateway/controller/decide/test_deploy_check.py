"""The check of a new revision: one worker, and the effect of its start, its failure and a lack of room."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gpufn_core.domain.revision import Check, CheckState, Revision, RevisionState
from gpufn_core.errors import ErrorInfo
from gpufn_core.spec.function_spec import ScalingPolicy
from gpufn_core.spec.image_spec import ImageSpec
from gpufn_core.spec.resources import Resources
from gpufn_core.spec.weights_spec import WeightsFile, WeightsSpec
from gpufn_gateway.controller.decide.actions import Action, Drain, EndCheck, EndQueued, MoveActive, MoveServing, Start
from gpufn_gateway.controller.decide.plan import plan
from gpufn_gateway.controller.state.world import World
from tests.gateway.controller.known_worlds import tell, world
from tests.gateway.controller.simulation import GIB, assignment, function, node, revision

RAISED = ErrorInfo("function_start_failed", "no such file", error_type="OSError")
_WEIGHTS = WeightsSpec(source="./weights", files=(WeightsFile("w", 1, "0" * 64),))
TOO_MUCH = Resources(memory_bytes=99 * GIB)


def _record(number: int, check: CheckState | None = CheckState.PENDING, **more: Any) -> Revision:
    resources = more.pop("resources", None)
    made = revision("f", number, resources=resources)
    return msgspec.structs.replace(made, check=None if check is None else Check(check), **more)


def _deployed(workers: int = 0, **more: Any) -> World:
    """Return a world in which `f@2` is deployed and `f@1` serves with `workers`."""
    made = world(workers)
    made.on_revision(("f", 2), _record(2, **more))
    made.on_function("f", function("f", serving=1, active=2))
    return made


def _actions(made: World, now: float = 100.0) -> list[Action]:
    return list(plan(made, now).actions)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_worker_of_it_is_started_and_calls_stay_with_the_old_one(workers: int) -> None:
    actions = _actions(_deployed(workers))
    assert [(action.revision) for action in actions if isinstance(action, Start)] == [2]
    assert [action for action in actions if isinstance(action, (MoveServing, MoveActive, EndCheck))] == []


def test_the_first_revision_of_a_function_is_checked_too() -> None:
    first = world()
    first.on_revision(("f", 1), _record(1))
    planned = plan(first, 100.0)
    assert [type(action) for action in planned.actions] == [Start]
    assert planned.statuses["f"].reason == "checking revision 1: 1 worker"


def test_it_has_passed_when_its_worker_is_ready() -> None:
    first = world(1)
    first.on_revision(("f", 1), _record(1))
    assert _actions(first) == [EndCheck("f", 1, CheckState.PASSED)]


def test_one_failed_start_is_enough() -> None:
    deployed = _deployed()
    deployed.view(("f", 2)).circuit.record_failure(99.0, RAISED)
    assert [a for a in _actions(deployed) if isinstance(a, EndCheck)] == [
        EndCheck("f", 2, CheckState.FAILED, error=RAISED)
    ]


@pytest.mark.parametrize(
    ("prepared", "code", "failures", "ends"),
    [
        ({}, "worker_lost", 1, True),
        ({"image": ImageSpec(python="3.12")}, "worker_lost", 1, False),
        ({"weights": (_WEIGHTS,)}, "worker_lost", 1, False),
        ({"image": ImageSpec(python="3.12")}, "worker_lost", 3, True),
        ({"image": ImageSpec(python="3.12")}, "build_failed", 1, True),
        ({"weights": (_WEIGHTS,)}, "artifact_unavailable", 1, True),
    ],
)
def test_a_start_that_is_late_while_its_node_may_build_or_fetch_is_tried_again(
    prepared: dict[str, Any], code: str, failures: int, ends: bool
) -> None:
    first = world()
    record = _record(1)
    spec = msgspec.structs.replace(record.spec, **prepared)
    first.on_revision(("f", 1), msgspec.structs.replace(record, spec=spec))
    for _ in range(failures):
        first.view(("f", 1)).circuit.record_failure(99.0, ErrorInfo(code, "it was not ready after 300 s"))
    assert any(isinstance(action, EndCheck) for action in _actions(first)) is ends


def test_a_revision_that_failed_its_check_returns_its_place_and_starts_no_worker() -> None:
    deployed = _deployed(check=CheckState.FAILED, state=RevisionState.FAILED, error=RAISED)
    actions = _actions(deployed)
    assert [type(action) for action in actions] == [MoveActive]


def test_where_no_other_revision_serves_its_calls_end_with_the_reason() -> None:
    first = world()
    first.on_revision(("f", 1), _record(1, CheckState.FAILED, state=RevisionState.FAILED, error=RAISED))
    first.on_depths({("f", 1): 2}, 100.0, 100.0)
    planned = plan(first, 100.0)
    assert [type(action) for action in planned.actions] == [EndQueued]
    assert planned.statuses["f"].start_error == RAISED


def test_a_pending_revision_receives_no_calls_even_if_the_old_one_fails_to_start() -> None:
    deployed = _deployed()
    for at in (97.0, 98.0, 99.0):
        deployed.view(("f", 1)).circuit.record_failure(at, RAISED)
    assert not [action for action in _actions(deployed) if isinstance(action, MoveServing)]


def test_without_room_it_is_not_checked_and_calls_move() -> None:
    deployed = _deployed(resources=TOO_MUCH)
    (end,) = [action for action in _actions(deployed) if isinstance(action, EndCheck)]
    assert (end.state, end.reason) == (CheckState.UNCHECKED, "a: needs 99 GiB of memory, 8 GiB are free")
    deployed.on_revision(("f", 2), _record(2, CheckState.UNCHECKED, resources=TOO_MUCH))
    assert [action.revision for action in _actions(deployed) if isinstance(action, MoveServing)] == [2]


def test_a_check_uses_no_room_of_idle_workers_of_other_functions() -> None:
    deployed = _deployed(resources=Resources(memory_bytes=8 * GIB - (100 << 20)))
    deployed.on_revision(("g", 1), revision("g", 1, ScalingPolicy(min_workers=0)))
    deployed.on_function("g", function("g"))
    deployed.on_assignment("w0", assignment("w0", "g"), 90.0)
    actions = _actions(deployed)
    assert [type(action) for action in actions if not isinstance(action, Drain)] == [EndCheck]
    assert not [action for action in actions if isinstance(action, Drain)]


def test_while_the_old_revision_is_warm_a_check_waits_for_the_room_that_it_makes() -> None:
    deployed = _deployed(1, resources=TOO_MUCH)
    assert not [action for action in _actions(deployed) if isinstance(action, EndCheck)]
    tell(deployed, 106.0, "w0")
    deployed.on_depths({}, 106.0, 106.0)
    assert [type(action) for action in _actions(deployed, 106.0) if isinstance(action, (EndCheck, MoveServing))] == [
        EndCheck
    ]


def test_without_a_node_a_check_waits_for_one_to_report() -> None:
    empty = World(100.0)
    empty.on_revision(("f", 1), _record(1))
    empty.on_function("f", function("f"))
    assert _actions(empty, 100.0) == []
    (end,) = _actions(empty, 105.0)
    assert isinstance(end, EndCheck)
    assert (end.function, end.revision, end.state) == ("f", 1, CheckState.UNCHECKED)
    assert "no node" in end.reason


def test_a_revision_that_was_replaced_before_its_check_ended_is_unchecked() -> None:
    deployed = _deployed()
    deployed.view(("f", 2))
    deployed.on_revision(("f", 3), _record(3))
    deployed.on_function("f", function("f", serving=1, active=3))
    ends = [action for action in _actions(deployed) if isinstance(action, EndCheck)]
    assert ends == [EndCheck("f", 2, CheckState.UNCHECKED, "revision 3 took its place")]


def test_a_function_that_may_have_no_workers_is_not_checked() -> None:
    paused = world(max_workers=0)
    paused.on_revision(("f", 1), _record(1))
    assert _actions(paused) == [EndCheck("f", 1, CheckState.UNCHECKED, "max_workers is 0")]


def test_a_check_that_nothing_hinders_starts_again_on_another_node_when_its_node_is_lost() -> None:
    deployed = _deployed()
    deployed.on_assignment("w9", assignment("w9", number=2, node="b"), 100.0)
    deployed.on_node_report(node(), 111.0)
    deployed.on_depths({}, 111.0, 111.0)
    plan(deployed, 111.0)
    deployed.on_assignment("w9", None, 111.0)
    assert [action.node for action in _actions(deployed, 111.0) if isinstance(action, Start)] == ["a"]
