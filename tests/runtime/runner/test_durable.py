"""Submitted calls at the runner: attempts, retries, large results, dead letters, and duplicate ends."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from gpufn_core.domain.invocation import InvocationState, OutcomeKind
from gpufn_core.domain.worker import WorkerState
from gpufn_core.errors import DeviceFailed, ErrorInfo, IdempotencyMismatch, QueueFull
from gpufn_core.ids import digest_of, new_invocation_id
from gpufn_core.protocol import frames, subjects
from gpufn_core.protocol.codec import encode, pack
from gpufn_core.protocol.limits import RECORD_BYTES
from gpufn_core.protocol.messages import CallLocation, unpack_invocation
from gpufn_core.protocol.records import CallRecord
from gpufn_core.spec.function_spec import Retry
from gpufn_core.spec.priority import Priority, QueueKind
from gpufn_platform.bus.connection import Bus, Message
from gpufn_platform.bus.nats_protocol import ack_tokens
from gpufn_platform.bus.storage import object_store, streams
from gpufn_platform.process.clock import SystemClock
from gpufn_platform.queue.delivery import Delivery
from gpufn_platform.queue.records import call_records, dead_letters
from gpufn_platform.shared_bodies.bodies import SharedBodies
from gpufn_runtime.runner.core import machine
from gpufn_runtime.runner.dispatch.pull_credits import PullCredits
from tests.runtime.runner.node import RETRY_AT_ONCE, FakeWorker, Node, on_node
from tests.taking import take

NO = ErrorInfo("function_raised", "no", error_type="ValueError", error_bases=("ValueError",))


async def ended(node: Node, invocation: str) -> CallRecord:
    return (await call_records.wait(node.bus, invocation, 10))[0]


def fail(worker: FakeWorker, run: frames.Run) -> None:
    worker.send(frames.Result(run.attempt, OutcomeKind.RAISED, NO, "", 0.001))


def test_each_attempt_is_kept_with_how_and_where_it_ended(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("attempts", retries=Retry(2, delay_s=0.0))
        first = await node.worker(revision, "w-1")
        call = await node.submit(revision, b"1")
        fail(first, (await first.run())[0])
        await first.run()
        first.die()
        await node.reap("attempts")
        second = await node.worker(revision, "w-2")
        run, body = await second.run()
        assert (run.number, body) == (3, b"1")
        second.answer(run, body)
        record = await ended(node, call.id)
        assert (record.state, record.attempt, record.worker) == (InvocationState.SUCCEEDED, 3, "w-2")
        assert [(each.number, each.outcome, each.worker, each.code) for each in record.attempts] == [
            (1, OutcomeKind.RAISED, "w-1", "function_raised"),
            (2, OutcomeKind.LOST, "w-1", "worker_lost"),
            (3, OutcomeKind.SUCCEEDED, "w-2", ""),
        ]
        assert record.attempts[0].message == "ValueError: no"
        assert await dead_letters.read(node.bus, "attempts", call.id) is None

    on_node(url, tmp_path, test)


def test_a_call_redelivered_while_another_runner_has_it_does_not_run_twice(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bus that was stopped redelivers running calls: deliveries expire before it reads the messages of runners."""
    monkeypatch.setattr(machine, "ACK_WAIT_S", 0.01)

    async def test(node: Node) -> None:
        revision = await node.deploy("elsewhere")
        call = await node.submit(revision)
        asked = 0

        def where(message: Message) -> None:
            nonlocal asked
            asked += 1
            node.bus.publish(message.reply, encode(CallLocation(call.id, "w-9", "n9", 1, 0.0)))
            if asked == 3:
                another.unsubscribe()  # it dies

        another = node.bus.subscribe(subjects.WHEREABOUTS, where)
        [delivery] = await take(node.bus, "elsewhere")
        delivery.nak()
        worker = await node.worker(revision)
        run, body = await worker.run()
        assert (run.invocation, asked) == (call.id, 3)
        worker.answer(run, body)

    on_node(url, tmp_path, test)


