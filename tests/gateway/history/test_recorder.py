"""Recording on a real bus: changes of the leader, restarts, and disks that are full or damaged."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gpufn_core.domain.invocation import OutcomeKind
from gpufn_core.errors import BusUnavailable, RateLimited
from gpufn_core.ids import new_ulid
from gpufn_core.protocol import subjects
from gpufn_core.protocol.messages import ResultReply
from gpufn_gateway.auth.access import Access
from gpufn_gateway.functions.registry import Registry
from gpufn_gateway.history.blocks import HOUR, MINUTE, SECONDS_10
from gpufn_gateway.history.collector import OVERVIEW
from gpufn_gateway.history.fields import Field
from gpufn_gateway.history.index import Index
from gpufn_gateway.history.recorder import Recorder
from gpufn_gateway.history.sampler import Sampler
from gpufn_gateway.metrics.telemetry import Telemetry
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import streams
from tests.gateway.whole import DIGEST, gateway_on

_START = 1_795_000_000 // HOUR * HOUR + 0.5


class FakeClock:
    def __init__(self) -> None:
        self.now = _START
        self.elapsed = 1000.0

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.elapsed

    def advance(self, seconds: float = 1.0) -> None:
        self.now += seconds
        self.elapsed += seconds


class Gateway:
    def __init__(self, bus: Bus, clock: FakeClock, folder: Path, name: str, *, leads: bool) -> None:
        name = f"{name}-{new_ulid()}"  # the bus of all tests drops messages that it has had
        registry = Registry(clock, Access(loopback=True, now=clock.time))
        self.clock = clock
        self.telemetry = Telemetry(lambda: 0)
        self.sampler = Sampler(bus, registry, self.telemetry, clock, name)
        self.recorder = Recorder(bus, self.sampler, clock, name=name, folder=folder)
        self.is_leader = leads
        self.recorder.leads = lambda: self.is_leader
        self.sampler.listen()

    def call(self) -> None:
        reply = ResultReply("i", OutcomeKind.SUCCEEDED, None, "", 1, 1, 0.0, 0.01)
        self.telemetry.of("f").count_end(reply, 0.05, self.clock.now)

    async def latencies(self, resolution: int) -> dict[int, int]:
        """Return the number of calls by slot, and 0 for those that were recorded without any."""

        def read(index: Index) -> dict[int, int]:
            first, last = int(_START) // resolution, int(self.clock.now) // resolution
            found = index.read(resolution, first, last, [OVERVIEW])
            return {
                slot - first: sum(points[OVERVIEW].get(Field.LATENCY, {}).values()) for slot, points in found.items()
            }

        return await self.recorder.query(read)


@contextlib.asynccontextmanager
async def empty(nats: Any) -> AsyncIterator[Bus]:
    """Connect to a bus without a history."""
    bus = await Bus.connect(nats.url, name="gateway")
    await streams.ensure_streams(bus)
    await streams.purge(bus, subjects.HISTORY, subjects.HISTORY_FILTER)
    try:
        yield bus
    finally:
        await bus.close()


async def pass_seconds(clock: FakeClock, count: int, *gateways: Gateway, calls: int = 0) -> None:
    for _ in range(count):
        clock.advance()
        for gateway in gateways:
            for _ in range(calls):
                gateway.call()
            gateway.sampler.sample()
        await asyncio.sleep(0)  # parts of other gateways
        for gateway in gateways:
            await gateway.recorder.store()


@contextlib.asynccontextmanager
async def closing(*gateways: Gateway) -> AsyncIterator[None]:
    try:
        yield
    finally:
        for gateway in gateways:
            await gateway.recorder.close()


async def test_a_new_leader_leaves_no_gap_and_counts_no_call_twice(nats: Any, tmp_path: Path) -> None:
    async with empty(nats) as bus:
        clock = FakeClock()
        first = Gateway(bus, clock, tmp_path / "a", "gw-1", leads=True)
        second = Gateway(bus, clock, tmp_path / "b", "gw-2", leads=False)
        async with closing(first, second):
            await pass_seconds(clock, 35, first, second, calls=1)
            first.is_leader = False  # killed: it sends no more messages
            await pass_seconds(clock, 5, second, calls=1)  # until the lease expires
            second.is_leader = True
            await pass_seconds(clock, 45, second, calls=1)
            found = await second.latencies(SECONDS_10)
            minutes = await second.latencies(MINUTE)
        # The killed gateway takes the calls of its last 5 seconds with it.
        assert found == {0: 20, 1: 20, 2: 20, 3: 10, 4: 10, 5: 10, 6: 10, 7: 10}
        assert minutes == {0: 90, 1: 20}


async def test_two_leaders_at_the_same_time_store_ten_seconds_once(nats: Any, tmp_path: Path) -> None:
    async with empty(nats) as bus:
        clock = FakeClock()
        both = [Gateway(bus, clock, tmp_path / name, name, leads=True) for name in ("gw-1", "gw-2")]
        async with closing(*both):
            await pass_seconds(clock, 40, *both, calls=1)
            found = await both[0].latencies(SECONDS_10)
        assert found[1] == 20


async def test_an_orderly_restart_loses_nothing_and_a_new_machine_has_everything(nats: Any, tmp_path: Path) -> None:
    async with empty(nats) as bus:
        clock = FakeClock()
        gateway = Gateway(bus, clock, tmp_path / "a", "gw-1", leads=True)
        async with closing(gateway):
            await pass_seconds(clock, 17, gateway, calls=1)
            await gateway.recorder.flush()
        moved = Gateway(bus, clock, tmp_path / "b", "gw-2", leads=True)
        async with closing(moved):
            await pass_seconds(clock, 80, moved, calls=1)
            found = await moved.latencies(SECONDS_10)
            hours = await moved.latencies(HOUR)
        assert [found[slot] for slot in range(9)] == [10] * 9
        assert hours == {0: 90}


async def test_minutes_are_published_once_they_have_ended_and_old_seconds_are_purged(
    nats: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with empty(nats) as bus:
        monkeypatch.setattr("gpufn_gateway.history.recorder.KEPT_MESSAGES", {SECONDS_10: 3, MINUTE: 100, HOUR: 100})
        clock = FakeClock()
        gateway = Gateway(bus, clock, tmp_path / "a", "gw-1", leads=True)
        async with closing(gateway):
            await pass_seconds(clock, 150, gateway, calls=1)
            clock.elapsed += 600
            await gateway.recorder.store()
        counts = await streams.messages_per_subject(bus, subjects.HISTORY)
        assert (counts[subjects.history("10s")], counts[subjects.history("60s")]) == (3, 2)
        fresh = Gateway(bus, clock, tmp_path / "b", "gw-2", leads=False)
        async with closing(fresh):
            await fresh.recorder.store()
            assert (await fresh.latencies(MINUTE))[0] == 60


async def test_the_clock_set_back_stops_nothing(nats: Any, tmp_path: Path) -> None:
    async with empty(nats) as bus:
        clock = FakeClock()
        gateway = Gateway(bus, clock, tmp_path / "a", "gw-1", leads=True)
        async with closing(gateway):
            await pass_seconds(clock, 60, gateway, calls=1)
            clock.now -= 30
            await pass_seconds(clock, 50, gateway, calls=1)
            found = await gateway.latencies(SECONDS_10)
        assert sum(found.values()) == 100  # the last ten seconds are not stored yet
        assert max(found.values()) > 10


async def test_a_full_disk_of_the_copy_stops_no_publishing_and_is_caught_up(
    nats: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with empty(nats) as bus:
        clock = FakeClock()
        gateway = Gateway(bus, clock, tmp_path / "a", "gw-1", leads=True)
        async with closing(gateway):
            await pass_seconds(clock, 14, gateway, calls=1)
            index = gateway.recorder._index
            apply = index.apply

            def full(messages: Any) -> None:
                raise sqlite3.OperationalError("database or disk is full")

            index.apply = full  # type: ignore[method-assign]
            await pass_seconds(clock, 30, gateway, calls=1)
            assert (await streams.messages_per_subject(bus, subjects.HISTORY))[subjects.history("10s")] >= 3
            index.apply = apply  # type: ignore[method-assign]
            await pass_seconds(clock, 10, gateway, calls=1)
            found = await gateway.latencies(SECONDS_10)
        assert [found[slot] for slot in range(4)] == [10, 10, 10, 10]
        assert sum("is not recorded" in record.message for record in caplog.records) == 1


async def test_a_stream_that_cannot_be_written_delays_the_history(
    nats: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with empty(nats) as bus:
        clock = FakeClock()
        gateway = Gateway(bus, clock, tmp_path / "a", "gw-1", leads=True)
        async with closing(gateway):
            await pass_seconds(clock, 14, gateway, calls=1)

            async def full(*args: Any, **options: Any) -> None:
                raise BusUnavailable("the disk is full")

            with monkeypatch.context() as patch:
                patch.setattr(bus, "publish_stored", full)
                await pass_seconds(clock, 30, gateway, calls=1)
            await pass_seconds(clock, 10, gateway, calls=1)
            found = await gateway.latencies(SECONDS_10)
        assert [found[slot] for slot in range(4)] == [10, 10, 10, 10]


async def test_a_file_damaged_in_use_is_read_again_from_the_stream(
    nats: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with empty(nats) as bus:
        clock, folder = FakeClock(), tmp_path / "a"
        gateway = Gateway(bus, clock, folder, "gw-1", leads=True)
        async with closing(gateway):
            await pass_seconds(clock, 24, gateway, calls=1)
            await gateway.recorder._in_thread(gateway.recorder._index.close)
            (folder / "0.db").write_bytes(b"SQLite format 3\x00" + b"\xff" * 9000)
            gateway.recorder._is_open = False
            await pass_seconds(clock, 10, gateway, calls=1)
            found = await gateway.latencies(SECONDS_10)
        assert [found[slot] for slot in range(3)] == [10, 10, 10]
        assert (folder / "0.db.damaged").exists()
        assert sum("is damaged" in record.message for record in caplog.records) == 1


async def test_more_queries_than_a_gateway_answers_at_once_are_refused(nats: Any, tmp_path: Path) -> None:
    async with empty(nats) as bus:
        gateway = Gateway(bus, FakeClock(), tmp_path / "a", "gw-1", leads=False)
        async with closing(gateway):
            await gateway.recorder.store()
            results = await asyncio.gather(
                *(gateway.recorder.query(lambda index: index.seq) for _ in range(40)), return_exceptions=True
            )
        assert {type(each) for each in results} == {int, RateLimited}


async def test_a_name_without_a_history_is_not_found_and_neither_is_a_revision(
    nats: Any, tmp_path: Path, make: Any, problem: Any
) -> None:
    async with gateway_on(nats, history=tmp_path / "history") as gateway:
        await gateway.deploys.deploy(make.spec("recorded"), DIGEST)
        await gateway.recorder.store()

        async def ask(subject: str) -> tuple[int, str]:
            answer = await gateway.http.get(f"/v1/history?subject={subject}")
            return answer.status_code, "" if answer.status_code == 200 else problem(answer)[1]

        found = [
            await ask(f"function:{name}") for name in ("recorded", "recorded@1", "recorded@2", "recorded@0", "gone")
        ]
        others = [await ask(subject) for subject in ("node:gone", "gpu:gone", "overview")]
        await gateway.http.delete("/v1/functions/recorded")
    assert found == [(200, ""), (200, ""), *[(404, "revision_not_found")] * 2, (404, "function_not_found")]
    assert [status for status, _ in others] == [404, 404, 200]
