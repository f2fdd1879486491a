"""Calls with a waiting caller: found or reported as lost when the bus restarts, ended at their queue timeout. Streams
report why they were interrupted."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import msgspec
import pytest

from gpufn_core.domain.invocation import STOPS_WITHIN_S, OutcomeKind
from gpufn_core.domain.revision import Revision
from gpufn_core.errors import BusUnavailable, GpufnError, InvocationExpired, WorkerLost
from gpufn_core.ids import digest_of
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import encode, pack
from gpufn_core.protocol.messages import (
    CallLocation,
    ItemReply,
    ResultReply,
    StartedReply,
    StreamCredit,
    WaitCheck,
    unpack_invocation,
)
from gpufn_core.protocol.streams.stream_window import STREAM_WINDOW
from gpufn_core.spec.function_spec import EntryPoint, FunctionSpec, MethodSpec
from gpufn_core.spec.priority import Priority
from gpufn_platform.bus.connection import Bus, Message
from gpufn_platform.bus.storage import streams
from gpufn_platform.process.clock import SystemClock
from gpufn_platform.queue import lost_call_lookup
from gpufn_platform.queue.call_request import CallRequest
from gpufn_platform.queue.caller import _STORE_TIMEOUT_S, Caller
from gpufn_platform.queue.pending import PendingCall, PendingStream
from tests.taking import take
from tests.waiting import until_async

SPEC = FunctionSpec(name="f", entry=EntryPoint("m", "f"), methods=(MethodSpec(),), queue_timeout_s=10.0)
REVISION = Revision(function="f", number=1, spec=SPEC, bundle=digest_of(b""), created_at=0.0)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_LOST_AFTER_S", "_LOST_RETRY_S", "_RECHECK_S"):
        monkeypatch.setattr(lost_call_lookup, name, 0.01)


def request() -> CallRequest:
    deadline = SystemClock().time() + 3600
    return CallRequest(REVISION, "", "application/json", b"{}", "application/json", deadline)


async def queued(bus: Bus, caller: Caller) -> PendingCall:
    call = caller.invoke(request())
    while not call.queue_seq:
        await bus.flush()
    return call


async def test_a_call_without_a_holder_after_a_restart_is_lost(connect: Any, crash: Any) -> None:
    bus = await connect(crash.server)
    await streams.ensure_streams(bus)
    caller = Caller(bus, name="gw", clock=SystemClock())
    caller.start()
    call = await queued(bus, caller)
    await crash.restart(bus)
    await streams.ensure_streams(bus)
    with pytest.raises(BusUnavailable, match="was lost"):
        await call.future


async def test_a_call_at_a_runner_is_looked_up_until_the_runner_has_ended(connect: Any, crash: Any) -> None:
    bus, runner = await connect(crash.server), await connect(crash.server)
    await streams.ensure_streams(bus)
    caller = Caller(bus, name="gw", clock=SystemClock())
    caller.start()
    call = await queued(bus, caller)
    asked = 0

    def whereabouts(message: Message) -> None:
        nonlocal asked
        asked += 1
        runner.publish(message.reply, encode(CallLocation(call.id, "w-1", "n-1", 1, 0.0)))
        if asked == 5:
            subscription.unsubscribe()  # the server is killed

    subscription = runner.subscribe(subjects.WHEREABOUTS, whereabouts)
    await crash.restart(bus, runner)
    await streams.ensure_streams(bus)
    with pytest.raises(BusUnavailable, match="was lost"):
        await call.future
    assert asked == 5


async def test_a_call_from_before_a_restart_removes_no_other_from_the_new_queue(connect: Any, crash: Any) -> None:
    """The queue is in memory and counts from 1 again."""
    bus, runner = await connect(crash.server), await connect(crash.server)
    await streams.ensure_streams(bus)
    caller = Caller(bus, name="gw", clock=SystemClock())
    caller.start()
    running = await queued(bus, caller)
    held = encode(CallLocation(running.id, "w-1", "n-1", 1, 0.0))
    runner.subscribe(subjects.WHEREABOUTS, lambda message: runner.publish(message.reply, held))
    before = running.queue_seq
    await crash.restart(bus, runner)
    await streams.ensure_streams(bus)
    behind = await queued(bus, caller)
    assert behind.queue_seq == before
    running.cancel()  # the client disconnects
    await bus.flush()
    stored = await streams.message_at(bus, subjects.SYNC, before)
    assert stored is not None
    assert unpack_invocation(stored.payload)[0].id == behind.id


async def test_a_call_that_is_in_the_queue_still_after_a_reconnect_is_taken_out_of_it(connect: Any, nats: Any) -> None:
    bus, _, call = await waiting(connect, nats)
    at = call.queue_seq
    bus._live().lose("a cable is pulled")
    await until_async(lambda: bus.connected and call.queue_seq == at)
    call.cancel()
    await bus.flush()
    assert await streams.message_at(bus, subjects.SYNC, at) is None


async def waiting(connect: Any, nats: Any) -> tuple[Bus, Caller, PendingCall]:
    """A call whose function's queue_timeout has passed by the clock of the next tick."""
    bus = await connect(nats)
    await streams.ensure_streams(bus)
    caller = Caller(bus, name="gw-waits", clock=SystemClock())
    caller.start()
    return bus, caller, await queued(bus, caller)


