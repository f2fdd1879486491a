"""Fake workers that start, drain, die, reconnect and lie."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import msgspec
import pytest

from gpufn_core.domain.invocation import InvocationState, OutcomeKind, StartReason
from gpufn_core.domain.revision import Revision
from gpufn_core.domain.worker import Desired, Exit, WorkerState
from gpufn_core.errors import ErrorInfo
from gpufn_core.protocol import frames, subjects
from gpufn_core.protocol.codec import PROTOCOL
from gpufn_core.protocol.launch import LAST_CALL_S, RECONNECT_S
from gpufn_core.protocol.messages import LogLine
from gpufn_core.protocol.reports import WorkerEvent
from gpufn_platform.bus.storage import streams
from gpufn_platform.queue.records import call_records
from gpufn_runtime.runner.directory import Directory
from tests.runtime.runner.node import RETRY_AT_ONCE, Node, on_node


def test_the_error_of_a_dead_worker_has_its_signal_and_last_output(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("dies")
        worker = await node.worker(revision)
        logged: list[LogLine] = []
        node.bus.subscribe(
            subjects.logs("dies"),
            lambda message: logged.append(msgspec.msgpack.decode(message.payload, type=LogLine)),
        )
        call = node.invoke(revision)
        await worker.run()
        worker.die()
        await node.reap("dies", Exit(signal=11, tail="Segmentation fault"))
        reply, _ = await call.future
        assert reply.kind is OutcomeKind.LOST
        assert reply.error is not None
        assert reply.error.code == "worker_lost"
        assert reply.error.retryable
        assert "SIGSEGV" in reply.error.message
        assert "Segmentation fault" in reply.error.message
        await node.bus.flush()
        assert [(line.stream, line.text.splitlines()[0][:12]) for line in logged] == [("error", "worker_lost:")]

    on_node(url, tmp_path, test)


def test_a_worker_that_never_connected_leaves_no_folder(url: str, tmp_path: Path) -> None:
    """Its launch failed, and the agent had cleaned up before the runner began to listen."""

    async def test(node: Node) -> None:
        revision = await node.deploy("never")
        await node.assign(revision, "w-1")
        await node.report_of("w-1", WorkerState.STARTING)
        folder = node.home.worker("w-1")
        async with asyncio.timeout(30):
            while not folder.exists():
                await node.reports.get()
            await node.unassign("w-1")
            while folder.exists():
                await node.reports.get()

    on_node(url, tmp_path, test)


def test_a_runner_keeps_a_call_until_the_agent_reports_the_end_of_its_worker(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("contained")
        worker = await node.worker(revision)
        call = node.invoke(revision)
        run, _ = await worker.run()
        worker.die()
        await node.report_of("w-1", WorkerState.FAILED)
        node.clock.skipped_s = 5.0
        held = await call_records.locate(node.bus, run.invocation)
        assert held is not None
        assert held.worker == "w-1"
        await node.reap("contained", Exit(signal=15))
        reply, _ = await call.future
        assert "SIGTERM" in reply.error.message

    on_node(url, tmp_path, test)


def test_a_call_whose_worker_has_ended_ends_when_its_caller_cancels_it(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("unwanted")
        worker = await node.worker(revision)
        call = node.invoke(revision)
        run, _ = await worker.run()
        worker.die()
        await node.kills.get()
        call.cancel()
        while await call_records.locate(node.bus, run.invocation) is not None:
            pass

    on_node(url, tmp_path, test)


def test_an_unexplained_death_is_not_a_timeout(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("hasty", timeout_s=3.0)
        worker = await node.worker(revision)
        call = node.invoke(revision)
        await worker.run()
        worker.die()
        await node.kills.get()
        node.clock.skipped_s = 4.0
        reply, _ = await call.future
        assert reply.kind is OutcomeKind.LOST

    on_node(url, tmp_path, test)


def test_a_runner_that_is_stopped_leaves_calls_of_workers_that_died_in_the_queue(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("once")
        worker = await node.worker(revision)
        call = await node.submit(revision)
        await worker.run()
        worker.die()
        await node.kills.get()
        await node.stop()
        assert (await streams.depths(node.bus))["once", 1].total == 1
        record, _ = await call_records.wait(node.bus, call.id, 0.0)
        assert record.state is InvocationState.QUEUED

    on_node(url, tmp_path, test)


@pytest.mark.parametrize("unassigned", [True, False])
def test_a_caller_gets_an_answer_although_no_exit_report_arrives(url: str, tmp_path: Path, unassigned: bool) -> None:
    """A deleted assignment proves nothing: the controller deletes the assignments of a silent node."""

    async def test(node: Node) -> None:
        revision = await node.deploy("untold")
        worker = await node.worker(revision)
        call = node.invoke(revision)
        run, _ = await worker.run()
        worker.die()
        await node.kills.get()
        if unassigned:
            await node.report_of("w-1", WorkerState.FAILED)
            await node.unassign("w-1")
            await node.report_without("w-1")
        assert await call_records.locate(node.bus, run.invocation) is not None
        node.skip(11.0)
        reply, _ = await call.future
        assert "closed its connection" in reply.error.message

    on_node(url, tmp_path, test)


def test_a_call_with_a_deleted_assignment_runs_again_only_when_its_process_is_dead(url: str, tmp_path: Path) -> None:
    """The controller deletes the assignments of a silent node; the worker's process may still run."""

    async def test(node: Node) -> None:
        revision = await node.deploy("given-up", retries=RETRY_AT_ONCE)
        first = await node.worker(revision, "w-1")
        call = await node.submit(revision)
        run, _ = await first.run()
        await node.report_of("w-1", WorkerState.READY)
        await node.unassign("w-1")
        await node.report_without("w-1")
        second = await node.worker(revision, "w-2")
        await node.report_of("w-2", WorkerState.READY)
        for passed_s in (0.0, 20.0):
            node.skip(passed_s)
            held = await call_records.locate(node.bus, run.invocation)
            assert held is not None
            assert (held.worker, held.attempt) == ("w-1", 1)
        assert await node.reap("given-up", Exit(signal=15)) == "w-1"
        again, body = await second.run()
        assert (again.invocation, again.number) == (call.id, 2)
        second.answer(again, body)
        record, _ = await call_records.wait(node.bus, call.id, 30.0)
        assert [each.reason for each in record.attempts] == [StartReason.FIRST, StartReason.WORKER_LOST]
        assert "SIGTERM" in record.attempts[0].message

    on_node(url, tmp_path, test)


