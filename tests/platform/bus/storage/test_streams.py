from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from gpufn_core.errors import BusUnavailable, InvalidSpec, QueueFull
from gpufn_core.protocol import subjects
from gpufn_core.spec.function_spec import EntryPoint, FunctionSpec, MethodSpec
from gpufn_platform.bus import jetstream
from gpufn_platform.bus.connection import JetStreamError
from gpufn_platform.bus.storage import stream_scan, streams
from gpufn_platform.bus.storage.streams import Depth
from gpufn_platform.queue.delivery import Delivery
from gpufn_platform.queue.puller import Pull
from tests.platform.conftest import lead_astray
from tests.waiting import until_async


async def test_the_first_process_creates_the_streams_and_later_ones_update_them(
    connect: Any, nats: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    buses = [await connect(nats, "gateway") for _ in range(3)]
    await asyncio.gather(*(streams.ensure_streams(bus) for bus in buses))
    changed = {**streams.STREAMS[subjects.SYNC], "max_msgs_per_subject": 3}
    monkeypatch.setattr(streams, "STREAMS", {**streams.STREAMS, subjects.SYNC: changed})
    await streams.ensure_streams(buses[0])
    queue = subjects.sync_queue("full", 1)
    for _ in range(3):
        await buses[0].publish_stored(queue, b"")
    with pytest.raises(QueueFull):
        await buses[0].publish_stored(queue, b"")
    await buses[0].publish_stored(subjects.sync_queue("other", 1), b"")


async def test_a_node_waits_for_the_streams_that_a_gateway_creates(connect: Any, crash: Any) -> None:
    gateway, runner = await connect(crash.server, "gateway"), await connect(crash.server, "runner")
    waiting = asyncio.create_task(streams.wait_for(runner, [subjects.SYNC, subjects.ASYNC]))
    await streams.ensure_stream(gateway, subjects.SYNC, streams.STREAMS[subjects.SYNC])
    await runner.flush()
    assert not waiting.done()
    await streams.ensure_streams(gateway)
    await waiting


async def test_depths_count_each_revision_over_both_queues_and_classes(connect: Any, nats: Any) -> None:
    bus = await connect(nats)
    await streams.ensure_streams(bus)
    for subject in (
        subjects.sync_queue("d", 1),
        subjects.sync_queue("d", 2),
        subjects.async_queue("d", 2, "hi"),
        subjects.async_queue("d", 2, "low"),
        subjects.async_queue("e", 1),
    ):
        await bus.publish_stored(subject, b"")
    found = await streams.depths(bus)
    assert {owner: found.get(owner) for owner in [("d", 1), ("d", 2), ("e", 1), ("e", 2)]} == {
        ("d", 1): Depth(sync=1),
        ("d", 2): Depth(sync=1, asynchronous=2),
        ("e", 1): Depth(asynchronous=1),
        ("e", 2): None,
    }
    await bus.js(f"STREAM.DELETE.{subjects.ASYNC}")
    with pytest.raises(JetStreamError, match="stream not found"):
        await streams.depths(bus)


@pytest.mark.parametrize(
    ("stream", "subject"),
    [(subjects.SYNC, subjects.sync_queue("f", 1)), (subjects.ASYNC, subjects.async_queue("f", 1, "i1"))],
)
async def test_an_already_removed_message_is_not_removed_again(
    connect: Any, nats: Any, stream: str, subject: str
) -> None:
    """Streams in memory and on disk report it with different errors."""
    bus = await connect(nats)
    await streams.ensure_streams(bus)
    stored = await bus.publish_stored(subject, b"1")
    assert [await streams.delete_message(bus, stream, stored.seq) for _ in range(2)] == [True, False]
    assert not await streams.delete_message(bus, stream, stored.seq + 9)


async def test_stored_messages_can_be_read_removed_and_purged(connect: Any, nats: Any) -> None:
    bus = await connect(nats)
    await streams.ensure_streams(bus)
    subject = subjects.result("f", "i1")
    stored = await bus.publish_stored(subject, b"1", headers={"A": "b"})
    last = await streams.last_message(bus, subjects.RESULTS, subjects.any_result("i1"))
    assert last is not None
    assert (last.subject, last.seq, last.payload, last.headers) == (subject, stored.seq, b"1", {"A": "b"})
    following = await streams.next_message(bus, subjects.RESULTS, subjects.any_result("*"), stored.seq)
    assert following == last
    assert await streams.next_message(bus, subjects.RESULTS, subjects.any_result("*"), stored.seq + 1) is None
    assert await streams.delete_message(bus, subjects.RESULTS, stored.seq)
    assert not await streams.delete_message(bus, subjects.RESULTS, stored.seq)
    assert await streams.last_message(bus, subjects.RESULTS, subject) is None
    await bus.publish_stored(subject, b"2")
    assert await streams.purge(bus, subjects.RESULTS, subject) == 1


async def test_history_returns_the_newest_messages_in_order(connect: Any, nats: Any) -> None:
    bus = await connect(nats)
    await streams.ensure_streams(bus)
    for number in range(60):
        await bus.publish_stored(subjects.logs("rare" if number % 20 == 0 else "chatty"), b"%d" % number)
    rare = await stream_scan.newest(bus, subjects.LOGS, subjects.logs("rare"), last=2)
    assert [message.payload for message in rare] == [b"20", b"40"]
    assert len(await stream_scan.newest(bus, subjects.LOGS, subjects.logs("rare"), last=100)) == 3
    assert await stream_scan.newest(bus, subjects.LOGS, subjects.logs("none"), last=2) == []


async def test_messages_that_a_lagging_node_lacks_come_from_the_leader(
    connect: Any, nats: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = await connect(nats)
    await streams.ensure_streams(bus)
    subject = subjects.logs("behind")
    stored = [(await bus.publish_stored(subject, b"%d" % number)).seq for number in range(3)]
    lead_astray(bus, monkeypatch, f"{jetstream.API}DIRECT.GET.{subjects.RESULTS}")
    monkeypatch.setitem(bus.server_info, "cluster", "several")
    found, seq = [], stored[0]
    while part := await streams.batch_from(bus, subjects.LOGS, subject, seq, most=100, max_bytes=1 << 20):
        found += part
        seq = part[-1].seq + 1
    assert [(each.seq, each.payload) for each in found] == list(zip(stored, (b"0", b"1", b"2"), strict=True))


async def test_a_stream_without_a_responder_does_not_count_as_empty(
    connect: Any, nats: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = await connect(nats)
    await streams.ensure_streams(bus)
    lead_astray(bus, monkeypatch, "nobody.listens.here")
    with pytest.raises(BusUnavailable, match="503"):
        await streams.batch_from(bus, subjects.LOGS, subjects.logs("away"), 1, most=100, max_bytes=1 << 20)


async def test_following_misses_and_repeats_nothing_across_a_crash(connect: Any, crash: Any) -> None:
    bus = await connect(crash.server)
    await streams.ensure_streams(bus)
    subject = subjects.logs("f")
    for number in range(700):  # more than one window
        bus.publish(subject, b"%d" % number)
    await bus.flush()
    follower = streams.follow(bus, subjects.LOGS, subject, since_seq=1)
    seen = [(await anext(follower)).payload for _ in range(700)]
    await crash.restart(bus)
    await bus.publish_stored(subject, b"700", msg_id="a")
    seen.append((await anext(follower)).payload)
    assert seen == [b"%d" % number for number in range(701)]
    await follower.aclose()


async def test_a_consumer_can_be_made_and_deleted_again_and_again(connect: Any, nats: Any) -> None:
    bus = await connect(nats)
    await streams.ensure_streams(bus)
    for ack_wait_s in (15, 15, 20):
        await streams.ensure_consumer(
            bus, subjects.SYNC, "S-c-1", subjects.sync_queue("c", 1), ack_wait_s=ack_wait_s, max_ack_pending=4
        )
    info = await bus.js(f"CONSUMER.INFO.{subjects.SYNC}.S-c-1")
    assert (info["config"]["ack_wait"], info["config"]["max_deliver"]) == (20_000_000_000, -1)
    await streams.delete_consumer(bus, subjects.SYNC, "S-c-1")
    await streams.delete_consumer(bus, subjects.SYNC, "S-c-1")


async def test_a_message_that_expires_while_it_runs_disappears_without_notice(connect: Any, nats: Any) -> None:
    """The reason why an invocation's stream keeps messages longer than any deadline."""
    bus = await connect(nats)
    config = {"subjects": ["brief"], "retention": "workqueue", "storage": "memory", "max_age": 200_000_000}
    await streams.ensure_stream(bus, "BRIEF", config)
    await streams.ensure_consumer(bus, "BRIEF", "c", "brief", ack_wait_s=60, max_ack_pending=10)
    got: list[Delivery] = []
    pull = Pull(bus, "BRIEF", "c", got.append)
    pull.grant(2)
    await bus.publish_stored("brief", b"runs")
    await until_async(lambda: got)
    while await streams.messages_per_subject(bus, "BRIEF"):
        got[0].touch()
    got[0].nak()
    await bus.flush()
    info = await bus.js("CONSUMER.INFO.BRIEF.c")
    assert (len(got), info["num_pending"], info["num_ack_pending"]) == (1, 0, 0)


@pytest.mark.parametrize("stream", [subjects.SYNC, subjects.ASYNC])
def test_no_call_outlives_its_message(stream: str) -> None:
    longest_s = 7 * 86_400.0
    spec = FunctionSpec(
        name="f", entry=EntryPoint("m", "f"), methods=(MethodSpec(),), timeout_s=longest_s, queue_timeout_s=longest_s
    )
    with pytest.raises(InvalidSpec, match="timeout"):
        msgspec.convert(msgspec.to_builtins(spec) | {"timeout_s": longest_s + 1}, FunctionSpec)
    with pytest.raises(InvalidSpec, match="queue_timeout"):
        msgspec.convert(msgspec.to_builtins(spec) | {"queue_timeout_s": longest_s + 1}, FunctionSpec)
    assert streams.STREAMS[stream]["max_age"] / 1e9 > 2 * longest_s
