"""GPU time that calls are charged, and its storage."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpufn_core.domain.devices.device import DeviceShare, Share
from gpufn_core.domain.devices.device_metrics import DeviceMetrics
from gpufn_core.domain.invocation import OutcomeKind
from gpufn_core.domain.usage import USAGE_RETENTION_S, Usage
from gpufn_core.errors import BusUnavailable, DeviceFailed
from gpufn_core.protocol import frames, subjects
from gpufn_core.protocol.codec import encode
from gpufn_core.protocol.messages import InvocationMessage
from gpufn_core.protocol.records import CallRecord
from gpufn_core.protocol.reports import DeviceReport
from gpufn_core.spec.function_spec import Batch, Retry
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage.key_value import KeyValue
from gpufn_platform.queue.records import call_records as records
from gpufn_runtime.runner.attempts import settle
from gpufn_runtime.runner.attempts.metering import Meter
from gpufn_runtime.runner.core.busy_time import BusyTime
from tests.runtime.runner.node import NODE, Node, SettableClock, on_node
from tests.runtime.runner.test_durable import ended

QUARTER = DeviceShare("cpu", 0.1, 1, ("GPU-1",), Share.MPS, 6 << 30, 25, gpu_part=0.25)
TWO = DeviceShare("cpu", 0.1, 1, ("GPU-1", "GPU-2"))


@pytest.mark.parametrize(
    ("spans", "each"),
    [
        ([(0, 2)], [2]),
        ([(0, 2), (0, 2)], [1, 1]),
        ([(0, 3), (1, 4)], [2, 2]),
        ([(0, 9), (1, 2), (3, 5)], [7.5, 0.5, 1]),
        ([(0, 1), (5, 6)], [1, 1]),
    ],
)
def test_the_time_of_a_worker_is_shared_out_among_the_calls_that_it_runs(
    spans: list[tuple[float, float]], each: list[float]
) -> None:
    time = BusyTime()
    begun: dict[int, float] = {}
    took: dict[int, float] = {}
    for at in sorted({at for span in spans for at in span}):
        for number, (_, last) in enumerate(spans):
            if last == at:
                took[number] = time.end(begun[number], at)
        for number, (first, _) in enumerate(spans):
            if first == at:
                begun[number] = time.begin(at)
    assert [took[number] for number in range(len(spans))] == each


def test_a_call_is_charged_its_workers_part_of_its_gpus_while_it_runs(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        for name, share, charged in (("quarter", QUARTER, 0.25), ("two", TWO, 2.0)):
            revision = await node.deploy(name)
            worker = await node.worker(revision, f"w-{name}", share=share)
            call = node.invoke(revision)
            run, _ = await worker.run()
            worker.answer(run)
            reply, _ = await call.future
            assert reply.gpu_s == pytest.approx(charged * reply.run_s)
            assert reply.gpu_s > 0
            report = await node.reports.get()
            while not any(each.gpu_seconds for each in report.traffic if each.function == name):
                report = await node.reports.get()

    on_node(url, tmp_path, test)


def test_figures_of_calls_that_end_with_the_last_worker_of_a_revision_are_reported(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("last")
        worker = await node.worker(revision)
        call = node.invoke(revision)
        await worker.run()
        await node.unassign("w-1")
        await node.reap("last")
        assert (await call.future)[0].kind is OutcomeKind.LOST
        told = [await node.reports.get()]
        while told[-1].traffic or not any(report.traffic for report in told):
            told.append(await node.reports.get())
        (traffic,) = [report for report in told if report.traffic][-1].traffic
        assert (traffic.ended, traffic.failed) == (1, 1)

    on_node(url, tmp_path, test)


def test_the_attempts_of_a_submitted_call_are_charged_except_after_a_gpu_failure(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("tried", retries=Retry(1, delay_s=0.0))
        worker = await node.worker(revision, share=TWO)
        record = await node.submit(revision)
        run, _ = await worker.run()
        lost = DeviceFailed("the GPU failed").info()
        worker.send(frames.Result(run.attempt, OutcomeKind.LOST, lost, "", 0.001))
        run, _ = await worker.run()
        worker.send(frames.Result(run.attempt, OutcomeKind.RAISED, None, "", 0.001))
        run, _ = await worker.run()
        worker.answer(run)
        last = await ended(node, record.id)
        failed, raised, succeeded = last.attempts
        assert failed.gpu_s == 0
        assert succeeded.gpu_s == pytest.approx(2 * (last.run_s or 0.0))
        assert last.gpu_s == pytest.approx(raised.gpu_s + succeeded.gpu_s) != succeeded.gpu_s

    on_node(url, tmp_path, test)


def test_attempts_missing_in_a_record_are_charged(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settle, "MAX_ATTEMPT_RECORDS", 1)

    async def queued_again(node: Node, invocation: str, attempt: int) -> CallRecord:
        while (found := await records.read(node.bus, invocation)) is None or found[0].attempt < attempt:
            pass
        return found[0]

    async def test(node: Node) -> None:
        revision = await node.deploy("often", retries=Retry(2, delay_s=0.0))
        worker = await node.worker(revision, share=TWO)
        record = await node.submit(revision)
        spent: list[float] = []
        for attempt in (2, 3):
            run, _ = await worker.run()
            worker.send(frames.Result(run.attempt, OutcomeKind.RAISED, None, "", 0.001))
            told = await queued_again(node, record.id, attempt)
            spent.append(told.attempts[-1].gpu_s)
            assert told.gpu_s == pytest.approx(sum(spent))
        run, _ = await worker.run()
        worker.answer(run)
        last = await ended(node, record.id)
        assert [each.number for each in last.attempts] == [3]
        assert last.gpu_s == pytest.approx(sum(spent) + last.attempts[0].gpu_s)

    on_node(url, tmp_path, test)


@pytest.fixture
def charged(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the seconds charged to each attempt, in the order of their ends."""
    seconds: list[float] = []

    def count(meter: Meter, message: InvocationMessage, *, is_failed: bool, run_s: float, gpu_s: float) -> None:
        seconds.append(run_s)

    monkeypatch.setattr(Meter, "count", count)
    return seconds


