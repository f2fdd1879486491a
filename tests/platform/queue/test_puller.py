from __future__ import annotations

import asyncio
import itertools
import threading
from typing import Any

import pytest

from gpufn_core.errors import BusUnavailable
from gpufn_core.protocol import subjects
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import streams
from gpufn_platform.queue import puller as consumer
from gpufn_platform.queue.delivery import AlreadySettled, Delivery
from gpufn_platform.queue.puller import Pull
from tests.waiting import until_async

_names = itertools.count()


class Queue:
    """One function's queue in SYNC, its consumer, and its pullers."""

    def __init__(self, bus: Bus, stream: str = subjects.SYNC, ack_wait_s: float = 15) -> None:
        self.ack_wait_s = ack_wait_s
        function = f"f{next(_names)}"
        self.bus = bus
        self.stream = stream
        is_sync = stream == subjects.SYNC
        self.subject = subjects.sync_queue(function, 1) if is_sync else subjects.async_queue(function, 1)
        self.consumer = f"C-{function}"
        self.got: list[Delivery] = []
        self.unused: list[int] = []
        self.missing = 0
        self.pull = self.puller(bus)

    def puller(self, bus: Bus) -> Pull:
        return Pull(
            bus, self.stream, self.consumer, self.got.append, on_empty=self.unused.append, on_missing=self._on_missing
        )

    def _on_missing(self) -> None:
        self.missing += 1

    async def ensure(self) -> Queue:
        await streams.ensure_streams(self.bus)
        await streams.ensure_consumer(
            self.bus, self.stream, self.consumer, self.subject, ack_wait_s=self.ack_wait_s, max_ack_pending=1000
        )
        return self

    async def put(self, *payloads: bytes) -> None:
        for payload in payloads:
            await self.bus.publish_stored(self.subject, payload, msg_id=f"{self.subject}-{payload.decode()}")

    async def listen(self, bus: Bus) -> list[bytes]:
        """The acknowledgements of this queue's deliveries from now on."""
        words: list[bytes] = []
        bus.subscribe(f"$JS.ACK.{self.stream}.{self.consumer}.>", lambda message: words.append(message.payload))
        await bus.flush()
        return words

    async def depth(self) -> int:
        await streams.ensure_streams(self.bus)
        owner = subjects.queue_owner(self.subject)
        return (await streams.depths(self.bus)).get(owner, streams.Depth()).total

    @property
    def payloads(self) -> list[bytes]:
        return [delivery.payload for delivery in self.got]


async def test_the_number_of_deliveries_matches_the_granted_credits(connect: Any, nats: Any) -> None:
    queue = await Queue(await connect(nats)).ensure()
    queue.pull.grant(1)
    queue.pull.grant(1)
    await queue.put(b"1", b"2", b"3")
    await until_async(lambda: len(queue.got) == 2)
    await queue.bus.flush()
    assert (queue.payloads, queue.pull.credits) == ([b"1", b"2"], 0)
    assert [(delivery.delivered, delivery.pending) for delivery in queue.got] == [(1, 0), (1, 0)]
    queue.got[0].ack()
    queue.pull.grant(5)
    await until_async(lambda: len(queue.got) == 3)
    assert queue.pull.credits == 4
    await queue.bus.flush()
    assert await queue.depth() == 2


async def test_a_delivery_is_settled_once_and_touched_only_before(connect: Any, nats: Any) -> None:
    queue = await Queue(await connect(nats)).ensure()
    await queue.put(b"1", b"2")
    queue.pull.grant(3)
    await until_async(lambda: len(queue.got) == 2)
    first, second = queue.got
    first.touch()
    first.ack()
    first.touch()
    for settle in (first.ack, first.nak, first.term):
        with pytest.raises(AlreadySettled, match="was settled before"):
            settle()
    second.nak()
    await until_async(lambda: len(queue.got) == 3)
    again = queue.got[2]
    assert (again.payload, again.seq, again.delivered) == (b"2", second.seq, 2)
    again.term("poison")
    await queue.bus.flush()
    assert await queue.depth() == 0


async def test_a_nak_with_a_delay_is_redelivered_later(connect: Any, nats: Any) -> None:
    queue = await Queue(await connect(nats)).ensure()
    await queue.put(b"1")
    queue.pull.grant(2)
    await until_async(lambda: queue.got)
    loop = asyncio.get_running_loop()
    queue.got[0].nak(0.2)
    started = loop.time()
    await until_async(lambda: len(queue.got) == 2)
    assert loop.time() - started > 0.15


