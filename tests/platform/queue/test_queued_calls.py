"""Queued calls: found by id and listed, without records."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

import msgspec
import pytest

from gpufn_core.domain.invocation import InvocationState, Outcome, OutcomeKind
from gpufn_core.domain.revision import Revision
from gpufn_core.errors import BusUnavailable, IdempotencyMismatch
from gpufn_core.ids import digest_of, id_at, item_id, new_invocation_id, new_map_id, new_stem, queue_position_in
from gpufn_core.protocol import subjects
from gpufn_core.protocol.messages import InvocationMessage
from gpufn_core.protocol.records import CallRecord
from gpufn_core.spec.function_spec import EntryPoint, FunctionSpec, MethodSpec
from gpufn_local.nats_process import EmbeddedServer
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import streams
from gpufn_platform.bus.storage.ordered_reader import StoredMessage
from gpufn_platform.queue import map_log, queue_position, queued_calls
from gpufn_platform.queue.call_request import CallRequest
from gpufn_platform.queue.records import call_records
from tests.platform.conftest import Connect, Crash
from tests.taking import take


async def begin(nats: EmbeddedServer, connect: Connect) -> Bus:
    bus = await connect(nats)
    await streams.ensure_streams(bus)
    for stream in (subjects.ASYNC, subjects.RESULTS):
        await streams.purge(bus, stream, ">")
    return bus


def revision_of(function: str) -> Revision:
    spec = FunctionSpec(name=function, entry=EntryPoint("m", "f"), methods=(MethodSpec(),), retention_s=60.0)
    return Revision(function=function, number=1, spec=spec, bundle=digest_of(b""), created_at=0.0)


async def submit(
    bus: Bus,
    function: str = "waits",
    body: bytes = b"1",
    *,
    now: float = 1.0,
    invocation: str | None = None,
    **asks: Any,
) -> CallRecord:
    fields: dict[str, Any] = {"accept": "", "deadline": 0.0} | asks
    request = CallRequest(revision_of(function), "", "application/json", body, **fields)
    return await call_records.submit(bus, request, now=now, invocation=invocation)


async def append(
    bus: Bus, map_id: str, before: map_log.Logged | None, count: int, *, closes: bool = False
) -> map_log.Logged:
    items = map_log.Items([b"1"] * count, "", "")
    return await map_log.append(
        bus, before, map_id, map_log.Target(revision_of("waits"), ""), items, now=1.0, closes=closes
    )


class Reads:
    """The reads of ASYNC for listing calls: number of reads and of messages."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times = self.messages = 0
        self._read = streams.batch_from
        monkeypatch.setattr(streams, "batch_from", self._counted)

    async def _counted(self, *arguments: Any, **fields: Any) -> list[StoredMessage]:
        found = await self._read(*arguments, **fields)
        self.times += 1
        self.messages += len(found)
        return found


async def state_of(bus: Bus, stream: str) -> dict[str, Any]:
    state: dict[str, Any] = (await bus.js(f"STREAM.INFO.{stream}"))["state"]
    return state


def test_the_charge_of_earlier_attempts_is_in_the_records_of_waiting_and_ended_calls() -> None:
    """Regression: a call that was cancelled, or expired, between two attempts had cost no GPU seconds."""
    message = InvocationMessage(new_invocation_id(), "f", 1, "", "", "", "", 1.0, attempt=3, gpu_s=1.0)
    ended = call_records.ended(message, Outcome(OutcomeKind.EXPIRED), 9.0)
    assert [record.gpu_s for record in (queued_calls.record(message, 7), ended)] == [1.0, 1.0]


async def test_a_call_that_waits_is_one_message_and_is_found_by_its_id(nats: EmbeddedServer, connect: Connect) -> None:
    bus = await begin(nats, connect)
    call = await submit(bus)
    assert (await state_of(bus, subjects.RESULTS))["messages"] == 0
    assert queue_position_in(call.id) == call.queue_seq == (await state_of(bus, subjects.ASYNC))["last_seq"]
    assert await call_records.read(bus, call.id) == (call, b"")
    assert call.state is InvocationState.QUEUED
    assert call.keep_s == 60.0