async def test_a_call_that_no_runner_began_ends_with_its_queue_timeout(connect: Any, nats: Any) -> None:
    bus, caller, call = await waiting(connect, nats)
    caller.tick(call.since + 9.9)
    await caller._lookup._tasks.done()
    assert not call.future.done()
    caller.tick(call.since + 10.1)
    with pytest.raises(InvocationExpired, match=r"queue .* s\)"):
        await call.future
    await bus.flush()
    assert await streams.next_message(bus, subjects.SYNC, subjects.sync_queue("f", 1, call.priority), 1) is None


async def test_a_call_that_has_begun_is_not_ended_by_its_queue_timeout(connect: Any, nats: Any) -> None:
    bus, caller, call = await waiting(connect, nats)
    runner = await connect(nats)
    asked: list[str] = []

    def whereabouts(message: Message) -> None:
        asked.append(message.reply)
        runner.publish(message.reply, encode(CallLocation(call.id, "w-1", "n-1", 1, 0.0)))

    runner.subscribe(subjects.WHEREABOUTS, whereabouts)
    await runner.flush()
    for seconds in (10.1, 12.0, 20.0):
        caller.tick(call.since + seconds)
        await caller._lookup._tasks.done()
    assert len(asked) == 1
    assert not call.future.done()
    call.cancel()
    await bus.flush()


async def test_a_call_that_has_begun_is_not_ended_by_its_queue_timeout_although_its_runner_is_lost(
    connect: Any, nats: Any
) -> None:
    bus, caller, call = await waiting(connect, nats)
    runner = await connect(nats)
    await take(runner, "f", is_sync=True)
    runner.publish(subjects.reply("f", "gw-waits", call.id), pack(StartedReply(call.id)))
    await runner.flush()
    await bus.flush()
    caller.tick(call.since + 10.1)
    await caller._lookup._tasks.done()
    assert not call.future.done()
    call.cancel()
    await bus.flush()


async def test_a_call_with_a_slow_runner_is_not_ended_by_its_queue_timeout(connect: Any, nats: Any) -> None:
    bus, caller, call = await waiting(connect, nats)
    runner = await connect(nats)
    await take(runner, "f", is_sync=True)
    asked: list[str] = []

    def whereabouts(message: Message) -> None:
        asked.append(message.reply)
        if len(asked) > 1:
            runner.publish(message.reply, encode(CallLocation(call.id, "w-1", "n-1", 1, 0.0)))

    runner.subscribe(subjects.WHEREABOUTS, whereabouts)
    await runner.flush()
    caller.tick(call.since + 10.1)
    await caller._lookup._tasks.done()
    assert (len(asked), call.future.done()) == (2, False)
    call.cancel()
    await bus.flush()


