"""Each start of user code has a number of its own, and a record of the place and reason of the start."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpufn_core.domain.invocation import InvocationState, OutcomeKind, StartReason
from gpufn_core.domain.worker import Exit
from gpufn_core.errors import DeviceFailed, ErrorInfo, PlatformStopping, WorkerLost
from gpufn_core.protocol import frames, subjects
from gpufn_core.protocol.messages import InvocationMessage
from gpufn_core.protocol.records import CallRecord, StartNote
from gpufn_core.spec.function_spec import Retry
from gpufn_platform.queue.records import call_records, start_notes
from gpufn_runtime.runner.core import machine
from gpufn_runtime.runner.core.start_numbers import adopted, interrupted, next_start
from tests.runtime.runner.node import NODE, RETRY_AT_ONCE, FakeWorker, Node, on_node
from tests.taking import take

NO = ErrorInfo("function_raised", "no", error_type="ValueError", error_bases=("ValueError",))
MESSAGE = InvocationMessage("i", "f", 1, "", "", "", "", 0.0)
NOTE = StartNote(
    seq=7, delivered=1, attempt=1, reason=StartReason.FIRST, node="n1", worker="w-1", started_at=5.0
)  # fmt: skip


async def ended(node: Node, invocation: str) -> CallRecord:
    return (await call_records.wait(node.bus, invocation, 10))[0]


def attempts_of(record: CallRecord) -> list[tuple[int, OutcomeKind, StartReason | None, str]]:
    return [(each.number, each.outcome, each.reason, each.node) for each in record.attempts]


async def noted(node: Node, invocation: str) -> StartNote:
    while (note := await start_notes.last(node.bus, invocation)) is None:
        pass
    return note


async def no_note_is_left(node: Node) -> None:
    while (await node.bus.js(f"STREAM.INFO.{subjects.CHECKPOINTS}"))["state"]["messages"]:
        pass


def fail(worker: FakeWorker, run: frames.Run) -> None:
    worker.send(frames.Result(run.attempt, OutcomeKind.RAISED, NO, "", 0.001))


@pytest.mark.parametrize(
    ("note", "unknown", "number", "reason"),
    [
        (None, 0, 1, StartReason.FIRST),
        (None, 2, 3, StartReason.RUNNER_LOST),
        (NOTE, 0, 2, StartReason.RUNNER_LOST),
        (NOTE, 1, 3, StartReason.RUNNER_LOST),
    ],
)
def test_a_start_is_numbered_behind_all_that_may_have_been(
    note: StartNote | None, unknown: int, number: int, reason: StartReason
) -> None:
    message, why = next_start(MESSAGE, note, unknown, 9.0)
    assert (message.attempt, why) == (number, reason)
    assert message.attempts == (() if note is None else (interrupted(NOTE, 9.0),))


@pytest.mark.parametrize(("claimed", "number"), [(0, 1), (2, 2), (1000, 3)])
def test_a_reported_number_of_a_worker_is_limited_by_the_count_of_the_bus(claimed: int, number: int) -> None:
    assert adopted(MESSAGE, None, claimed, 3)[0].attempt == number


def test_a_start_after_a_runner_that_died_has_a_number_of_its_own(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("again")
        call = await node.submit(revision)
        [delivery] = await take(node.bus, "again")
        delivery.nak(has_begun=True)
        worker = await node.worker(revision)
        run, _ = await worker.run()
        assert run.number == 2
        assert (await noted(node, call.id)).attempt == 2
        worker.answer(run)
        record = await ended(node, call.id)
        assert (record.attempt, record.state) == (2, InvocationState.SUCCEEDED)
        assert attempts_of(record) == [(2, OutcomeKind.SUCCEEDED, StartReason.RUNNER_LOST, NODE)]
        await no_note_is_left(node)

    on_node(url, tmp_path, test)


def test_the_start_that_died_with_its_node_is_in_the_record(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("noted")
        call = await node.submit(revision)
        [delivery] = await take(node.bus, "noted")
        note = StartNote(
            seq=delivery.seq, delivered=1, attempt=1, reason=StartReason.FIRST, node="n9", worker="w-9", started_at=5.0
        )
        await start_notes.store(node.bus, call.id, note)
        delivery.nak(has_begun=True)
        worker = await node.worker(revision)
        run, _ = await worker.run()
        worker.answer(run)
        record = await ended(node, call.id)
        assert attempts_of(record) == [
            (1, OutcomeKind.LOST, StartReason.FIRST, "n9"),
            (2, OutcomeKind.SUCCEEDED, StartReason.RUNNER_LOST, NODE),
        ]
        assert (record.attempts[0].started_at, record.attempts[0].worker) == (5.0, "w-9")
        assert record.attempts[0].code == WorkerLost.code

    on_node(url, tmp_path, test)


def test_a_start_that_lasts_is_noted_until_it_ends(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "NOTED_AFTER_S", 0.0)

    async def test(node: Node) -> None:
        revision = await node.deploy("lasts")
        worker = await node.worker(revision)
        call = await node.submit(revision)
        run, _ = await worker.run()
        note = await noted(node, call.id)
        assert (note.attempt, note.delivered, note.reason, note.node, note.worker) == (
            1, 1, StartReason.FIRST, NODE, "w-1"
        )  # fmt: skip
        worker.answer(run)
        assert attempts_of(await ended(node, call.id)) == [(1, OutcomeKind.SUCCEEDED, StartReason.FIRST, NODE)]
        await no_note_is_left(node)

    on_node(url, tmp_path, test)


def test_a_hand_over_that_started_nothing_is_no_attempt(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("unstarted", retries=Retry(1, delay_s=0.3))
        worker = await node.worker(revision)
        call = await node.submit(revision)
        fail(worker, (await worker.run())[0])
        again, _ = await worker.run()  # its message arrived too early and was handed back
        assert again.number == 2
        worker.answer(again)
        assert attempts_of(await ended(node, call.id)) == [
            (1, OutcomeKind.RAISED, StartReason.FIRST, NODE),
            (2, OutcomeKind.SUCCEEDED, StartReason.RAISED, NODE),
        ]

    on_node(url, tmp_path, test)


def test_starts_that_the_platform_repeats_use_up_no_retry(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("policy", retries=RETRY_AT_ONCE)
        call = await node.submit(revision)
        [delivery] = await take(node.bus, "policy")
        delivery.nak(has_begun=True)
        worker = await node.worker(revision)
        numbers = []
        for _ in range(2):
            run, _ = await worker.run()
            numbers.append(run.number)
            fail(worker, run)
        record = await ended(node, call.id)
        assert (numbers, record.state, record.attempt) == ([2, 3], InvocationState.FAILED, 3)
        await no_note_is_left(node)

    on_node(url, tmp_path, test)


def test_an_item_of_a_map_is_numbered_as_any_other_call(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("items")
        item = f"{'0' * 26}-0"
        call = await node.submit(revision, invocation=item)
        [delivery] = await take(node.bus, "items")
        delivery.nak(has_begun=True)
        worker = await node.worker(revision)
        run, _ = await worker.run()
        assert (run.invocation, run.number) == (item, 2)
        worker.answer(run)
        assert (await ended(node, call.id)).attempt == 2

    on_node(url, tmp_path, test)


def test_a_waiting_caller_receives_the_number_of_the_attempt_that_answered(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("waits")
        call = node.invoke(revision)
        [delivery] = await take(node.bus, "waits", is_sync=True)
        delivery.nak(has_begun=True)
        worker = await node.worker(revision)
        run, _ = await worker.run()
        worker.answer(run)
        assert (run.number, (await call.future)[0].attempt) == (2, 2)

    on_node(url, tmp_path, test)


@pytest.mark.parametrize(
    ("error", "end", "reason"),
    [
        (DeviceFailed, Exit(signal=9, device_fault="GPU-1 fell off"), StartReason.DEVICE_FAILED),
        (PlatformStopping, Exit(signal=9, stopping=True), StartReason.STOPPED),
    ],
)
def test_an_interrupted_call_runs_again_with_the_reason(
    url: str, tmp_path: Path, error: type[Exception], end: Exit, reason: StartReason
) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("interrupted")
        first = await node.worker(revision, "w-1")
        call = await node.submit(revision)
        await first.run()
        first.die()
        await node.reap("interrupted", end)
        second = await node.worker(revision, "w-2")
        run, _ = await second.run()
        assert run.number == 2
        second.answer(run)
        record = await ended(node, call.id)
        assert attempts_of(record) == [
            (1, OutcomeKind.LOST, StartReason.FIRST, NODE),
            (2, OutcomeKind.SUCCEEDED, reason, NODE),
        ]
        assert record.attempts[0].code == error.code  # type: ignore[attr-defined]
        await no_note_is_left(node)

    on_node(url, tmp_path, test)


def test_an_interrupted_call_runs_again_for_its_waiting_caller(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("moved")
        first = await node.worker(revision, "w-1")
        call = node.invoke(revision)
        await first.run()
        first.die()
        await node.reap("moved", Exit(signal=9, stopping=True))
        second = await node.worker(revision, "w-2")
        run, _ = await second.run()
        second.answer(run)
        assert (run.number, (await call.future)[0].attempt) == (2, 2)

    on_node(url, tmp_path, test)


def test_a_call_that_expires_after_an_interruption_names_it(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("late")
        call = await call_records.submit(
            node.bus, node.request(revision, timeout_s=5.0), now=node.clock.time(), invocation="0" * 26
        )
        first = await node.worker(revision, "w-1")
        await first.run()
        first.die()
        await node.reap("late", Exit(signal=9, stopping=True))
        while (note := await noted(node, call.id)).interrupted is None:
            pass
        node.clock.ahead_s = 10.0
        await node.worker(revision, "w-2")
        record = await ended(node, call.id)
        assert (record.state, record.attempt) == (InvocationState.EXPIRED, 1)
        assert attempts_of(record) == [(1, OutcomeKind.LOST, StartReason.FIRST, NODE)]
        assert note.interrupted is StartReason.STOPPED
        await no_note_is_left(node)

    on_node(url, tmp_path, test)
