"""The runner's process: settings → bus → Runner, until SIGTERM."""

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
from gpufn.ids import new_ulid
from gpufn.protocol import subjects
from gpufn.secrecy import hide_environment
from gpufn.usage import KEPT_S
from gpufn_runtime.runner.gpu_turns import NodeTurns
from gpufn_runtime.runner.loop import Runner
from gpufn_runtime.runner.settings import RunnerSettings

log = logging.getLogger("gpufn.runner")

_BUS_PATIENCE_S = 5.0  # it may be starting again, together with us


async def serve(settings: RunnerSettings) -> None:
    bus = await Bus.connect(settings.nats_url, name=f"runner {settings.node}", patience_s=_BUS_PATIENCE_S)
    try:
        clock = SystemClock()
        runner = Runner(
            bus,
            assignments=await KeyValue.open(bus, subjects.ASSIGNMENTS),
            functions=await KeyValue.open(bus, subjects.FUNCTIONS),
            revisions=await KeyValue.open(bus, subjects.REVISIONS),
            usage=await KeyValue.open(bus, subjects.USAGE, ttl_s=KEPT_S),
            name=new_ulid()[-16:],
            node=settings.node,
            home=settings.home,
            clock=clock,
            turns=NodeTurns(clock, settings.turns_per_gpu, asyncio.get_running_loop().call_later),
        )
        task = asyncio.create_task(runner.run(), name="runner")
        for name in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(name, task.cancel)
        log.info("runs node %s", settings.node)
        with contextlib.suppress(asyncio.CancelledError):
            await task
    finally:
        await bus.close()


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s runner %(levelname)s %(message)s", stream=sys.stderr)
    try:
        settings = RunnerSettings.from_env(os.environ)
        hide_environment("GPUFN_NATS_URL")
        settings.home.ensure()
        uvloop.run(serve(settings))
    except GpufnError as error:
        print(f"gpufn runner: {error}", file=sys.stderr)  # noqa: T201  the supervisor shows a process's last line
        return 1 if isinstance(error, BusUnavailable) else EXIT_CONFIGURATION
    return 0


if __name__ == "__main__":
    sys.exit(main())