async def test_a_call_that_waits_for_its_next_attempt_is_not_ended_by_its_queue_timeout(
    connect: Any, nats: Any
) -> None:
    bus, caller, call = await waiting(connect, nats)
    queue = subjects.sync_queue("f", 1, call.priority)
    stored = await streams.next_message(bus, subjects.SYNC, queue, call.queue_seq)
    assert stored is not None
    first, body = unpack_invocation(stored.payload)
    await bus.publish_stored(queue, pack(msgspec.structs.replace(first, attempt=2), body))
    await streams.delete_message(bus, subjects.SYNC, call.queue_seq)
    caller.tick(call.since + 10.1)
    await caller._lookup._tasks.done()
    assert not call.future.done()
    call.cancel()


async def test_a_call_stopped_at_its_deadline_has_time_to_report_its_end(connect: Any, nats: Any) -> None:
    bus = await connect(nats)
    await streams.ensure_streams(bus)
    caller = Caller(bus, name="gw-late", clock=SystemClock())
    caller.start()
    patient = msgspec.structs.replace(REVISION, spec=msgspec.structs.replace(SPEC, queue_timeout_s=None))
    call = caller.invoke(request()._replace(revision=patient))
    caller.tick(call.expires_at + STOPS_WITHIN_S + 0.5)
    assert not call.future.done(), "its runner has stopped it and is about to report its end"
    caller.tick(call.expires_at + STOPS_WITHIN_S + 1.1)
    with pytest.raises(InvocationExpired, match="before its deadline"):
        await call.future


def item(stream: PendingStream, number: int) -> None:
    stream.take(ItemReply(stream.id, number, "application/json", ""), b"1")


def end(stream: PendingStream, items: int) -> None:
    stream.take(ResultReply(stream.id, OutcomeKind.SUCCEEDED, None, "", 1, 1, queue_s=0.0, run_s=0.0, items=items), b"")


@pytest.mark.parametrize(
    ("breaks", "error", "why"),
    [
        (lambda stream: item(stream, 0), WorkerLost, "after 2 items: its worker died"),
        (
            lambda stream: item(stream, 3),
            BusUnavailable,
            "after 2 items: the message bus lost the items before number 3",
        ),
        (lambda stream: end(stream, 5), BusUnavailable, "delivered 2 of 5 items"),
    ],
    ids=["it began again", "items are missing", "the last ones are missing"],
)
async def test_an_incomplete_stream_ends_with_the_reason(
    connect: Any, nats: Any, breaks: Any, error: type[GpufnError], why: str
) -> None:
    bus = await connect(nats)
    await streams.ensure_streams(bus)
    caller = Caller(bus, name="gw", clock=SystemClock())
    caller.start()
    stream = caller.open_stream(request())
    for number in range(2):
        item(stream, number)
    breaks(stream)
    assert len([body async for _, body in stream.items()]) == 2
    with pytest.raises(error, match=why):
        await stream.future
    assert caller.pending == 0


async def test_a_stream_that_has_begun_continues(connect: Any, nats: Any) -> None:
    bus = await connect(nats)
    await streams.ensure_streams(bus)
    caller = Caller(bus, name="gw-begun", clock=SystemClock())
    stream = caller.open_stream(request())
    stream.take(StartedReply(stream.id), b"")
    item(stream, 0)
    end(stream, 1)
    assert [body async for _, body in stream.items()] == [b"1"]
    assert stream.start_deadline == math.inf


@pytest.mark.parametrize("items", [0, 2])
async def test_a_stream_that_was_read_is_not_awaited_by_a_runner_that_would_restart_it(
    connect: Any, nats: Any, items: int
) -> None:
    """Regression: it ran from the start to its first item, only to learn that no reader can use it."""
    bus = await connect(nats)
    await streams.ensure_streams(bus)
    caller = Caller(bus, name="gw-anew", clock=SystemClock())
    caller.start()
    stream = caller.open_stream(request())
    for number in range(items):
        stream.take(ItemReply(stream.id, number, "application/json", ""), b"")

    async def waited_for(*, anew: bool) -> tuple[str, ...]:
        asked = encode(WaitCheck((stream.id, "of another"), anew))
        answer = await bus.request(subjects.reply("f", "gw-anew", subjects.WAIT_CHECK_PART), asked)
        return msgspec.msgpack.decode(answer.payload, type=WaitCheck).invocations

    assert await waited_for(anew=False) == (stream.id,)
    assert await waited_for(anew=True) == (() if items else (stream.id,))
    if items:
        with pytest.raises(WorkerLost, match="was interrupted after 2 items: its worker died"):
            await stream.future
    stream.cancel()


