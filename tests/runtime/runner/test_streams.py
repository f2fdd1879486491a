"""Streams: items in order, within the reader's credit."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gpufn_core.domain.invocation import OutcomeKind
from gpufn_core.protocol import frames
from gpufn_core.protocol.streams.stream_window import STREAM_WINDOW, WINDOW_BYTES
from gpufn_core.spec.function_spec import CallKind
from gpufn_runtime.runner.core.attempt import Execution
from tests.runtime.runner.node import Node, on_node


def test_items_of_a_stream_arrive_in_order_and_reading_returns_credit(url: str, tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("credits", "granted"),
    [
        ([], []),
        ([32, 64], [32, 32]),
        ([32, 32, 64], [32, 0, 32]),  # one arrived twice
        ([64, 32], [64, 0]),  # one was lost or late
        ([1000], [STREAM_WINDOW]),  # no more than these were sent
    ],
)
def test_credit_has_the_total_that_was_read(credits: list[int], granted: list[int]) -> None:  # noqa: A002
    run = Execution(started_at=0.0, began=0.0, must_end_at=0.0, is_cold=False, busy_from=0.0)
    assert run.grant(5) == 0, "it is no stream"
    run.granted = run.items = STREAM_WINDOW
    assert [run.grant(taken) for taken in credits] == granted


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


def test_unread_items_of_a_stream_have_few_bytes(url: str, tmp_path: Path) -> None:
    """Bug: 64 unread items of 7 MiB waited in the gateway's memory, for each client that read nothing."""

    async def test(node: Node) -> None:
        revision = await node.deploy("greedy", kind=CallKind.GENERATOR)
        worker = await node.worker(revision)
        stream = node.caller.open_stream(node.request(revision))
        run, _ = await worker.run()
        for _ in range(3):
            worker.send(frames.Item(run.attempt, "application/json"), bytes(WINDOW_BYTES // 2))
        assert (await node.kills.get()).worker == "w-1"
        stream.cancel()

    on_node(url, tmp_path, test)
