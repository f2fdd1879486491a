"""The builder's process: settings → bus → Builder, until SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys

import uvloop

from gpufn.bus.connection import Bus
from gpufn.bus.kv import KeyValue
from gpufn.clock import SystemClock
from gpufn.errors import BusUnavailable, GpufnError
from gpufn.exits import EXIT_CONFIGURATION
from gpufn.protocol import subjects
from gpufn.secrecy import hide_environment
from gpufn_builder.building import Building
from gpufn_builder.loop import Builder
from gpufn_builder.settings import BuilderSettings
from gpufn_builder.store import Store

log = logging.getLogger("gpufn.builder")

_BUS_PATIENCE_S = 5.0  # it may be starting again, together with us


async def serve(settings: BuilderSettings) -> None:
    bus = await Bus.connect(settings.nats_url, name=f"builder {settings.node}", patience_s=_BUS_PATIENCE_S)
    clock = SystemClock()
    try:
        building = Building(
            await Store.open(bus, clock),
            folder=settings.home.builds,
            caches=settings.home.tuning,
            environ=os.environ,
            clock=clock,
            memory_limit_bytes=settings.memory_limit_bytes,
            measuring=settings.measuring,
        )
        builds = await KeyValue.open(bus, subjects.BUILDS)
        builder = Builder(bus, builds=builds, building=building, node=settings.node, clock=clock)
        task = asyncio.create_task(builder.run(), name="builder")
        for name in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(name, task.cancel)
        log.info("builds for node %s", settings.node)
        with contextlib.suppress(asyncio.CancelledError):
            await task
    finally:
        await bus.close()


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s builder %(levelname)s %(message)s", stream=sys.stderr)
    try:
        settings = BuilderSettings.from_env(os.environ)
        hide_environment("GPUFN_NATS_URL")
        settings.home.ensure()
        uvloop.run(serve(settings))
    except GpufnError as error:
        print(f"gpufn builder: {error}", file=sys.stderr)  # noqa: T201  the supervisor shows a process's last line
        return 1 if isinstance(error, BusUnavailable) else EXIT_CONFIGURATION
    return 0


if __name__ == "__main__":
    sys.exit(main())
