"""Adoption of calls that workers still run, or have ended, for a previous runner."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from gpufn_core.domain.invocation import InvocationState, OutcomeKind
from gpufn_core.domain.revision import Revision
from gpufn_core.domain.worker import WorkerState
from gpufn_core.errors import ErrorInfo
from gpufn_core.ids import digest_of
from gpufn_core.protocol import frames, subjects
from gpufn_core.protocol.codec import PROTOCOL, encode
from gpufn_core.protocol.messages import CallLocation
from gpufn_core.protocol.records import CallRecord
from gpufn_core.spec.function_spec import EntryPoint, FunctionSpec, MethodSpec
from gpufn_core.spec.priority import Priority, QueueKind
from gpufn_platform.bus.connection import Bus, Message
from gpufn_platform.queue.records import call_records
from gpufn_runtime.runner.recovery.adoption import queue_position_of
from tests.runtime.runner.node import RETRY_AT_ONCE, FakeWorker, Node, on_node

SPEC = FunctionSpec(name="f", entry=EntryPoint("app", "f"), methods=(MethodSpec(),))
REVISION = Revision(function="f", number=1, spec=SPEC, bundle=digest_of(b""), created_at=1.0)
PLACE = ("GPUFN_ASYNC", QueueKind(Priority.NORMAL, is_sync=False), 7)


async def orphan(node: Node, url: str, revision: Revision) -> frames.Run:
    """Return the waiting call as an unfinished attempt of a worker whose runner is gone."""
    await node.stop()
    bus = await Bus.connect(url, name="runner that dies")
    await node.start(bus)
    run, _ = await (await node.worker(revision)).run()
    await node.stop()
    await bus.close()
    return run


async def come_back(node: Node, *runs: frames.Run) -> FakeWorker:
    """Connect a worker to the next runner, with unfinished attempts of the previous one."""
    await node.start()
    unfinished = tuple(frames.Unfinished(run.attempt, run.invocation, run.delivery, 0.5) for run in runs)
    worker = await node.connect("w-1", frames.Hello(PROTOCOL, "w-1", was_ready=True, unfinished=unfinished))
    worker.ready()
    return worker


async def ended(node: Node, invocation: str) -> CallRecord:
    return (await call_records.wait(node.bus, invocation, 10))[0]


async def cancelled(worker: FakeWorker, run: frames.Run) -> None:
    """Wait for the order to stop the attempt, and stop it."""
    assert (await worker.next())[0] == frames.Cancel(run.attempt)
    worker.send(frames.Result(run.attempt, OutcomeKind.CANCELLED, None, "", 0.1))


def test_a_submitted_call_has_one_attempt_though_its_runner_died(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("once")
        call = await node.submit(revision, b"1")
        run = await orphan(node, url, revision)
        worker = await come_back(node, run)
        worker.answer(run, b"2")  # before its owner is known
        record = await ended(node, call.id)
        assert (record.state, record.worker) == (InvocationState.SUCCEEDED, "w-1")
        assert [(each.number, each.outcome) for each in record.attempts] == [(1, OutcomeKind.SUCCEEDED)]
        await node.queue_is_empty(revision)
        other = node.invoke(revision, b"3")
        run_of_other, body = await worker.run()
        assert (body, run_of_other.attempt) == (b"3", run.attempt + 1)
        worker.answer(run_of_other)
        await other.future

    on_node(url, tmp_path, test)


def test_a_waiting_caller_gets_the_result_although_its_runner_died(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("waited-for")
        call = node.invoke(revision, b"1")
        run = await orphan(node, url, revision)
        (await come_back(node, run)).answer(run, b"2")
        reply, body = await call.future
        assert (reply.kind, body, reply.attempt) == (OutcomeKind.SUCCEEDED, b"2", 1)
        await node.queue_is_empty(revision)

    on_node(url, tmp_path, test)


def test_an_adopted_call_can_be_found_and_cancelled(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("found")
        call = await node.submit(revision)
        run = await orphan(node, url, revision)
        worker = await come_back(node, run)
        while (held := await call_records.locate(node.bus, call.id)) is None:
            pass
        assert (held.worker, held.attempt) == ("w-1", 1)
        assert await call_records.cancel(node.bus, call, node.clock.time())
        await cancelled(worker, run)
        assert (await ended(node, call.id)).state is InvocationState.CANCELLED

    on_node(url, tmp_path, test)


def test_platform_requests_of_an_adopted_call_are_answered(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("asks")
        call = await node.submit(revision)
        run = await orphan(node, url, revision)
        worker = await come_back(node, run)
        worker.send(frames.Call(1, frames.Verb.CHECKPOINT, "", content_type="text/plain", parent=run.attempt), b"here")
        assert (await worker.next())[0] == frames.Answer(1, OutcomeKind.SUCCEEDED, None, "")
        worker.answer(run)
        assert (await ended(node, call.id)).state is InvocationState.SUCCEEDED

    on_node(url, tmp_path, test)


def test_an_adopted_call_has_until_its_timeout(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("late", timeout_s=60.0)
        call = await node.submit(revision)
        run = await orphan(node, url, revision)
        await come_back(node, run)
        while await call_records.locate(node.bus, call.id) is None:
            pass
        node.clock.skipped_s = 61.0
        assert (await ended(node, call.id)).state is InvocationState.TIMED_OUT

    on_node(url, tmp_path, test)


def test_an_adopted_call_is_lost_with_its_worker(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("lost")
        call = await node.submit(revision)
        run = await orphan(node, url, revision)
        (await come_back(node, run)).die()
        await node.reap("lost")
        record = await ended(node, call.id)
        assert (record.state, record.error and record.error.code) == (InvocationState.FAILED, "worker_lost")
        assert len(record.attempts) == 1

    on_node(url, tmp_path, test)


def test_an_adopted_call_that_fails_is_tried_again(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("again", retries=RETRY_AT_ONCE)
        call = await node.submit(revision, b"1")
        run = await orphan(node, url, revision)
        worker = await come_back(node, run)
        worker.send(frames.Result(run.attempt, OutcomeKind.RAISED, ErrorInfo("function_raised", "no"), "", 0.1))
        second, body = await worker.run()
        assert (second.invocation, second.number, body) == (call.id, 2, b"1")
        worker.answer(second)
        record = await ended(node, call.id)
        assert [each.outcome for each in record.attempts] == [OutcomeKind.RAISED, OutcomeKind.SUCCEEDED]

    on_node(url, tmp_path, test)


def test_a_redelivered_adopted_call_does_not_run_twice(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("twice", concurrency=2)
        call = await node.submit(revision, b"1")
        run = await orphan(node, url, revision)
        worker = await come_back(node, run)
        while await call_records.locate(node.bus, call.id) is None:
            pass
        node.bus.publish(run.delivery, b"-NAK")  # as if `ack_wait` had expired
        other = await node.submit(revision, b"2")
        run_of_other, body = await worker.run()
        assert (run_of_other.invocation, body) == (other.id, b"2")
        for each in (run, run_of_other):
            worker.answer(each)
        assert len((await ended(node, call.id)).attempts) == 1
        await node.queue_is_empty(revision)

    on_node(url, tmp_path, test)


def test_a_call_cancelled_without_a_runner_is_stopped_and_its_slot_is_reused(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("cancelled")
        call = await node.submit(revision)
        run = await orphan(node, url, revision)
        assert await call_records.cancel(node.bus, call, node.clock.time())
        worker = await come_back(node, run)
        assert (await worker.next())[0] == frames.Cancel(run.attempt)
        while (await node.report_of("w-1", WorkerState.READY)).in_use != 1:
            pass  # a report of the runner that died
        other = node.invoke(revision, b"2")
        worker.send(frames.Result(run.attempt, OutcomeKind.CANCELLED, None, "", 0.1))
        await worker.echo(1)
        assert (await other.future)[1] == b"2"

    on_node(url, tmp_path, test)


@pytest.mark.parametrize("is_submitted", [False, True])
def test_a_call_that_another_runner_has_by_now_is_stopped(url: str, tmp_path: Path, *, is_submitted: bool) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("elsewhere")
        waited_for = None if is_submitted else node.invoke(revision)
        if is_submitted:
            await node.submit(revision)
        run = await orphan(node, url, revision)

        def where(message: Message) -> None:
            node.bus.publish(message.reply, encode(CallLocation(run.invocation, "w-9", "n9", 1, 0.0)))

        node.bus.subscribe(subjects.WHEREABOUTS, where)
        await cancelled(await come_back(node, run), run)
        if waited_for is not None:
            waited_for.cancel()

    on_node(url, tmp_path, test)


@pytest.mark.parametrize(
    "made_up",
    [
        lambda run: frames.Unfinished(run.attempt, "another", run.delivery, 0.0),
        lambda run: frames.Unfinished(run.attempt, run.invocation, "gpufn.v1.cancel", 0.0),
        lambda run: frames.Unfinished(run.attempt, run.invocation, "", 0.0),
    ],
)
def test_an_attempt_invented_by_a_worker_is_not_adopted(
    url: str, tmp_path: Path, made_up: Callable[[frames.Run], frames.Unfinished]
) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("hostile")
        await node.submit(revision)
        run = await orphan(node, url, revision)
        await node.start()
        hello = frames.Hello(PROTOCOL, "w-1", was_ready=True, unfinished=(made_up(run),))
        await cancelled(await node.connect("w-1", hello), run)

    on_node(url, tmp_path, test)


def test_a_call_with_a_waiting_caller_does_not_run_twice_while_another_runner_has_it(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("held")
        call = node.invoke(revision)
        run = await orphan(node, url, revision)
        asked = asyncio.Event()

        def where(message: Message) -> None:
            node.bus.publish(message.reply, encode(CallLocation(run.invocation, "w-9", "n9", 1, 0.0)))
            asked.set()

        node.bus.subscribe(subjects.WHEREABOUTS, where)
        node.bus.publish(run.delivery, b"-NAK")
        again = await come_back(node)
        await asked.wait()
        other = node.invoke(revision, b"2")
        run_of_other, body = await again.run()
        assert (run_of_other.invocation == run.invocation, body) == (False, b"2")
        again.answer(run_of_other)
        await other.future
        call.cancel()

    on_node(url, tmp_path, test)


@pytest.mark.parametrize(
    ("settled_at", "place"),
    [
        ("$JS.ACK.GPUFN_ASYNC.A-f-1-normal.1.7.9.1500000000.3", PLACE),
        ("$JS.ACK._.AcCt.GPUFN_ASYNC.A-f-1-normal.1.7.9.1500000000.3", PLACE),
        ("$JS.ACK.hub.AcCt.GPUFN_ASYNC.A-f-1-normal.1.7.9.1500000000.3.tOkEn", PLACE),
        ("$JS.ACK.GPUFN_ASYNC.A-f-1-normal.1.7.9.1500000000.3.tOkEn", None),
        ("$JS.ACK.GPUFN_ASYNC.A-f-2-normal.1.7.9.1500000000.3", None),
        ("$JS.ACK.GPUFN_ASYNC.A-g-1-normal.1.7.9.1500000000.3", None),
        ("$JS.ACK.GPUFN_SYNC.A-f-1-normal.1.7.9.1500000000.3", None),
        ("$JS.ACK.GPUFN_ASYNC.A-f-1-normal.1.7.9.1500000000", None),
        ("$JS.ACK.GPUFN_ASYNC.A-f-1-normal.1.x.9.1500000000.3", None),
        ("$JS.ACK.GPUFN_ASYNC.A-f-1-normal.1.7.9.1500000000.3 x", None),
        ("$JS.API.STREAM.DELETE.GPUFN_ASYNC", None),
        ("", None),
    ],
)
def test_a_worker_can_name_deliveries_of_its_own_revision_only(
    settled_at: str, place: tuple[str, QueueKind, int] | None
) -> None:
    assert queue_position_of(REVISION, settled_at) == place
