"""`python -m gpufn_runtime.runner`: runs the runner until SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys

from gpufn_core.home import Home
from gpufn_core.ids import new_ulid
from gpufn_core.protocol import subjects
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.node_claim import claim_node
from gpufn_platform.bus.storage import object_store, streams
from gpufn_platform.bus.storage.key_value import stream_of
from gpufn_platform.bus.tls import BusTls
from gpufn_platform.process import grace_period
from gpufn_platform.process.clock import SystemClock
from gpufn_platform.process.node_process import run, run_until_signaled
from gpufn_platform.volume_store.choose import volume_store
from gpufn_runtime.runner.gpu.gpu_turns import NodeTurns
from gpufn_runtime.runner.loop import Runner
from gpufn_runtime.runner.settings import RunnerSettings

log = logging.getLogger("gpufn.runner")

_BUS_RETRY_FOR_S = 5.0  # NATS may be restarting together with the runner
_STREAMS = (subjects.SYNC, subjects.ASYNC, subjects.RESULTS, subjects.DEAD_LETTERS, subjects.CHECKPOINTS)
_BUCKETS = (subjects.ASSIGNMENTS, subjects.FUNCTIONS, subjects.REVISIONS, subjects.TEAMS, subjects.USAGE)
_STORES = (subjects.RESULT_FILES, subjects.VOLUME_FILES, subjects.VALUES)
_AGENT_NOTICE_S = 0.3  # an agent that is stopped together with the runner has announced it by then
_POLL_S = 0.05


async def serve(settings: RunnerSettings) -> None:
    tls = BusTls.from_env(os.environ)
    bus = await Bus.connect(settings.nats_url, name=f"runner {settings.node}", tls=tls, retry_for_s=_BUS_RETRY_FOR_S)
    try:
        await claim_node(bus, "runner", settings.node, settings.home)
        clock = SystemClock()
        await streams.wait_for(bus, (*_STREAMS, *map(stream_of, _BUCKETS), *map(object_store.stream_of, _STORES)))
        volume_files = volume_store(settings.volume_store, os.environ, bus, clock, purges=False)
        runner = Runner(
            bus,
            name=new_ulid()[-16:],
            node=settings.node,
            home=settings.home,
            clock=clock,
            turns=NodeTurns(clock, settings.turns_per_gpu, asyncio.get_running_loop().call_later),
            volume_files=volume_files,
        )
        log.info("serving node %s", settings.node)
        async with contextlib.aclosing(volume_files):
            await run_until_signaled(runner.run(), "runner", lambda: _agent_has_stopped(settings.home))
    finally:
        await bus.close()


async def _agent_has_stopped(home: Home) -> None:
    """Wait while the agent stops. If both are stopped, as with their node, the agent's workers need the runner to
    finish or hand back their calls. If the agent goes on, its workers wait for the next runner."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _AGENT_NOTICE_S
    while grace_period.is_stopping(home) or (loop.time() < deadline and grace_period.has_agent(home)):  # noqa: ASYNC110
        await asyncio.sleep(_POLL_S)


def main() -> int:
    return run("runner", RunnerSettings.from_env, serve)


if __name__ == "__main__":
    sys.exit(main())
