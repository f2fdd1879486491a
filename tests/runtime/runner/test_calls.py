"""Calls and their ends on a real bus, with fake workers."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpufn_core.domain.invocation import InvocationState, OutcomeKind
from gpufn_core.domain.worker import WorkerState
from gpufn_core.ids import new_invocation_id
from gpufn_core.protocol import frames, subjects
from gpufn_core.spec.function_spec import CallKind, Retry
from gpufn_platform.bus.storage import streams
from gpufn_platform.queue.records import call_records
from tests.runtime.runner.node import NODE, Node, on_node


def test_a_call_is_sent_to_the_worker_and_its_result_returns(url: str, tmp_path: Path) -> None:
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


def test_a_call_that_arrived_while_a_worker_was_ready_is_not_cold_on_any_worker(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("warm")
        busy = await node.worker(revision)
        first = node.invoke(revision)
        run, _ = await busy.run()
        turn_waits = node.invoke(revision)
        other = await node.worker(revision, "w-2")
        await other.echo(1)
        reply, _ = await turn_waits.future
        assert (reply.worker, reply.cold_start) == ("w-2", None), "it waited for a slot, not for a start"
        busy.answer(run)
        await first.future

    on_node(url, tmp_path, test)


def test_calls_that_arrived_before_any_worker_was_ready_are_cold_on_the_second_worker_as_well(
    url: str, tmp_path: Path
) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("several")
        calls = [node.invoke(revision) for _ in range(2)]
        one = await node.worker(revision)
        run, _ = await one.run()
        two = await node.worker(revision, "w-2")
        await two.echo(1)
        one.answer(run)
        for call in calls:
            assert (await call.future)[0].cold_start is not None, "no worker was READY when the call arrived"

    on_node(url, tmp_path, test)


def test_a_call_that_arrived_after_the_last_worker_ended_is_cold(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("again")
        await node.worker(revision)
        await node.report_of("w-1", WorkerState.READY)
        await node.unassign("w-1")
        while (await node.reports.get()).workers:
            pass
        call = node.invoke(revision)
        await (await node.worker(revision, "w-2")).echo(1)
        assert (await call.future)[0].cold_start is not None

    on_node(url, tmp_path, test)


def test_a_runner_requests_no_more_deliveries_than_it_has_free_slots(url: str, tmp_path: Path) -> None:
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


def test_a_caller_with_a_queue_timeout_learns_that_its_call_has_begun(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("began", queue_timeout_s=5.0)
        worker = await node.worker(revision)
        call = node.invoke(revision)
        assert call.start_deadline == call.since + 5.0
        run, _ = await worker.run()
        await node.bus.flush()  # its runner's messages have arrived
        assert call.start_deadline == math.inf
        worker.answer(run)
        assert (await call.future)[0].kind is OutcomeKind.SUCCEEDED

    on_node(url, tmp_path, test)


def test_a_submitted_call_ends_in_a_record_and_leaves_the_queue(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("durable")
        worker = await node.worker(revision)
        invocation = (await node.submit(revision, b'"later"')).id
        await worker.echo(1)
        record, body = await call_records.wait(node.bus, invocation, 10)
        assert (record.state, body) == (InvocationState.SUCCEEDED, b'"later"')
        # The queue is empty again once the delivery is acked, which comes after the record.
        await node.queue_is_empty(revision)

    on_node(url, tmp_path, test)


def test_one_slot_serves_the_sync_and_the_async_queue_in_turn(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("both")
        worker = await node.worker(revision)
        ids = [(await node.submit(revision, b"1")).id for _ in range(10)]
        calls = [node.invoke(revision, b"2") for _ in range(10)]
        await worker.echo(20)
        for call in calls:
            assert (await call.future)[1] == b"2"
        for invocation in ids:
            assert (await call_records.wait(node.bus, invocation, 10))[1] == b"1"

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
        await node.report_of("w-1", WorkerState.FAILED)

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
def test_a_call_without_a_waiting_caller_is_removed_from_the_queue(url: str, tmp_path: Path, is_stored: bool) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("gone")
        call = node.invoke(revision)
        if is_stored:
            while not call.queue_seq:
                await node.bus.flush()
        call.cancel()
        await node.bus.flush()
        await node.queue_is_empty(revision)

    on_node(url, tmp_path, test)


def test_a_retry_without_a_waiting_caller_is_removed_from_the_queue(url: str, tmp_path: Path) -> None:
    """The caller only knew the position of the first attempt; the next attempt ran although no caller waited."""

    async def test(node: Node) -> None:
        revision = await node.deploy("left", retries=Retry(1, delay_s=600.0))
        worker = await node.worker(revision)
        call = node.invoke(revision, timeout_s=3600.0)
        run, _ = await worker.run()
        while not (first := call.queue_seq):
            await node.bus.flush()
        worker.send(frames.Result(run.attempt, OutcomeKind.RAISED, None, "", 0.001))
        while call.queue_seq == first:
            await node.bus.flush()
        call.cancel()
        await node.queue_is_empty(revision)

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
        invocation = (await node.submit(revision)).id
        found = await call_records.read(node.bus, invocation)
        assert found is not None
        assert await call_records.cancel(node.bus, found[0], node.clock.time())
        assert not await call_records.cancel(node.bus, found[0], node.clock.time())
        ended = await call_records.read(node.bus, invocation)
        assert ended is not None
        assert ended[0].state is InvocationState.CANCELLED
        assert ("cancelled-later", 1) not in await streams.depths(node.bus)

    on_node(url, tmp_path, test)


def test_the_same_id_submitted_twice_is_one_invocation(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("twice")
        invocation = new_invocation_id()
        both = await asyncio.gather(*(node.submit(revision, b"{}", invocation) for _ in range(2)))
        assert both[0].id == both[1].id
        assert (await streams.depths(node.bus))["twice", 1].asynchronous == 1

    on_node(url, tmp_path, test)


def test_the_first_end_of_an_invocation_wins(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("once")
        found = await call_records.read(node.bus, (await node.submit(revision)).id)
        assert found is not None
        finisher = [
            msgspec.structs.replace(found[0], state=state)
            for state in (InvocationState.SUCCEEDED, InvocationState.FAILED)
        ]
        assert sorted(await asyncio.gather(*(call_records.end(node.bus, end) for end in finisher))) == [False, True]

    on_node(url, tmp_path, test)


def test_a_second_end_is_dropped_and_reported(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("second")
        worker = await node.worker(revision)
        invocation = (await node.submit(revision)).id
        run, _ = await worker.run()
        found = await call_records.read(node.bus, invocation)
        assert found is not None
        assert await call_records.end(node.bus, msgspec.structs.replace(found[0], state=InvocationState.FAILED))
        worker.answer(run)
        while (await node.reports.get()).dropped_outcomes != 1:
            pass

    on_node(url, tmp_path, test)


def test_a_long_call_survives_a_broken_connection(url: str, tmp_path: Path) -> None:
    """The caller gave up at the reconnect, because the call was older than the caller's patience."""

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