def test_a_call_with_a_deleted_assignment_ends_when_its_worker_must_have_ended(url: str, tmp_path: Path) -> None:
    """Its node has no agent. A worker that finds no runner ends itself."""

    async def test(node: Node) -> None:
        revision = await node.deploy("alone", timeout_s=600.0)
        worker = await node.worker(revision)
        call = await node.submit(revision)
        run, _ = await worker.run()
        await node.report_of("w-1", WorkerState.READY)
        await node.unassign("w-1")
        await node.report_without("w-1")
        node.skip(RECONNECT_S + LAST_CALL_S)
        assert await call_records.locate(node.bus, run.invocation) is not None
        node.skip(10.0)
        record, _ = await call_records.wait(node.bus, call.id, 30.0)
        assert [each.outcome for each in record.attempts] == [OutcomeKind.LOST]
        async with asyncio.timeout(30):
            while (await node.reports.get()).traffic:  # the queue of a revision without workers here is closed
                pass

    on_node(url, tmp_path, test)


def test_a_lost_attempt_is_retried_within_the_policy_and_counted(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("retried", retries=RETRY_AT_ONCE)
        first = await node.worker(revision, "w-1")
        call = node.invoke(revision, b'"again"')
        run, _ = await first.run()
        assert run.number == 1
        first.die()
        await node.reap("retried")
        second = await node.worker(revision, "w-2")
        run, body = await second.run()
        assert (run.number, body) == (2, b'"again"')
        second.answer(run, body)
        reply, _ = await call.future
        assert (reply.kind, reply.attempt) == (OutcomeKind.SUCCEEDED, 2)

    on_node(url, tmp_path, test)


def test_a_call_of_a_disconnected_worker_waits_for_the_death_of_its_process(url: str, tmp_path: Path) -> None:
    """The agent does not answer."""

    async def test(node: Node) -> None:
        revision = await node.deploy("babbles", retries=RETRY_AT_ONCE)
        worker = await node.worker(revision)
        call = node.invoke(revision)
        run, _ = await worker.run()
        worker.send_raw(UNKNOWN_FRAME)
        order = await node.kills.get()
        node.skip(20.0)
        held = await call_records.locate(node.bus, run.invocation)
        assert held is not None
        assert (held.worker, held.attempt) == ("w-1", 1)
        node.kills.put_nowait(order)
        await node.reap("babbles")
        second = await node.worker(revision, "w-2")
        again, body = await second.run()
        second.answer(again, body)
        assert (await call.future)[0].attempt == 2

    on_node(url, tmp_path, test)


UNKNOWN_FRAME = b"\0\0\0\x02\0\0\0\0\x91\x63"


@pytest.mark.parametrize(
    "garbage",
    [b"\xff" * 64, frames.encode(frames.Result(99, OutcomeKind.SUCCEEDED, None, "", 0.0)), UNKNOWN_FRAME],
    ids=["noise", "a result of nothing", "an unknown frame"],
)  # fmt: skip
def test_garbage_on_the_socket_ends_only_its_worker(url: str, tmp_path: Path, garbage: bytes) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("garbage")
        worker = await node.worker(revision)
        call = node.invoke(revision)
        await worker.run()
        worker.send_raw(garbage)
        assert await node.reap("garbage") == "w-1"
        assert (await call.future)[0].kind is OutcomeKind.LOST
        healthy = await node.worker(revision, "w-2")
        again = node.invoke(revision)
        await healthy.echo(1)
        assert (await again.future)[0].kind is OutcomeKind.SUCCEEDED

    on_node(url, tmp_path, test)


def test_a_drained_worker_finishes_running_calls_and_accepts_no_new_ones(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("drained")
        worker = await node.worker(revision)
        running = node.invoke(revision, b"1")
        run, body = await worker.run()
        await node.assign(revision, "w-1", Desired.DRAIN)
        await node.report_of("w-1", WorkerState.DRAINING)
        waiting = node.invoke(revision, b"2")
        worker.answer(run, body)
        assert (await running.future)[1] == b"1"
        assert isinstance((await worker.next())[0], frames.Drain)
        worker.die()
        await node.report_of("w-1", WorkerState.STOPPED)
        await node.unassign("w-1")
        assert node.kills.empty(), "the worker ends as its Drain frame demands"
        fresh = await node.worker(revision, "w-2")
        await fresh.echo(1)
        assert (await waiting.future)[1] == b"2"

    on_node(url, tmp_path, test)


def test_a_worker_drains_during_its_last_call(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("single", max_calls=1)
        worker = await node.worker(revision)
        call = node.invoke(revision, b"1")
        run, body = await worker.run()
        await node.report_of("w-1", WorkerState.DRAINING)
        waiting = node.invoke(revision, b"2")
        worker.answer(run, body)
        assert (await call.future)[1] == b"1"
        assert isinstance((await worker.next())[0], frames.Drain)
        fresh = await node.worker(revision, "w-2")
        await fresh.echo(1)
        assert (await waiting.future)[1] == b"2"

    on_node(url, tmp_path, test)


def test_a_worker_whose_calls_an_earlier_runner_counted_runs_no_further_call(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("counted", max_calls=5)
        await node.assign(revision, "w-1")
        worker = await node.connect("w-1", frames.Hello(PROTOCOL, "w-1", was_ready=True))
        worker.ready()
        assert isinstance((await worker.next())[0], frames.Drain)

    on_node(url, tmp_path, test)


def test_a_worker_that_cannot_start_is_reported_with_the_users_error(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("broken")
        events: asyncio.Queue[WorkerEvent] = asyncio.Queue()
        node.bus.subscribe(
            subjects.worker_event("broken"),
            lambda message: events.put_nowait(msgspec.msgpack.decode(message.payload, type=WorkerEvent)),
        )
        await node.assign(revision, "w-1")
        worker = await node.connect("w-1")
        worker.send(frames.StartFailed("load", ErrorInfo("function_start_failed", "no torch")))
        event = await events.get()
        assert event.kind == "start_failed"
        assert event.failure is not None
        assert event.failure.error.message == "no torch"

    on_node(url, tmp_path, test)


@pytest.mark.parametrize("inherited", [False, True])
def test_a_worker_has_its_startup_timeout_and_a_worker_of_an_earlier_runner_has_time_to_reconnect(
    url: str, tmp_path: Path, inherited: bool
) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("slow", startup_timeout_s=3.0)  # longer than the test
        if inherited:
            await node.stop()
        await node.assign(revision, "w-1")
        if inherited:
            await node.start()
        await node.report_of("w-1", WorkerState.STARTING)
        for seconds in (25.0, 31.0) if inherited else (0.0, 4.0):
            assert node.kills.empty()
            node.clock.skipped_s = seconds
            await node.reports.get()
            await node.reports.get()
        assert (await node.kills.get()).worker == "w-1"

    on_node(url, tmp_path, test)


def test_a_cancelled_call_that_does_not_stop_is_no_call_that_runs(url: str, tmp_path: Path) -> None:
    """A waiting call needs a new worker: to the controller, the slot is used by no queued call."""

    async def test(node: Node) -> None:
        revision = await node.deploy("stubborn")
        worker = await node.worker(revision)
        call = await node.submit(revision)
        await worker.run()
        assert await call_records.cancel(node.bus, call, node.clock.time())
        while not (found := (await node.reports.get()).workers) or not found[0].left_over:
            pass
        assert (found[0].in_use, found[0].left_over) == (1, 1)

    on_node(url, tmp_path, test)


def test_a_worker_whose_socket_cannot_be_made_yet_has_all_of_its_time_to_start(url: str, tmp_path: Path) -> None:
    """The runner assumed that it had been listening since the machine's start, and killed it."""

    async def test(node: Node) -> None:
        revision = await node.deploy(startup_timeout_s=600.0)
        in_the_way = node.home.worker_socket("w-1").parent
        in_the_way.parent.mkdir(parents=True)
        in_the_way.touch()
        await node.assign(revision, "w-1")
        told: list[WorkerState] = []
        while len(told) < 3:
            told += [each.state for each in (await node.reports.get()).workers]
        assert told == [WorkerState.STARTING] * 3
        in_the_way.unlink()
        (await node.connect("w-1")).ready()
        await node.report_of("w-1", WorkerState.READY)
        assert node.kills.empty()

    on_node(url, tmp_path, test)


def test_a_worker_that_is_unassigned_before_its_socket_could_not_be_made_is_forgotten(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, may_go_on = Directory.revision, asyncio.Event()

    async def late(directory: Directory, function: str, number: int) -> Revision:
        await may_go_on.wait()
        return await read(directory, function, number)

    async def test(node: Node) -> None:
        monkeypatch.setattr(Directory, "revision", late)
        revision = await node.deploy()
        in_the_way = node.home.worker_socket("w-1").parent
        in_the_way.parent.mkdir(parents=True)
        in_the_way.touch()
        await node.assign(revision, "w-1")
        await node.unassign("w-1")
        may_go_on.set()
        told = [(await node.reports.get()).traffic for _ in range(5)]
        assert told[-1] == ()  # its queue does not exist (any longer)

    on_node(url, tmp_path, test)


def test_a_worker_finds_its_runner_again_after_the_runner_died(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("reborn")
        await node.worker(revision)
        other = Node(node.bus, node.home)
        await other.open()
        task = asyncio.create_task(other.runner("r2").run())
        try:
            # The second runner listens on the same path; the worker connects again and is READY at once.
            again = await node.connect("w-1")
            again.ready()
            await other.report_of("w-1", WorkerState.READY)
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    on_node(url, tmp_path, test)


def test_a_returning_worker_reports_its_running_attempts(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("comeback", concurrency=2)
        events: list[str] = []
        node.bus.subscribe(
            subjects.worker_event("comeback"),
            lambda message: events.append(msgspec.msgpack.decode(message.payload, type=WorkerEvent).kind),
        )
        await node.assign(revision, "w-1")
        worker = await node.connect("w-1", frames.Hello(PROTOCOL, "w-1", was_ready=True, running=2))
        worker.ready()
        report = await node.report_of("w-1", WorkerState.READY)
        assert (report.in_use, report.cold_start, report.idle_since) == (2, None, None)
        call = node.invoke(revision, b"1")
        worker.send(frames.Freed())
        run, body = await worker.run()
        worker.answer(run, body)
        assert (await call.future)[1] == b"1"
        assert events == [], "its cold start is long over"

    on_node(url, tmp_path, test)


def test_a_worker_that_is_to_drain_while_it_starts_ends_at_once(url: str, tmp_path: Path) -> None:
    """It held its GPU until it had loaded, and had no call to finish."""

    async def test(node: Node) -> None:
        revision = await node.deploy("unwanted")
        await node.assign(revision, "w-1")
        await node.connect("w-1")
        await node.assign(revision, "w-1", Desired.DRAIN)
        order = await node.kills.get()
        assert order.worker == "w-1"
        assert (await node.report_of("w-1", WorkerState.STOPPED)).in_use == 0

    on_node(url, tmp_path, test)


def test_a_worker_that_an_earlier_runner_may_have_used_ends_when_it_is_ready(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("undecided")
        await node.stop()
        await node.assign(revision, "w-1")
        await node.start()
        worker = await node.connect("w-1")
        await node.assign(revision, "w-1", Desired.DRAIN)
        call = node.invoke(revision)
        await node.bus.flush()
        worker.ready()
        assert isinstance((await worker.next())[0], frames.Drain)
        fresh = await node.worker(revision, "w-2")
        await fresh.echo(1)
        assert (await call.future)[0].kind is OutcomeKind.SUCCEEDED

    on_node(url, tmp_path, test)


def test_a_call_waits_for_the_successor_of_a_worker_with_many_slots(url: str, tmp_path: Path) -> None:
    """The credits of a dead worker's slots caused redeliveries until the call was considered lost."""

    async def test(node: Node) -> None:
        revision = await node.deploy("many", concurrency=64)
        first = await node.worker(revision, "w-1")
        warm = node.invoke(revision)
        await first.echo(1)
        await warm.future
        first.die()
        await node.kills.get()
        call = node.invoke(revision, b"2")
        await node.assign(revision, "w-2")
        second = await node.connect("w-2")
        for _ in range(20):
            await node.bus.flush()
        assert not call.future.done()
        second.ready()
        run, body = await second.run()
        second.answer(run, body)
        assert (await call.future)[1] == b"2"

    on_node(url, tmp_path, test)


@pytest.mark.parametrize("claimed", [float("inf"), float("nan"), -1.0, 1e300])
def test_durations_that_cannot_be_are_not_believed(url: str, tmp_path: Path, claimed: float) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("liar")
        await node.assign(revision, "w-1")
        worker = await node.connect("w-1")
        worker.send(frames.Ready(claimed, claimed, ("a" * 10_000, "numpy", "no/module")))
        report = await node.report_of("w-1", WorkerState.READY)
        assert report.modules == ("numpy",)
        assert report.cold_start is not None
        assert 0 <= report.cold_start.total_s < 60
        call = node.invoke(revision)
        run, _ = await worker.run()
        worker.send(frames.Result(run.attempt, OutcomeKind.SUCCEEDED, None, "application/json", claimed), b"1")
        assert 0 <= (await call.future)[0].run_s < 60

    on_node(url, tmp_path, test)


def test_a_worker_that_reports_draining_gets_no_further_calls_and_loses_none(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("told", concurrency=2)
        worker = await node.worker(revision)
        calls = [node.invoke(revision)]
        first, body = await worker.run()
        worker.send(frames.Draining())
        await node.report_of("w-1", WorkerState.DRAINING)
        calls.append(node.invoke(revision))
        worker.answer(first, body)
        assert isinstance((await worker.next())[0], frames.Drain)
        successor = await node.worker(revision, "w-2")
        await successor.echo(1)
        assert [(await call.future)[0].kind for call in calls] == [OutcomeKind.SUCCEEDED] * 2
        assert node.kills.empty()

    on_node(url, tmp_path, test)
