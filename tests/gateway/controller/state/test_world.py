"""The effect of reports and events on the controller's world."""

from __future__ import annotations

import msgspec
import pytest

from gpufn_core.domain.worker import NODE_PHASE, Assignment, ColdStart, Desired, Exit, StartFailure, WorkerState
from gpufn_core.errors import ErrorInfo
from gpufn_core.protocol.reports import (
    LastStart,
    RevisionTraffic,
    RunnerReport,
    WorkerEvent,
    WorkerEventKind,
    WorkerReport,
)
from gpufn_core.spec.function_spec import ScalingPolicy
from gpufn_gateway.controller.state.views import NODE_FORGOTTEN_S
from tests.gateway.controller.known_worlds import tell, world
from tests.gateway.controller.simulation import assignment


def test_the_last_start_is_known_by_its_node_and_phases() -> None:
    some = world(1)
    start = ColdStart(place_s=0.1, fetch_s=5.0, launch_s=0.2, load_s=2.0, warm_s=0.3)
    some.on_event(WorkerEvent(WorkerEventKind.READY, "w0", "f", 1, "b", 1e9, cold_start=start), 101.0)
    view = some.view(("f", 1))
    assert view.last_start == LastStart("b", 1e9, start.phases)
    assert view.start_s_by_node == {"b": pytest.approx(2.5)}
    resume = ColdStart(resume_s=0.5)
    some.on_event(WorkerEvent(WorkerEventKind.READY, "w0", "f", 1, "c", 2e9, cold_start=resume), 102.0)
    assert view.last_start == LastStart("c", 2e9, {"resume": 0.5})
    assert list(view.start_s_by_node) == ["b"]


def test_a_revision_is_in_use_while_it_has_workers_or_calls_and_that_is_known() -> None:
    busy = world(1)
    busy.on_depths({("f", 2): 1, ("f", 3): 0}, 104.0, 104.0)
    assert busy.in_use(104.0) == {("f", 1), ("f", 2)}
    assert busy.in_use(110.0) is None
    busy.on_depths(None, 110.0, 110.0)
    assert busy.in_use(110.0) is None


def test_a_wakeup_counts_until_later_requested_depths_arrive() -> None:
    empty = world()
    empty.on_wakeup("f", 100.1)
    empty.on_depths({}, 100.0, 100.2)
    assert empty.depths.has_wakeup("f")
    empty.on_depths({}, 100.3, 100.4)
    assert not empty.depths.has_wakeup("f")


def test_calls_that_a_lost_runner_had_are_not_counted_for_ever() -> None:
    lost = world(0, ScalingPolicy(max_workers=1))
    tell(lost, 100.0, traffic=RevisionTraffic("f", 1, 0, 0, 0, 0.0, direct=3))
    lost.on_depths({}, 101.0, 101.0)
    assert lost.calls(("f", 1), 101.0) == 3
    lost.on_depths({}, 121.0, 121.0)
    assert lost.calls(("f", 1), 121.0) == 0
    assert lost.in_use(121.0) == set()


def test_a_node_that_has_been_away_for_an_hour_is_forgotten_unless_it_has_a_worker() -> None:
    """Hosts come back under new names; a container has a new name after each start."""
    known = world()
    known.on_runner_report(RunnerReport("a", "r", 100.0), 100.0)
    known.on_assignment("w", assignment("w", node="b"), 100.0)
    known.forget_nodes(100.0 + NODE_FORGOTTEN_S)
    assert known.nodes.keys() == {"a", "b"}
    known.forget_nodes(101.0 + NODE_FORGOTTEN_S)
    assert known.nodes.keys() == {"b"}
    known.on_assignment("w", None, 101.0 + NODE_FORGOTTEN_S)
    known.forget_nodes(101.0 + NODE_FORGOTTEN_S)
    assert known.nodes == {}


def test_a_standby_controller_forgets_unused_revisions() -> None:
    known = world(1)
    known.on_assignment("old", assignment("old", number=7), 100.0)
    known.on_assignment("old", None, 101.0)
    assert known.numbers("f") == {1, 7}
    known.forget_unused()
    assert known.numbers("f") == {1}