@pytest.mark.parametrize("delay_s", [0.0, 0.3])
def test_the_next_attempt_is_rung_for_when_it_is_due(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, delay_s: float
) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("due", retries=Retry(1, delay_s=delay_s))
        worker = await node.worker(revision)
        call = await node.submit(revision)
        run, _ = await worker.run()
        monkeypatch.setattr(PullCredits, "tick", lambda *_: None)  # no runner polls the queue without a wakeup
        fail(worker, run)
        again, _ = await worker.run()
        assert (again.invocation, again.number) == (call.id, 2)
        worker.answer(again)
        await ended(node, call.id)

    on_node(url, tmp_path, test)


def test_a_call_that_waits_for_its_next_attempt_reports_it_and_can_be_cancelled(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("patient", retries=Retry(1, delay_s=3600.0))
        worker = await node.worker(revision)
        call = await node.submit(revision)
        began = node.clock.time()
        fail(worker, (await worker.run())[0])
        while (found := await call_records.read(node.bus, call.id)) is None or found[0].attempt == 1:
            pass
        record = found[0]
        assert (record.state, record.attempt) == (InvocationState.QUEUED, 2)
        assert began + 3600 <= record.not_before <= node.clock.time() + 3600
        assert [each.outcome for each in record.attempts] == [OutcomeKind.RAISED]
        assert await call_records.cancel(
            node.bus, call, node.clock.time()
        )  # according to a record from before the retry
        await node.queue_is_empty(revision)
        assert [each.outcome for each in (await ended(node, call.id)).attempts] == [OutcomeKind.RAISED]

    on_node(url, tmp_path, test)


def test_an_attempt_that_follows_a_cancel_is_not_run(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("overtaken", retries=RETRY_AT_ONCE)
        worker = await node.worker(revision)
        call = await node.submit(revision)
        run, _ = await worker.run()
        # As if the cancel's record were written while the failed attempt's retry is being written.
        assert await call_records.end(node.bus, msgspec.structs.replace(call, state=InvocationState.CANCELLED))
        fail(worker, run)
        await node.queue_is_empty(revision)
        await node.submit(revision, b'"next"')
        assert (await worker.run())[1] == b'"next"'

    on_node(url, tmp_path, test)


def test_a_worker_whose_call_had_ended_before_it_began_is_idle_again(url: str, tmp_path: Path) -> None:
    """It was considered busy until its next call had ended; without a next call it never ended."""

    async def test(node: Node) -> None:
        revision = await node.deploy("nothing", retries=RETRY_AT_ONCE)
        worker = await node.worker(revision)
        call = await node.submit(revision)
        run, _ = await worker.run()
        assert await call_records.end(node.bus, msgspec.structs.replace(call, state=InvocationState.CANCELLED))
        worker.send(frames.Result(run.attempt, OutcomeKind.LOST, DeviceFailed().info(), "", 0.001))  # it is redelivered
        await node.queue_is_empty(revision)
        while not node.reports.empty():
            node.reports.get_nowait()
        await node.reports.get()  # which may have been in flight
        (found,) = (await node.reports.get()).workers
        assert found.in_use == 0
        assert found.idle_since is not None

    on_node(url, tmp_path, test)


def test_a_cancel_during_the_read_of_the_record_of_an_attempt_is_applied(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It found no running attempt, and the attempt that it was meant for began a moment later."""
    to_cancel: list[CallRecord] = []

    async def read_and_cancel(bus: Bus, invocation: str) -> tuple[CallRecord, bytes] | None:
        found = await call_records.record_of(bus, invocation)
        if to_cancel:
            await call_records.cancel(bus, to_cancel.pop(), SystemClock.time())
            await call_records.record_of(bus, invocation)  # the reply arrives after the cancel
        return found

    async def test(node: Node) -> None:
        revision = await node.deploy("late", retries=RETRY_AT_ONCE)
        worker = await node.worker(revision)
        call = await node.submit(revision, b"1")
        run, _ = await worker.run()
        to_cancel.append(call)
        fail(worker, run)
        assert (await ended(node, call.id)).state is InvocationState.CANCELLED
        other = await node.submit(revision, b"2")
        run, body = await worker.run()
        assert (run.invocation, body) == (other.id, b"2")
        worker.answer(run, body)
        assert (await ended(node, other.id)).state is InvocationState.SUCCEEDED
        assert (await ended(node, call.id)).state is InvocationState.CANCELLED

    monkeypatch.setattr(
        "gpufn_runtime.runner.dispatch.revision_queue.call_records", SimpleNamespace(record_of=read_and_cancel)
    )
    on_node(url, tmp_path, test)


def test_an_id_that_is_used_again_within_minutes_has_its_second_attempt_again(url: str, tmp_path: Path) -> None:
    """The queue remembers the retry of the earlier call with the same id."""

    async def test(node: Node) -> None:
        revision = await node.deploy("reused", retries=RETRY_AT_ONCE)
        worker = await node.worker(revision)
        for _ in range(2):
            call = await node.submit(revision, invocation="01k9xq3zr7c8m2v5t0w4y6b1d3")
            fail(worker, (await worker.run())[0])
            run, body = await worker.run()
            assert run.number == 2
            worker.answer(run, body)
            assert (await ended(node, call.id)).state is InvocationState.SUCCEEDED
            await node.queue_is_empty(revision)
            await streams.purge(node.bus, subjects.RESULTS, subjects.result("reused", call.id))  # its retention is over

    on_node(url, tmp_path, test)


def test_a_delivery_whose_retry_is_not_stored_yet_is_touched(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise another node would receive it and run the same attempt again."""

    async def test(node: Node) -> None:
        revision = await node.deploy("retried", retries=Retry(1, delay_s=0.0))
        worker = await node.worker(revision)
        store, refused = Bus.publish_stored, asyncio.Event()

        async def full(bus: Bus, subject: str, payload: bytes, **more: Any) -> Any:
            if str(more.get("msg_id", "")).endswith(".2"):
                refused.set()
                raise QueueFull("its queue is full")
            return await store(bus, subject, payload, **more)

        said: asyncio.Queue[tuple[bytes, int]] = asyncio.Queue()  # with the delivery count of the message at that time
        node.bus.subscribe(
            "$JS.ACK.>", lambda message: said.put_nowait((message.payload, ack_tokens(message.subject)[0]))
        )
        with monkeypatch.context() as patch:
            patch.setattr(Bus, "publish_stored", full)
            await node.submit(revision)
            fail(worker, (await worker.run())[0])
            await refused.wait()
            node.clock.skipped_s = 3.0
            assert await said.get() == (b"+WPI", 1)
        run, _ = await worker.run()
        assert run.number == 2

    on_node(url, tmp_path, test)


def test_an_attempt_that_could_not_start_before_the_deadline_is_not_waited_for(url: str, tmp_path: Path) -> None:
    """It would have ended as expired in the queue although it ran, and long after it had failed."""

    async def test(node: Node) -> None:
        revision = await node.deploy("no-time", retries=Retry(3, delay_s=60.0))
        worker = await node.worker(revision)
        waited_for = node.invoke(revision, timeout_s=30.0)
        fail(worker, (await worker.run())[0])
        reply, _ = await waited_for.future
        assert (reply.kind, reply.error) == (OutcomeKind.RAISED, NO)
        call = await call_records.submit(node.bus, node.request(revision, timeout_s=30.0), now=node.clock.time())
        fail(worker, (await worker.run())[0])
        record = await ended(node, call.id)
        assert (record.state, record.attempt, record.error) == (InvocationState.FAILED, 1, NO)

    on_node(url, tmp_path, test)


def test_an_attempt_whose_next_one_is_queued_is_not_run_again(url: str, tmp_path: Path) -> None:
    """Its runner died before the ack."""

    async def test(node: Node) -> None:
        revision = await node.deploy("overtook", retries=Retry(1, delay_s=3600.0))
        call = await node.submit(revision, b"overtaken")
        queue, consumer = subjects.async_queue("overtook", 1), subjects.async_consumer("overtook", 1)
        await streams.ensure_consumer(node.bus, subjects.ASYNC, consumer, queue, ack_wait_s=8.0, max_ack_pending=-1)
        await deliver_once(node, consumer)
        stored = await streams.message_at(node.bus, subjects.ASYNC, call.queue_seq)
        assert stored is not None
        message, body = unpack_invocation(stored.payload)
        again = msgspec.structs.replace(message, attempt=2, not_before=node.clock.time() + 3600.0)
        next_seq = (await node.bus.publish_stored(queue, pack(again, body))).seq
        await call_records.retry(node.bus, again, body, next_seq)
        await node.submit(revision, b"next")
        worker = await node.worker(revision)
        run, body = await worker.run()
        assert body == b"next"
        worker.answer(run)
        while await streams.message_at(node.bus, subjects.ASYNC, call.queue_seq) is not None:
            pass
        found = await call_records.read(node.bus, call.id)
        assert found is not None
        assert (found[0].state, found[0].attempt, found[0].queue_seq) == (InvocationState.QUEUED, 2, next_seq)

    on_node(url, tmp_path, test)


def test_a_permanently_failed_call_leaves_a_dead_letter(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("dead", retries=RETRY_AT_ONCE)
        worker = await node.worker(revision)
        call = await node.submit(revision, b'{"x":1}')
        for _ in range(2):
            fail(worker, (await worker.run())[0])
        await node.queue_is_empty(revision)
        found = await dead_letters.read(node.bus, "dead", call.id)
        assert found is not None
        letter, payload = found
        assert (letter.state, letter.error, payload, letter.size) == (InvocationState.FAILED, NO, b'{"x":1}', 7)
        assert [each.number for each in letter.attempts] == [1, 2]
        assert [each.id for each in await dead_letters.recent(node.bus, "*", 1000) if each.function == "dead"] == [
            call.id
        ]
        assert await dead_letters.drop(node.bus, "dead", call.id) == 1
        assert await dead_letters.read(node.bus, "dead", call.id) is None

    on_node(url, tmp_path, test)


@pytest.mark.parametrize(
    ("error", "content_type"),
    [
        (msgspec.structs.replace(NO, message="語" * (16 << 10)), ""),  # the limit of the worker's own code
        (ErrorInfo("x" * 400_000, "y" * 400_000), "z" * 100_000),
    ],
)
def test_a_call_that_failed_with_a_long_message_has_ended(
    url: str, tmp_path: Path, error: ErrorInfo, content_type: str
) -> None:
    """Its list entry is a header, which is limited to 64 KiB by the server: storing the end was retried endlessly."""

    async def test(node: Node) -> None:
        revision = await node.deploy("wordy")
        worker = await node.worker(revision)
        call = await node.submit(revision)
        run, _ = await worker.run()
        worker.send(frames.Result(run.attempt, OutcomeKind.RAISED, error, content_type, 0.001))
        assert (await ended(node, call.id)).error == error
        await node.queue_is_empty(revision)
        letter = await dead_letters.read(node.bus, "wordy", call.id)
        assert letter is not None
        assert letter[0].error == error
        (listed,) = (each for each in await call_records.recent(node.bus, "wordy", 10) if each.id == call.id)
        assert listed.error is not None
        assert error.message.startswith(listed.error.message)

    on_node(url, tmp_path, test)


def test_a_dead_letter_is_written_though_the_runner_died_before(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("late-letter")
        call = await node.submit(revision, b"7", "")
        # The state after a runner dies before the ack: an unacknowledged delivery of a call that has ended.
        failed = msgspec.structs.replace(call, state=InvocationState.FAILED, error=NO, ended_at=1.0)
        assert await call_records.end(node.bus, failed)
        queue = subjects.async_queue("late-letter", 1)
        await streams.ensure_consumer(
            node.bus, subjects.ASYNC, subjects.async_consumer("late-letter", 1), queue,
            ack_wait_s=8.0, max_ack_pending=-1,
        )  # fmt: skip
        await deliver_once(node, subjects.async_consumer("late-letter", 1))
        await node.worker(revision)
        await node.queue_is_empty(revision)
        found = await dead_letters.read(node.bus, "late-letter", call.id)
        assert found is not None
        assert (found[0].error, found[1]) == (NO, b"7")

    on_node(url, tmp_path, test)


def test_a_worker_that_was_about_to_run_an_ended_call_is_idle_again(url: str, tmp_path: Path) -> None:
    """It was considered busy forever, and kept its GPU."""

    async def test(node: Node) -> None:
        revision = await node.deploy("idle")
        call = await node.submit(revision)
        assert await call_records.end(
            node.bus, msgspec.structs.replace(call, state=InvocationState.FAILED, ended_at=1.0)
        )
        queue, consumer = subjects.async_queue("idle", 1), subjects.async_consumer("idle", 1)
        await streams.ensure_consumer(node.bus, subjects.ASYNC, consumer, queue, ack_wait_s=8.0, max_ack_pending=-1)
        await deliver_once(node, consumer)
        await node.worker(revision)
        await node.queue_is_empty(revision)
        while not node.reports.empty():
            node.reports.get_nowait()
        assert (await node.report_of("w-1", WorkerState.READY)).idle_since is not None

    on_node(url, tmp_path, test)


def test_a_call_that_is_delivered_a_hundred_times_is_a_dead_letter(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("poison")
        call = await node.submit(revision, b"bad")
        queue, consumer = subjects.async_queue("poison", 1), subjects.async_consumer("poison", 1)
        await streams.ensure_consumer(node.bus, subjects.ASYNC, consumer, queue, ack_wait_s=8.0, max_ack_pending=-1)
        for _ in range(100):
            await deliver_once(node, consumer)
        worker = await node.worker(revision)
        record = await ended(node, call.id)
        assert record.error is not None
        assert (record.state, record.error.code) == (InvocationState.FAILED, "worker_lost")
        assert "101 times" in record.error.message
        await node.queue_is_empty(revision)
        found = await dead_letters.read(node.bus, "poison", call.id)
        assert found is not None
        assert found[1] == b"bad"
        await node.submit(revision, b"good")
        assert (await worker.run())[1] == b"good"

    on_node(url, tmp_path, test)


def test_the_queue_timeout_does_not_end_a_call_that_another_runner_may_have_begun(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("begun", queue_timeout_s=2.0)
        await node.submit(revision, b"begun")
        queue, consumer = subjects.async_queue("begun", 1), subjects.async_consumer("begun", 1)
        await streams.ensure_consumer(node.bus, subjects.ASYNC, consumer, queue, ack_wait_s=8.0, max_ack_pending=-1)
        await deliver_once(node, consumer)
        turn_waits = await node.submit(revision, b"waits")
        node.clock.ahead_s += 3
        worker = await node.worker(revision)
        run, body = await worker.run()
        assert body == b"begun"
        worker.answer(run)
        assert (await ended(node, turn_waits.id)).state is InvocationState.EXPIRED

    on_node(url, tmp_path, test)


async def deliver_once(node: Node, consumer: str) -> None:
    """Take a delivery and hand it back, like a runner that dies with it."""
    arrived: asyncio.Queue[Message] = asyncio.Queue()
    inbox = node.bus.new_inbox()
    node.bus.subscribe(inbox, arrived.put_nowait)
    node.bus.publish(f"$JS.API.CONSUMER.MSG.NEXT.{subjects.ASYNC}.{consumer}", b'{"batch":1}', reply=inbox)
    node.bus.publish((await arrived.get()).reply, b"-NAK")


@pytest.mark.parametrize("size", [RECORD_BYTES, RECORD_BYTES + 1, 20 << 20])
def test_a_result_of_any_size_is_kept(url: str, tmp_path: Path, size: int) -> None:
    async def test(node: Node) -> None:
        await object_store.ensure_bucket(node.bus, subjects.RESULT_FILES, expires=True)
        revision = await node.deploy("large", retention_s=100.0)
        worker = await node.worker(revision)
        call = await node.submit(revision)
        run, _ = await worker.run()
        assert run.takes_shared_body
        body = bytes(range(251)) * (size // 251 + 1)
        shared_body = SharedBodies(node.home.shared_bodies / "w-1").write([body[:size]])
        worker.send(
            frames.Result(run.attempt, OutcomeKind.SUCCEEDED, None, "application/octet-stream", 0.001, shared_body)
        )
        record, kept = await call_records.wait(node.bus, call.id, 20)
        assert (record.state, record.size, record.error) == (InvocationState.SUCCEEDED, size, None)
        if size > RECORD_BYTES:
            assert (record.blob, kept) == (digest_of(body[:size]), b"")
            kept = b"".join([part async for part in call_records.blob_parts(node.bus, record)])
            described = await streams.last_message(node.bus, f"OBJ_{subjects.RESULT_FILES}", "$O.gpufn_results.M.>")
            assert described is not None
            assert described.headers["Nats-TTL"] == "700s"
        assert kept == body[:size]
        await node.queue_is_empty(revision)
        assert not list((node.home.shared_bodies / "kept").glob("*"))

    on_node(url, tmp_path, test)


def test_a_record_is_stored_for_the_retention_of_its_function(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("brief", retention_s=7.0)
        worker = await node.worker(revision)
        call = await node.submit(revision)
        queued = await streams.last_message(node.bus, subjects.RESULTS, subjects.any_result(call.id))
        assert queued is not None
        assert "Nats-TTL" not in queued.headers
        await worker.echo(1)
        await ended(node, call.id)
        stored = await streams.last_message(node.bus, subjects.RESULTS, subjects.any_result(call.id))
        assert stored is not None
        assert stored.headers["Nats-TTL"] == "7s"

    on_node(url, tmp_path, test)


def test_an_id_is_one_call_until_its_record_is_removed(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("same")
        worker = await node.worker(revision)
        call = await node.submit(revision, b"1")
        with pytest.raises(IdempotencyMismatch):
            await node.submit(revision, b"2", call.id)
        await worker.echo(1)
        await ended(node, call.id)
        with pytest.raises(IdempotencyMismatch):
            await node.submit(revision, b"2", call.id)
        assert (await node.submit(revision, b"1", call.id)).state is InvocationState.SUCCEEDED
        await node.queue_is_empty(revision)
        await streams.purge(node.bus, subjects.RESULTS, subjects.any_result(call.id))  # like its retention
        again = await node.submit(revision, b"2", call.id)
        assert again.state is InvocationState.QUEUED
        assert (await worker.run())[1] == b"2"

    on_node(url, tmp_path, test)


def test_another_body_under_an_id_is_refused_before_there_is_a_record(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("raced")
        call = await node.submit(revision, b"1")
        await streams.purge(node.bus, subjects.RESULTS, subjects.any_result(call.id))  # as if its gateway had died
        with pytest.raises(IdempotencyMismatch):
            await node.submit(revision, b"2", call.id)
        assert (await node.submit(revision, b"1", call.id)).queue_seq == call.queue_seq

    on_node(url, tmp_path, test)


def test_a_backlog_is_taken_though_the_sync_queue_has_all_the_credit(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("backlog")
        taken: asyncio.Queue[Delivery] = asyncio.Queue()

        def take(delivery: Delivery) -> None:
            delivery.ack()
            taken.put_nowait(delivery)
            intake.offer()

        intake = PullCredits(node.bus, revision, room=lambda: 1, capacity=lambda: 1, receive=take, clock=node.clock)
        intake.open()
        node.bus.publish(subjects.sync_queue("backlog", 1), b"it is open")
        await taken.get()
        for _ in range(20):
            await node.submit(revision)
        intake.on_wakeup(QueueKind(Priority.NORMAL, is_sync=False))  # one delivery; and no ticks
        for _ in range(20):
            await taken.get()
        intake.close()

    on_node(url, tmp_path, test)


def test_a_follower_of_a_call_receives_its_start(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("heard")
        worker = await node.worker(revision)
        invocation = new_invocation_id()
        heard: list[str] = []
        node.bus.subscribe(subjects.call_started(invocation), lambda message: heard.append(message.subject))
        await node.submit(revision, b"1", invocation)
        await worker.echo(1)
        await ended(node, invocation)
        assert heard == [subjects.call_started(invocation)]

    on_node(url, tmp_path, test)
