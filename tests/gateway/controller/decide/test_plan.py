"""Steps on a world with known reports."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from gpufn_core.domain.devices.device import Device, DeviceType
from gpufn_core.domain.invocation import OutcomeKind
from gpufn_core.domain.worker import Cause, WorkerState
from gpufn_core.errors import ErrorInfo
from gpufn_core.protocol.reports import (
    NodeReport,
    RevisionTraffic,
    RunnerReport,
    WeightsFetch,
    WeightsReport,
    WorkerEvent,
    WorkerEventKind,
    WorkerReport,
)
from gpufn_core.spec.function_spec import Batch, ScalingPolicy
from gpufn_core.spec.image_spec import ImageSpec
from gpufn_core.spec.model_spec import ModelFile, ModelSpec
from gpufn_core.spec.resources import Resources
from gpufn_core.spec.weights_spec import WeightsFile, WeightsSpec
from gpufn_gateway.controller.decide.actions import Delete, Drain, EndQueued, MoveServing, Start
from gpufn_gateway.controller.decide.plan import plan
from gpufn_gateway.controller.decide.scaling import policy
from gpufn_gateway.controller.decide.scaling.demand import demand_of
from gpufn_gateway.controller.decide.scaling.policy import Demand, ScaleDecision
from gpufn_gateway.controller.decide.scaling.rollout import LINGER_S
from gpufn_gateway.controller.state.world import World
from tests.gateway.controller.known_worlds import tell, world
from tests.gateway.controller.simulation import GIB, assignment, cpu, function, node, revision


def test_a_restarted_controller_keeps_running_workers_for_one_window() -> None:
    at_work = world(4, ScalingPolicy(scaledown_window_s=30))
    at_work.take_over(100.0)
    counts = []
    for now in (100.0, 129.0, 131.0):
        tell(at_work, now, "w0", "w1", "w2", "w3", since=now - 5)
        at_work.on_depths({}, now, now)
        counts.append(sum(isinstance(action, Drain) for action in plan(at_work, now).actions))
    assert counts == [0, 0, 2]


@pytest.mark.parametrize("depths_known", [True, False])
def test_workers_go_only_when_the_depths_are_known(depths_known: bool) -> None:
    idle = world(2)
    if not depths_known:
        idle.on_depths(None, 100.0, 100.0)
    actions = plan(idle, 100.0).actions
    assert [type(action) for action in actions] == ([Drain] if depths_known else [])


def test_depths_that_are_old_are_unknown() -> None:
    idle = world(1)
    tell(idle, 110.0, "w0")
    assert plan(idle, 110.0).statuses["f"].reason == "demand unknown: keep 1 worker"


def test_workers_of_a_silent_runner_are_not_idle() -> None:
    idle = world(1)
    idle.on_node_report(node(), 106.0)
    idle.on_depths({}, 106.0, 106.0)
    assert plan(idle, 106.0).actions == ()


def test_a_wakeup_starts_a_worker_without_known_depths() -> None:
    empty = world()
    empty.on_depths(None, 100.0, 100.0)
    empty.on_wakeup("f", 100.1)
    planned = plan(empty, 100.1, only={"f"})
    assert [(action.node, action.revision) for action in planned.actions if isinstance(action, Start)] == [("a", 1)]
    waiting = planned.statuses["f"].waiting
    assert waiting is not None
    assert waiting.reason == "starting"


def test_a_node_is_lost_after_ten_silent_seconds_and_not_before_it_had_time_to_report() -> None:
    started = World(100.0)
    started.on_function("f", function("f"))
    started.on_assignment("w", assignment("w", node="b"), 100.0)
    assert plan(started, 109.0).actions == ()
    (deletion,) = plan(started, 111.0).actions
    assert isinstance(deletion, Delete)
    assert (deletion.worker, "node b" in deletion.reason) == ("w", True)
    started.reset_silence(111.0)  # the controller itself was away
    assert plan(started, 112.0).actions == ()


def test_an_agent_that_is_away_costs_no_worker_that_its_runner_still_serves() -> None:
    served = world(2, ScalingPolicy(min_workers=2))
    served.on_assignment("w2", assignment("w2"), 100.0)  # its process has never been reported
    both, one = (
        tuple(WorkerReport(name, "f", 1, WorkerState.READY, 1, idle_since=0.0) for name in names)
        for names in (("w0", "w1"), ("w1",))
    )

    def given_up(now: float) -> list[str]:
        return [action.worker for action in plan(served, now).actions if isinstance(action, Delete)]

    for now, workers, expected in ((109.0, both, []), (111.0, both, ["w2"]), (160.0, both, ["w2"])):
        served.on_runner_report(RunnerReport("a", "r", now, workers), now)
        assert given_up(now) == expected
    served.on_runner_report(RunnerReport("a", "r", 161.0, one), 161.0)  # w0 is no longer reported
    assert given_up(161.0) == ["w0", "w2"]
    assert given_up(171.5) == ["w0", "w1", "w2"]  # nor is any other worker


def test_workers_whose_runner_is_silent_for_long_are_replaced_on_another_node() -> None:
    """Its process may hang: it is not restarted, and its workers take no calls."""
    hung = world(1, ScalingPolicy(max_workers=1))
    both = [node("a"), node("b")]
    hung.on_runner_report(RunnerReport("b", "r2", 100.0), 100.0)
    for now, given_up, started in ((106.0, [], []), (119.0, [], []), (121.0, ["w0"], []), (122.0, [], ["b"])):
        for report in both:
            hung.on_node_report(report, now)
        hung.on_runner_report(RunnerReport("b", "r2", now), now)
        hung.on_depths({("f", 1): 1}, now, now)
        actions = plan(hung, now).actions
        deleted = [action for action in actions if isinstance(action, Delete)]
        assert [(action.worker, "runner" in action.reason) for action in deleted] == [(name, True) for name in given_up]
        assert [action.node for action in actions if isinstance(action, Start)] == started
        for action in deleted:
            hung.on_assignment(action.worker, None, now)


def test_an_agent_that_is_away_holds_up_no_rollout() -> None:
    rolling = world(1, active=2)
    rolling.on_revision(("f", 2), revision("f", 2))
    rolling.on_assignment("w9", assignment("w9", number=2), 100.0)
    workers = (
        WorkerReport("w0", "f", 1, WorkerState.READY, 1, in_use=1),
        WorkerReport("w9", "f", 2, WorkerState.READY, 1, idle_since=0.0),
    )
    rolling.on_runner_report(RunnerReport("a", "r", 112.0, workers), 112.0)
    rolling.on_depths({("f", 1): 1}, 112.0, 112.0)
    (move,) = plan(rolling, 112.0).actions
    assert isinstance(move, MoveServing)
    assert (move.function, move.revision) == ("f", 2)


def test_a_lost_node_gets_no_workers() -> None:
    empty = world()
    empty.on_wakeup("f", 120.0)
    status = plan(empty, 120.0).statuses["f"]
    assert status.waiting is not None
    assert (status.waiting.reason, "no node" in status.waiting.detail) == ("no_capacity", True)


def test_a_revision_waits_for_a_device_that_it_has_engines_for() -> None:
    empty = world()
    model = ModelSpec(parameter="net", files=(ModelFile("net.onnx", "0" * 64, 1),))
    without = revision("f", 1)
    spec = msgspec.structs.replace(without.spec, models=(model,))
    for engines, reason in (({"net": {"NVIDIA L4": ("k",)}}, "no_capacity"), ({"net": {"cpu": ("k",)}}, "starting")):
        empty.on_revision(("f", 1), msgspec.structs.replace(without, spec=spec, engines=engines))
        empty.on_wakeup("f", 100.0)
        waiting = plan(empty, 100.0).statuses["f"].waiting
        assert waiting is not None
        assert waiting.reason == reason


_T5000 = Device("t", DeviceType.GPU, "T5000", 8 * GIB)


@pytest.mark.parametrize(
    ("at", "report", "told"),
    [
        (109.0, node(), "no worker could be placed for its last call less than a minute ago: a: it has no T5000 GPU"),
        (285.0, node(), "no worker could be placed for its last call 3 min ago: a: it has no T5000 GPU"),
        (
            109.0,
            node("b"),
            "no worker could be placed for its last call less than a minute ago: a: it has no T5000 GPU",
        ),
        (109.0, node("b", cpu(), _T5000), ""),
        (109.0, node("a", cpu(), _T5000), ""),
    ],
)
def test_why_names_the_missing_gpu_after_the_only_call_expired(at: float, report: NodeReport, told: str) -> None:
    """Regression: the demand was 0 by then, and the reason named only the demand."""
    empty = world()
    empty.on_revision(("f", 1), revision("f", resources=Resources(gpu=("T5000",))))
    empty.on_depths({("f", 1): 1}, 100.0, 100.0)
    waits = plan(empty, 100.0).statuses["f"]
    assert waits.waiting is not None
    assert "T5000" in waits.waiting.detail
    assert "its last call" not in waits.reason
    for now in (at - 1, at):  # the second step has the same result
        tell(empty, now)
        empty.on_node_report(report, now)
        empty.on_runner_report(RunnerReport(report.node, "r", now), now)
        empty.on_depths({}, now, now)
        expired = plan(empty, now).statuses["f"]
        assert expired.waiting is None
        assert expired.reason.partition("; ")[2] == told


def test_why_names_a_module_that_workers_import_themselves() -> None:
    some = world()
    for refused in ("importing bitsandbytes made torch initialize CUDA", ""):
        event = WorkerEvent(WorkerEventKind.STARTED, "w", "f", 1, "a", 100.0, refused_modules=refused)
        some.on_event(event, 100.0)
        assert ("bitsandbytes" in plan(some, 100.0).statuses["f"].reason) == bool(refused)


def test_why_forgets_the_missing_gpu_once_a_worker_is_placed() -> None:
    empty = world()
    empty.on_revision(("f", 1), revision("f", resources=Resources(gpu=("T5000",))))
    view = empty.view(("f", 1))
    for now, devices, is_noted in ((100.0, (), True), (101.0, (cpu(), _T5000), False)):
        empty.on_node_report(node("a", *devices), now)
        empty.on_depths({("f", 1): 1}, now, now)
        plan(empty, now)
        assert (view.placement_failure is not None) is is_noted


def test_a_function_whose_worker_waits_for_its_gpu_turn_reports_it() -> None:
    empty = world()
    empty.on_assignment("w", assignment("w"), 100.0)
    for waits_on, told in (("GPU-0", "waits for its turn on GPU-0"), ("", None)):
        report = WorkerReport("w", "f", 1, WorkerState.READY, slots=1, in_use=1, waits_on=waits_on)
        empty.on_runner_report(RunnerReport("a", "r", 100.0, (report,)), 100.0)
        empty.on_depths({("f", 1): 1}, 100.0, 100.0)
        waiting = plan(empty, 100.0).statuses["f"].waiting
        assert (waiting and waiting.detail) == told


@pytest.mark.parametrize(("left_over", "calls", "starts"), [(1, (1, 1), True), (0, (0, 2), False)])
def test_a_slot_held_by_a_call_of_a_dead_runner_serves_no_waiting_call(
    left_over: int, calls: tuple[int, int], starts: bool
) -> None:
    """Of two calls one runs. The other's slot is held by an attempt that the first call's runner left when it died."""
    two = world(2)
    workers = tuple(
        WorkerReport(name, "f", 1, WorkerState.READY, slots=1, in_use=1, left_over=each)
        for name, each in (("w0", left_over), ("w1", 0))
    )
    for second in range(60):
        now = 100.0 + second
        two.on_node_report(node(), now)
        two.on_runner_report(RunnerReport("a", "r", now, workers), now)
        two.on_depths({("f", 1): 2}, now, now)
    demand = demand_of(two, ("f", 1), now)
    assert demand is not None
    assert (demand.queued, demand.running, demand.stuck) == (*calls, left_over)
    assert any(isinstance(action, Start) for action in plan(two, now).actions) is starts


@pytest.mark.parametrize(
    ("concurrency", "in_use", "calls", "starts"), [(1, 16, (8, 8), 1), (1, 8, (0, 8), 0), (2, 24, (8, 16), 0)]
)
def test_gathering_calls_are_queued_and_do_not_count_as_running(
    concurrency: int, in_use: int, calls: tuple[int, int], starts: int
) -> None:
    """A worker with Batch(8) holds (concurrency + 1) x 8 calls, and runs concurrency x 8. Slots are planned in full."""
    batched = world(1)
    one = revision("f", 1, ScalingPolicy(target=1.0))
    spec = msgspec.structs.replace(one.spec, concurrency=concurrency, batch=Batch(8))
    batched.on_revision(("f", 1), msgspec.structs.replace(one, spec=spec))
    worker = WorkerReport("w0", "f", 1, WorkerState.READY, slots=spec.slots, in_use=in_use)
    batched.on_runner_report(RunnerReport("a", "r", 101.0, (worker,)), 101.0)
    batched.on_depths({("f", 1): in_use}, 101.0, 101.0)
    batched.view(("f", 1)).service_s = 1.0
    demand = demand_of(batched, ("f", 1), 101.0)
    assert demand is not None
    assert (demand.queued, demand.running) == calls
    assert sum(isinstance(action, Start) for action in plan(batched, 101.0).actions) == starts


def test_a_revision_with_an_image_waits_for_a_node_that_starts_containers() -> None:
    empty = world()
    without = revision("f", 1)
    spec = msgspec.structs.replace(without.spec, image=ImageSpec(base="x"))
    empty.on_revision(("f", 1), msgspec.structs.replace(without, spec=spec))
    for trouble, reason in (("Docker does not answer", "no_capacity"), ("", "starting")):
        empty.on_node_report(msgspec.structs.replace(node(), container_trouble=trouble), 100.0)
        empty.on_wakeup("f", 100.0)
        waiting = plan(empty, 100.0).statuses["f"].waiting
        assert waiting is not None
        assert (waiting.reason, trouble in waiting.detail) == (reason, True)


@pytest.mark.parametrize(
    ("memory_bytes", "told"),
    [
        (8 * GIB - (256 << 20), "; held by f (4 workers, min_workers=4) and g (1 worker)"),
        (9 * GIB, ""),  # more than any node has
    ],
)
def test_the_reason_to_wait_for_room_names_the_functions_that_use_it(memory_bytes: int, told: str) -> None:
    """Workers that min_workers protects are not drained for others, whose calls waited without a reason."""
    full = world(4, ScalingPolicy(min_workers=4, max_workers=4))
    full.on_revision(("g", 1), revision("g"))
    full.on_function("g", function("g"))
    full.on_assignment("v", assignment("v", "g"), 100.0)
    full.on_revision(("h", 1), revision("h", resources=Resources(memory_bytes=memory_bytes)))
    full.on_function("h", function("h"))
    full.on_depths({("h", 1): 1}, 100.0, 100.0)
    waiting = plan(full, 100.0).statuses["h"].waiting
    assert waiting is not None
    assert (waiting.reason, waiting.detail.partition(" are free")[2]) == ("no_capacity", told)


@pytest.mark.parametrize(
    ("calls", "min_workers", "active", "drains"),
    [
        (0, 0, 1, [Drain("w0", "makes room for h, which has calls and no room", Cause.ROOM)]),
        (1, 0, 1, []),  # a call waits for it
        (0, 1, 1, []),
        (0, 0, 2, []),  # it belongs to the next revision, which gets calls once it has started
    ],
)
def test_a_starting_worker_without_waiting_calls_makes_room(
    calls: int, min_workers: int, active: int, drains: list[Drain]
) -> None:
    """Its call was cancelled while it loaded. Later calls of others waited until it had loaded and was idle."""
    slow = world(scaling=ScalingPolicy(min_workers=min_workers))
    slow.on_revision(("f", 2), revision("f", 2))
    slow.on_function("f", function("f", active=active))
    slow.on_assignment("w0", assignment("w0", number=active), 90.0)
    slow.on_revision(("h", 1), revision("h", resources=Resources(memory_bytes=8 * GIB - (100 << 20))))
    slow.on_function("h", function("h"))
    slow.on_depths({("h", 1): 1} | ({("f", 1): calls} if calls else {}), 100.0, 100.0)
    assert [action for action in plan(slow, 100.0).actions if isinstance(action, Drain)] == drains


@pytest.mark.parametrize(
    ("max_workers", "going"), [(4, []), (3, ["w3"]), (2, ["w2", "w3"]), (1, ["w2", "w3"]), (0, ["w2", "w3"])]
)
def test_above_max_workers_unstarted_workers_are_removed_first(max_workers: int, going: list[str]) -> None:
    """Warm workers used to be drained instead: `gpufn scale --max 0` left a model loading for minutes."""
    slow = world(2, ScalingPolicy(scaledown_window_s=0))
    for name in ("w2", "w3"):
        slow.on_assignment(name, assignment(name), 100.0)
    slow.on_function("f", function("f", max_workers=max_workers))
    slow.on_depths({("f", 1): 4}, 100.0, 100.0)
    drains = sorted(action.worker for action in plan(slow, 100.0).actions if isinstance(action, Drain))
    assert drains == going  # at most half of all at a time


def test_calls_of_a_retired_revision_have_their_own_reason_to_wait() -> None:
    """They had the reason of the serving revision, or none if that one did not wait."""
    moved = world()
    moved.on_revision(("f", 1), revision("f", resources=Resources(memory_bytes=9 * GIB)))
    moved.on_revision(("f", 2), revision("f", 2))
    moved.on_function("f", function("f", serving=2))
    moved.on_depths({("f", 1): 1}, 100.0, 100.0)
    status = plan(moved, 100.0).statuses["f"]
    assert status.waiting is None
    assert {number: waiting.reason for number, waiting in status.waiting_of.items()} == {1: "no_capacity"}


def test_a_limit_is_a_reason_to_wait() -> None:
    limited = world(1, ScalingPolicy(max_workers=1))
    limited.view(("f", 1)).service_s = 5.0
    limited.on_depths({("f", 1): 9}, 100.0, 100.0)
    waiting = plan(limited, 100.0).statuses["f"].waiting
    assert waiting is not None
    assert (waiting.reason, waiting.detail) == ("limit", "max_workers is reached: 1")


@pytest.mark.parametrize(("in_use", "waits_for_own"), [(0, 0), (1, 0), (1, 1)])
@pytest.mark.parametrize("calls", [2, 9])
def test_the_reason_to_wait_shows_that_running_calls_wait_for_queued_ones(
    in_use: int, waits_for_own: int, calls: int
) -> None:
    """A function that calls itself was reported as having reached max_workers, like a busy one, or without a reason."""
    limited = world(1, ScalingPolicy(max_workers=1))
    limited.view(("f", 1)).service_s = 5.0
    report = WorkerReport("w0", "f", 1, WorkerState.READY, 1, in_use, waits_for_own=waits_for_own)
    limited.on_runner_report(RunnerReport("a", "r", 100.0, (report,)), 100.0)
    limited.on_depths({("f", 1): calls}, 100.0, 100.0)
    waiting = plan(limited, 100.0).statuses["f"].waiting
    told = "" if waiting is None else waiting.detail
    assert ("hold the slots" in told) == (in_use == 1 == waits_for_own)


def test_a_worker_that_does_not_get_ready_long_after_its_timeout_is_drained() -> None:
    stuck = world()
    stuck.on_assignment("w0", assignment("w0"), 100.0)
    stuck.on_depths({("f", 1): 1}, 731.0, 731.0)
    tell(stuck, 731.0)
    assert Drain("w0", "not ready after 631 s", Cause.ERROR) in plan(stuck, 731.0).actions


def test_a_worker_that_does_not_come_back_to_a_new_runner_is_replaced() -> None:
    """A worker that holds the interpreter, or is stopped, kept its place for the whole start timeout."""
    at_work = world(1)
    now = 100.0
    while now < 170.0:
        now += 1.0
        at_work.on_node_report(node(), now)
        frozen = WorkerReport("w0", "f", 1, WorkerState.STARTING, 1)
        at_work.on_runner_report(RunnerReport("a", "next", now, (frozen,) if now > 105.0 else ()), now)
        at_work.on_depths({("f", 1): 1}, now, now)
        if drains := [action for action in plan(at_work, now).actions if isinstance(action, Drain)]:
            break
    assert drains == [Drain("w0", "not ready after 61 s", Cause.ERROR)]


def test_calls_move_at_once_when_the_old_revision_fails_to_start() -> None:
    broken = world(0, active=2)
    broken.on_revision(("f", 2), revision("f", 2))
    assert not any(isinstance(action, MoveServing) for action in plan(broken, 100.0).actions)
    for _ in range(3):
        broken.view(("f", 1)).circuit.record_failure(100.0, ErrorInfo("function_start_failed", "no module named nope"))
    moves = [action for action in plan(broken, 100.0).actions if isinstance(action, MoveServing)]
    assert [(move.function, move.revision) for move in moves] == [("f", 2)]


def test_a_revision_that_no_longer_serves_keeps_its_workers_while_gateways_learn_of_it() -> None:
    """Regression: a gateway sent one more call before it learned of the move. The call had to wait for a new worker."""
    moved = world(1, ScalingPolicy(min_workers=1))
    moved.on_revision(("f", 2), revision("f", 2))
    plan(moved, 100.0)
    moved.on_function("f", function("f", serving=2))
    moved.on_depths({}, 100.1, 100.1)
    assert [action for action in plan(moved, 100.1).actions if isinstance(action, Drain)] == []
    moved.on_depths({}, 102.1, 102.1)
    assert Drain("w0", "revision 1 is retired, 0 calls left", Cause.DEPLOY) in plan(moved, 102.1).actions


@pytest.mark.parametrize(("calls", "go"), [(1, ["w1", "w2"]), (2, [])])
def test_idle_workers_of_a_retired_revision_leave_when_its_queue_is_empty(calls: int, go: list[str]) -> None:
    """They kept their GPUs until the call ended, and the new revision had none."""
    moved = world(3)
    plan(moved, 100.0)
    moved.on_revision(("f", 2), revision("f", 2))
    moved.on_function("f", function("f", serving=2))
    at_work = WorkerReport("w0", "f", 1, WorkerState.READY, 1, in_use=1)
    idle = [WorkerReport(name, "f", 1, WorkerState.READY, 1, idle_since=0.0) for name in ("w1", "w2")]
    now = 100.0 + LINGER_S
    moved.on_runner_report(RunnerReport("a", "r", now, (at_work, *idle)), now)
    moved.on_depths({("f", 1): calls}, now, now)
    assert [action.worker for action in plan(moved, now).actions if isinstance(action, Drain)] == go


def test_a_step_over_one_function_does_not_change_others() -> None:
    two = world()
    two.on_revision(("g", 1), revision("g"))
    two.on_function("g", function("g"))
    two.on_depths({("f", 1): 1, ("g", 1): 1}, 100.0, 100.0)
    planned = plan(two, 100.0, only={"g"})
    assert [action.function for action in planned.actions if isinstance(action, Start)] == ["g"]
    assert set(planned.statuses) == {"g"}


@pytest.mark.parametrize(("ready", "ends"), [(0, 1), (1, 0)])
def test_submitted_calls_end_for_failing_starts_only_without_a_serving_worker(ready: int, ends: int) -> None:
    failing = world(ready, ScalingPolicy(max_workers=4))
    circuit = failing.view(("f", 1)).circuit
    for at in (0.0, 1.0, 2.0, 50.0):
        circuit.record_failure(at, ErrorInfo("function_start_failed", "boom"))
    assert circuit.openings == 2
    failing.on_depths({("f", 1): 3}, 100.0, 100.0)
    assert sum(isinstance(action, EndQueued) for action in plan(failing, 100.0).actions) == ends


def test_the_reason_to_wait_for_a_failing_function_has_its_revision_and_type_of_exception() -> None:
    failing = world(0, ScalingPolicy(max_workers=4))
    circuit = failing.view(("f", 1)).circuit
    for at in (0.0, 1.0, 2.0, 50.0):
        circuit.record_failure(
            at, ErrorInfo("function_start_failed", "'WEIGHTS'", error_type="KeyError", traceback="...")
        )
    failing.on_depths({("f", 1): 3}, 100.0, 100.0)
    planned = plan(failing, 100.0)
    waiting = planned.statuses["f"].waiting
    assert waiting is not None
    assert waiting.detail.endswith(": KeyError: 'WEIGHTS'")
    (ended,) = [action for action in planned.actions if isinstance(action, EndQueued)]
    assert (ended.error.code, ended.error.traceback) == ("function_start_failed", "...")
    assert all(fact in ended.error.message for fact in ("KeyError: 'WEIGHTS'", "`gpufn logs f`"))


def test_the_status_has_the_error_of_failed_starts_until_a_worker_is_ready() -> None:
    failing = world(0, ScalingPolicy(max_workers=4))
    circuit = failing.view(("f", 1)).circuit
    for at in (0.0, 1.0, 2.0):
        circuit.record_failure(at, ErrorInfo("function_start_failed", "'WEIGHTS'\nmore", error_type="KeyError"))
    failing.on_depths({("f", 1): 0}, 100.0, 100.0)
    told = plan(failing, 100.0).statuses["f"]
    assert told.start_error is None  # else the call that triggers the next attempt would be refused
    assert told.reason.endswith(": KeyError: 'WEIGHTS'"), "its first line"
    circuit.record_ready()
    assert "WEIGHTS" not in plan(failing, 100.0).statuses["f"].reason


def test_a_new_revision_that_does_not_start_is_reported_with_the_type_of_its_exception() -> None:
    two = world(1, ScalingPolicy(min_workers=1, max_workers=4))
    two.on_revision(("f", 2), revision("f"))
    two.on_function("f", msgspec.structs.replace(function("f"), active=2, latest=2))
    circuit = two.view(("f", 2)).circuit
    for at in (97.0, 98.0, 99.0):
        circuit.record_failure(at, ErrorInfo("function_start_failed", "'WEIGHTS'", error_type="KeyError"))
    assert plan(two, 100.0).statuses["f"].reason.endswith(": KeyError: 'WEIGHTS'")


def test_the_calls_of_a_deleted_function_end_as_cancelled() -> None:
    deleted = world(1)
    deleted.on_function("f", None)
    for now in (100.0, 102.5):
        deleted.on_depths({("f", 1): 2}, now, now)
    ended = [action for action in plan(deleted, 102.5).actions if not isinstance(action, Drain)]
    assert [(action.kind, action.error.code) for action in ended if isinstance(action, EndQueued)] == [
        (OutcomeKind.CANCELLED, "invocation_cancelled")
    ]
    assert len(ended) == 1


@pytest.mark.parametrize("run_seconds", [float("nan"), float("inf"), -5.0, 1e308])
def test_a_bad_number_of_one_function_does_not_stop_others(run_seconds: float) -> None:
    two = world(1)
    two.on_revision(("g", 1), revision("g"))
    two.on_function("g", function("g"))
    tell(two, 100.5, "w0", traffic=RevisionTraffic("f", 1, 1, 1, 0, 0.5))
    tell(two, 101.0, "w0", traffic=RevisionTraffic("f", 1, 2, 2, 0, run_seconds))
    two.on_depths({("f", 1): 3, ("g", 1): 1}, 102.0, 102.0)
    planned = plan(two, 102.0)
    assert "g" in {action.function for action in planned.actions if isinstance(action, Start)}
    assert "g" in planned.statuses


def test_a_function_that_cannot_be_decided_keeps_its_last_decision_and_reports_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    two = world(1)
    two.on_revision(("g", 1), revision("g"))
    two.on_function("g", function("g"))
    two.on_depths({("f", 1): 1, ("g", 1): 1}, 100.0, 100.0)
    decide = policy.decide

    def broken(scaling: ScalingPolicy, demand: Demand | None, *args: Any, **options: Any) -> ScaleDecision:
        if demand is not None and demand.queued == 7:
            raise OverflowError("cannot convert float infinity to integer")
        return decide(scaling, demand, *args, **options)

    monkeypatch.setattr(policy, "decide", broken)
    plan(two, 100.0)
    last = two.view(("f", 1)).last
    two.on_depths({("f", 1): 7, ("g", 1): 1}, 100.5, 100.5)
    planned = plan(two, 100.5)
    assert {name: type(error) for name, error in planned.failed.items()} == {"f": OverflowError}
    assert two.view(("f", 1)).last is last
    assert [action.function for action in planned.actions if isinstance(action, Start)] == ["g"]
    assert set(planned.statuses) == {"g"}


def test_an_error_in_placing_one_function_fails_only_that_function() -> None:
    two = world()
    two.on_revision(("g", 1), revision("g"))
    two.on_function("g", function("g"))
    two.on_depths({}, 100.0, 100.0)
    placement_failure = Mock()
    placement_failure.after.side_effect = ArithmeticError("no number")
    two.view(("f", 1)).placement_failure = placement_failure
    planned = plan(two, 100.0)
    assert list(planned.failed) == ["f"]
    assert set(planned.statuses) == {"g"}


def test_a_start_that_waits_for_weights_reports_the_fetched_bytes() -> None:
    starting = world()
    weights = WeightsSpec(source="./weights", files=(WeightsFile("w", 1 << 30, "a" * 64),))
    without = revision("f", 1)
    spec = msgspec.structs.replace(without.spec, weights=(weights,))
    starting.on_revision(("f", 1), msgspec.structs.replace(without, spec=spec))
    starting.on_assignment("w0", assignment("w0"), 100.0)
    starting.on_depths({("f", 1): 1}, 100.0, 100.0)
    for digest, reason in (("b" * 64, "starting"), (weights.digest, "weights")):
        fetch = WeightsFetch(digest, "./weights", 1 << 20, 1 << 30)
        starting.on_node_report(msgspec.structs.replace(node(), weights=WeightsReport(fetches=(fetch,))), 100.0)
        status = plan(starting, 100.0).statuses["f"]
        assert status.waiting is not None
        assert (status.waiting.reason, "1 MiB of 1 GiB" in status.waiting.detail) == (reason, reason == "weights")
        assert ("1 MiB of 1 GiB" in status.reason) == (reason == "weights"), "also without a call, during a deploy"


def test_a_start_that_waits_for_its_packages_reports_the_node() -> None:
    starting = world()
    image = ImageSpec(python="3.12", pip=("numpy>=2",))
    without = revision("f", 1)
    spec = msgspec.structs.replace(without.spec, image=image)
    starting.on_revision(("f", 1), msgspec.structs.replace(without, spec=spec))
    starting.on_assignment("w0", assignment("w0"), 93.0)
    starting.on_depths({("f", 1): 1}, 100.0, 100.0)
    for digest, says_so in (("b" * 64, False), (image.digest, True)):
        starting.on_node_report(msgspec.structs.replace(node(), making_environments=(digest,)), 100.0)
        status = plan(starting, 100.0).statuses["f"]
        assert status.waiting is not None
        assert status.waiting.reason == "starting"
        assert ("packages" in status.waiting.detail, "7.0 s" in status.waiting.detail) == (says_so, True)


def test_a_worker_is_placed_on_the_node_that_last_reported_its_weights() -> None:
    weights = WeightsSpec(source="./weights", files=(WeightsFile("w", 100 << 30, "a" * 64),))
    some = World(100.0)
    without = revision("f", 1)
    spec = msgspec.structs.replace(without.spec, weights=(weights,))
    some.on_revision(("f", 1), msgspec.structs.replace(without, spec=spec))
    some.on_function("f", function("f"))
    small, large = node("small"), node("large", cpu(memory_bytes=64 << 30))  # the small one is the tighter fit
    for report in (small, large, msgspec.structs.replace(large, weights=WeightsReport(complete=(weights.digest,)))):
        some.on_node_report(report, 100.0)
        some.on_runner_report(RunnerReport(report.node, "r", 100.0, (), ()), 100.0)
    some.on_depths({("f", 1): 1}, 100.0, 100.0)
    assert [action.node for action in plan(some, 100.0).actions if isinstance(action, Start)] == ["large"]
