"""The gateway's timer: call deadlines, reconnection to the runner, stalled clients, certificate, leftover files."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from gpufn_gateway.auth.quota_sync import QuotaSync
from gpufn_gateway.calls.fast_path import FastPath
from gpufn_gateway.calls.shared_bodies import GatewaySharedBodies
from gpufn_gateway.http.connection.server import Server
from gpufn_gateway.routes.calls.invoke import Invoke
from gpufn_platform.process.clock import Clock
from gpufn_platform.process.pause_detector import PauseDetector
from gpufn_platform.queue.caller import Caller

log = logging.getLogger(__name__)

_TICK_S: Final = 0.1
# In ticks.
_CALLS: Final = 3
_SECOND: Final = 10
_MINUTE: Final = 600


async def tick(
    caller: Caller,
    fast_path: FastPath,
    shared_bodies: GatewaySharedBodies,
    *,
    invoke: Invoke,
    quotas: QuotaSync,
    server: Server,
    clock: Clock,
) -> None:
    """Run all periodic jobs until cancelled."""
    loop = asyncio.get_running_loop()
    pauses = PauseDetector(clock.monotonic())
    while True:
        await asyncio.sleep(_TICK_S)
        now = clock.monotonic()
        if (number := pauses.next(now)) is None:
            continue
        try:
            invoke.tick(now)
            if number % _CALLS == 0:
                caller.tick(now)
            if number % _SECOND == 0:
                fast_path.tick(loop.time())
                quotas.publish()
                server.tick(loop.time())
            if number % _MINUTE == 0:
                shared_bodies.sweep()
        except Exception:
            log.exception("a timer tick failed; continuing with the next one")
