"""What looks at the clock now and then: calls that end, a runner to connect to, clients that stall, files left over."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from gpufn_gateway.auth.quota_sync import KeyUses
from gpufn_gateway.calls.fast_path import Lane
from gpufn_gateway.calls.shared_bodies import GatewayParcels
from gpufn_gateway.http.server import Server
from gpufn_gateway.routes.invoke import Invoke
from gpufn_platform.process.clock import Clock
from gpufn_platform.process.pause_detector import Beats
from gpufn_platform.queue.caller import Caller

log = logging.getLogger(__name__)

_TICK_S: Final = 0.1
# Every so many ticks.
_CALLS: Final = 3
_SECOND: Final = 10
_MINUTE: Final = 600


async def tick(
    *,
    caller: Caller,
    lane: Lane,
    parcels: GatewayParcels,
    invoke: Invoke,
    uses: KeyUses,
    server: Server,
    clock: Clock,
) -> None:
    """Until cancelled."""
    loop = asyncio.get_running_loop()
    beats = Beats(clock.monotonic())
    while True:
        await asyncio.sleep(_TICK_S)
        now = clock.monotonic()
        if (beat := beats.next(now)) is None:
            continue
        try:
            invoke.tick(now)
            if beat % _CALLS == 0:
                caller.tick(now)
            if beat % _SECOND == 0:
                lane.tick(loop.time())
                uses.tell()
                server.sweep(loop.time())
                parcels.rest()
            if beat % _MINUTE == 0:
                parcels.sweep()
        except Exception:
            log.exception("a tick failed; the next one goes on")
