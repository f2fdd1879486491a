from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gpufn_core.errors import BusUnavailable, Conflict, PayloadTooLarge, QueueFull
from gpufn_local.nats_process import EmbeddedServer
from gpufn_platform.bus.connection import Bus, JetStreamError, Message, NoResponders


async def test_a_message_reaches_every_subscription_and_one_of_a_queue_group(connect: Any, nats: Any) -> None:
    bus = await connect(nats)
    seen: list[str] = []
    for name in ("a", "b"):
        bus.subscribe("t.fan.*", lambda message, name=name: seen.append(name))
        bus.subscribe("t.fan.*", lambda message: seen.append("group"), queue="q")
    bus.publish("t.fan.x", b"")
    await bus.flush()
    assert sorted(seen) == ["a", "b", "group"]


async def test_messages_keep_their_order_headers_and_bytes_whatever_their_size(connect: Any, nats: Any) -> None:
    bus = await connect(nats)
    seen: list[Message] = []
    bus.subscribe("t.sizes", seen.append)
    sizes = [0, 1, 70_000, 0, 3_000_000, 5]
    for size in sizes:
        bus.publish("t.sizes", b"\r\nMSG"[:5] * (size // 5), headers={"Size": f"{size}: å"})
    await bus.flush()
    assert [len(message.payload) for message in seen] == [size // 5 * 5 for size in sizes]
    assert [message.headers for message in seen] == [{"Size": f"{size}: å"} for size in sizes]


async def test_a_request_gets_its_own_answer(connect: Any, nats: Any) -> None:
    bus = await connect(nats)
    bus.subscribe("t.echo", lambda message: bus.publish(message.reply, message.payload))
    answers = await asyncio.gather(*(bus.request("t.echo", b"%d" % n) for n in range(50)))
    assert [answer.payload for answer in answers] == [b"%d" % n for n in range(50)]


async def test_a_request_without_responders_fails_at_once_and_an_unanswered_one_times_out(
    connect: Any, nats: Any
) -> None:
    bus = await connect(nats)
    with pytest.raises(NoResponders, match=r"t\.nobody"):
        await bus.request("t.nobody", timeout_s=60)
    bus.subscribe("t.silent", lambda message: None)
    with pytest.raises(BusUnavailable, match=r"^t\.silent .* 0\.05 s"):
        await bus.request("t.silent", timeout_s=0.05)


async def test_the_error_of_a_missing_acknowledgement_suggests_a_full_disk(connect: Any, nats: Any) -> None:
    """A stream whose server once found the disk full no longer acknowledges."""
    bus = await connect(nats)
    bus.subscribe("t.full", lambda message: None)
    why = r"t\.full did not answer within 0\.05 s: the disk of the message bus may be full"
    with pytest.raises(BusUnavailable, match=why):
        await bus.publish_stored("t.full", b"", timeout_s=0.05)
    with pytest.raises(BusUnavailable, match=why):
        await bus.publish_batch([("t.full", b"")], expected_last=0, timeout_s=0.05)


async def test_an_ended_subscription_receives_nothing_and_a_drained_one_all_sent_messages(
    connect: Any, nats: Any
) -> None:
    bus = await connect(nats)
    seen: list[str] = []
    gone = bus.subscribe("t.end", lambda message: seen.append("gone"))
    drained = bus.subscribe("t.end", lambda message: seen.append("drained"))
    bus.publish("t.end", b"")
    gone.unsubscribe()
    drained.drain()
    bus.publish("t.end", b"")
    await bus.flush()
    assert seen == ["drained"]


@pytest.mark.parametrize("subject", ["", "a b", "a\r\nPUB x 0", "a\tb"])
async def test_a_subject_cannot_smuggle_a_command(connect: Any, nats: Any, subject: str) -> None:
    bus = await connect(nats)
    with pytest.raises(ValueError, match="not a subject"):
        bus.publish(subject, b"")
    with pytest.raises(ValueError, match="not a subject"):
        bus.subscribe(subject, lambda message: None)
    with pytest.raises(ValueError, match="line break"):
        bus.publish("t", b"", headers={"a": "b\r\nc: d"})


async def test_a_payload_above_the_limit_is_refused_and_the_connection_kept(connect: Any, nats: Any) -> None:
    bus = await connect(nats)
    with pytest.raises(PayloadTooLarge, match=r"^t\.big: 9,437,184 bytes"):
        bus.publish("t.big", bytes(9 << 20))
    await bus.flush()


async def test_connecting_to_nothing_or_with_a_wrong_password_is_reported(nats: Any) -> None:
    with pytest.raises(BusUnavailable, match=r"127\.0\.0\.1:9: .*refused"):
        await Bus.connect("nats://127.0.0.1:9", name="t")
    with pytest.raises(BusUnavailable, match=r"Authorization|password"):
        await Bus.connect(f"nats://admin:wrong@127.0.0.1:{nats.port}", name="t")


async def test_a_closed_bus_refuses_requests_and_ends_waiting_ones(connect: Any, nats: Any) -> None:
    bus = await connect(nats)
    bus.subscribe("t.never", lambda message: None)
    request = asyncio.create_task(bus.request("t.never"))
    await bus.flush()
    await bus.close()
    with pytest.raises(BusUnavailable, match="closed"):
        await request
    with pytest.raises(BusUnavailable, match="closed"):
        bus.publish("t", b"")


async def test_an_outage_fails_fast_then_everything_works_again(connect: Any, crash: Any) -> None:
    bus = await connect(crash.server)
    reconnects: list[int] = []
    unregister = bus.on_reconnect(lambda: reconnects.append(1))
    bus.subscribe("t.echo", lambda message: bus.publish(message.reply, message.payload))
    bus.subscribe("t.never", lambda message: None)
    request = asyncio.create_task(bus.request("t.never", timeout_s=60))
    await bus.flush()
    crash.server.kill()
    with pytest.raises(BusUnavailable, match="was lost"):
        await request
    with pytest.raises(BusUnavailable, match="Not connected"):
        bus.publish("t", b"")
    late: list[Message] = []
    bus.subscribe("t.late", late.append)  # without a server
    await crash.restart(bus)
    bus.publish("t.late", b"")
    assert (await bus.request("t.echo", b"again")).payload == b"again"
    assert (len(late), reconnects) == (1, [1])
    unregister()
    await crash.restart(bus)
    assert reconnects == [1]


async def test_storing_reports_the_sequence_duplicates_conflicts_and_full_queues(connect: Any, nats: Any) -> None:
    bus = await connect(nats)
    config = {"name": "STORE", "subjects": ["store.*"], "discard": "new", "discard_new_per_subject": True}
    await bus.js("STREAM.CREATE.STORE", {**config, "max_msgs_per_subject": 2, "storage": "memory"})
    first = await bus.publish_stored("store.a", b"", msg_id="m")
    again = await bus.publish_stored("store.a", b"", msg_id="m")
    assert [(stored.seq, stored.duplicate) for stored in (first, again)] == [(1, False), (1, True)]
    with pytest.raises(Conflict, match=r"^store\.a "):
        await bus.publish_stored("store.a", b"", expected_last=0)
    await bus.publish_stored("store.a", b"", expected_last=1)
    with pytest.raises(QueueFull, match=r"store\.a is full"):
        await bus.publish_stored("store.a", b"")
    await bus.publish_stored("store.b", b"")
    with pytest.raises(JetStreamError, match="stream not found") as caught:
        await bus.js("STREAM.INFO.NOPE")
    assert caught.value.err_code == 10059


async def test_roles_receive_only_their_own_messages_and_nodes_decide_nothing(connect: Any, nats: Any) -> None:
    gateway, runner = await connect(nats, "gateway"), await connect(nats, "runner")
    overheard: list[Message] = []
    runner.subscribe("_INBOX.gateway.>", overheard.append)
    runner.subscribe("$KV.>", overheard.append)
    gateway.subscribe("gpufn.v1.ctl.where", lambda message: gateway.publish(message.reply, b"yes"))
    await gateway.flush()
    assert (await runner.request("gpufn.v1.ctl.where")).payload == b"yes"
    assert (await gateway.request("gpufn.v1.ctl.where")).payload == b"yes"
    gateway.publish("$KV.gpufn_functions.x", b"")
    await gateway.flush()
    await runner.flush()
    assert overheard == []
    with pytest.raises(BusUnavailable):
        await runner.request("$JS.API.STREAM.DELETE.X", timeout_s=0.05)


async def test_a_patient_client_waits_for_a_server_that_starts_later(crash: Any) -> None:
    url = crash.server.url
    crash.server.kill()
    with pytest.raises(BusUnavailable, match="Cannot connect"):
        await Bus.connect(url, name="hasty")
    waiting = asyncio.create_task(Bus.connect(url, name="patient", retry_for_s=15.0))
    await asyncio.sleep(0)
    crash.server = EmbeddedServer.start(crash.server.directory)
    await (await waiting).close()