async def test_a_call_with_an_id_of_its_own_has_a_record_at_once(nats: EmbeddedServer, connect: Connect) -> None:
    bus = await begin(nats, connect)
    call = await submit(bus, invocation=new_invocation_id())
    assert (await state_of(bus, subjects.RESULTS))["messages"] == 1
    assert await call_records.read(bus, call.id) == (call, b"")


async def test_an_id_with_the_place_of_another_call_finds_nothing(nats: EmbeddedServer, connect: Connect) -> None:
    bus = await begin(nats, connect)
    call = await submit(bus)
    for other in (id_at(new_stem(), call.queue_seq), id_at(call.id[:18], call.queue_seq + 1), "0" * 26, "no id", ""):
        assert await queued_calls.find(bus, other) is None, other


async def test_the_id_of_a_call_that_waits_is_an_idempotency_key_too(nats: EmbeddedServer, connect: Connect) -> None:
    bus = await begin(nats, connect)
    call = await submit(bus)
    assert await submit(bus, invocation=call.id) == call
    with pytest.raises(IdempotencyMismatch):
        await submit(bus, body=b"2", invocation=call.id)
    assert (await state_of(bus, subjects.ASYNC))["messages"] == 1


async def test_a_call_whose_fate_is_unknown_is_not_sent_again(connect: Connect, crash: Crash) -> None:
    bus = await connect(crash.server)
    await streams.ensure_streams(bus)
    os.kill(crash.server.pid, signal.SIGSTOP)
    submitted = asyncio.ensure_future(submit(bus))
    await asyncio.sleep(0)  # it is sent
    await crash.restart(bus)
    with pytest.raises(BusUnavailable, match="Idempotency-Key"):
        await submitted
    assert (await state_of(bus, subjects.ASYNC))["messages"] == 0


async def test_the_first_end_of_a_call_without_a_record_wins(nats: EmbeddedServer, connect: Connect) -> None:
    bus = await begin(nats, connect)
    call = await submit(bus)
    ends = [msgspec.structs.replace(call, state=InvocationState.SUCCEEDED, worker=f"w-{n}") for n in range(4)]
    assert sorted(await asyncio.gather(*(call_records.end(bus, end) for end in ends))) == [False, False, False, True]
    assert await call_records.cancel(bus, call, 2.0) is False
    found = await call_records.read(bus, call.id)
    assert found is not None
    assert found[0].state is InvocationState.SUCCEEDED


async def test_a_cancelled_call_is_out_of_its_queue_and_has_a_record(nats: EmbeddedServer, connect: Connect) -> None:
    bus = await begin(nats, connect)
    call = await submit(bus)
    assert await call_records.cancel(bus, call, 2.0) is True
    assert (await state_of(bus, subjects.ASYNC))["messages"] == 0
    found = await call_records.read(bus, call.id)
    assert found is not None
    assert (found[0].state, found[0].queue_seq, found[0].keep_s) == (InvocationState.CANCELLED, call.queue_seq, 60.0)


async def test_the_newest_are_listed_whatever_their_arguments_weigh(nats: EmbeddedServer, connect: Connect) -> None:
    bus = await begin(nats, connect)
    large = [await submit(bus, body=b"x" * (2 << 20)) for _ in range(5)]
    other = await submit(bus, "other")
    small = [await submit(bus) for _ in range(3)]
    assert (await queued_calls.search(bus, "waits", 6)).calls == [*small[::-1], *large[:1:-1]]
    assert (await queued_calls.search(bus, "*", 100)).calls == [*small[::-1], other, *large[::-1]]
    assert (await queued_calls.search(bus, "other", 1, lambda call: call.id == small[0].id)).calls == []


