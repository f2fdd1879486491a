"""The runner against a real bus; its workers are played by the test."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import msgspec
import pytest

from gpufn.bus import records, streams
from gpufn.errors import ErrorInfo
from gpufn.ids import new_invocation_id
from gpufn.invocation import InvocationState, OutcomeKind
from gpufn.protocol import frames, subjects
from gpufn.protocol.codec import PROTOCOL
from gpufn.protocol.messages import WorkerEvent, WorkerEventKind, WorkerReport, encode
from gpufn.revision import Revision
from gpufn.spec import CallKind
from gpufn.workers import Desired, Exit, WorkerState
from tests.runtime.runner.node import NODE, RETRY_AT_ONCE, Node, on_node


async def submit(node: Node, revision: Revision, body: bytes = b"{}") -> str:
    record = await records.submit(
        node.bus, revision, "", "application/json", body,
        invocation=new_invocation_id(), accept="application/json", deadline=0.0, now=node.clock.time(),
    )  # fmt: skip
    return record.id


async def queue_is_empty(node: Node, revision: Revision) -> None:
    while (revision.function, revision.number) in await streams.depths(node.bus):
        pass


async def state_of_worker(node: Node, worker: str, state: WorkerState) -> None:
    while True:
        report = await node.reports.get()
        if any(known.worker == worker and known.state is state for known in report.workers):
            return


def test_a_call_goes_to_the_worker_and_its_result_comes_back(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("basic")
        call = node.invoke(revision, b'{"x": 1}')
        worker = await node.worker(revision)
        await worker.echo(1)
        reply, body = await call.future
        assert (reply.kind, body, reply.attempt) == (OutcomeKind.SUCCEEDED, b'{"x": 1}', 1)
        assert reply.cold_start is not None, "it waited for its worker to start"
        warm = node.invoke(revision)
        await worker.echo(1)
        assert (await warm.future)[0].cold_start is None

    on_node(url, tmp_path, test)


def test_a_runner_takes_no_more_deliveries_than_it_has_free_slots(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("slots", concurrency=2)
        worker = await node.worker(revision)
        calls = [node.invoke(revision, b"%d" % number) for number in range(5)]
        first, second = await worker.run(), await worker.run()
        depth = await streams.depths(node.bus)
        assert depth["slots", 1].sync == 5
        info = await node.bus.js(f"CONSUMER.INFO.{subjects.SYNC}.{subjects.sync_consumer('slots', 1)}")
        assert (info["num_ack_pending"], info["num_pending"]) == (2, 3)
        worker.answer(*first)
        worker.answer(*second)
        await worker.echo(3)
        assert sorted([body for _, body in await asyncio.gather(*(call.future for call in calls))]) == [
            b"0", b"1", b"2", b"3", b"4",
        ]  # fmt: skip

    on_node(url, tmp_path, test)


def test_a_submitted_call_ends_in_a_record_and_leaves_the_queue(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("durable")
        worker = await node.worker(revision)
        invocation = await submit(node, revision, b'"later"')
        await worker.echo(1)
        record, body = await records.wait(node.bus, invocation, 10)
        assert (record.state, body) == (InvocationState.SUCCEEDED, b'"later"')
        # The queue is empty again once the delivery is acked, which comes after the record.
        await queue_is_empty(node, revision)

    on_node(url, tmp_path, test)


def test_one_slot_serves_the_sync_and_the_async_queue_in_turn(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("both")
        worker = await node.worker(revision)
        ids = [await submit(node, revision, b"1") for _ in range(10)]
        calls = [node.invoke(revision, b"2") for _ in range(10)]
        await worker.echo(20)
        for call in calls:
            assert (await call.future)[1] == b"2"
        for invocation in ids:
            assert (await records.wait(node.bus, invocation, 10))[1] == b"1"

    on_node(url, tmp_path, test)


def test_a_dead_worker_is_told_with_its_signal_and_its_last_words(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("dies")
        worker = await node.worker(revision)
        call = node.invoke(revision)
        await worker.run()
        worker.die()
        order = await node.kills.get()
        exited = WorkerEvent(
            WorkerEventKind.EXITED,
            order.worker,
            "dies",
            1,
            NODE,
            node.clock.time(),
            exit=Exit(signal=11, tail="Segmentation fault"),
        )
        node.bus.publish(subjects.worker_event("dies"), encode(exited))
        reply, _ = await call.future
        assert reply.kind is OutcomeKind.LOST
        assert reply.error is not None
        assert reply.error.code == "worker_lost"
        assert reply.error.retryable
        assert "was killed by SIGSEGV" in reply.error.message
        assert "Segmentation fault" in reply.error.message

    on_node(url, tmp_path, test)


def test_a_lost_attempt_is_retried_within_the_policy_and_counted(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("retried", retries=RETRY_AT_ONCE)
        first = await node.worker(revision, "w-1")
        call = node.invoke(revision, b'"again"')
        run, _ = await first.run()
        assert run.number == 1
        first.die()
        second = await node.worker(revision, "w-2")
        run, body = await second.run()
        assert (run.number, body) == (2, b'"again"')
        second.answer(run, body)
        reply, _ = await call.future
        assert (reply.kind, reply.attempt) == (OutcomeKind.SUCCEEDED, 2)

    on_node(url, tmp_path, test)


def test_a_sync_call_that_runs_too_long_ends_with_its_worker(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("slow", timeout_s=0.05)
        worker = await node.worker(revision)
        call = node.invoke(revision)
        await worker.run()
        reply, _ = await call.future
        assert reply.kind is OutcomeKind.TIMED_OUT
        assert (await node.kills.get()).worker == "w-1"
        await state_of_worker(node, "w-1", WorkerState.FAILED)

    on_node(url, tmp_path, test)


def test_an_async_call_that_runs_too_long_is_cancelled_and_its_worker_lives(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("slow-async", kind=CallKind.ASYNC, timeout_s=0.05)
        worker = await node.worker(revision)
        call = node.invoke(revision)
        run, _ = await worker.run()
        cancel, _ = await worker.next()
        assert cancel == frames.Cancel(run.attempt)
        worker.send(frames.Result(run.attempt, OutcomeKind.CANCELLED, None, "", 0.05))
        assert (await call.future)[0].kind is OutcomeKind.TIMED_OUT
        again = node.invoke(revision)
        await worker.echo(1)
        assert (await again.future)[0].kind is OutcomeKind.SUCCEEDED
        assert node.kills.empty()

    on_node(url, tmp_path, test)


def test_a_poisoned_slot_waits_for_the_other_calls_of_its_worker(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("poison", concurrency=2)
        worker = await node.worker(revision)
        short = node.invoke(revision, b"1", timeout_s=0.3)
        long = node.invoke(revision, b"2")
        runs = {body: run for run, body in [await worker.run(), await worker.run()]}
        assert (await short.future)[0].kind is OutcomeKind.TIMED_OUT
        assert node.kills.empty(), "the other call still runs there"
        worker.answer(runs[b"2"], b"2")
        assert (await long.future)[1] == b"2"
        assert (await node.kills.get()).worker == "w-1"

    on_node(url, tmp_path, test)


@pytest.mark.parametrize("is_stored", [True, False], ids=["stored", "not stored yet"])
def test_a_call_that_nobody_waits_for_is_taken_out_of_the_queue(url: str, tmp_path: Path, is_stored: bool) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("gone")
        call = node.invoke(revision)
        if is_stored:
            while not call.queue_seq:
                await node.bus.flush()
        call.cancel()
        await node.bus.flush()
        await queue_is_empty(node, revision)

    on_node(url, tmp_path, test)


def test_cancelling_a_running_call_reaches_its_worker(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("cancelled", kind=CallKind.ASYNC)
        worker = await node.worker(revision)
        call = node.invoke(revision)
        run, _ = await worker.run()
        call.cancel()
        assert (await worker.next())[0] == frames.Cancel(run.attempt)

    on_node(url, tmp_path, test)


def test_cancelling_a_submitted_call_ends_it_once(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("cancelled-later")
        invocation = await submit(node, revision)
        found = await records.read(node.bus, invocation)
        assert found is not None
        assert await records.cancel(node.bus, found[0], node.clock.time())
        assert not await records.cancel(node.bus, found[0], node.clock.time())
        ended = await records.read(node.bus, invocation)
        assert ended is not None
        assert ended[0].state is InvocationState.CANCELLED
        assert ("cancelled-later", 1) not in await streams.depths(node.bus)

    on_node(url, tmp_path, test)


def test_the_same_id_submitted_twice_is_one_invocation(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("twice")
        invocation = new_invocation_id()
        both = await asyncio.gather(
            *(
                records.submit(
                    node.bus, revision, "", "application/json", b"{}",
                    invocation=invocation, accept="", deadline=0.0, now=node.clock.time(),
                )
                for _ in range(2)
            )
        )  # fmt: skip
        assert both[0].id == both[1].id
        assert (await streams.depths(node.bus))["twice", 1].asynchronous == 1

    on_node(url, tmp_path, test)


def test_the_first_end_of_an_invocation_wins(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("once")
        found = await records.read(node.bus, await submit(node, revision))
        assert found is not None
        ends = [
            msgspec.structs.replace(found[0], state=state)
            for state in (InvocationState.SUCCEEDED, InvocationState.FAILED)
        ]
        assert sorted(await asyncio.gather(*(records.end(node.bus, end) for end in ends))) == [False, True]

    on_node(url, tmp_path, test)


def test_an_end_that_comes_second_is_dropped_and_reported(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("second")
        worker = await node.worker(revision)
        invocation = await submit(node, revision)
        run, _ = await worker.run()
        found = await records.read(node.bus, invocation)
        assert found is not None
        assert await records.end(node.bus, msgspec.structs.replace(found[0], state=InvocationState.FAILED))
        worker.answer(run)
        while (await node.reports.get()).dropped_outcomes != 1:
            pass

    on_node(url, tmp_path, test)


def test_items_of_a_stream_arrive_in_order_and_reading_gives_credit(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("stream", kind=CallKind.GENERATOR)
        worker = await node.worker(revision)
        stream = node.caller.open_stream(node.request(revision))
        run, _ = await worker.run()
        assert run.stream

        async def produce(count: int) -> None:
            credit = run.credits
            for number in range(count):
                if credit == 0:
                    frame, _ = await worker.next()
                    assert isinstance(frame, frames.Credit)
                    credit += frame.items
                worker.send(frames.Item(run.attempt, "application/json"), b"%d" % number)
                credit -= 1
            worker.send(frames.Result(run.attempt, OutcomeKind.SUCCEEDED, None, "", 0.1))

        producing = asyncio.create_task(produce(300))
        items = [int(body) async for _, body in stream.items()]
        await producing
        assert items == list(range(300))
        assert (await stream.future)[0].items == 300

    on_node(url, tmp_path, test)


def test_an_item_without_credit_ends_the_link(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("greedy", kind=CallKind.GENERATOR)
        worker = await node.worker(revision)
        stream = node.caller.open_stream(node.request(revision))
        run, _ = await worker.run()
        for _ in range(run.credits + 1):
            worker.send(frames.Item(run.attempt, "application/json"), b"1")
        assert (await node.kills.get()).worker == "w-1"
        stream.cancel()

    on_node(url, tmp_path, test)


UNKNOWN_FRAME = b"\0\0\0\x02\0\0\0\0\x91\x63"


@pytest.mark.parametrize(
    "garbage",
    [b"\xff" * 64, frames.encode(frames.Result(99, OutcomeKind.SUCCEEDED, None, "", 0.0)), UNKNOWN_FRAME],
    ids=["noise", "a result of nothing", "an unknown frame"],
)  # fmt: skip
def test_garbage_on_the_socket_costs_the_worker_its_life_and_nobody_else(
    url: str, tmp_path: Path, garbage: bytes
) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("garbage")
        worker = await node.worker(revision)
        call = node.invoke(revision)
        await worker.run()
        worker.send_raw(garbage)
        assert (await node.kills.get()).worker == "w-1"
        assert (await call.future)[0].kind is OutcomeKind.LOST
        healthy = await node.worker(revision, "w-2")
        again = node.invoke(revision)
        await healthy.echo(1)
        assert (await again.future)[0].kind is OutcomeKind.SUCCEEDED

    on_node(url, tmp_path, test)


def test_a_drained_worker_finishes_what_runs_and_takes_nothing_new(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("drained")
        worker = await node.worker(revision)
        running = node.invoke(revision, b"1")
        run, body = await worker.run()
        await node.assign(revision, "w-1", Desired.DRAIN)
        await state_of_worker(node, "w-1", WorkerState.DRAINING)
        waiting = node.invoke(revision, b"2")
        worker.answer(run, body)
        assert (await running.future)[1] == b"1"
        assert isinstance((await worker.next())[0], frames.Drain)
        worker.die()
        await state_of_worker(node, "w-1", WorkerState.STOPPED)
        await node.unassign("w-1")
        assert node.kills.empty(), "it ends as it was told to"
        fresh = await node.worker(revision, "w-2")
        await fresh.echo(1)
        assert (await waiting.future)[1] == b"2"

    on_node(url, tmp_path, test)


def test_a_worker_that_cannot_start_is_told_with_the_users_error(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("broken")
        events: asyncio.Queue[WorkerEvent] = asyncio.Queue()
        node.bus.subscribe(
            subjects.worker_event("broken"),
            lambda message: events.put_nowait(msgspec.msgpack.decode(message.payload, type=WorkerEvent)),
        )
        await node.assign(revision, "w-1")
        worker = await node.connect("w-1")
        worker.send(frames.StartFailed("load", ErrorInfo("function_start_failed", "No module named 'torch'")))
        event = await events.get()
        assert event.kind == "start_failed"
        assert event.failure is not None
        assert event.failure.error.message == "No module named 'torch'"

    on_node(url, tmp_path, test)


def test_a_function_calls_another_through_its_socket(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        outer, inner = await node.deploy("outer"), await node.deploy("inner")
        outer_worker = await node.worker(outer, "w-1")
        inner_worker = await node.worker(inner, "w-2")
        call = node.invoke(outer)
        run, _ = await outer_worker.run()
        ask = frames.Call(7, "call", "inner", "", "application/json", "application/json", 10.0, run.attempt)
        outer_worker.send(ask, b'"deep"')
        await inner_worker.echo(1)
        frame, body = await outer_worker.next()
        assert frame == frames.Answer(7, OutcomeKind.SUCCEEDED, None, "application/json")
        outer_worker.answer(run, body)
        assert (await call.future)[1] == b'"deep"'

    on_node(url, tmp_path, test)


def test_a_stream_between_functions_waits_for_its_reader(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        outer, inner = await node.deploy("reader"), await node.deploy("writer", kind=CallKind.GENERATOR)
        reader = await node.worker(outer, "w-1")
        writer = await node.worker(inner, "w-2")
        call = node.invoke(outer)
        run, _ = await reader.run()
        reader.send(frames.Call(1, "stream", "writer", "", "application/json", "", 10.0, run.attempt), b"{}")
        written, _ = await writer.run()

        async def write(count: int) -> None:
            credit = written.credits
            for number in range(count):
                while credit == 0:
                    frame, _ = await writer.next()
                    assert isinstance(frame, frames.Credit)
                    credit += frame.items
                writer.send(frames.Item(written.attempt, "application/json"), b"%d" % number)
                credit -= 1
            writer.send(frames.Result(written.attempt, OutcomeKind.SUCCEEDED, None, "", 0.1))

        writing = asyncio.create_task(write(400))
        items: list[int] = []
        for _ in range(frames.STREAM_WINDOW):
            frame, body = await reader.next()
            assert isinstance(frame, frames.AnswerItem)
            items.append(int(body))
        await node.bus.flush()
        assert not writing.done(), "nobody has read: two windows are the most that may be under way"
        reader.send(frames.CallCredit(1, frames.STREAM_WINDOW))
        while True:
            frame, body = await reader.next()
            if isinstance(frame, frames.Answer):
                break
            items.append(int(body))
            reader.send(frames.CallCredit(1, 1))
        assert items == list(range(400))
        await writing
        reader.answer(run)
        await call.future

    on_node(url, tmp_path, test)


def test_a_call_of_a_function_that_does_not_exist_is_answered_with_the_reason(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("lonely")
        worker = await node.worker(revision)
        worker.send(frames.Call(1, "call", "nobody"))
        frame, _ = await worker.next()
        assert isinstance(frame, frames.Answer)
        assert frame.error is not None
        assert frame.error.code == "function_not_found"

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
            await state_of_worker(other, "w-1", WorkerState.READY)
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    on_node(url, tmp_path, test)


async def ready_report(node: Node, worker: str) -> WorkerReport:
    while True:
        for known in (await node.reports.get()).workers:
            if known.worker == worker and known.state is WorkerState.READY:
                return known


def test_a_worker_that_comes_back_says_what_still_runs_there(url: str, tmp_path: Path) -> None:
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
        report = await ready_report(node, "w-1")
        assert (report.in_use, report.cold_start, report.idle_since) == (2, None, None)
        call = node.invoke(revision, b"1")
        worker.send(frames.Freed())
        run, body = await worker.run()
        worker.answer(run, body)
        assert (await call.future)[1] == b"1"
        assert events == [], "its cold start is long over"

    on_node(url, tmp_path, test)


def test_a_worker_that_is_told_to_drain_while_it_starts_ends_when_it_is_ready(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("undecided")
        await node.assign(revision, "w-1")
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
    """The credits of a dead worker's slots once brought the call back and forth until it counted as lost."""

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