def test_a_worker_that_ends_before_it_is_ready_is_a_failed_start_once() -> None:
    starting = world()
    view = starting.view(("f", 1))
    for number in range(3):
        name = f"w{number}"
        starting.on_assignment(name, assignment(name), 100.0)
        failure = StartFailure("load", ErrorInfo("function_start_failed", "boom"))
        starting.on_event(WorkerEvent(WorkerEventKind.START_FAILED, name, "f", 1, "a", 0.0, failure=failure), 100.0)
        starting.on_event(WorkerEvent(WorkerEventKind.EXITED, name, "f", 1, "a", 0.0, exit=Exit(code=3)), 100.0)
    assert repr(view.circuit) == "<Circuit [3 failures, 1 openings]>"
    starting.on_assignment("w9", assignment("w9", number=2), 100.0)
    starting.on_event(
        WorkerEvent(WorkerEventKind.EXITED, "w9", "f", 2, "a", 0.0, exit=Exit(signal=11, tail="oh")), 100.0
    )
    error = starting.view(("f", 2)).circuit.last_error
    assert error is not None
    assert "SIGSEGV" in error.message
    assert error.message.endswith("\noh")


@pytest.mark.parametrize("is_forgotten", [False, True])
def test_a_failed_start_is_reported_with_the_users_error_though_its_exit_arrives_first(is_forgotten: bool) -> None:
    starting = world()
    view = starting.view(("f", 1))
    for name in ("w0", "w1"):
        starting.on_assignment(name, assignment(name), 100.0)
        starting.on_event(WorkerEvent(WorkerEventKind.EXITED, name, "f", 1, "a", 0.0, exit=Exit(code=3)), 100.0)
        if is_forgotten:
            starting.on_assignment(name, None, 100.0)
        failure = StartFailure("load", ErrorInfo("function_start_failed", f"no weights for {name}"))
        starting.on_event(WorkerEvent(WorkerEventKind.START_FAILED, name, "f", 1, "a", 0.0, failure=failure), 100.0)
    assert repr(view.circuit) == "<Circuit [2 failures, 0 openings]>"
    assert view.circuit.last_error == ErrorInfo("function_start_failed", "no weights for w1")


def test_a_late_report_of_an_earlier_start_does_not_replace_the_last_error() -> None:
    starting = world()
    for name in ("w0", "w1"):
        starting.on_assignment(name, assignment(name), 100.0)
        exited = WorkerEvent(WorkerEventKind.EXITED, name, "f", 1, "a", 0.0, exit=Exit(code=3, tail=f"end of {name}"))
        starting.on_event(exited, 100.0)
    failure = StartFailure("load", ErrorInfo("function_start_failed", "no weights"))
    starting.on_event(WorkerEvent(WorkerEventKind.START_FAILED, "w0", "f", 1, "a", 0.0, failure=failure), 100.0)
    circuit = starting.view(("f", 1)).circuit
    assert repr(circuit) == "<Circuit [2 failures, 0 openings]>"
    assert circuit.last_error is not None
    assert circuit.last_error.message.endswith("end of w1")


def test_a_start_that_fails_on_its_node_is_no_failure_of_the_function() -> None:
    starting = world()
    for name in ("w0", "w1", "w2"):
        starting.on_assignment(name, assignment(name), 100.0)
        failure = StartFailure(NODE_PHASE, ErrorInfo("platform_error", "Cannot start a process: no memory."))
        starting.on_event(WorkerEvent(WorkerEventKind.START_FAILED, name, "f", 1, "a", 0.0, failure=failure), 100.0)
        assert starting.workers[name].state is WorkerState.FAILED
    assert repr(starting.view(("f", 1)).circuit) == "<Circuit [0 failures, 0 openings]>"


def test_a_worker_that_ends_after_it_was_ready_is_no_failed_start() -> None:
    crashed = world(1)
    crashed.on_runner_report(RunnerReport("a", "r2", 100.0), 100.0)  # a restarted runner, before w0 reconnects
    crashed.on_event(WorkerEvent(WorkerEventKind.EXITED, "w0", "f", 1, "a", 0.0, exit=Exit(signal=9)), 100.0)
    assert repr(crashed.view(("f", 1)).circuit) == "<Circuit [0 failures, 0 openings]>"


@pytest.mark.parametrize(("after_s", "failures"), [(10.5, 0), (0.5, 1)])
@pytest.mark.parametrize("ahead_s", [0.0, 60.0, -60.0])
def test_a_worker_without_a_runner_is_no_failed_start_but_an_early_reported_error_is(
    after_s: float, failures: int, ahead_s: float
) -> None:
    """Independently of the host's clock."""
    starting = world()
    starting.on_assignment("w0", assignment("w0"), 100.0)
    exited = WorkerEvent(WorkerEventKind.EXITED, "w0", "f", 1, "a", after_s + ahead_s, exit=Exit(code=4))
    starting.on_event(exited, 100.0 + after_s)
    assert repr(starting.view(("f", 1)).circuit) == f"<Circuit [{failures} failures, 0 openings]>"
    assert starting.workers["w0"].is_gone