def test_members_of_a_batch_are_charged_their_parts_and_report_their_gathering_time(
    url: str, tmp_path: Path, charged: list[float]
) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("batched", batch=Batch(max_size=2))
        worker = await node.worker(revision)
        calls = [node.invoke(revision), node.invoke(revision)]
        runs = [(await worker.run())[0] for _ in calls]
        for run in runs:
            worker.send(
                frames.Result(run.attempt, OutcomeKind.SUCCEEDED, None, "application/json", 2e-9, "", 1e-9), b"1"
            )
        replies = [(await call.future)[0] for call in calls]
        assert [reply.run_s for reply in replies] == [2e-9, 2e-9]
        assert all(reply.gather_s > 0 for reply in replies)
        assert charged == [1e-9, 1e-9]

    on_node(url, tmp_path, test)


@pytest.mark.parametrize("kind", [OutcomeKind.SUCCEEDED, OutcomeKind.RAISED])
def test_the_usage_counts_failures(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: OutcomeKind
) -> None:
    counted: list[bool] = []
    monkeypatch.setattr(Meter, "count", lambda *_, is_failed, **__: counted.append(is_failed))

    async def test(node: Node) -> None:
        revision = await node.deploy("counted")
        worker = await node.worker(revision)
        call = node.invoke(revision)
        (run, _) = await worker.run()
        worker.send(frames.Result(run.attempt, kind, None, "application/json", 0.0))
        await call.future

    on_node(url, tmp_path, test)
    assert counted == [kind is OutcomeKind.RAISED]


def test_members_of_a_batch_whose_worker_died_are_charged_their_parts_of_its_time(
    url: str, tmp_path: Path, charged: list[float]
) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("died", batch=Batch(max_size=2))
        worker = await node.worker(revision)
        calls = [node.invoke(revision), node.invoke(revision)]
        for _ in calls:
            await worker.run()
        await node.unassign("w-1")
        await node.reap("died")
        replies = [(await call.future)[0] for call in calls]
        assert len(charged) == len(replies)
        assert sum(charged) <= max(reply.run_s for reply in replies)

    on_node(url, tmp_path, test)