def test_the_nested_calls_of_a_worker_that_is_killed_end_with_it(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        outer = await node.deploy("impatient", timeout_s=0.1)
        inner = await node.deploy("callee", kind=CallKind.ASYNC)
        asking = await node.worker(outer, "w-1")
        asked = await node.worker(inner, "w-2")
        call = node.invoke(outer)
        run, _ = await asking.run()
        asking.send(frames.Call(1, "call", "callee", "", "application/json", "", 30.0, run.attempt), b"{}")
        running, _ = await asked.run()
        assert (await call.future)[0].kind is OutcomeKind.TIMED_OUT
        assert (await asked.next())[0] == frames.Cancel(running.attempt)

    on_node(url, tmp_path, test)


@pytest.mark.parametrize("claimed", [float("inf"), float("nan"), -1.0, 1e300])
def test_durations_that_cannot_be_are_not_believed(url: str, tmp_path: Path, claimed: float) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("liar")
        await node.assign(revision, "w-1")
        worker = await node.connect("w-1")
        worker.send(frames.Ready(claimed, claimed, ("a" * 10_000, "numpy", "no/module")))
        report = await ready_report(node, "w-1")
        assert report.modules == ("numpy",)
        assert report.cold_start is not None
        assert 0 <= report.cold_start.total_s < 60
        call = node.invoke(revision)
        run, _ = await worker.run()
        worker.send(frames.Result(run.attempt, OutcomeKind.SUCCEEDED, None, "application/json", claimed), b"1")
        assert 0 <= (await call.future)[0].run_s < 60

    on_node(url, tmp_path, test)


def test_a_long_call_survives_a_broken_connection(url: str, tmp_path: Path) -> None:
    """Its caller once gave up at the reconnect because the call was older than its patience."""

    async def test(node: Node) -> None:
        revision = await node.deploy("long")
        worker = await node.worker(revision)
        call = node.invoke(revision)
        call.since -= 60.0
        run, body = await worker.run()
        reconnected = asyncio.Event()
        node.bus.on_reconnect(reconnected.set)
        assert node.bus._link is not None
        node.bus._link._transport.abort()
        await reconnected.wait()
        worker.answer(run, body)
        assert (await call.future)[0].kind is OutcomeKind.SUCCEEDED

    on_node(url, tmp_path, test)


def test_a_worker_that_somebody_told_to_end_gets_no_more_calls_and_loses_none(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("told", concurrency=2)
        worker = await node.worker(revision)
        calls = [node.invoke(revision)]
        first, body = await worker.run()
        worker.send(frames.Draining())
        await state_of_worker(node, "w-1", WorkerState.DRAINING)
        calls.append(node.invoke(revision))
        worker.answer(first, body)
        assert isinstance((await worker.next())[0], frames.Drain)
        successor = await node.worker(revision, "w-2")
        await successor.echo(1)
        assert [(await call.future)[0].kind for call in calls] == [OutcomeKind.SUCCEEDED] * 2
        assert node.kills.empty()

    on_node(url, tmp_path, test)


def test_who_runs_an_invocation_can_be_asked(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("where")
        worker = await node.worker(revision)
        invocation = await submit(node, revision)
        run, body = await worker.run()
        held = await records.where(node.bus, invocation)
        assert held is not None
        assert (held.worker, held.node, held.attempt) == ("w-1", NODE, 1)
        worker.answer(run, body)
        await records.wait(node.bus, invocation, 10)
        assert await records.where(node.bus, invocation) is None

    on_node(url, tmp_path, test)