async def test_the_items_of_maps_are_not_read_to_list_the_calls_between_them(
    nats: EmbeddedServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = await begin(nats, connect)
    first = await submit(bus)
    one, other = new_map_id(), new_map_id()
    begun = await append(bus, one, None, 500)
    second = await submit(bus)
    await append(bus, other, None, 3)
    await map_log.end(bus, await append(bus, one, begun, 500, closes=True))
    third = await submit(bus, "others")
    last = await submit(bus)
    reads = Reads(monkeypatch)
    assert (await queued_calls.search(bus, "*", 20)).calls == [last, third, second, first]
    assert (await queued_calls.search(bus, "waits", 20)).calls == [last, second, first]
    assert reads.messages < 60  # of more than a thousand, for each of the lists


async def test_a_search_for_a_function_without_calls_does_not_read_calls_of_others(
    nats: EmbeddedServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = await begin(nats, connect)
    monkeypatch.setattr(queued_calls, "_AT_ONCE", 2)
    for _ in range(20):
        await submit(bus, "others")
    call = await submit(bus)
    reads = Reads(monkeypatch)
    assert (await queued_calls.search(bus, "idle", 20)).calls == []
    assert reads.times == 0
    assert (await queued_calls.search(bus, "waits", 20)).calls == [call]
    assert reads.times < 5  # the only message that it has


async def test_calls_from_before_the_requested_time_are_not_read(
    nats: EmbeddedServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = await begin(nats, connect)
    monkeypatch.setattr(queued_calls, "_AT_ONCE", 2)
    for _ in range(20):
        await submit(bus)
    reads = Reads(monkeypatch)
    assert await call_records.recent(bus, "waits", 20, since=time.time() + 3600) == []
    assert reads.times < 5


async def test_listing_ended_calls_reads_no_queue(
    nats: EmbeddedServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = await begin(nats, connect)
    await submit(bus)
    ended = await submit(bus)
    assert await call_records.end(bus, msgspec.structs.replace(ended, state=InvocationState.SUCCEEDED, ended_at=4.0))
    reads = Reads(monkeypatch)
    found = await call_records.recent(bus, "waits", 10, lambda call: call.state.ended, ended_only=True)
    assert [call.id for call in found] == [ended.id]
    assert reads.times == 0


@pytest.mark.parametrize(
    ("taken", "left"),
    [
        ([], [(10, 20)]),
        ([(10, 20)], []),
        ([(8, 12), (12, 14), (18, 25)], [(14, 18)]),  # the first range begins before, the last ends after
        ([(12, 13), (15, 16)], [(10, 12), (13, 15), (16, 20)]),
        ([(2, 5), (20, 30)], [(10, 20)]),
        ([(11, 40)], [(10, 11)]),
    ],
)
def test_messages_outside_the_chunks_of_maps(taken: list[tuple[int, int]], left: list[tuple[int, int]]) -> None:
    found = queued_calls.outside([range(*stretch) for stretch in taken], 10, 20)
    assert [(gap.start, gap.stop) for gap in found] == left


async def test_a_list_has_calls_with_and_without_a_record_once_each(nats: EmbeddedServer, connect: Connect) -> None:
    bus = await begin(nats, connect)
    waits = await submit(bus, now=1.0)
    ended = await submit(bus, now=2.0)  # still in its queue, because its runner died
    keyed = await submit(bus, now=3.0, invocation=new_invocation_id())
    assert await call_records.end(bus, msgspec.structs.replace(ended, state=InvocationState.SUCCEEDED, ended_at=4.0))
    assert [call.id for call in await call_records.recent(bus, "waits", 10)] == [keyed.id, ended.id, waits.id]
    queued = await call_records.recent(bus, "waits", 10, lambda call: not call.state.ended)
    assert [call.id for call in queued] == [keyed.id, waits.id]
    assert [call.id for call in await call_records.recent(bus, "waits", 1)] == [ended.id]  # the last ones that changed


@pytest.mark.parametrize("is_over", [False, True])
async def test_pages_have_each_call_once_whether_it_waits_or_has_ended(
    nats: EmbeddedServer, connect: Connect, monkeypatch: pytest.MonkeyPatch, is_over: bool
) -> None:
    bus = await begin(nats, connect)
    monkeypatch.setattr(queued_calls, "_AT_ONCE", 2)
    calls = [await submit(bus, now=float(number)) for number in range(12)]
    for call in calls[::3]:
        assert await call_records.end(bus, msgspec.structs.replace(call, state=InvocationState.FAILED, ended_at=20.0))
        await streams.delete_message(bus, subjects.ASYNC, call.queue_seq)
    found: list[str] = []
    before: call_records.CallCursor | None = None
    for _ in range(40):
        page = await call_records.search(bus, "waits", 3, before=before, budget=lambda: lambda: is_over)
        assert len(page.records) <= 3
        found += [call.id for call in page.records]
        if (before := page.before) is None:
            break
    assert sorted(found) == sorted(call.id for call in calls)


@pytest.mark.parametrize("items", [1, 30])
async def test_items_of_maps_are_no_calls_whether_there_are_few_or_many(
    nats: EmbeddedServer, connect: Connect, items: int
) -> None:
    bus = await begin(nats, connect)
    calls = [await submit(bus) for _ in range(6)]
    map_id = new_map_id()
    for call in calls:
        assert await call_records.end(bus, msgspec.structs.replace(call, state=InvocationState.FAILED, ended_at=2.0))
        for index in range(items):
            item = msgspec.structs.replace(call, id=item_id(map_id, index), state=InvocationState.FAILED, ended_at=2.0)
            await call_records.end(bus, item)
    found: list[str] = []
    before: call_records.CallCursor | None = None
    for _ in range(20):
        page = await call_records.search(bus, "*", 1, ended_only=True, before=before, budget=lambda: lambda: True)
        found += [call.id for call in page.records]
        if (before := page.before) is None:
            break
    assert found == [call.id for call in reversed(calls)]


async def test_a_page_that_found_nothing_leads_on(nats: EmbeddedServer, connect: Connect) -> None:
    bus = await begin(nats, connect)
    oldest, *others = [await submit(bus) for _ in range(30)]
    for call in (oldest, *others):
        assert await call_records.end(bus, msgspec.structs.replace(call, state=InvocationState.FAILED, ended_at=2.0))

    def is_oldest(call: CallRecord) -> bool:
        return call.id == oldest.id

    page = await call_records.search(bus, "waits", 1, is_oldest, ended_only=True, budget=lambda: lambda: True)
    assert page.records == []
    while not page.records:
        assert page.before is not None
        page = await call_records.search(bus, "waits", 1, is_oldest, ended_only=True, before=page.before)
    assert [call.id for call in page.records] == [oldest.id]


async def test_a_place_counts_the_calls_that_wait_before_it(nats: EmbeddedServer, connect: Connect) -> None:
    bus = await begin(nats, connect)
    calls = []
    for _ in range(4):
        calls.append(await submit(bus))
        await submit(bus, "other")
    assert [await queue_position.position(bus, call) for call in calls] == [1, 2, 3, 4]
    await take(bus, "waits")
    await call_records.cancel(bus, calls[2], 2.0)
    assert [await queue_position.position(bus, calls[number]) for number in (0, 1, 3)] == [None, 1, 2]


async def test_a_place_far_back_is_estimated_among_the_calls_of_others(
    nats: EmbeddedServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_position, "_EXACT_POSITIONS", 2)
    bus = await begin(nats, connect)
    calls = []
    for _ in range(10):
        calls.append(await submit(bus))
        await submit(bus, "other")
    places = [await queue_position.position(bus, call) for call in calls]
    assert places[:2] == [1, 2]
    assert places == sorted(places, key=lambda place: place or 0)
    assert all(abs((place or 0) - true) <= 1 for true, place in enumerate(places, 1)), places


@pytest.mark.parametrize(
    ("seq", "waiting", "last", "found"),
    [
        (101, 10, 110, (1, 1)),  # no calls of others
        (110, 10, 110, (10, 10)),
        (105, 7, 110, (2, 5)),  # 3 of 110 belong to others, before or after it
        (110, 3, 110, (3, 3)),  # it is the last one
        (105, 0, 110, (1, 1)),  # it has just been taken
    ],
)
def test_the_estimate_of_a_place_without_a_read_of_the_queue(
    seq: int, waiting: int, last: int, found: tuple[int, int]
) -> None:
    assert queue_position.bounds(seq, streams.ConsumerProgress(waiting=waiting, taken=100), last) == found
