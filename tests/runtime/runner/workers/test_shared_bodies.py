"""Shared bodies between a caller and a worker on one host."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from gpufn_core.domain.invocation import OutcomeKind
from gpufn_core.domain.revision import Revision
from gpufn_core.home import Home
from gpufn_core.protocol import frames, subjects
from gpufn_core.protocol.limits import MESSAGE_BYTES
from gpufn_platform.queue import large_bodies
from gpufn_platform.queue.caller import Caller
from gpufn_platform.shared_bodies.bodies import MIN_SHARED_BYTES, SharedBodies
from gpufn_runtime.runner.workers.shared_bodies import NodeSharedBodies
from tests.runtime.runner.node import FakeWorker, Node, on_node, read
from tests.waiting import until_async


@pytest.fixture(autouse=True)
def _shared_bodies_in_the_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Home, "shared_bodies", property(lambda home: home.root / "shared_bodies"))


def caller_with_shared_bodies(node: Node) -> tuple[Caller, SharedBodies, list[str]]:
    dropped: list[str] = []
    caller = Caller(node.bus, name="gw-large", clock=node.clock)
    caller.start(shared_folder="gw-large", drop=dropped.append)
    shared_bodies = SharedBodies(node.home.shared_bodies / "gw-large")
    shared_bodies.remove(shared_bodies.write([]))  # the folder exists
    return caller, shared_bodies, dropped


def invoke(caller: Caller, node: Node, revision: Revision, shared_body: str = "") -> Any:
    return caller.invoke(node.request(revision)._replace(body=b"", shared_body=shared_body))


def worker_shared_bodies(node: Node, worker: FakeWorker) -> SharedBodies:
    return SharedBodies(node.home.shared_bodies / worker.worker)


def _exists(shared_bodies: SharedBodies) -> bool:
    return os.path.exists(shared_bodies.folder)


def answer(worker: FakeWorker, run: frames.Run, shared_body: str) -> None:
    worker.send(frames.Result(run.attempt, OutcomeKind.SUCCEEDED, None, "application/octet-stream", 0.0, shared_body))


def test_a_shared_body_reaches_the_worker_and_its_result_returns_as_one(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("large")
        worker = await node.worker(revision)
        caller, shared_bodies, _ = caller_with_shared_bodies(node)
        sent = shared_bodies.write([b"a large input"])
        call = invoke(caller, node, revision, sent)
        run, body = await worker.run()
        assert (body, run.takes_shared_body) == (b"", True)
        theirs = worker_shared_bodies(node, worker)
        assert bytes(theirs.take(run.shared_body)) == b"a large input"
        assert shared_bodies.size(sent), "the caller keeps it until the call has ended"
        answer(worker, run, theirs.write([b"a large result"]))
        reply, body = await call.future
        assert (reply.kind, body) == (OutcomeKind.SUCCEEDED, b"")
        assert bytes(shared_bodies.take(reply.shared_body)) == b"a large result"
        assert os.listdir(theirs.folder) == []

    on_node(url, tmp_path, test)


def test_a_missing_input_ends_its_call(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("gone")
        await node.worker(revision)
        caller, shared_bodies, _ = caller_with_shared_bodies(node)
        sent = shared_bodies.write([b"x"])
        shared_bodies.remove(sent)
        reply, _ = await invoke(caller, node, revision, sent).future
        assert reply.kind is OutcomeKind.LOST
        assert reply.error is not None
        assert reply.error.code == "artifact_unavailable"

    on_node(url, tmp_path, test)


@pytest.mark.parametrize("claim", ["../../../etc/passwd", "0" * 26, "not a name"])
def test_a_result_that_a_worker_makes_up_fails_its_call(url: str, tmp_path: Path, claim: str) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("liar")
        worker = await node.worker(revision)
        caller, _, _ = caller_with_shared_bodies(node)
        call = invoke(caller, node, revision)
        run, _ = await worker.run()
        answer(worker, run, claim)
        reply, _ = await call.future
        assert (reply.kind, reply.shared_body) == (OutcomeKind.RAISED, "")
        assert reply.error is not None
        assert reply.error.code == "result_not_encodable"

    on_node(url, tmp_path, test)


@pytest.mark.parametrize("folder", ["", "gw-far"])
@pytest.mark.parametrize("size", [MIN_SHARED_BYTES, MESSAGE_BYTES + 1])
def test_a_caller_on_another_host_gets_a_large_result(url: str, tmp_path: Path, folder: str, size: int) -> None:
    """In the reply or, if too large for it, by reference. Such a result was refused."""

    async def test(node: Node) -> None:
        await large_bodies.ensure_buckets(node.bus)
        revision = await node.deploy("far")
        worker = await node.worker(revision)
        caller = Caller(node.bus, name="gw-far", clock=node.clock)
        caller.start(shared_folder=folder, drop=lambda name: None)  # a folder on the caller's own host
        call = invoke(caller, node, revision)
        run, _ = await worker.run()
        result = bytes(range(251)) * (size // 251) + b"." * (size % 251)
        answer(worker, run, worker_shared_bodies(node, worker).write([result]))
        reply, body = await call.future
        assert (reply.kind, reply.shared_body) == (OutcomeKind.SUCCEEDED, "")
        if reply.reference is not None:
            assert body == b""
            body = await read(node.bus, subjects.RESULT_FILES, reply.reference)
        assert (reply.reference is not None) is (size > MESSAGE_BYTES)
        assert body == result
        assert os.listdir(node.home.shared_bodies / "kept") == []

    on_node(url, tmp_path, test)


def test_a_result_that_its_worker_truncates_fails_a_call_from_another_host(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("cut")
        worker = await node.worker(revision)
        call = node.invoke(revision)
        run, _ = await worker.run()
        answer(worker, run, "0" * 26)
        reply, _ = await call.future
        assert reply.kind is OutcomeKind.RAISED
        assert reply.error is not None
        assert reply.error.code == "result_not_encodable"

    on_node(url, tmp_path, test)


def test_a_result_for_a_call_that_had_ended_is_dropped(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("late")
        worker = await node.worker(revision)
        caller, shared_bodies, dropped = caller_with_shared_bodies(node)
        call = invoke(caller, node, revision)
        run, _ = await worker.run()
        caller._pending.clear()  # as if it had ended in another way; its runner does not know
        answer(worker, run, worker_shared_bodies(node, worker).write([b"late"]))
        again = invoke(caller, node, revision)
        run, _ = await worker.run()
        worker.answer(run)
        await again.future
        assert len(dropped) == 1
        assert bytes(shared_bodies.take(dropped[0])) == b"late"
        assert not call.future.done()

    on_node(url, tmp_path, test)


def test_files_of_a_worker_are_removed_with_it(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("left")
        worker = await node.worker(revision)
        theirs = worker_shared_bodies(node, worker)
        theirs.write([b"left"])
        await node.unassign(worker.worker)
        while _exists(theirs):
            await node.reports.get()

    on_node(url, tmp_path, test)


def test_files_of_an_earlier_runner_for_a_worker_are_removed_even_if_it_was_never_served(
    url: str, tmp_path: Path
) -> None:
    """Its revision could not be read before the worker died."""

    async def test(node: Node) -> None:
        revision = await node.deploy("unread")
        await node.revisions.delete(subjects.revision_key("unread", 1))
        theirs = SharedBodies(node.home.shared_bodies / "w-1")
        theirs.write([b"left"])
        await node.assign(revision, "w-1")
        await node.unassign("w-1")
        while _exists(theirs):
            await node.reports.get()

    on_node(url, tmp_path, test)


def test_files_of_a_worker_are_removed_outside_the_event_loop(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a million files, the removal would block all calls of the node for four seconds."""
    removed_in: list[str] = []
    monkeypatch.setattr(
        NodeSharedBodies, "forget", lambda self, worker: removed_in.append(threading.current_thread().name)
    )

    async def test(node: Node) -> None:
        revision = await node.deploy("forgotten")
        await node.worker(revision)
        await node.unassign("w-1")
        await until_async(lambda: removed_in)

    on_node(url, tmp_path, test)
    assert removed_in[0] != threading.main_thread().name
