"""Arguments that are too large for a message: the runner fetches them for its workers, and removes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpufn_core.domain.invocation import InvocationState, OutcomeKind
from gpufn_core.domain.revision import Revision
from gpufn_core.errors import CapacityError, ErrorInfo
from gpufn_core.ids import new_invocation_id
from gpufn_core.protocol import frames, subjects
from gpufn_core.protocol.records import BodyReference, CallRecord
from gpufn_platform.bus.storage import streams
from gpufn_platform.queue import large_bodies
from gpufn_platform.queue.records import call_records, dead_letters
from gpufn_platform.shared_bodies.bodies import SharedBodies
from gpufn_runtime.runner.dispatch.large_bodies import NodeBodies
from tests.runtime.runner.node import RETRY_AT_ONCE, Node, on_node, read
from tests.waiting import until_async

LARGE = bytes(range(251)) * 40_000
NO = ErrorInfo("function_raised", "no")


async def submit(node: Node, revision: Revision) -> CallRecord:
    invocation = new_invocation_id()
    await large_bodies.ensure_buckets(node.bus)
    reference = await large_bodies.store(node.bus, subjects.ARGUMENT_FILES, LARGE, owner=invocation)
    request = node.request(revision, b"")._replace(deadline=0.0, reference=reference)
    return await call_records.submit(node.bus, request, now=node.clock.time(), invocation=invocation)


async def is_stored(node: Node) -> bool:
    return bool(await streams.messages_per_subject(node.bus, f"OBJ_{subjects.ARGUMENT_FILES}"))


def taken(node: Node, run: frames.Run) -> bytes:
    return bytes(SharedBodies(node.home.shared_bodies / "w-1").take(run.shared_body))


def failed(run: frames.Run) -> frames.Result:
    return frames.Result(run.attempt, OutcomeKind.RAISED, NO, "", 0.0)


def test_each_attempt_gets_them_and_the_dead_letter_keeps_them(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("tried", retries=RETRY_AT_ONCE)
        worker = await node.worker(revision)
        call = await submit(node, revision)
        for _ in range(2):
            run, body = await worker.run()
            assert (body, taken(node, run)) == (b"", LARGE)
            worker.send(failed(run))
        record, _ = await call_records.wait(node.bus, call.id, 20)
        assert record.state is InvocationState.FAILED
        await node.queue_is_empty(revision)
        letter = await dead_letters.read(node.bus, "tried", call.id)
        assert letter is not None
        assert (letter[0].size, letter[1]) == (len(LARGE), b"")
        assert letter[0].reference is not None
        assert await read(node.bus, subjects.ARGUMENT_FILES, letter[0].reference) == LARGE

    on_node(url, tmp_path, test)


def test_they_are_removed_when_the_call_has_succeeded(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("succeeds")
        await large_bodies.ensure_buckets(node.bus)
        await streams.purge(node.bus, f"OBJ_{subjects.ARGUMENT_FILES}", ">")  # left by other tests
        worker = await node.worker(revision)
        call = await submit(node, revision)
        run, _ = await worker.run()
        assert taken(node, run) == LARGE
        worker.answer(run)
        assert (await call_records.wait(node.bus, call.id, 20))[0].state is InvocationState.SUCCEEDED
        while await is_stored(node):
            pass

    on_node(url, tmp_path, test)


def test_a_call_with_lost_arguments_ends_with_the_reason(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("gone")
        call = await submit(node, revision)
        await streams.purge(node.bus, f"OBJ_{subjects.ARGUMENT_FILES}", ">")
        await node.worker(revision)
        record, _ = await call_records.wait(node.bus, call.id, 20)
        assert record.error is not None
        assert (record.state, record.error.code) == (InvocationState.FAILED, "artifact_unavailable")

    on_node(url, tmp_path, test)


def test_a_call_waits_while_memory_has_no_room_for_them(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch, tries = NodeBodies.fetch, list[str]()

    async def full_at_first(self: NodeBodies, bucket: str, reference: BodyReference, worker: str) -> str:
        tries.append(worker)
        if len(tries) == 1:
            raise CapacityError("a large body cannot be kept: No space left on device")
        return await fetch(self, bucket, reference, worker)

    monkeypatch.setattr(NodeBodies, "fetch", full_at_first)

    async def test(node: Node) -> None:
        revision = await node.deploy("crowded")
        worker = await node.worker(revision)
        await submit(node, revision)
        run, _ = await worker.run()
        assert taken(node, run) == LARGE
        assert (run.number, len(tries)) == (1, 2)

    on_node(url, tmp_path, test)


def test_a_call_cancelled_while_its_arguments_arrive_does_not_begin(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch, calls = NodeBodies.fetch, list[CallRecord]()

    async def test(node: Node) -> None:
        async def cancelled_meanwhile(self: NodeBodies, bucket: str, reference: BodyReference, worker: str) -> str:
            assert await call_records.cancel(node.bus, calls[0], node.clock.time())
            await until_async(lambda: any(attempt.is_cancelled for attempt in node.serving._attempts.values()))
            return await fetch(self, bucket, reference, worker)

        revision = await node.deploy("changed-mind")
        calls.append(await submit(node, revision))
        monkeypatch.setattr(NodeBodies, "fetch", cancelled_meanwhile)
        await node.worker(revision)
        await node.queue_is_empty(revision)
        record, _ = await call_records.wait(node.bus, calls[0].id, 20)
        assert record.state is InvocationState.CANCELLED
        await until_async(lambda: not node.serving._attempts)
        assert not list((node.home.shared_bodies / "w-1").glob("*"))

    on_node(url, tmp_path, test)