async def test_a_poll_receives_waiting_messages_and_reports_unused_credit_once(connect: Any, nats: Any) -> None:
    queue = await Queue(await connect(nats)).ensure()
    queue.pull.poll(2)
    await until_async(lambda: queue.unused)
    assert (queue.payloads, queue.unused) == ([], [2])
    await queue.put(b"1", b"2", b"3")
    queue.pull.poll(2)
    await until_async(lambda: len(queue.got) == 2)
    queue.pull.poll(3)
    await until_async(lambda: len(queue.unused) == 2)
    await queue.bus.flush()
    assert (queue.payloads, queue.unused, queue.pull.credits) == ([b"1", b"2", b"3"], [2, 2], 0)


async def test_a_failed_handler_hands_its_delivery_back(
    connect: Any, nats: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer, "_HANDLER_FAILED_DELAY_S", 0.01)
    queue = await Queue(await connect(nats)).ensure()
    seen: list[Delivery] = []

    def fail_once(delivery: Delivery) -> None:
        seen.append(delivery)
        if len(seen) == 1:
            raise RuntimeError("broken")

    pull = Pull(queue.bus, queue.stream, queue.consumer, fail_once)
    pull.grant(2)
    await queue.put(b"1")
    await until_async(lambda: len(seen) == 2)
    assert [delivery.delivered for delivery in seen] == [1, 2]


async def test_deliveries_in_flight_to_a_withdrawn_pull_go_to_another(connect: Any, nats: Any) -> None:
    queue = await Queue(await connect(nats)).ensure()
    other = await connect(nats)
    queue.pull.grant(2)
    await queue.bus.flush()
    # Published before the withdrawal on the same connection: the server sends it to the old inbox.
    queue.bus.publish(queue.subject, b"1")
    queue.pull.withdraw()
    queue.pull.grant(1)
    taken: list[Delivery] = []
    heir = Pull(other, queue.stream, queue.consumer, taken.append)
    heir.grant(1)
    await until_async(lambda: taken)
    assert (taken[0].payload, queue.got, queue.pull.credits) == (b"1", [], 0)


async def test_an_expired_request_is_sent_again(connect: Any, nats: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer, "_EXPIRES_S", 0.1)
    monkeypatch.setattr(consumer, "_HEARTBEAT_S", 0.05)
    queue = await Queue(await connect(nats)).ensure()
    expired: list[str] = []
    queue.bus.subscribe("_INBOX.admin.*.*.s", lambda message: expired.append(message.description))
    queue.pull.grant(2)
    await until_async(lambda: expired.count("Request Timeout") == 2)
    await queue.put(b"1", b"2", b"3")
    await until_async(lambda: len(queue.got) == 2)
    await queue.bus.flush()
    assert (queue.payloads, queue.pull.credits) == ([b"1", b"2"], 0)