def test_a_call_that_was_cancelled_while_its_runner_was_without_the_bus_is_ended(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("unheard")
        worker = await node.worker(revision)
        call = await node.submit(revision)
        await worker.run()
        # The effect of a cancel that this runner missed.
        assert await call_records.end(
            node.bus, msgspec.structs.replace(call, state=InvocationState.CANCELLED, ended_at=1.0)
        )
        assert node.bus._link is not None
        node.bus._link._transport.abort()
        frame, _ = await worker.next()
        assert isinstance(frame, frames.Cancel)

    on_node(url, tmp_path, test)


def test_an_ended_call_is_held_until_its_record_shows_the_end(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_called, may_end, end = asyncio.Event(), asyncio.Event(), call_records.end

    async def end_later(*given: Any) -> bool:
        is_called.set()
        await may_end.wait()
        return await end(*given)

    async def test(node: Node) -> None:
        revision = await node.deploy("settles")
        worker = await node.worker(revision)
        invocation = (await node.submit(revision)).id
        monkeypatch.setattr(call_records, "end", end_later)
        worker.answer(*(await worker.run()))
        await is_called.wait()
        held = await call_records.locate(node.bus, invocation)
        assert held is not None
        assert held.worker == "w-1", "otherwise its status would be queued again"
        assert list(await call_records.running_calls(node.bus)) == [invocation]
        may_end.set()
        await call_records.wait(node.bus, invocation, 10)
        assert await call_records.running_calls(node.bus) == {}

    on_node(url, tmp_path, test)


def test_the_runner_of_an_invocation_can_be_queried(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("where")
        worker = await node.worker(revision)
        invocation = (await node.submit(revision)).id
        run, body = await worker.run()
        held = await call_records.locate(node.bus, invocation)
        assert held is not None
        assert (held.worker, held.node, held.attempt) == ("w-1", NODE, 1)
        worker.answer(run, body)
        await call_records.wait(node.bus, invocation, 10)
        assert await call_records.locate(node.bus, invocation) is None

    on_node(url, tmp_path, test)
