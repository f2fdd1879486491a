"""Bugs of nats-py 2.16 that must not happen here. The numbers refer to the list in design/transport.md."""

from __future__ import annotations

import asyncio
import os
import signal
from types import ModuleType
from typing import Any

import pytest

from gpufn_core.errors import ArtifactUnavailable
from gpufn_core.protocol import subjects
from gpufn_platform.bus import tcp_connection
from gpufn_platform.bus.connection import Bus, Message
from gpufn_platform.bus.storage import object_store, ordered_reader, streams
from gpufn_platform.bus.storage.key_value import Entry, KeyValue
from gpufn_platform.queue import puller
from gpufn_platform.queue.delivery import Delivery
from gpufn_platform.queue.puller import Pull
from tests.waiting import until_async


def _without_heartbeats(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the detection of silent connections, so that it cannot cause the messages that tests expect."""
    monkeypatch.setattr(module, "_EXPIRES_S", 3 * 3600)
    monkeypatch.setattr(module, "_HEARTBEAT_S", 3600)
    monkeypatch.setattr(module, "_SILENCE_S", 2 * 3600, raising=False)


async def test_1_callbacks_that_raise_do_not_stop_the_bus(connect: Any, crash: Any) -> None:
    bus = await connect(crash.server)

    def broken(*_: object) -> None:
        raise RuntimeError("broken")

    reconnects: list[int] = []
    bus.on_reconnect(broken)
    bus.on_reconnect(lambda: reconnects.append(1))
    bus.subscribe("t.x", broken)
    seen: list[Message] = []
    bus.subscribe("t.x", seen.append)
    bus.publish("t.x", b"")
    await bus.flush()
    await crash.restart(bus)
    bus.publish("t.x", b"")
    await bus.flush()
    assert (len(seen), reconnects) == (2, [1])


async def test_2_a_bus_with_refused_credentials_reconnects_when_they_are_valid_again(connect: Any, crash: Any) -> None:
    bus: Bus = await connect(crash.server)
    config = crash.server.directory / "nats.conf"
    good = config.read_text()
    config.write_text(good.replace('"password": "', '"password": "revoked'))
    os.kill(crash.server.pid, signal.SIGHUP)
    await until_async(lambda: "authorization" in bus._disconnect_reason.lower())
    config.write_text(good)
    os.kill(crash.server.pid, signal.SIGHUP)
    await until_async(lambda: bus.connected)
    await bus.flush()


async def test_3_a_restart_does_not_stall_a_pull_and_a_withdrawn_one_receives_nothing(
    connect: Any, crash: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _without_heartbeats(puller, monkeypatch)
    bus, other = await connect(crash.server), await connect(crash.server)
    await streams.ensure_streams(bus)
    queue = subjects.async_queue("f", 1)
    await streams.ensure_consumer(bus, subjects.ASYNC, "c", queue, ack_wait_s=60, max_ack_pending=10)
    got: list[Delivery] = []
    pull = Pull(bus, subjects.ASYNC, "c", got.append)
    pull.grant(1)
    await bus.flush()
    await crash.restart(bus, other)
    await bus.publish_stored(queue, b"1", msg_id="1")
    await until_async(lambda: got)
    pull.grant(1)
    await bus.flush()
    pull.withdraw()
    await bus.flush()
    heir = Pull(other, subjects.ASYNC, "c", got.append)
    heir.grant(1)
    await bus.publish_stored(queue, b"2", msg_id="2")
    await until_async(lambda: len(got) == 2)
    assert [(delivery.payload, delivery.delivered) for delivery in got] == [(b"1", 1), (b"2", 1)]


async def test_4_a_key_with_a_time_to_live_can_be_created_again_once_it_has_expired(connect: Any, nats: Any) -> None:
    kv = await KeyValue.open(await connect(nats), "guard4")
    first = await kv.create("a", b"1", ttl_s=1)
    renewed = await kv.update("a", b"1", first, ttl_s=1)
    while await kv.get("a") is not None:
        pass
    assert await kv.keys() == []
    assert await kv.create("a", b"2") > renewed


async def test_5_a_watch_receives_changes_at_once_after_a_restart(
    connect: Any, crash: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _without_heartbeats(ordered_reader, monkeypatch)
    bus = await connect(crash.server)
    kv = await KeyValue.open(bus, "guard5")
    told: list[Entry | None] = []
    watch = await kv.watch(lambda key, entry: told.append(entry))
    await crash.restart(bus)
    await bus.publish_stored(kv.subject("a"), b"1", msg_id="a")
    await until_async(lambda: told)
    watch.stop()


async def test_6_a_blob_without_its_chunks_fails_at_once(connect: Any, nats: Any) -> None:
    bus = await connect(nats)
    await object_store.ensure_bucket(bus, "guard6")
    for remove in ("$O.guard6.C.>", None):
        digest = await object_store.put(bus, "guard6", bytes(12 << 20) + os.urandom(1))
        if remove:
            await streams.purge(bus, "OBJ_guard6", remove)
        else:  # one in the middle
            chunk = await streams.next_message(bus, "OBJ_guard6", "$O.guard6.C.>", 1)
            assert chunk is not None
            await streams.delete_message(bus, "OBJ_guard6", chunk.seq + 9)
        with pytest.raises(ArtifactUnavailable, match="lacks chunks"):
            await asyncio.wait_for(object_store.get(bus, "guard6", digest), 10)


async def test_7_a_time_to_live_is_rounded_up_and_headers_stay_the_callers(connect: Any, nats: Any) -> None:
    bus = await connect(nats)
    await streams.ensure_streams(bus)
    headers = {"A": "b"}
    subject = subjects.result("f", "i")
    await bus.publish_stored(subject, b"", ttl_s=1.2, headers=headers)
    stored = await streams.last_message(bus, subjects.RESULTS, subject)
    assert stored is not None
    assert (headers, stored.headers) == ({"A": "b"}, {"A": "b", "Nats-TTL": "2s"})
    await bus.publish_stored(subject, b"", ttl_s=0.1)
    stored = await streams.last_message(bus, subjects.RESULTS, subject)
    assert stored is not None
    assert stored.headers == {"Nats-TTL": "1s"}


async def test_8_a_server_that_hangs_is_noticed_by_its_missing_pongs(connect: Any, crash: Any) -> None:
    bus = await connect(crash.server, ping_interval_s=0.05)
    assert (tcp_connection._MAX_PINGS_OUT, (await connect(crash.server))._ping_interval_s) == (2, 5.0)
    os.kill(crash.server.pid, signal.SIGSTOP)
    await until_async(lambda: not bus.connected)
    assert "pings" in bus._disconnect_reason
    os.kill(crash.server.pid, signal.SIGCONT)
    await until_async(lambda: bus.connected)
    await bus.flush()


async def test_9_storing_waits_out_a_stream_without_a_leader_and_counts_once(connect: Any, nats: Any) -> None:
    bus = await connect(nats)
    storing = asyncio.create_task(bus.publish_stored("guard9", b"", msg_id="m"))
    await bus.flush()  # by now the first attempt found no subscriber
    await bus.js("STREAM.CREATE.GUARD9", {"name": "GUARD9", "subjects": ["guard9"]})
    assert (await storing).seq == 1
    assert (await bus.publish_stored("guard9", b"", msg_id="m")).duplicate
