"""Checkpoints and progress that a fake worker sends to the runner."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from gpufn_core.domain.invocation import InvocationState, OutcomeKind
from gpufn_core.errors import BusUnavailable
from gpufn_core.protocol import frames, subjects
from gpufn_core.protocol.codec import Unpacker
from gpufn_core.protocol.limits import CHECKPOINT_BYTES
from gpufn_core.protocol.messages import ItemReply, Progress
from gpufn_core.spec.function_spec import CallKind
from gpufn_platform.queue.records import call_records, checkpoints
from tests.runtime.runner.node import RETRY_AT_ONCE, FakeWorker, Node, on_node

STATE = b"\x92\x01\x02"


async def ask(worker: FakeWorker, run: frames.Run | None, verb: str, body: bytes = b"") -> tuple[frames.Answer, bytes]:
    worker.send(frames.Call(1, verb, "", content_type="x/state", parent=run.attempt if run else 0), body)
    answer, data = await worker.next()
    assert isinstance(answer, frames.Answer), answer
    return answer, data


async def stored(node: Node) -> int:
    info = await node.bus.js(f"STREAM.INFO.{subjects.CHECKPOINTS}")
    return int(info["state"]["messages"])


async def none_stored(node: Node) -> None:
    while await stored(node):
        pass


def test_a_call_whose_worker_died_continues_from_its_last_checkpoint(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy(retries=RETRY_AT_ONCE)
        worker = await node.worker(revision)
        await node.submit(revision)
        run, _ = await worker.run()
        assert (await ask(worker, run, "restore"))[0].content_type == ""
        for body in (b"older", STATE):
            assert (await ask(worker, run, "checkpoint", body))[0].kind is OutcomeKind.SUCCEEDED
        worker.die()
        await node.reap("f")
        await node.unassign("w-1")
        heir = await node.worker(revision, "w-2")
        again, _ = await heir.run()
        assert (again.invocation, again.number) == (run.invocation, 2)
        answer, data = await ask(heir, again, "restore")
        assert (answer.content_type, data) == ("x/state", STATE)
        heir.answer(again)
        await none_stored(node)

    on_node(url, tmp_path, test)


def test_a_checkpoint_outlives_the_runner(url: str, tmp_path: Path) -> None:
    async def first(node: Node) -> str:
        revision = await node.deploy()
        worker = await node.worker(revision)
        invocation = (await node.submit(revision)).id
        run, _ = await worker.run()
        await ask(worker, run, "checkpoint", STATE)
        return invocation

    async def second(node: Node) -> None:
        kept = await checkpoints.last(node.bus, invocation)
        assert kept is not None
        assert (kept.checkpoint.content_type, kept.checkpoint.attempt, kept.body) == ("x/state", 1, STATE)

    invocation = on_node(url, tmp_path, first)
    on_node(url, tmp_path, second)


def test_a_call_with_a_waiting_caller_leaves_no_checkpoint(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy()
        worker = await node.worker(revision)
        call = node.invoke(revision)
        run, _ = await worker.run()
        await ask(worker, run, "checkpoint", STATE)
        assert await stored(node) == 1
        worker.answer(run)
        await call.future
        await none_stored(node)

    on_node(url, tmp_path, test)


@pytest.mark.parametrize("is_submitted", [True, False])
def test_a_checkpoint_is_removed_with_an_attempt_that_has_not_read_it(
    url: str, tmp_path: Path, is_submitted: bool
) -> None:
    """It stayed for two weeks, and the next call with the same id continued from it."""

    async def test(node: Node) -> None:
        revision = await node.deploy(retries=RETRY_AT_ONCE)
        worker = await node.worker(revision)
        await node.submit(revision) if is_submitted else node.invoke(revision)
        run, _ = await worker.run()
        await ask(worker, run, "checkpoint", STATE)
        worker.send(frames.Result(run.attempt, OutcomeKind.RAISED, None, "", 0.001))
        run, _ = await worker.run()
        assert (run.number, await stored(node)) == (2, 1)
        worker.answer(run)
        await none_stored(node)

    on_node(url, tmp_path, test)


def test_a_checkpoint_is_removed_with_a_call_that_has_no_time_for_another_attempt(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy(retries=RETRY_AT_ONCE)
        worker = await node.worker(revision)
        call = await call_records.submit(node.bus, node.request(revision, timeout_s=60.0), now=node.clock.time())
        run, _ = await worker.run()
        await ask(worker, run, "checkpoint", STATE)
        worker.die()
        await node.reap("f")
        await node.unassign("w-1")
        while (found := await call_records.read(node.bus, call.id)) is None or found[0].attempt == 1:
            pass
        node.clock.ahead_s += 100.0
        await node.worker(revision, "w-2")
        assert (await call_records.wait(node.bus, call.id, 30))[0].state is InvocationState.EXPIRED
        await none_stored(node)

    on_node(url, tmp_path, test)


def test_a_checkpoint_is_there_until_the_end_of_its_call_is_kept(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was deleted at once: if a runner died before the record was stored, the call started from the beginning."""
    store, there = call_records.end, list[int]()

    async def test(node: Node) -> None:
        async def away_at_first(*arguments: object) -> bool:
            there.append(await stored(node))
            if len(there) < 3:
                raise BusUnavailable("away")
            return await store(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(call_records, "end", away_at_first)
        revision = await node.deploy()
        worker = await node.worker(revision)
        await node.submit(revision)
        run, _ = await worker.run()
        await ask(worker, run, "checkpoint", STATE)
        worker.answer(run)
        await none_stored(node)
        assert there == [1, 1, 1]

    on_node(url, tmp_path, test)


def test_a_checkpoint_above_the_limit_or_without_a_call_is_refused(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy()
        worker = await node.worker(revision)
        node.invoke(revision)
        run, _ = await worker.run()
        too_large, _ = await ask(worker, run, "checkpoint", bytes(CHECKPOINT_BYTES + 1))
        assert too_large.error is not None
        assert too_large.error.code == "payload_too_large"
        for verb in ("checkpoint", "restore"):
            nobodys, _ = await ask(worker, None, verb)
            assert nobodys.error is not None
            assert nobodys.error.code == "invalid_input"
        assert await stored(node) == 0

    on_node(url, tmp_path, test)


def test_a_bus_that_is_away_for_a_moment_only_delays_a_checkpoint(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, refused = checkpoints.store, [BusUnavailable("away"), BusUnavailable("away")]

    async def away_at_first(*arguments: object) -> int:
        if refused:
            raise refused.pop()
        return await store(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(checkpoints, "store", away_at_first)

    async def test(node: Node) -> None:
        revision = await node.deploy()
        worker = await node.worker(revision)
        node.invoke(revision)
        run, _ = await worker.run()
        assert (await ask(worker, run, "checkpoint", STATE))[0].kind is OutcomeKind.SUCCEEDED
        assert (refused, await stored(node)) == ([], 1)

    on_node(url, tmp_path, test)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ((0.4, "frame 4"), Progress(0.4, "frame 4")),
        ((-3.0, ""), Progress(0.0, "")),
        ((1e9, "x" * 10_000), Progress(1.0, "x" * 500)),
        ((float("nan"), ""), Progress(0.0, "")),
    ],
)
def test_progress_reaches_followers_and_status_requests(
    url: str, tmp_path: Path, said: tuple[float, str], told: Progress
) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy()
        worker = await node.worker(revision)
        invocation = (await node.submit(revision)).id
        run, _ = await worker.run()
        heard: asyncio.Queue[bytes] = asyncio.Queue()
        node.bus.subscribe(subjects.progress(invocation), lambda message: heard.put_nowait(message.payload))
        await node.bus.flush()
        worker.send(frames.Progress(run.attempt, *said))
        assert msgspec.msgpack.decode(await heard.get(), type=Progress) == told
        held = await call_records.locate(node.bus, invocation)
        assert held is not None
        assert held.progress == told

    on_node(url, tmp_path, test)


def test_previews_of_items_are_published_in_order(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy(kind=CallKind.GENERATOR)
        worker = await node.worker(revision)
        invocation = (await node.submit(revision, is_live=True)).id
        run, _ = await worker.run()
        assert (run.is_live, run.stream) == (True, False)
        heard: asyncio.Queue[bytes] = asyncio.Queue()
        node.bus.subscribe(subjects.live_items(invocation), lambda message: heard.put_nowait(message.payload))
        await node.bus.flush()
        for number, body in enumerate((b"1", b"2")):
            worker.send(frames.LiveItem(run.attempt, number, "application/json"), body)
        unpack: Unpacker[ItemReply] = Unpacker(ItemReply)
        got = [unpack(await heard.get()) for _ in range(2)]
        assert [(item.number, bytes(body)) for item, body in got] == [(0, b"1"), (1, b"2")]

    on_node(url, tmp_path, test)


def test_the_worker_receives_the_end_of_its_call(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy(timeout_s=50.0)
        worker = await node.worker(revision)
        before = node.clock.time()
        node.invoke(revision, timeout_s=20.0)
        run, _ = await worker.run()
        assert before + 19.9 <= run.deadline <= node.clock.time() + 20.0
        worker.answer(run)
        await node.submit(revision)
        run, _ = await worker.run()
        assert before + 50.0 <= run.deadline <= node.clock.time() + 50.0

    on_node(url, tmp_path, test)
