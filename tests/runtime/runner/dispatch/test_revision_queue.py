"""The edge of the state machine: actions and lookups that fail, the timer, and what is kept of ended calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpufn_core.domain.invocation import InvocationState, OutcomeKind
from gpufn_core.domain.worker import Exit
from gpufn_core.errors import ErrorInfo
from gpufn_core.protocol import frames
from gpufn_platform.queue.records import call_records
from gpufn_runtime.runner.attempts.settle import Settler
from gpufn_runtime.runner.core import machine
from gpufn_runtime.runner.recovery.abandoned_calls import AbandonedCalls
from tests.runtime.runner.node import RETRY_AT_ONCE, Node, on_node
from tests.waiting import until_async

RAISED = ErrorInfo("function_raised", "no")


def test_an_action_that_fails_stops_no_other_and_its_log_has_no_arguments(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settle = Settler.settle

    def fail(*_: Any, **__: Any) -> None:
        monkeypatch.setattr(Settler, "settle", settle)
        raise ValueError("a bug")

    async def test(node: Node) -> None:
        revision = await node.deploy("f")
        worker = await node.worker(revision)
        monkeypatch.setattr(Settler, "settle", fail)
        node.invoke(revision, b'"a secret"')
        worker.answer((await worker.run())[0], b'"a secret"')
        second = node.invoke(revision, b"2")
        await worker.echo(1)
        assert (await second.future)[1] == b"2"

    on_node(url, tmp_path, test)
    assert "cannot execute Settle" in caplog.text
    assert "a bug" in caplog.text
    assert "a secret" not in caplog.text


def fail_once(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> None:
    """Make the module's function fail at the next call."""
    function = getattr(module, name)

    async def fail(*_: Any, **__: Any) -> None:
        monkeypatch.setattr(module, name, function)
        raise ValueError("a bug")

    monkeypatch.setattr(module, name, fail)


def test_a_call_whose_lookup_fails_returns_to_its_queue(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "ACK_WAIT_S", 0.05)

    async def test(node: Node) -> None:
        revision = await node.deploy("f", retries=RETRY_AT_ONCE)
        worker = await node.worker(revision)
        call = await node.submit(revision)
        run, _ = await worker.run()
        fail_once(monkeypatch, call_records, "record_of")
        worker.send(frames.Result(run.attempt, OutcomeKind.RAISED, RAISED, "", 0.001))
        again, _ = await worker.run()
        assert again.number == 2
        worker.answer(again)
        assert (await call_records.wait(node.bus, call.id, 10))[0].state is InvocationState.SUCCEEDED

    on_node(url, tmp_path, test)


@pytest.mark.parametrize("step", ["locate", "is_waited_for"])
def test_a_call_whose_caller_cannot_be_looked_up_returns_to_its_queue(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("f")
        worker = await node.worker(revision)
        call = node.invoke(revision)
        await worker.run()
        fail_once(monkeypatch, *((call_records, step) if step == "locate" else (AbandonedCalls, step)))
        worker.die()
        await node.reap("f", Exit(signal=9, stopping=True))
        other = await node.worker(revision, "w-2")
        await other.echo(1)
        assert (await call.future)[0].kind is OutcomeKind.SUCCEEDED

    on_node(url, tmp_path, test)


def test_the_timer_stops_and_the_backlog_opens_when_nothing_runs_any_longer(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("f")
        worker = await node.worker(revision)
        call = node.invoke(revision)
        run, _ = await worker.run()
        queue = node.serving._queues.get(revision.key)
        assert queue is not None
        while not queue._capacity.backlog.is_closed:  # a call runs for long
            await node.reports.get()
        worker.answer(run)
        await call.future
        while queue._timer is not None:
            await node.reports.get()
        assert not queue._capacity.backlog.is_closed

    on_node(url, tmp_path, test)


def is_noted(node: Node) -> bool:
    """Return whether the start of a running attempt is stored."""
    notes = node.serving._start_log._notes.values()
    return bool(notes) and all(storing.done() for storing in notes)


@pytest.mark.parametrize(
    "exit_", [Exit(signal=9), Exit(signal=9, stopping=True), Exit(signal=9, device_fault="Xid 79")]
)
def test_nothing_is_kept_of_calls_that_have_ended(url: str, tmp_path: Path, exit_: Exit) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("f", retries=RETRY_AT_ONCE, concurrency=2)
        worker = await node.worker(revision)
        call = await node.submit(revision)
        await worker.run()
        await until_async(lambda: is_noted(node))
        worker.die()
        await node.reap("f", exit_)
        other = await node.worker(revision, "w-2")
        run, _ = await other.run()
        assert run.number == 2
        waited = node.invoke(revision, b"2")
        await other.echo(1)
        await until_async(lambda: is_noted(node))
        other.answer(run)
        await waited.future
        record, _ = await call_records.wait(node.bus, call.id, 10)
        assert record.state is InvocationState.SUCCEEDED
        queue = node.serving._queues.get(revision.key)
        assert queue is not None
        while queue._timer is not None or node.serving._settler.unsettled or node.serving._start_log._notes:
            await node.reports.get()
        machine = queue._machine
        assert (dict(node.serving._attempts), dict(machine._unbegun), machine._lost_workers.losses) == (
            {},
            {},
            {},
        )

    on_node(url, tmp_path, test)
