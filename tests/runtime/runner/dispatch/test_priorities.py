"""Calls of the three classes, with one slot. The rule itself is tested as a table in test_queue_choice.py."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from gpufn_core.domain.invocation import OutcomeKind
from gpufn_core.domain.revision import Revision
from gpufn_core.errors import ErrorInfo
from gpufn_core.ids import new_invocation_id
from gpufn_core.protocol import frames, subjects
from gpufn_core.protocol.messages import InvocationMessage, unpack_invocation
from gpufn_core.protocol.records import CallRecord
from gpufn_core.spec.priority import QUEUES, Priority, QueueKind
from gpufn_platform.bus.connection import JetStreamError
from gpufn_platform.bus.storage import streams
from gpufn_platform.queue import queue_position
from gpufn_platform.queue.records import call_records
from gpufn_runtime.runner.dispatch.queue_choice import AGED_AFTER_S
from tests.runtime.runner.node import RETRY_AT_ONCE, FakeWorker, Node, on_node

HI, NORMAL, LOW = Priority


async def submit(
    node: Node,
    revision: Revision,
    body: bytes,
    priority: Priority | None = None,
    *,
    owner: str = subjects.PLATFORM,
    invocation: str | None = None,
) -> CallRecord:
    request = node.request(revision, body)._replace(deadline=0.0, priority=priority, owner=owner)
    return await call_records.submit(node.bus, request, now=node.clock.time(), invocation=invocation)


def invoke(node: Node, revision: Revision, body: bytes, priority: Priority) -> None:
    node.caller.invoke(node.request(revision, body)._replace(priority=priority))


async def consumer(node: Node, revision: Revision, kind: QueueKind) -> dict[str, Any]:
    queue = queue_position.address(revision.function, revision.number, kind)
    return await node.bus.js(f"CONSUMER.INFO.{queue.stream}.{queue.consumer}")


async def opened(node: Node, revision: Revision, kind: QueueKind) -> None:
    """Wait until the runner polls this queue."""
    while True:
        with contextlib.suppress(JetStreamError):
            await consumer(node, revision, kind)
            await consumer(node, revision, kind)  # by the second reply the runner has received its own
            return


async def served(worker: FakeWorker, calls: int) -> bytes:
    """Return the arguments of the calls in the order in which they run."""
    seen = []
    for _ in range(calls):
        run, body = await worker.run()
        worker.answer(run, body)
        seen.append(body)
    return b"".join(seen)


def test_a_slot_runs_submitted_calls_of_the_highest_class_first_and_each_class_in_order(
    url: str, tmp_path: Path
) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("classes", priority=LOW)
        for body, priority in ((b"5", None), (b"3", NORMAL), (b"1", HI), (b"6", None), (b"2", HI), (b"4", NORMAL)):
            await submit(node, revision, body, priority)
        worker = await node.worker(revision)
        assert await served(worker, 6) == b"123456"

    on_node(url, tmp_path, test)


def test_callers_wait_for_higher_classes_and_go_before_all_calls_of_lower_ones(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("callers")
        worker = await node.worker(revision)
        node.invoke(revision, b"0")
        run, _ = await worker.run()
        for body, priority in ((b"6", LOW), (b"4", NORMAL), (b"2", HI)):
            await submit(node, revision, body, priority)
        for body, priority in ((b"5", LOW), (b"3", NORMAL), (b"1", HI)):
            invoke(node, revision, body, priority)
        for kind in QUEUES:
            await opened(node, revision, kind)
        while (await consumer(node, revision, QueueKind(NORMAL, is_sync=True)))["delivered"]["consumer_seq"] < 2:
            pass
        await streams.depths(node.bus)  # by then the runner has returned the call, and knows the others
        worker.answer(run, b"0")
        order = await served(worker, 6)
        assert [set(order[at : at + 2]) for at in (0, 2, 4)] == [set(b"12"), set(b"34"), set(b"56")]

    on_node(url, tmp_path, test)


def test_an_aged_call_gets_the_slot_before_higher_classes(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("aged")
        worker = await node.worker(revision)
        node.invoke(revision, b"0")
        run, _ = await worker.run()
        await submit(node, revision, b"l", LOW)
        await opened(node, revision, QueueKind(LOW, is_sync=False))
        node.clock.ahead_s = AGED_AFTER_S
        for _ in range(8):
            await submit(node, revision, b"h", HI)
        worker.answer(run)
        order = await served(worker, 9)
        assert (order.count(b"h"), b"l" in order[:6]) == (8, True)

    on_node(url, tmp_path, test)


def test_a_retry_is_of_the_class_that_its_call_is(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("again", retries=RETRY_AT_ONCE)
        worker = await node.worker(revision)
        await submit(node, revision, b"1", HI, owner="key1")
        run, _ = await worker.run()
        await submit(node, revision, b"2", NORMAL)
        error = ErrorInfo("function_raised", "no", error_type="ValueError", error_bases=("ValueError",))
        worker.send(frames.Result(run.attempt, OutcomeKind.RAISED, error, "", 0.001))
        queue = subjects.async_queue("again", 1, HI, "key1")
        while (stored := await streams.next_message(node.bus, subjects.ASYNC, queue, 2)) is None:
            pass
        again, _ = unpack_invocation(stored.payload)
        assert (again.attempt, again.priority, again.owner) == (2, HI, "key1")

    on_node(url, tmp_path, test)


async def made(node: Node, priority: Priority, *, is_sync: bool = True) -> InvocationMessage:
    """Return the nested call of `child` from its queue of this class."""
    queue = queue_position.address("child", 1, QueueKind(priority, is_sync))
    while (stored := await streams.next_message(node.bus, queue.stream, queue.subject, 1)) is None:
        pass
    return unpack_invocation(stored.payload)[0]


@pytest.mark.parametrize(
    ("verb", "parents", "asked", "childs", "becomes"),
    [
        ("call", HI, None, LOW, HI),  # its caller must not wait among calls of a lower class
        ("call", LOW, None, NORMAL, NORMAL),
        ("call", NORMAL, LOW, NORMAL, LOW),
        ("stream", HI, None, NORMAL, HI),
        ("submit", HI, None, NORMAL, NORMAL),
        ("submit", HI, HI, NORMAL, HI),
        ("call", NORMAL, HI, HI, HI),
    ],
)
def test_the_class_of_a_call_that_a_function_makes(  # noqa: PLR0917
    url: str, tmp_path: Path, verb: str, parents: Priority, asked: Priority | None, childs: Priority, becomes: Priority
) -> None:
    async def test(node: Node) -> None:
        await node.deploy("child", priority=childs)
        revision = await node.deploy("parent")
        worker = await node.worker(revision)
        node.caller.invoke(node.request(revision)._replace(priority=parents, owner="key1"))
        run, _ = await worker.run()
        worker.send(frames.Call(1, verb, "child", "", "application/json", "", None, run.attempt, asked), b"{}")
        assert (await made(node, becomes, is_sync=verb != "submit")).owner == "key1"

    on_node(url, tmp_path, test)


def test_a_function_cannot_raise_itself_to_hi(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        await node.deploy("child")
        revision = await node.deploy("parent")
        worker = await node.worker(revision)
        node.invoke(revision)
        run, _ = await worker.run()
        worker.send(frames.Call(1, "call", "child", "", "application/json", "", None, run.attempt, HI), b"{}")
        answer, _ = await worker.next()
        assert isinstance(answer, frames.Answer)
        assert answer.error is not None
        assert answer.error.code == "forbidden"

    on_node(url, tmp_path, test)


def test_a_place_in_the_queue_counts_calls_of_higher_classes(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("places")
        calls = [await submit(node, revision, b"1", priority) for priority in (LOW, NORMAL, HI, NORMAL, LOW)]
        assert [await queue_position.position(node.bus, call) for call in calls] == [4, 2, 1, 3, 5]

    on_node(url, tmp_path, test)


def test_the_same_call_in_another_class_is_the_same_call(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("same")
        id_ = new_invocation_id()
        first = await submit(node, revision, b"1", LOW, invocation=id_)
        second = await submit(node, revision, b"1", HI, invocation=id_)
        assert (second.priority, second.queue_seq) == (LOW, first.queue_seq)

    on_node(url, tmp_path, test)
