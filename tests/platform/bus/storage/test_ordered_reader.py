"""Ordered reads of a stream, as fast as the reader takes messages."""

from __future__ import annotations

import asyncio
import gc
import json
from typing import Any, cast

import pytest

from gpufn_core.errors import BusUnavailable
from gpufn_core.protocol import subjects
from gpufn_platform.bus.connection import Message
from gpufn_platform.bus.storage import ordered_reader, streams
from gpufn_platform.bus.storage.async_reader import Follower
from gpufn_platform.bus.storage.ordered_reader import Feed, StoredMessage


async def test_a_reader_of_large_messages_is_sent_few_ahead(
    nats: Any, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ordered_reader, "_WINDOW_BYTES", 64 << 10)
    bus = await connect(nats)
    await streams.ensure_streams(bus)
    subject = subjects.logs("large")
    stored = [await bus.publish_stored(subject, b"x" * (16 << 10)) for _ in range(200)]
    start = stored[0].seq
    waiting: list[StoredMessage] = []
    most = 0

    def on_message(message: StoredMessage, pending: int) -> None:
        nonlocal most
        waiting.append(message)
        if message.seq > start + 64:  # the message size is known by now
            most = max(most, len(waiting))

    reader = await Feed.open(bus, subjects.LOGS, subject, on_message, pytest.fail, since_seq=start)
    for _ in range(200):
        while not waiting:
            await bus.flush()
        waiting.pop(0)
        reader.take()
    reader.close()
    assert 0 < most <= 4


async def test_a_follower_returns_the_available_messages_and_detects_the_end(nats: Any, connect: Any) -> None:
    bus = await connect(nats)
    await streams.ensure_streams(bus)
    subject = subjects.logs("some")
    async with Follower(bus, subjects.LOGS, subject, 1) as follower:
        assert await follower.next_batch(0.01) == []
        assert await follower.is_drained()
        stored = [await bus.publish_stored(subject, b"%d" % number) for number in range(600)]
        found: list[StoredMessage] = []
        while len(found) < 600:
            found += await follower.next_batch(5.0)
        assert [message.seq for message in found] == [each.seq for each in stored]
        assert await follower.is_drained()


