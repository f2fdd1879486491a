"""The stored histories of arrivals, on a real nats-server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from gpufn_core.protocol import subjects
from gpufn_gateway.controller.arrival_store import ArrivalStore, is_due
from gpufn_gateway.controller.decide.scaling.prewarm import SLOT_S, ArrivalHistory, slot_of
from gpufn_gateway.controller.state.arrivals import Arrivals
from gpufn_local.nats_process import EmbeddedServer
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage.key_value import KeyValue

NOON = 1_767_614_400.0


def play(nats: EmbeddedServer, scene: Callable[[KeyValue], Awaitable[None]]) -> None:
    async def main() -> None:
        bus = await Bus.connect(nats.url, name="test")
        try:
            bucket = await KeyValue.open(bus, subjects.ARRIVALS)
            for key in await bucket.keys():  # left by an earlier test
                await bucket.delete(key)
            await scene(bucket)
        finally:
            await bus.close()

    asyncio.run(main())


def arrivals(*names: str) -> Arrivals:
    made = Arrivals()
    made.observe(set(names), 0.0, NOON)
    return made


def test_a_new_leader_adds_its_own_counts_to_the_stored_arrivals(nats: EmbeddedServer) -> None:
    async def scene(bucket: KeyValue) -> None:
        first = arrivals("f")
        first.record_call("f", 0.0)
        await ArrivalStore(bucket, first, lambda: True).step()

        second = arrivals("f")
        second.record_call("f", SLOT_S)
        await ArrivalStore(bucket, second, lambda: True).step()
        history = second.histories["f"]
        assert history.has_call(slot_of(NOON))
        assert history.has_call(slot_of(NOON + SLOT_S))

    play(nats, scene)


@pytest.mark.parametrize("ahead_s", [7 * 86_400.0, 400 * 86_400.0])
def test_a_record_of_a_clock_that_was_ahead_is_replaced(nats: EmbeddedServer, ahead_s: float) -> None:
    async def scene(bucket: KeyValue) -> None:
        ahead = Arrivals()
        ahead.observe({"f"}, 0.0, NOON + ahead_s)
        ahead.record_call("f", 0.0)
        await ArrivalStore(bucket, ahead, lambda: True).step()

        made = arrivals("f")
        made.record_call("f", 0.0)
        await ArrivalStore(bucket, made, lambda: True).step()
        entry = await bucket.get("f")
        assert entry is not None
        assert ArrivalHistory.decode(entry.value).last == slot_of(NOON)

    play(nats, scene)


def test_only_the_leader_stores(nats: EmbeddedServer) -> None:
    async def scene(bucket: KeyValue) -> None:
        made = arrivals("f", "silent")
        made.record_call("f", 0.0)
        leads = False
        store = ArrivalStore(bucket, made, lambda: leads)
        await store.step()
        assert await bucket.keys() == []
        leads = True
        await store.step()
        assert await bucket.keys() == ["f"]

    play(nats, scene)


def test_the_record_of_a_function_without_a_history_is_deleted(nats: EmbeddedServer) -> None:
    async def scene(bucket: KeyValue) -> None:
        await bucket.put("deleted-while-nobody-led", ArrivalHistory().encode())
        made = arrivals("f", "g")
        made.record_call("f", 0.0)
        made.record_call("g", 0.0)
        store = ArrivalStore(bucket, made, lambda: True)
        await store.step()
        assert sorted(await bucket.keys()) == ["f", "g"]
        made.observe({"g"}, 1.0, NOON + 1)
        await store.step()
        assert await bucket.keys() == ["g"]

    play(nats, scene)


@pytest.mark.parametrize("record", [b"", b"no record", b"\x93\x01\x02\x03"])
def test_an_unreadable_record_is_replaced(nats: EmbeddedServer, record: bytes) -> None:
    async def scene(bucket: KeyValue) -> None:
        await bucket.put("f", record)
        made = arrivals("f")
        made.record_call("f", 0.0)
        await ArrivalStore(bucket, made, lambda: True).step()
        entry = await bucket.get("f")
        assert entry is not None
        assert ArrivalHistory.decode(entry.value) == made.histories["f"]

    play(nats, scene)


CALLED = ArrivalHistory().record(100, is_call=True)


@pytest.mark.parametrize(
    ("history", "stored", "expected"),
    [
        (ArrivalHistory().record(100, is_call=False), None, False),
        (CALLED, None, True),
        (CALLED, ArrivalHistory().record(100, is_call=False), False),  # written in this slot already
        (CALLED.record(101, is_call=True), CALLED, True),
        (CALLED.record(101, is_call=False), CALLED, False),
        (CALLED.record(103, is_call=False), CALLED, False),
        (CALLED.record(104, is_call=False), CALLED, True),
    ],
)
def test_a_record_is_written_once_a_slot_and_once_an_hour_without_calls(
    history: ArrivalHistory, stored: ArrivalHistory | None, expected: bool
) -> None:
    assert is_due(history, stored) is expected
