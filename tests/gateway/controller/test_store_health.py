"""Reports while the bus does not store the controller's decisions."""

from __future__ import annotations

import pytest

from gpufn_core.protocol.reports import FunctionStatus, WaitReason
from gpufn_gateway.controller.decide.plan import plan
from gpufn_gateway.controller.decide.status import statuses_without_leader
from gpufn_gateway.controller.state.world import World
from gpufn_gateway.controller.store_health import NOT_STORED, STUCK_FOR_S, Store
from tests.gateway.controller.known_worlds import world
from tests.gateway.controller.simulation import assignment

NOW = 101.0


def reason(status: FunctionStatus) -> WaitReason | None:
    return None if status.waiting is None else status.waiting.reason


def called(workers: int = 0) -> World:
    made = world(workers)
    made.on_depths({("f", 1): 1}, NOW, NOW)
    made.store.record_failure(NOW)
    return made


def test_a_failed_write_is_doubted_until_a_write_succeeds_and_not_forever() -> None:
    store = Store()
    assert not store.is_stuck(NOW)
    store.record_failure(NOW)
    assert [store.is_stuck(NOW + after) for after in (0.0, STUCK_FOR_S, STUCK_FOR_S + 0.1)] == [True, True, False]
    store.record_success()
    assert not store.is_stuck(NOW)


@pytest.mark.parametrize(
    ("version", "expected"), [(None, WaitReason.STORE), (0, WaitReason.STORE), (7, WaitReason.STARTING)]
)
def test_a_call_waits_for_the_store_unless_a_worker_is_starting_that_was_stored(
    version: int | None, expected: WaitReason
) -> None:
    made = called()
    if version is not None:
        made.on_assignment("w", assignment("w"), NOW)
        made.workers["w"].version = version
    assert reason(plan(made, NOW).statuses["f"]) is expected


@pytest.mark.parametrize(
    ("workers", "calls", "expected"),
    [(0, 1, WaitReason.STORE), (0, 0, None), (1, 1, None), (0, None, WaitReason.STORE)],
)
def test_without_a_possible_leader_functions_have_a_status_and_wait_if_they_have_no_worker(
    workers: int, calls: int | None, expected: WaitReason | None
) -> None:
    made = called(workers)
    made.on_depths(None if calls is None else {("f", 1): calls}, NOW, NOW)
    status = statuses_without_leader(made, NOW)["f"]
    assert (status.workers.ready, reason(status)) == (workers, expected)
    assert status.reason.endswith(NOT_STORED)