async def test_a_large_result_that_arrives_twice_is_read_before_the_second_is_dropped(connect: Any, nats: Any) -> None:
    bus = await connect(nats)
    await streams.ensure_streams(bus)
    caller, seen = Caller(bus, name="gw-twice", clock=SystemClock()), asyncio.Queue[str]()
    caller.start(shared_folder="gw-twice", drop=lambda shared_body: seen.put_nowait(f"{shared_body} is dropped"))
    call = caller.invoke(request())

    async def take_it() -> None:
        seen.put_nowait(f"{(await call.future)[0].shared_body} is taken")

    taking = asyncio.create_task(take_it())
    await bus.flush()
    end = ResultReply(call.id, OutcomeKind.SUCCEEDED, None, "", 1, 1, 0.0, 0.0, shared_body="p")
    reply = Message(subjects.reply("f", "gw-twice", call.id), "", pack(end))
    for _ in range(2):  # in one read
        caller._on_reply(reply)
    assert [await seen.get() for _ in range(2)] == ["p is taken", "p is dropped"]
    await taking


async def test_undelivered_credit_is_sent_when_the_bus_is_back(
    connect: Any, nats: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus, runner = await connect(nats), await connect(nats)
    await streams.ensure_streams(bus)
    caller = Caller(bus, name="gw", clock=SystemClock())
    caller.start()
    stream = caller.open_stream(request())
    given: asyncio.Queue[StreamCredit] = asyncio.Queue()
    inbox = subjects.runner_inbox("r")
    runner.subscribe(
        inbox, lambda message: given.put_nowait(msgspec.msgpack.decode(message.payload, type=StreamCredit))
    )
    await runner.flush()
    count = STREAM_WINDOW // 2 + 1
    for number in range(count):
        stream.take(ItemReply(stream.id, number, "application/json", inbox), b"1")
    end(stream, count)

    def away(*_: Any, **__: Any) -> None:
        raise BusUnavailable("away")

    with monkeypatch.context() as patch:
        patch.setattr(bus, "publish", away)
        assert len([body async for _, body in stream.items()]) == count
    stream.on_reconnect()
    assert (await given.get()).taken == count


class Still(SystemClock):
    """Time passes only by the argument of `tick`."""

    def monotonic(self) -> float:
        return 1000.0


async def test_a_silent_stream_repeats_its_read_count(connect: Any, nats: Any) -> None:
    """Its credit may have been lost, and the generator waits for it."""
    bus, runner = await connect(nats), await connect(nats)
    await streams.ensure_streams(bus)
    caller = Caller(bus, name="gw-silent", clock=Still())
    caller.start()
    stream = caller.open_stream(request())
    inbox = subjects.runner_inbox("silent")
    given: asyncio.Queue[int] = asyncio.Queue()
    runner.subscribe(
        inbox, lambda message: given.put_nowait(msgspec.msgpack.decode(message.payload, type=StreamCredit).taken)
    )
    await runner.flush()
    caller.tick(stream.since + 5.0)  # before the first item the credit's subject is unknown
    for number in range(STREAM_WINDOW):
        stream.take(ItemReply(stream.id, number, "application/json", inbox), b"1")
    items = stream.items()
    for _ in range(STREAM_WINDOW):
        await anext(items)
    assert [await given.get() for _ in range(2)] == [STREAM_WINDOW // 2, STREAM_WINDOW]
    for seconds in (6.0, 6.1, 9.0):
        caller.tick(stream.since + seconds)
    caller.fail("f", None, BusUnavailable("the end"))
    bus.publish(inbox, encode(StreamCredit("the end", 0)))
    assert [await given.get() for _ in range(3)] == [STREAM_WINDOW, STREAM_WINDOW, 0]
    assert [item async for item in items] == []


async def test_a_call_that_no_stream_stored_is_published_again(connect: Any, crash: Any) -> None:
    """During an election the queue's subject has no subscriber."""
    bus = await connect(crash.server)
    caller = Caller(bus, name="gw", clock=SystemClock())
    caller.start()
    call = caller.invoke(request())
    await bus.flush()
    assert not call.future.done()
    await streams.ensure_streams(bus)
    caller.tick(call.since + 1.0)
    await until_async(lambda: call.queue_seq)
    stored = await streams.message_at(bus, subjects.SYNC, call.queue_seq)
    assert stored is not None
    assert unpack_invocation(stored.payload)[0].id == call.id
    caller.tick(call.since + 2.0)
    await bus.flush()
    assert await streams.messages_per_subject(bus, subjects.SYNC) == {stored.subject: 1}
    assert not call.future.done()


async def test_a_call_that_a_stream_cannot_store_now_is_published_again(connect: Any, crash: Any) -> None:
    bus, server = await connect(crash.server), await connect(crash.server)
    unavailable = b'{"error":{"code":503,"err_code":10008,"description":"JetStream system temporarily unavailable"}}'
    queue = subjects.sync_queue("f", 1, Priority.NORMAL)
    refusing = server.subscribe(queue, lambda message: server.publish(message.reply, unavailable))
    await server.flush()
    caller = Caller(bus, name="gw", clock=SystemClock())
    caller.start()
    call = caller.invoke(request())
    await until_async(lambda: call.is_refused)
    refusing.unsubscribe()
    await server.flush()
    await streams.ensure_streams(bus)
    caller.tick(call.since + 1.0)
    await until_async(lambda: call.queue_seq)
    assert not call.future.done()


@pytest.mark.parametrize("deadline_s", [3600.0, 1.0])
async def test_a_call_that_no_stream_stores_ends_within_seconds_or_at_its_deadline(
    connect: Any, crash: Any, deadline_s: float
) -> None:
    bus = await connect(crash.server)
    caller = Caller(bus, name="gw", clock=SystemClock())
    caller.start()
    call = caller.invoke(request()._replace(deadline=SystemClock().time() + deadline_s))
    await until_async(lambda: call.is_refused)
    end = min(call.expires_at, call.since + _STORE_TIMEOUT_S)
    caller.tick(end - 0.1)
    assert not call.is_refused
    await until_async(lambda: call.is_refused)
    caller.tick(end + 0.1)
    with pytest.raises(BusUnavailable, match="call again") as raised:
        await call.future
    assert raised.value.retryable
    assert not caller.pending


async def test_an_abandoned_call_is_not_published_again(connect: Any, crash: Any) -> None:
    bus = await connect(crash.server)
    caller = Caller(bus, name="gw", clock=SystemClock())
    caller.start()
    call = caller.invoke(request())
    await until_async(lambda: call.is_refused)
    call.cancel()
    await streams.ensure_streams(bus)
    caller.tick(call.since + 1.0)
    await bus.flush()
    assert await streams.messages_per_subject(bus, subjects.SYNC) == {}


async def test_a_call_that_no_stream_stores_ends_with_its_queue_timeout(connect: Any, crash: Any) -> None:
    bus = await connect(crash.server)
    caller = Caller(bus, name="gw", clock=SystemClock())
    caller.start()
    call = caller.invoke(request())
    await until_async(lambda: call.is_refused)
    caller.fail_unless_started(GpufnError("the platform stops"))
    with pytest.raises(GpufnError, match="stops"):
        await call.future


async def test_a_call_that_is_about_to_be_published_again_is_not_lost_with_a_restart(connect: Any, crash: Any) -> None:
    bus = await connect(crash.server)
    caller = Caller(bus, name="gw", clock=SystemClock())
    caller.start()
    refused = caller.invoke(request())
    await until_async(lambda: refused.is_refused)
    await streams.ensure_streams(bus)
    lost = await queued(bus, caller)
    await crash.restart(bus)
    await streams.ensure_streams(bus)
    with pytest.raises(BusUnavailable, match="was lost"):
        await lost.future
    caller.tick(refused.since + 1.0)
    await until_async(lambda: refused.queue_seq)
    assert not refused.future.done()
