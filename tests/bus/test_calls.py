"""Calls that somebody waits for, when the bus restarts: they are found, or told to be lost."""

from __future__ import annotations

from typing import Any

import pytest

from gpufn.bus import calls, streams
from gpufn.bus.calls import Caller, CallRequest, PendingCall
from gpufn.bus.connection import Bus, Message
from gpufn.clock import SystemClock
from gpufn.errors import BusUnavailable
from gpufn.ids import digest_of
from gpufn.protocol import subjects
from gpufn.protocol.codec import encode
from gpufn.protocol.messages import HeldBy
from gpufn.revision import Revision
from gpufn.spec import EntryPoint, FunctionSpec, MethodSpec

SPEC = FunctionSpec(name="f", entry=EntryPoint("m", "f"), methods=(MethodSpec(),))
REVISION = Revision(function="f", number=1, spec=SPEC, bundle=digest_of(b""), created_at=0.0)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_LOST_AFTER_S", "_LOST_RETRY_S", "_HELD_AGAIN_S"):
        monkeypatch.setattr(calls, name, 0.01)


async def queued(bus: Bus, caller: Caller) -> PendingCall:
    deadline = SystemClock().time() + 3600
    call = caller.invoke(CallRequest(REVISION, "", "application/json", b"{}", "application/json", deadline))
    await bus.flush()
    return call


async def test_a_call_that_nobody_has_after_a_restart_is_lost(connect: Any, crash: Any) -> None:
    bus = await connect(crash.server)
    await streams.ensure_streams(bus)
    caller = Caller(bus, name="gw", clock=SystemClock())
    caller.start()
    call = await queued(bus, caller)
    await crash.restart(bus)
    await streams.ensure_streams(bus)
    with pytest.raises(BusUnavailable, match="was lost"):
        await call.future


async def test_a_call_that_a_runner_has_is_looked_for_until_that_is_gone(connect: Any, crash: Any) -> None:
    bus, runner = await connect(crash.server), await connect(crash.server)
    await streams.ensure_streams(bus)
    caller = Caller(bus, name="gw", clock=SystemClock())
    caller.start()
    call = await queued(bus, caller)
    asked = 0

    def whereabouts(message: Message) -> None:
        nonlocal asked
        asked += 1
        runner.publish(message.reply, encode(HeldBy(call.id, "w-1", "n-1", 1, 0.0)))
        if asked == 5:
            subscription.unsubscribe()  # it is killed

    subscription = runner.subscribe(subjects.WHEREABOUTS, whereabouts)
    await crash.restart(bus, runner)
    await streams.ensure_streams(bus)
    with pytest.raises(BusUnavailable, match="was lost"):
        await call.future
    assert asked == 5
