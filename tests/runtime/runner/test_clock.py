"""Jumps of the wall clock while the runner works do not affect the durations that it measures."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from gpufn_core.domain.invocation import OutcomeKind
from gpufn_core.domain.worker import WorkerState
from gpufn_core.errors import InvocationExpired
from gpufn_core.protocol import frames, subjects
from gpufn_core.protocol.messages import LogLine
from gpufn_core.protocol.reports import RunnerReport, WorkerReport
from gpufn_platform.bus.storage import streams
from gpufn_runtime.runner.dispatch import pull_credits
from tests.runtime.runner.node import Node, on_node

_HOURS_S = 3 * 3600.0


async def next_reports(node: Node, count: int) -> RunnerReport:
    """Wait for some seconds: the runner reports each second."""
    while not node.reports.empty():
        node.reports.get_nowait()
    for _ in range(count):
        report = await node.reports.get()
    return report


@pytest.mark.parametrize("by_s", [_HOURS_S, -_HOURS_S])
def test_calls_and_workers_stay_when_the_clock_is_set(url: str, tmp_path: Path, by_s: float) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("set", concurrency=2)
        worker = await node.worker(revision, "w-1")
        await node.assign(revision, "w-2")
        call = node.invoke(revision)
        run, body = await worker.run()
        logged: list[LogLine] = []
        node.bus.subscribe(
            subjects.logs("set"),
            lambda message: logged.append(msgspec.msgpack.decode(message.payload, type=LogLine)),
        )
        worker.send(frames.Log(run.attempt, "stdout"), b"before")
        await next_reports(node, 1)
        node.clock.ahead_s += by_s
        worker.send(frames.Log(run.attempt, "stdout"), b"after")
        node.caller.tick(node.clock.monotonic())
        report = await next_reports(node, 2)
        assert {known.worker: known.state for known in report.workers} == {
            "w-1": WorkerState.READY,
            "w-2": WorkerState.STARTING,
        }
        assert [line.text for line in logged] == ["before", "after"]
        worker.answer(run, body)
        reply, _ = await call.future
        assert reply.kind is OutcomeKind.SUCCEEDED
        assert reply.run_s < 30
        report = await next_reports(node, 1)
        assert 0 <= report.sent_at - idle_since(report.workers[0]) < 30
        again = node.invoke(revision)
        await worker.echo(1)
        assert (await again.future)[0].kind is OutcomeKind.SUCCEEDED

    on_node(url, tmp_path, test)


def test_a_paused_runner_reads_pending_messages_before_it_ends_calls_and_workers(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("stood-still", timeout_s=5.0, startup_timeout_s=5.0)
        await node.assign(revision, "w-1")
        worker = await node.connect("w-1")
        worker.ready()
        node.clock.skipped_s += 60
        node.serving.step(node.clock.monotonic())
        call = node.invoke(revision, timeout_s=600)
        run, body = await worker.run()
        worker.answer(run, body)
        node.clock.skipped_s += 60
        for queue in node.serving._queues.values():
            queue._on_timer()
        assert (await call.future)[0].kind is OutcomeKind.SUCCEEDED

    on_node(url, tmp_path, test)


def test_a_call_that_runs_too_long_ends_though_the_clock_was_set_back(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("set-back", timeout_s=0.2)
        worker = await node.worker(revision)
        call = node.invoke(revision)
        await worker.run()
        node.clock.ahead_s -= _HOURS_S
        assert (await call.future)[0].kind is OutcomeKind.TIMED_OUT

    on_node(url, tmp_path, test)


def test_a_call_without_a_worker_expires_although_the_clock_was_set_back(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("nobody")
        call = node.invoke(revision, timeout_s=30)
        node.clock.ahead_s -= _HOURS_S
        node.caller.tick(node.clock.monotonic() + 32)
        with pytest.raises(InvocationExpired):
            await call.future

    on_node(url, tmp_path, test)


def idle_since(worker: WorkerReport) -> float:
    assert worker.idle_since is not None
    return worker.idle_since


def test_a_call_that_the_server_hands_over_again_while_it_runs_runs_once(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server whose clock is set forward considers `ack_wait` expired."""
    monkeypatch.setattr(pull_credits, "ACK_WAIT_S", 0.1)

    async def test(node: Node) -> None:
        revision = await node.deploy("once", concurrency=3)
        worker = await node.worker(revision)
        call = node.invoke(revision, b"1")
        run, _ = await worker.run()
        consumer = f"CONSUMER.INFO.{subjects.SYNC}.{subjects.sync_consumer('once', 1)}"
        while (await node.bus.js(consumer))["delivered"]["consumer_seq"] < 3:
            pass
        other = node.invoke(revision, b"2")
        assert (await worker.run())[1] == b"2", "nothing else was started meanwhile"
        worker.answer(run)
        assert (await call.future)[0].kind is OutcomeKind.SUCCEEDED
        while (await streams.messages_per_subject(node.bus, subjects.SYNC))[subjects.sync_queue("once", 1)] > 1:
            pass
        assert not other.future.done()

    on_node(url, tmp_path, test)
