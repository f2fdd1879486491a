"""Replies that a connection takes along when it breaks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from gpufn.bus.connection import Bus, Message
from gpufn_runtime.runner import replies
from gpufn_runtime.runner.replies import Replies


class Scene:
    def __init__(self, bus: Bus, caller: Bus) -> None:
        self.bus = bus
        self.replies = Replies(bus)
        self._heard: asyncio.Queue[Message] = asyncio.Queue()
        caller.subscribe("reply.*", self._heard.put_nowait)

    async def heard(self, count: int) -> list[bytes]:
        return [(await self._heard.get()).payload for _ in range(count)]

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
        assert await it.heard(3) == [b"1", b"2", b"3"]

    on_bus(url, test)


def test_replies_are_kept_while_the_bus_is_away_but_not_without_end(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "_MOST", 3)
    monkeypatch.setattr(replies, "_MOST_BYTES", 10)

    async def test(it: Scene) -> None:
        it.bus._live().lose("a cable is pulled")
        for number in range(5):
            it.replies.send("reply.x", b"%d" % number)
        assert await it.heard(3) == [b"2", b"3", b"4"]
        it.bus._live().lose("and once more")
        it.replies.send("reply.x", b"of nine b")
        assert await it.heard(2) == [b"4", b"of nine b"]

    on_bus(url, test)


def test_a_reply_that_the_bus_had_no_room_for_is_sent_when_it_has(url: str) -> None:
    async def test(it: Scene) -> None:
        it.bus._live().congested = True
        it.replies.send("reply.1", b"1")
        it.replies.tick()
        it.bus._live().congested = False
        it.replies.tick()
        assert await it.heard(1) == [b"1"]

    on_bus(url, test)
