"""What runs for a caller that died is ended; what runs for one that is back, or is asked on a lane, goes on."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from gpufn.bus.calls import Caller
from gpufn.bus.connection import Bus, NoResponders
from gpufn.bus.embedded import EmbeddedServer
from gpufn.clock import SystemClock
from gpufn.errors import BusUnavailable
from gpufn.protocol import subjects
from gpufn_runtime.runner.departed import Departed


def attempt(caller: str, *, is_direct: bool = False) -> Any:
    reply = subjects.reply("f", caller, "01k9xq3zr7c8m2v5t0w4y6b1d3") if caller else ""
    return SimpleNamespace(message=SimpleNamespace(reply=reply), is_direct=is_direct)


async def has_left(bus: Bus, caller: str) -> None:
    """The server hears of a connection's end a moment later."""
    while True:
        try:
            await bus.request(subjects.reply("f", caller, "-"), timeout_s=0.1)
        except NoResponders:
            return
        except BusUnavailable:
            pass


def test_the_calls_of_a_caller_that_is_away_twice_in_a_row_are_ended(nats: EmbeddedServer) -> None:
    async def scenario() -> None:
        bus = await Bus.connect(nats.url, name="runner")
        callers = {name: await Bus.connect(nats.url, name=name) for name in ("gw-dies", "gw-lives", "gw-returns")}
        for name, its in callers.items():
            Caller(its, name=name, clock=SystemClock()).start()
            await its.flush()
        running = {name: attempt(name) for name in callers}
        running |= {"submitted": attempt(""), "direct": attempt("gw-dies", is_direct=True)}
        ended: list[str] = []
        departed = Departed(bus, running, ended.append)
        await departed.look()
        for name in ("gw-dies", "gw-returns"):
            await callers.pop(name).close()
            await has_left(bus, name)
        await departed.look()
        assert ended == []
        callers["gw-returns"] = await Bus.connect(nats.url, name="again")
        Caller(callers["gw-returns"], name="gw-returns", clock=SystemClock()).start()
        await callers["gw-returns"].flush()
        await departed.look()
        assert ended == ["gw-dies"]
        for each in (*callers.values(), bus):
            await each.close()

    asyncio.run(scenario())