async def test_a_follower_detects_the_end_although_pending_messages_are_removed(
    nats: Any, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like results whose retention ends before a slow reader gets to them."""
    monkeypatch.setattr(ordered_reader, "_HEARTBEAT_S", 1)
    bus = await connect(nats)
    await streams.ensure_streams(bus)
    subject = subjects.logs("removed")
    number = 2 * ordered_reader._MAX_WINDOW  # more than a reader requests ahead
    stored = [await bus.publish_stored(subject, b"x") for _ in range(number)]
    async with Follower(bus, subjects.LOGS, subject, stored[0].seq) as follower:
        found = await follower.next_batch(5.0)
        await streams.purge(bus, subjects.LOGS, subject)
        while not await follower.is_drained():
            found += await follower.next_batch(5.0)
        assert 0 < len(found) < number
        more = await bus.publish_stored(subject, b"and on")
        while not (last := await follower.next_batch(5.0)):
            pass
        assert [message.seq for message in last] == [more.seq]


async def test_a_follower_does_not_skip_messages_that_arrive_during_its_check_for_the_end(
    nats: Any, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = await connect(nats)
    await streams.ensure_streams(bus)
    subject, newest_seq = subjects.logs("meanwhile"), ordered_reader.last_seq
    first = await bus.publish_stored(subject, b"")
    async with Follower(bus, subjects.LOGS, subject, first.seq) as follower:
        while not await follower.next_batch(5.0):
            pass

        async def slowly(*which: Any) -> int:
            await bus.publish_stored(subject, b"")
            found = await newest_seq(*which)
            while not follower._ready:
                await bus.flush()
            return found

        monkeypatch.setattr("gpufn_platform.bus.storage.async_reader.last_seq", slowly)
        assert not await follower.is_drained()


def _mislead(bus: Any, monkeypatch: pytest.MonkeyPatch, times: int) -> list[str]:
    """Misdirect the first requests for messages to a subject without subscribers; returns the original subjects."""
    publish, misled = bus.publish, list[str]()

    def mislead(to: str, payload: bytes, **more: Any) -> None:
        if ".MSG.NEXT." in to and len(misled) < times:
            misled.append(to)
            to = "nobody.listens.here"
        publish(to, payload, **more)

    monkeypatch.setattr(bus, "publish", mislead)
    return misled


async def test_a_consumer_that_is_not_found_yet_is_requested_again(
    nats: Any, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a cluster the consumer may be on another node, which learns of our subscription only after the consumer
    exists."""
    bus = await connect(nats)
    await streams.ensure_streams(bus)
    subject = subjects.logs("found")
    await bus.publish_stored(subject, b"there")
    misled = _mislead(bus, monkeypatch, 3)
    found = await ordered_reader.collect(bus, subjects.LOGS, subject)
    assert [message.payload for message in found] == [b"there"]
    assert len(misled) == 3


async def test_a_missing_consumer_is_reported(nats: Any, connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordered_reader, "_ROUTE_TIMEOUT_S", 0.1)
    bus = await connect(nats)
    await streams.ensure_streams(bus)
    subject = subjects.logs("lost")
    await bus.publish_stored(subject, b"there")
    _mislead(bus, monkeypatch, 1000)
    with pytest.raises(BusUnavailable, match="503"):
        await ordered_reader.collect(bus, subjects.LOGS, subject)


async def test_a_follower_whose_feed_is_lost_as_it_begins_opens_another(
    nats: Any, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = await connect(nats)
    await streams.ensure_streams(bus)
    subject = subjects.logs("brief")
    await bus.publish_stored(subject, b"there")
    publish, broke = bus.publish, list[str]()

    def breaks(to: str, payload: bytes, **more: Any) -> None:
        if ".MSG.NEXT." in to and not broke:
            broke.append(to)
            raise BusUnavailable("The connection broke.")
        publish(to, payload, **more)

    monkeypatch.setattr(bus, "publish", breaks)
    async with Follower(bus, subjects.LOGS, subject, 1) as follower:
        async with asyncio.timeout(30):
            assert (await follower.next()).payload == b"there"
    assert len(broke) == 1


async def test_received_messages_are_returned_although_the_feed_is_lost_meanwhile(nats: Any, connect: Any) -> None:
    follower = Follower(await connect(nats), subjects.LOGS, subjects.logs("brief"), 1)

    class Breaks:
        """Because the reader cannot request more."""

        def take(self) -> None:
            follower._on_lost("the connection broke")

    follower._feed = cast("Feed", Breaks())
    came = [StoredMessage("s", seq, b"", {}, 0.0) for seq in (1, 2)]
    for message in came:
        follower._on_message(message, 0)
    assert await follower.next_batch(30) == came


async def test_a_follower_is_opened_even_if_that_exceeds_the_wait_of_its_reader(nats: Any, connect: Any) -> None:
    """Each abandoned attempt leaves another consumer on the server, which slows it down further."""
    bus = await connect(nats)
    await streams.ensure_streams(bus)
    subject = subjects.logs("slow")
    await bus.publish_stored(subject, b"there")
    async with Follower(bus, subjects.LOGS, subject, 1) as follower, asyncio.timeout(30):
        found: list[StoredMessage] = []
        while not found:
            found = await follower.next_batch(0.0)
    assert [message.payload for message in found] == [b"there"]


def _requests(bus: Any, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The requests for messages, as sent."""
    publish, sent = bus.publish, list[dict[str, Any]]()

    def record(to: str, payload: bytes, **more: Any) -> None:
        if ".MSG.NEXT." in to:
            sent.append(json.loads(payload))
        publish(to, payload, **more)

    monkeypatch.setattr(bus, "publish", record)
    return sent


async def test_a_collection_ends_at_once_when_pending_messages_are_removed(
    nats: Any, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: it waited for a heartbeat, which comes after five seconds."""
    bus = await connect(nats)
    await streams.ensure_streams(bus)
    subject = subjects.logs("removed-early")
    for _ in range(3):
        await bus.publish_stored(subject, b"there")
    js, requests = bus.js, _requests(bus, monkeypatch)

    async def removed(to: str, *more: Any) -> Any:
        answer = await js(to, *more)
        if ".CREATE." in to:
            assert answer["num_pending"] == 1  # the newest of its subject
            await streams.purge(bus, subjects.LOGS, subject)
        return answer

    monkeypatch.setattr(bus, "js", removed)
    assert await ordered_reader.collect(bus, subjects.LOGS, subject) == []
    assert requests == [{"batch": ordered_reader._FIRST_WINDOW, "no_wait": True}]


async def test_a_collection_requests_no_more_than_exists(
    nats: Any, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = await connect(nats)
    await streams.ensure_streams(bus)
    subject = subjects.logs("batches")
    stored = [await bus.publish_stored(subject, b"%d" % number) for number in range(3 * ordered_reader._FIRST_WINDOW)]
    requests = _requests(bus, monkeypatch)
    found = await ordered_reader.collect(bus, subjects.LOGS, subject, since_seq=stored[0].seq)
    assert [message.seq for message in found] == [each.seq for each in stored]
    assert all(request["no_wait"] for request in requests)
    assert sum(request["batch"] for request in requests[:-1]) < len(stored)


async def test_a_collection_requests_again_while_the_node_of_its_consumer_is_behind(
    nats: Any, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node reports that nothing is stored, but the stream's leader has messages."""
    bus = await connect(nats)
    await streams.ensure_streams(bus)
    subject = subjects.logs("behind")
    await bus.publish_stored(subject, b"there")
    publish, subscribe, handlers, behind = bus.publish, bus.subscribe, dict[str, Any](), list[str]()

    def keep(to: str, handler: Any, **more: Any) -> Any:
        handlers[to] = handler
        return subscribe(to, handler, **more)

    def nothing_yet(to: str, payload: bytes, *, reply: str = "", **more: Any) -> None:
        if ".MSG.NEXT." in to and len(behind) < 3:
            behind.append(to)
            none = Message(reply, "", b"", None, 404, "No Messages")
            asyncio.get_running_loop().call_soon(handlers[reply], none)
        else:
            publish(to, payload, reply=reply, **more)

    monkeypatch.setattr(bus, "subscribe", keep)
    monkeypatch.setattr(bus, "publish", nothing_yet)
    found = await ordered_reader.collect(bus, subjects.LOGS, subject)
    assert [message.payload for message in found] == [b"there"]
    assert len(behind) == 3


async def test_a_collection_whose_node_stays_behind_breaks_off(
    nats: Any, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ordered_reader, "_CATCH_UP_S", 0.1)
    bus = await connect(nats)
    await streams.ensure_streams(bus)
    subject = subjects.logs("stays-behind")
    await bus.publish_stored(subject, b"there")
    publish = bus.publish

    def of_another_consumer(to: str, payload: bytes, **more: Any) -> None:
        publish(to.replace(".NEXT.GPUFN_LOGS.feed", ".NEXT.GPUFN_LOGS.empty"), payload, **more)

    js = bus.js

    async def made(to: str, body: Any = None, *more: Any) -> Any:
        answer = await js(to, body, *more)
        if ".CREATE." in to:  # another watch, on a subject without messages
            other = {key: value for key, value in body["config"].items() if key != "filter_subject"}
            name = other["name"].replace("feed", "empty")
            other |= {"name": name, "filter_subject": subjects.logs("empty")}
            await js(
                f"CONSUMER.CREATE.{subjects.LOGS}.{name}.{subjects.logs('empty')}",
                {"stream_name": subjects.LOGS, "config": other, "action": "create"},
            )
        return answer

    monkeypatch.setattr(bus, "js", made)
    monkeypatch.setattr(bus, "publish", of_another_consumer)
    with pytest.raises(BusUnavailable, match=f"{subjects.LOGS} .* removed"):
        await ordered_reader.collect(bus, subjects.LOGS, subject)


@pytest.mark.parametrize("removed", [(), (4,), (3, 4, 5), (2, 3, 4)])
async def test_a_read_of_a_range_is_sent_hardly_more_than_the_range(
    nats: Any, connect: Any, monkeypatch: pytest.MonkeyPatch, removed: tuple[int, ...]
) -> None:
    bus = await connect(nats)
    await streams.ensure_streams(bus)
    subject = subjects.logs("range")
    stored = [(await bus.publish_stored(subject, b"%d" % number)).seq for number in range(60)]
    for number in removed:
        await streams.delete_message(bus, subjects.LOGS, stored[number])
    sent: list[int] = []
    on_delivery = Feed._on_delivery

    def counted(feed: Feed, message: Message) -> None:
        sent.append(message.status)
        on_delivery(feed, message)

    monkeypatch.setattr(Feed, "_on_delivery", counted)
    found = await ordered_reader.collect(bus, subjects.LOGS, ">", since_seq=stored[2], before_seq=stored[5])
    await bus.flush()
    assert [message.seq for message in found] == [stored[number] for number in (2, 3, 4) if number not in removed]
    assert len(sent) <= 3


async def test_the_messages_of_a_read_are_freed_with_its_result(nats: Any, connect: Any) -> None:
    """Bug: the gateway held the messages of searches until a full garbage collection, and grew by 84 MiB."""
    bus = await connect(nats)
    await streams.ensure_streams(bus)
    subject = subjects.logs("freed")
    first = await bus.publish_stored(subject, b"1")
    gc.collect()
    gc.disable()
    try:
        assert len(await ordered_reader.collect(bus, subjects.LOGS, subject, since_seq=first.seq)) == 1
        assert not [each for each in gc.get_objects() if isinstance(each, StoredMessage) and each.subject == subject]
    finally:
        gc.enable()
