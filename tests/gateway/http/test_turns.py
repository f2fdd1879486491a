"""Resources that the senders of requests share: turns, memory for bodies, resumable streams."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from typing import Any
from unittest.mock import Mock

import httpx

from gpufn_core.errors import CapacityError
from gpufn_gateway.auth.access import new_key
from gpufn_gateway.http import sender
from gpufn_gateway.http.body_reader import BodyBudget
from gpufn_gateway.http.body_readers import BodyReaders
from gpufn_gateway.http.turns import Turns
from gpufn_gateway.settings import GatewaySettings
from gpufn_gateway.submitted.resumable_streams import ResumableStreams
from gpufn_platform.process.clock import SystemClock


async def test_a_sender_waits_for_its_own_turns_only() -> None:
    turns = Turns(2)
    order: list[str] = []

    async def work(sender: str, name: str) -> None:
        async with turns.of(sender):
            order.append(name)
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    flood = [work("team/b", f"b{number}") for number in range(6)]
    await asyncio.gather(*flood, work("team/a", "a"))
    assert order.index("a") == 2
    assert [name for name in order if name != "a"] == [f"b{number}" for number in range(6)]


async def test_a_flood_of_lists_does_not_run_before_the_request_of_another_team(gateway: Any) -> None:
    """Bug: the gateway rendered 32 documents of one team before it read the next request of another."""
    headers = {}
    for name in ("a", "b"):
        key, secret = new_key(name, ("read",), 0.0)
        gateway.access.put(key)
        headers[name] = {"authorization": f"Bearer {secret}"}
    order: list[str] = []

    async def ask(name: str, client: httpx.AsyncClient) -> None:
        await client.get("/openapi.json")
        order.append(name)

    # A client takes longer than a request, so the last request would come late.
    async with gateway.client(**headers["a"]) as one, gateway.client(**headers["b"]) as other:
        await asyncio.gather(*(ask("b", other) for _ in range(10)), ask("a", one))
    assert order.index("a") < 5


def test_a_sender_leaves_room_for_the_bodies_of_others() -> None:
    """Bug: 34 requests that announced a body and sent nothing held all memory for bodies for 30 s."""
    budget = BodyBudget(1000)

    def reserve(of: str, size: int) -> int:
        sender.current.set(of)
        reserved = 0
        with contextlib.suppress(CapacityError):
            while reserved < 1000:
                budget.reserve(size)
                reserved += size
        return reserved

    context = contextvars.copy_context()
    flood = context.run(reserve, "team/b", 50)
    assert 700 <= flood <= 800
    assert context.run(reserve, "team/a", 50) >= 50
    for size, of in ((flood, "team/b"), (budget.used_bytes - flood, "team/a")):
        budget.release(size, of)
    assert context.run(reserve, "team/a", 1000) == 1000, "one body may take all"


def test_a_sender_leaves_resumable_streams_for_others() -> None:
    streams = ResumableStreams(SystemClock())
    held: dict[str, Any] = streams._streams
    held.update({str(number): Mock(sender="team/b") for number in range(800)})
    assert streams._are_used_up("team/b")
    assert not streams._are_used_up("team/a")


def test_a_client_without_a_key_sends_only_a_login() -> None:
    """Bug: anybody could send 4 MiB to the route that exchanges tokens, which has no key yet."""
    readers = BodyReaders(GatewaySettings(), 8 << 20, Mock())
    assert readers.for_logins.limit_bytes == 64 << 10