def test_the_energy_of_its_gpus_is_counted_for_a_call(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        async def sample(**joules: float) -> None:
            metrics = tuple(DeviceMetrics(uuid=f"GPU-{name}", energy_joules=each) for name, each in joules.items())
            node.bus.publish(subjects.device_report(NODE), encode(DeviceReport(NODE, 0.0, metrics)))
            await node.bus.flush()

        revision = await node.deploy("heated")
        worker = await node.worker(revision, share=TWO)
        await sample(**{"1": 1000.0, "2": 500.0})
        calls = [node.invoke(revision), node.invoke(revision)]
        for _ in calls:
            worker.answer((await worker.run())[0])
        for call in calls:
            await call.future
        await sample(**{"1": 1300.0, "2": 600.0})
        await node.stop()
        (usage,) = (await _stored(node.usage, "heated")).values()
        assert (usage.calls, usage.joules_calls) == (2, 2)
        assert usage.joules == pytest.approx(400.0)

    on_node(url, tmp_path, test)


# --- records ----------------------------------------------------------------------------------------------------------


def _message(function: str, owner: str = subjects.PLATFORM) -> InvocationMessage:
    return InvocationMessage("i", function, 1, "", "", "", "", 0.0, owner=owner)


async def _stored(records: KeyValue, function: str) -> dict[str, Usage]:
    entries = await records.entries()
    return {
        entry.key.split(".", 1)[1]: msgspec.msgpack.decode(entry.value, type=Usage)
        for entry in entries
        if f".{function}." in entry.key
    }


def _on_bus(url: str, test: Any) -> None:
    async def main() -> None:
        bus = await Bus.connect(url, name="test")
        try:
            await test(await KeyValue.open(bus, subjects.USAGE, ttl_s=USAGE_RETENTION_S))
        finally:
            await bus.close()

    asyncio.run(main())


def test_usage_is_added_up_per_function_and_key_by_all_runners_of_a_node(url: str) -> None:
    async def test(records: KeyValue) -> None:
        first, second = (Meter(records, NODE, SettableClock()) for _ in range(2))
        first.count(_message("added"), is_failed=False, run_s=1.0, gpu_s=0.5)
        first.count(_message("added"), is_failed=True, run_s=1.0, gpu_s=0.0)
        first.count(_message("added", "k1"), is_failed=False, run_s=3.0, gpu_s=3.0)
        await first.store()
        second.count(_message("added"), is_failed=False, run_s=2.0, gpu_s=0.25)
        await asyncio.gather(first.store(), second.store())
        assert await _stored(records, "added") == {
            f"added.platform.{NODE}": Usage(3, 1, 4.0, 0.75),
            f"added.k1.{NODE}": Usage(1, 0, 3.0, 3.0),
        }

    _on_bus(url, test)


@pytest.mark.parametrize("was_stored", [False, True])
def test_usage_sent_while_the_bus_disconnects_is_counted_once(url: str, was_stored: bool) -> None:
    async def test(records: KeyValue) -> None:
        class Losing(KeyValue):
            """The reply to the write never arrives."""

            async def create(self, key: str, value: bytes, **options: Any) -> int:
                if was_stored:
                    await records.create(key, value)
                raise BusUnavailable("no answer")

        name = f"once-{was_stored}".lower()
        meter = Meter(Losing(records.bus, records.bucket, {}), NODE, SettableClock())
        meter.count(_message(name), is_failed=False, run_s=1.0, gpu_s=1.0)
        await meter.store()
        meter.count(_message(name), is_failed=False, run_s=2.0, gpu_s=2.0)
        meter._records = records
        await meter.store()
        assert await _stored(records, name) == {f"{name}.platform.{NODE}": Usage(2, 0, 3.0, 3.0)}

    _on_bus(url, test)
