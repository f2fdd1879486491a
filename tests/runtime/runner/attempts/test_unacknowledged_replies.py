"""Replies that are lost with a broken connection: the runner's or the caller's."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from gpufn_core.protocol import subjects
from gpufn_platform.bus.connection import Bus, Message
from gpufn_platform.queue.caller import Caller
from gpufn_platform.queue.delivery import Delivery
from gpufn_runtime.runner.attempts import unacknowledged_replies as replies
from gpufn_runtime.runner.attempts.unacknowledged_replies import UnacknowledgedReplies
from tests.runtime.runner.node import Node, on_node


class Scene:
    def __init__(self, bus: Bus, caller: Bus) -> None:
        self.bus = bus
        self.replies = UnacknowledgedReplies(bus)
        self._received: asyncio.Queue[Message] = asyncio.Queue()
        caller.subscribe("reply.*", self._received.put_nowait)

    async def received(self, count: int) -> list[bytes]:
        return [(await self._received.get()).payload for _ in range(count)]

    async def loses_its_connection(self) -> None:
        back = asyncio.Event()
        self.bus.on_reconnect(back.set)
        self.bus._live().lose("a cable is pulled")
        await back.wait()


def on_bus(url: str, test: Callable[[Scene], Awaitable[None]]) -> None:
    """A hang is a failure."""

    async def main() -> None:
        bus, caller = await Bus.connect(url, name="runner"), await Bus.connect(url, name="caller")
        try:
            it = Scene(bus, caller)
            await caller.flush()
            async with asyncio.timeout(30):
                await test(it)
        finally:
            await bus.close()
            await caller.close()

    asyncio.run(main())


def test_a_reply_that_was_on_its_way_when_the_connection_broke_is_sent_again(url: str) -> None:
    async def test(it: Scene) -> None:
        it.replies.send("reply.1", b"1")
        await it.replies.confirm()
        it.replies.send("reply.2", b"2")
        await it.loses_its_connection()
        it.replies.send("reply.3", b"3")
        assert await it.received(3) == [b"1", b"2", b"3"]

    on_bus(url, test)


def test_replies_are_kept_while_the_bus_is_away_but_not_without_end(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "_MAX_REPLIES", 3)
    monkeypatch.setattr(replies, "_MAX_BYTES", 10)

    async def test(it: Scene) -> None:
        it.bus._live().lose("a cable is pulled")
        for number in range(5):
            it.replies.send(f"reply.{number}", b"%d" % number)
        assert await it.received(3) == [b"2", b"3", b"4"]
        it.bus._live().lose("and once more")
        it.replies.send("reply.5", b"of nine b")
        assert await it.received(2) == [b"4", b"of nine b"]

    on_bus(url, test)


def test_acknowledged_replies_use_little_memory(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "_MAX_CONFIRMED_BYTES", 10)

    async def test(it: Scene) -> None:
        for number in range(3):
            it.replies.send(f"reply.{number}", b"of six")
        await it.replies.confirm()
        it.replies.tick()
        for number in range(3):
            it.replies.repeat(str(number))
        it.replies.send("reply.end", b"that is all")
        assert await it.received(5) == [*[b"of six"] * 4, b"that is all"]

    on_bus(url, test)


def test_a_reply_that_the_bus_had_no_room_for_is_sent_when_it_has(url: str) -> None:
    async def test(it: Scene) -> None:
        it.bus._live().congested = True
        it.replies.send("reply.1", b"1")
        it.replies.tick()
        it.bus._live().congested = False
        it.replies.tick()
        assert await it.received(1) == [b"1"]

    on_bus(url, test)


def test_a_stored_reply_is_sent_again_on_request_and_only_for_a_while(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(it: Scene) -> None:
        it.replies.send("reply.1", b"1")
        await it.replies.confirm()
        it.replies.repeat("another")
        it.replies.repeat("1")
        await it.bus.flush()
        await it.loses_its_connection()
        it.replies.send("reply.2", b"2")
        assert await it.received(3) == [b"1", b"1", b"2"]
        monkeypatch.setattr(replies, "_KEEP_S", -1.0)
        it.replies.tick()  # it is unknown whether the second one has arrived
        it.replies.repeat("1")
        it.replies.repeat("2")
        assert await it.received(1) == [b"2"]

    on_bus(url, test)


@pytest.mark.parametrize("is_ack_lost", [False, True], ids=["", "and whose ack was lost, too"])
def test_a_caller_that_lost_the_bus_receives_the_results_of_the_meantime(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_ack_lost: bool
) -> None:
    if is_ack_lost:
        monkeypatch.setattr(Delivery, "ack", lambda _: None)

    async def test(node: Node) -> None:
        gateway = await Bus.connect(url, name="gateway that hangs")
        caller = Caller(gateway, name="hangs", clock=node.clock)
        caller.start()
        revision, told = await node.deploy(f"ends-{is_ack_lost}".lower()), asyncio.Event()

        def on_reply(message: Message) -> None:
            if message.payload[:1] != b"{":  # not a report that it is queued
                told.set()

        node.bus.subscribe(subjects.replies("hangs"), on_reply)
        worker = await node.worker(revision)
        call = caller.invoke(node.request(revision))
        run, _ = await worker.run()
        gateway._live()._transport.pause_reading()
        worker.answer(run, b"7")
        await told.wait()
        gateway._live().lose("the bus does not answer pings")
        assert (await call.future)[1] == b"7"
        await gateway.close()

    on_node(url, tmp_path, test)
