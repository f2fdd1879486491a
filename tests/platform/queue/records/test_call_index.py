"""The index of ended calls: it names each record that may match. A search finds the same with it and without it."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from gpufn_core.domain.invocation import InvocationState
from gpufn_core.ids import id_at, item_id, new_map_id, new_stem
from gpufn_core.protocol import subjects
from gpufn_core.protocol.records import CallRecord
from gpufn_local.nats_process import EmbeddedServer
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import ordered_reader, streams
from gpufn_platform.bus.storage.ordered_reader import StoredMessage
from gpufn_platform.queue.records import call_index, call_records
from gpufn_platform.queue.records.call_index import CallFacts, CallIndex, Wanted
from gpufn_platform.queue.records.call_index_fill import SearchView, fill
from tests.platform.conftest import Connect
from tests.platform.queue.test_queued_calls import begin, submit

FAILED, SUCCEEDED, CANCELLED = InvocationState.FAILED, InvocationState.SUCCEEDED, InvocationState.CANCELLED


def facts(state: InvocationState = SUCCEEDED, function: str = "f", at: float = 1.0, **fields: Any) -> CallFacts:
    return CallFacts(function, state, at, **fields)


def index_of(records: Iterable[tuple[int, CallFacts]], start: int, stop: int) -> CallIndex:
    index = CallIndex()
    index.begin("today", stop)
    index.add(start, stop, records)
    return index


def named(index: CallIndex, wanted: Wanted, before: int) -> list[int]:
    """Return the sequences that the index names, as a search asks for them."""
    found: list[int] = []
    while before > index.low:
        before, ranges = index.spans(wanted, before, 5)
        assert all(span.start >= before for span in ranges)
        found += [seq for span in ranges for seq in reversed(span)]
    return found


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (Wanted(FAILED), {1100, 4300, 9000}),
        (Wanted(InvocationState.QUEUED), {2000}),  # also those that run: the record says only that they have not ended
        (Wanted(InvocationState.RUNNING), {2000}),
        (Wanted(FAILED, "g"), {4300}),
        (Wanted(owner="k1"), {1100, 9500}),
        (Wanted(parent="p"), {9500}),
        (Wanted(SUCCEEDED, "f", "k1"), {9500}),
        (Wanted(FAILED, until=10.0), {1100}),
        (Wanted(CANCELLED), set()),
        (Wanted(parent="unknown"), set()),
    ],
)
def test_an_index_names_the_records_that_match(wanted: Wanted, expected: set[int]) -> None:
    records = [
        (1100, facts(FAILED, owner="k1")),
        (2000, facts(InvocationState.QUEUED)),
        (4300, facts(FAILED, "g", at=20.0)),
        (9000, facts(FAILED, at=1.0, ended_at=30.0)),
        (9500, facts(owner="k1", parent="p", at=40.0)),
    ]
    assert set(named(index_of(records, 1000, 10_000), wanted, 10_000)) == expected


def test_each_record_is_named_once_newest_first_however_dense_they_are() -> None:
    chance = random.Random(7)
    states = [chance.choice((FAILED, *[SUCCEEDED] * chance.choice((1, 100)))) for _ in range(12_000)]
    index = index_of(((seq, facts(state)) for seq, state in enumerate(states)), 0, len(states))
    failed = [seq for seq in reversed(range(len(states))) if states[seq] is FAILED]
    sequence = named(index, Wanted(FAILED), len(states))
    assert sequence == sorted(set(sequence), reverse=True)
    assert [seq for seq in sequence if states[seq] is FAILED] == failed


def test_an_index_is_bounded_and_drops_its_oldest_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_index, "_MAX_BLOCKS", 2)
    index = index_of([(seq, facts()) for seq in range(8000, 10_000)], 8000, 10_000)
    assert (index.low, index.high) == (8000, 10_000)  # of the blocks from 4096, 8192 on
    index.add(10_000, 14_000, [(seq, facts(FAILED)) for seq in range(10_000, 14_000)])
    assert (index.low, index.high, index.is_full) == (8192, 14_000, True)
    assert len(named(index, Wanted(FAILED), 14_000)) == 4000
    index.forget_before(13_000)
    assert (index.low, index.is_full) == (13_000, False)
    index.forget_before(20_000)
    assert (index.low, index.high) == (20_000, 20_000)


def test_an_index_of_another_stream_or_of_an_older_copy_is_forgotten() -> None:
    index = index_of([(1, facts())], 1, 10)
    index.begin("today", 12)
    assert (index.low, index.high) == (1, 10)
    index.begin("tomorrow", 12)
    assert (index.low, index.high) == (12, 12)
    index = index_of([(1, facts())], 1, 10)
    index.begin("today", 5)
    assert (index.low, index.high) == (5, 5)


def test_a_range_behind_a_gap_is_not_added_and_one_that_overlaps_is() -> None:
    index = index_of([], 50, 100)
    for start, stop in ((10, 49), (101, 120)):
        index.add(start, stop, [(start, facts(FAILED))])
    assert (index.low, index.high) == (50, 100)
    index.add(40, 60, [(45, facts(FAILED))])
    index.add(90, 120, [(110, facts(FAILED))])
    assert (index.low, index.high) == (40, 120)
    assert {45, 110} <= set(named(index, Wanted(FAILED), 120))


async def end(bus: Bus, number: int, chance: random.Random, now: float = 0.0) -> CallRecord:
    state = chance.choice((FAILED, CANCELLED, *[SUCCEEDED] * 6))
    ended = CallRecord(
        id=id_at(new_stem(), number + 1),
        function=f"f{number % 3}",
        revision=1,
        state=state,
        submitted_at=now + number,
        ended_at=now + number,
        queue_seq=number + 1,
        owner=chance.choice(("k1", "k2")),
        parent=chance.choice(("", "", "p")),
        keep_s=60.0,
    )
    assert await call_records.end(bus, ended)
    return ended


def matches(call: CallRecord, wanted: Wanted) -> bool:
    return (
        wanted.state in (None, call.state)
        and wanted.function in (None, call.function)
        and wanted.owner in (None, call.owner)
        and wanted.parent in (None, call.parent)
    )


async def pages(bus: Bus, wanted: Wanted, index: CallIndex | None, *, limit: int, is_over: bool) -> list[str]:
    found: list[str] = []
    before: call_records.CallCursor | None = None
    for _ in range(400):
        page = await call_records.search(
            bus,
            wanted.function or "*",
            limit,
            lambda call: matches(call, wanted),
            until=math.inf if wanted.until is None else wanted.until,
            ended_only=True,
            before=before,
            budget=lambda: lambda: is_over,
            is_rare=True,
            index=None if index is None else SearchView(index, wanted),
        )
        assert len(page.records) <= limit
        found += [call.id for call in page.records]
        if (before := page.before) is None:
            return found
    raise AssertionError("the search does not end")


WANTED = (
    Wanted(FAILED),
    Wanted(CANCELLED, "f1"),
    Wanted(function="f2"),
    Wanted(owner="k1", parent="p"),
    Wanted(owner="none"),
)


@pytest.mark.parametrize("is_over", [False, True])
async def test_a_search_finds_the_same_with_any_part_of_the_index(
    nats: EmbeddedServer, connect: Connect, monkeypatch: pytest.MonkeyPatch, is_over: bool
) -> None:
    bus = await begin(nats, connect)
    chance = random.Random(3)
    now = time.time()  # the server's clock tells where a search until a time begins
    monkeypatch.setattr(call_index, "_NEIGHBOURS", 3)
    calls = [await end(bus, number, chance, now) for number in range(200)]
    item = msgspec.structs.replace(calls[0], id=item_id(new_map_id(), 0), state=FAILED)
    assert await call_records.end(bus, item)
    index = CallIndex()
    await fill(bus, index, at_once=30)  # the index begins here; what ended before is added later
    calls += [await end(bus, number, chance, now) for number in range(200, 240)]
    for call in calls[100:120]:
        message = await streams.last_message(bus, subjects.RESULTS, subjects.result(call.function, call.id))
        assert message is not None
        await streams.delete_message(bus, subjects.RESULTS, message.seq)
    del calls[100:120]
    for _ in range(3):  # a part of it, more of it, all
        for wanted in (*WANTED, Wanted(FAILED, until=now + 150.0)):
            latest = math.inf if wanted.until is None else wanted.until
            expected = [call.id for call in reversed(calls) if matches(call, wanted) and call.submitted_at <= latest]
            assert await pages(bus, wanted, index, limit=7, is_over=is_over) == expected, wanted
            assert await pages(bus, wanted, None, limit=7, is_over=is_over) == expected, wanted
        for _ in range(5):
            await fill(bus, index, at_once=30)
    assert not await fill(bus, index)


async def test_a_search_with_an_index_reads_the_records_that_match(
    nats: EmbeddedServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = await begin(nats, connect)
    calls = [await submit(bus) for _ in range(200)]
    for number, call in enumerate(calls):
        state = FAILED if number in (3, 90, 91, 180) else SUCCEEDED
        assert await call_records.end(bus, msgspec.structs.replace(call, state=state, ended_at=2.0))
    index = CallIndex()
    while await fill(bus, index):
        pass
    monkeypatch.setattr(call_index, "_NEIGHBOURS", 1)
    read: list[StoredMessage] = []
    original = ordered_reader.collect

    async def counted(*arguments: Any, **fields: Any) -> list[StoredMessage]:
        found = await original(*arguments, **fields)
        read.extend(found)
        return found

    monkeypatch.setattr(ordered_reader, "collect", counted)
    assert len(await pages(bus, Wanted(FAILED), index, limit=50, is_over=False)) == 4
    assert len(read) == 4
    await streams.delete_message(bus, subjects.RESULTS, read[0].seq)
    assert len(await pages(bus, Wanted(FAILED), index, limit=50, is_over=False)) == 3
    assert len(named(index, Wanted(FAILED), index.high)) == 3  # it has learned that one is gone


async def test_a_search_of_all_functions_fills_the_index_and_one_of_a_function_does_not(
    nats: EmbeddedServer, connect: Connect
) -> None:
    bus = await begin(nats, connect)
    chance = random.Random(1)
    for number in range(50):
        await end(bus, number, chance)
    state = (await bus.js(f"STREAM.INFO.{subjects.RESULTS}"))["state"]
    index = CallIndex()
    await pages(bus, Wanted(function="f1"), index, limit=5, is_over=False)
    assert index.low == index.high
    await pages(bus, Wanted(owner="none"), index, limit=5, is_over=False)
    assert (index.low, index.high) == (state["first_seq"], state["last_seq"] + 1)
    assert not await fill(bus, index)


async def test_what_was_read_from_an_earlier_stream_does_not_change_the_index(
    nats: EmbeddedServer, connect: Connect
) -> None:
    bus = await begin(nats, connect)
    await end(bus, 0, random.Random(1))
    info = await bus.js(f"STREAM.INFO.{subjects.RESULTS}")
    seq = int(info["state"]["last_seq"])
    read = await ordered_reader.collect(bus, subjects.RESULTS, ">", since_seq=seq)
    index = CallIndex()
    view = SearchView(index, Wanted())
    view.begin(info["created"], seq + 1)
    index.begin("later", seq + 1)
    await view.add(seq, seq + 1, read)
    assert index.low == index.high
    index.add(seq, seq + 1, [(seq, facts(FAILED))])
    view.keep(range(seq, seq + 1), set())
    assert named(index, Wanted(FAILED), seq + 1) == [seq]
    view.begin("later", seq + 1)
    view.keep(range(seq, seq + 1), set())
    assert named(index, Wanted(FAILED), seq + 1) == []


async def test_a_call_that_has_just_ended_is_not_listed_as_waiting(nats: EmbeddedServer, connect: Connect) -> None:
    bus = await begin(nats, connect)
    waits, ended = await submit(bus), await submit(bus)
    assert await call_records.end(bus, msgspec.structs.replace(ended, state=SUCCEEDED, ended_at=4.0))
    index = CallIndex()
    while await fill(bus, index):
        pass
    view = SearchView(index, Wanted(InvocationState.QUEUED))
    page = await call_records.search(bus, "*", 9, lambda call: not call.state.ended, is_rare=True, index=view)
    assert [call.id for call in page.records] == [waits.id]


async def test_calls_that_end_during_a_search_neither_hide_nor_repeat_others(
    nats: EmbeddedServer, connect: Connect
) -> None:
    bus = await begin(nats, connect)
    chance = random.Random(5)
    calls = [await end(bus, number, chance) for number in range(60)]
    index = CallIndex()
    found: list[str] = []
    before: call_records.CallCursor | None = None
    for number in range(60, 100):
        view = SearchView(index, Wanted(SUCCEEDED))
        page = await call_records.search(
            bus, "*", 5, lambda call: call.state is SUCCEEDED, ended_only=True, before=before, is_rare=True, index=view
        )
        found += [call.id for call in page.records]
        await end(bus, number, chance)
        await fill(bus, index, at_once=7)
        if (before := page.before) is None:
            break
    assert found == [call.id for call in reversed(calls) if call.state is SUCCEEDED]