async def test_silence_renews_every_request_and_credits_stay_unchanged(
    connect: Any, nats: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await Queue(await connect(nats)).ensure()
    queue.pull.grant(2)
    await queue.bus.flush()
    for now in (0.0, 1.0, 13.0):  # the first tick starts the silence, the last finds it too long
        queue.pull.tick(now)
    await queue.put(b"1", b"2", b"3")
    await until_async(lambda: len(queue.got) == 2)
    await queue.bus.flush()
    assert (queue.pull.credits, await queue.depth()) == (0, 3)


async def test_a_missing_consumer_is_reported_and_pulled_from_once_it_exists(connect: Any, nats: Any) -> None:
    queue = Queue(await connect(nats))
    await streams.ensure_streams(queue.bus)
    queue.pull.grant(1)
    queue.pull.poll(1)
    await until_async(lambda: queue.missing)
    await queue.ensure()
    await queue.put(b"1")
    queue.pull.retry()
    await until_async(lambda: queue.got)
    assert (queue.missing, queue.unused) in [(1, []), (1, [1])]
    queue.pull.grant(1)
    await queue.bus.flush()
    await streams.delete_consumer(queue.bus, queue.stream, queue.consumer)
    await until_async(lambda: queue.missing == 2)
    assert queue.pull.credits == 1


@pytest.mark.parametrize("kill", [True, False])
async def test_nothing_is_lost_or_taken_twice_when_the_server_restarts(connect: Any, crash: Any, kill: bool) -> None:
    queue = await Queue(await connect(crash.server), subjects.ASYNC).ensure()
    outer = [b"%d" % number for number in range(20)]
    await queue.put(*outer[:10])
    queue.pull.grant(4)
    await until_async(lambda: len(queue.got) == 4)
    for delivery in queue.got:
        delivery.ack()
    await queue.bus.flush()
    queue.pull.grant(8)
    await until_async(lambda: len(queue.got) == 10)
    assert queue.pull.credits == 2
    held = queue.got[4:]
    await crash.restart(queue.bus, kill=kill)
    for delivery in held:
        delivery.ack()  # an acknowledgement is also valid for the restarted server
    await queue.put(*outer[10:12])
    await until_async(lambda: len(queue.got) == 12)
    assert queue.pull.credits == 0
    for delivery in queue.got[10:]:
        delivery.ack()
    queue.pull.grant(8)
    await queue.put(*outer[12:])
    await until_async(lambda: len(queue.got) == 20)
    assert queue.payloads == outer
    for delivery in queue.got[12:]:
        delivery.ack()
    await queue.bus.flush()
    assert (queue.pull.credits, await queue.depth()) == (0, 0)


async def test_a_queue_in_memory_is_pulled_from_again_after_a_crash(connect: Any, crash: Any) -> None:
    queue = await Queue(await connect(crash.server)).ensure()
    queue.pull.grant(2)
    await queue.put(b"1")
    await until_async(lambda: queue.got)
    await crash.restart(queue.bus)
    await until_async(lambda: queue.missing)
    await queue.ensure()
    queue.pull.retry()
    await queue.put(b"2", b"3")
    await until_async(lambda: len(queue.got) == 2)
    await queue.bus.flush()
    assert (queue.payloads, queue.pull.credits) == ([b"1", b"2"], 0)


async def test_a_poll_lost_with_the_server_ends_unused(connect: Any, crash: Any) -> None:
    queue = await Queue(await connect(crash.server), subjects.ASYNC).ensure()
    crash.server.kill()
    queue.pull.poll(3)  # goes into a dead socket
    await crash.restart(queue.bus)
    await until_async(lambda: queue.unused)
    assert queue.unused == [3]


async def test_a_settlement_that_the_bus_missed_is_repeated_at_the_next_delivery(connect: Any, crash: Any) -> None:
    queue = await Queue(await connect(crash.server), subjects.ASYNC, ack_wait_s=1).ensure()
    await queue.put(b"1")
    queue.pull.grant(1)
    await until_async(lambda: queue.got)
    crash.server.kill()
    await until_async(lambda: not queue.bus.connected)
    with pytest.raises(BusUnavailable):
        queue.got[0].ack()
    await crash.restart(queue.bus)
    queue.pull.grant(1)  # the slot is free, so there is a credit for the redelivered message
    while await queue.depth():
        await queue.bus.flush()
    assert len(queue.got) == 1, "it is not run again"


async def redelivered(bus: Bus, queue: Queue, times: int) -> None:
    while (await bus.js(f"CONSUMER.INFO.{queue.stream}.{queue.consumer}"))["num_redelivered"] < times:
        pass


async def test_a_redelivery_while_it_runs_is_the_existing_delivery(connect: Any, nats: Any) -> None:
    """Like after the server's clock was set forward: `ack_wait` seems to be over."""
    queue = await Queue(await connect(nats), ack_wait_s=0.1).ensure()
    words = await queue.listen(await connect(nats))
    queue.pull.grant(3)
    await queue.put(b"1")
    await until_async(lambda: words.count(b"+WPI") >= 2)
    assert (queue.payloads, queue.pull.credits) == ([b"1"], 2)
    queue.got[0].ack()
    await until_async(lambda: b"+ACK" in words)
    await queue.put(b"2")
    await until_async(lambda: len(queue.got) == 2)
    assert (queue.payloads, await queue.depth()) == ([b"1", b"2"], 1)


async def test_a_redelivery_without_a_credit_is_not_handed_to_another_while_it_runs(connect: Any, nats: Any) -> None:
    queue = await Queue(await connect(nats), ack_wait_s=0.1).ensure()
    words = await queue.listen(await connect(nats))
    queue.pull.grant(2)
    await queue.put(b"1")
    await until_async(lambda: queue.got)

    def wait_for_the_next() -> None:
        async def look() -> None:
            bus = await Bus.connect(nats.url_for("admin"), name="looks")
            await redelivered(bus, queue, 1)
            await bus.close()

        asyncio.run(look())

    # Our event loop is blocked meanwhile, so that the message is on its way when its credit is withdrawn.
    looking = threading.Thread(target=wait_for_the_next)
    looking.start()
    looking.join()
    queue.pull.limit(0)
    await until_async(lambda: words)
    assert (words, queue.payloads) == ([b"+WPI"], [b"1"])
    queue.got[0].ack()
    await queue.bus.flush()
    assert await queue.depth() == 0