def test_workers_that_their_stopping_node_ends_while_they_start_are_no_failed_starts() -> None:
    starting = world()
    for name in ("w0", "w1", "w2"):
        starting.on_assignment(name, assignment(name), 100.0)
        ended = Exit(signal=15, stopping=True)
        starting.on_event(WorkerEvent(WorkerEventKind.EXITED, name, "f", 1, "a", 0.0, exit=ended), 100.0)
        assert starting.workers[name].is_gone
    assert repr(starting.view(("f", 1)).circuit) == "<Circuit [0 failures, 0 openings]>"


def test_a_drained_worker_that_ends_is_no_failure() -> None:
    idle = world(1)
    idle.on_assignment("w0", msgspec.structs.replace(assignment("w0"), desired=Desired.DRAIN), 100.0)
    idle.on_event(WorkerEvent(WorkerEventKind.EXITED, "w0", "f", 1, "a", 0.0, exit=Exit(code=0)), 100.0)
    assert repr(idle.view(("f", 1)).circuit) == "<Circuit [0 failures, 0 openings]>"


def test_a_drain_request_stays_while_the_watch_delivers_older_records() -> None:
    idle = world(1)
    idle.workers["w0"].drain_requested = True
    idle.on_assignment("w0", assignment("w0"), 100.0)
    assert repr(idle.workers["w0"]) == "<WorkerView w0 draining>"


def test_a_restarted_runner_counts_from_zero_and_that_is_no_traffic() -> None:
    told = world(1)
    tell(told, 101.0, "w0", traffic=RevisionTraffic("f", 1, 10, 10, 0, 5.0))
    tell(told, 102.0, "w0", traffic=RevisionTraffic("f", 1, 20, 20, 0, 25.0))
    view = told.view(("f", 1))
    assert view.ended == 20
    restarted = RunnerReport("a", "r2", 103.0, (), (RevisionTraffic("f", 1, 5, 5, 0, 1.0),))
    told.on_runner_report(restarted, 103.0)
    assert view.ended == 20
    assert view.service_s == pytest.approx(1.48, abs=0.01)


@pytest.mark.parametrize("run_seconds", [float("nan"), float("inf"), -5.0])
def test_times_that_cannot_be_are_not_learned_from(run_seconds: float) -> None:
    told = world(1)
    tell(told, 101.0, "w0", traffic=RevisionTraffic("f", 1, 0, 0, 0, 0.0))
    for ended, seconds in ((1, 2.0), (2, run_seconds), (3, 4.0)):
        tell(told, 101.0 + ended, "w0", traffic=RevisionTraffic("f", 1, ended, ended, 0, seconds))
    event = WorkerEvent(WorkerEventKind.READY, "w0", "f", 1, "a", 0.0, cold_start=ColdStart(load_s=run_seconds))
    told.on_event(event, 105.0)
    view = told.view(("f", 1))
    assert view.service_s is not None
    assert (0 < view.service_s < 5, list(view.cold_starts)) == (True, [])


@pytest.mark.parametrize("event_is_lost", [False, True])
def test_a_node_whose_clock_is_ahead_does_not_make_starts_look_long(event_is_lost: bool) -> None:
    """With a recorded cold start of an hour, no queue justified a second worker."""
    begun = world()
    begun.on_assignment("w", assignment("w"), 100.0)
    cold_start = ColdStart(place_s=3600.0, load_s=0.3)
    if event_is_lost:
        report = WorkerReport("w", "f", 1, WorkerState.READY, 1, cold_start=cold_start)
        begun.on_runner_report(RunnerReport("a", "r", 3700.0, (report,)), 100.5)
    else:
        begun.on_event(WorkerEvent(WorkerEventKind.READY, "w", "f", 1, "a", 3700.0, cold_start=cold_start), 100.5)
    assert begun.view(("f", 1)).cold_start_s == pytest.approx(0.8)


def test_equal_repeated_records_are_one_worker() -> None:
    told = world()
    one: Assignment = assignment("w0")
    told.on_assignment("w0", one, 100.0)
    told.on_assignment("w0", one, 101.0)
    assert repr(told) == "<World [1 functions, 1 workers, 1 nodes]>"
    told.on_assignment("w0", None, 102.0)
    assert repr(told.leases) == "<LeaseBook [0 leases on 0 nodes]>"


def test_an_event_of_another_kind_is_not_read_as_one_of_ours() -> None:
    event = WorkerEvent(WorkerEventKind.READY, "w0", "f", 1, "a", 0.0)
    told = msgspec.msgpack.encode(event).replace(b"ready", b"bored")
    with pytest.raises(msgspec.ValidationError, match="bored"):
        msgspec.msgpack.decode(told, type=WorkerEvent)
