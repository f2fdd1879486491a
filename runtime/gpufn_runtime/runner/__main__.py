"""The runner's process: settings → bus → Runner, until SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import sys

from gpufn_core.home import Home
from gpufn_core.ids import new_ulid
from gpufn_core.protocol import subjects
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.node_claim import claim_node
from gpufn_platform.bus.storage import object_store, streams
from gpufn_platform.bus.storage.key_value import KeyValue, stream_of
from gpufn_platform.process import grace_period
from gpufn_platform.process.clock import SystemClock
from gpufn_platform.process.node_process import run, until_told
from gpufn_runtime.runner.gpu.gpu_turns import NodeTurns
from gpufn_runtime.runner.loop import Runner
from gpufn_runtime.runner.settings import RunnerSettings

log = logging.getLogger("gpufn.runner")

_BUS_PATIENCE_S = 5.0  # it may be starting again, together with us
_STREAMS = (subjects.SYNC, subjects.ASYNC, subjects.RESULTS, subjects.DEAD_LETTERS, subjects.CHECKPOINTS)
_BUCKETS = (subjects.ASSIGNMENTS, subjects.FUNCTIONS, subjects.REVISIONS, subjects.USAGE)
_AGENT_BEGINS_S = 0.3  # an agent that is told to stop together with us has said so by then
_LOOK_S = 0.05


async def serve(settings: RunnerSettings) -> None:
    bus = await Bus.connect(settings.nats_url, name=f"runner {settings.node}", patience_s=_BUS_PATIENCE_S)
    try:
        await claim_node(bus, "runner", settings.node, settings.home)
        clock = SystemClock()
        await streams.wait_for(
            bus, (*_STREAMS, *map(stream_of, _BUCKETS), object_store.stream_of(subjects.RESULT_FILES))
        )
        runner = Runner(
            bus,
            assignments=KeyValue(bus, subjects.ASSIGNMENTS),
            functions=KeyValue(bus, subjects.FUNCTIONS),
            revisions=KeyValue(bus, subjects.REVISIONS),
            usage=KeyValue(bus, subjects.USAGE),
            name=new_ulid()[-16:],
            node=settings.node,
            home=settings.home,
            clock=clock,
            turns=NodeTurns(clock, settings.turns_per_gpu, asyncio.get_running_loop().call_later),
        )
        log.info("runs node %s", settings.node)
        await until_told(runner.run(), "runner", lambda: _agent_has_stopped(settings.home))
    finally:
        await bus.close()


async def _agent_has_stopped(home: Home) -> None:
    """Both may be told to stop at once, as with their node: the agent's workers finish their calls, or their calls are
    handed back, with our help. An agent that goes on has workers that wait for our successor."""
    loop = asyncio.get_running_loop()
    begins_by = loop.time() + _AGENT_BEGINS_S
    while grace_period.is_under_way(home) or (loop.time() < begins_by and grace_period.has_agent(home)):  # noqa: ASYNC110
        await asyncio.sleep(_LOOK_S)


def main() -> int:
    return run("runner", RunnerSettings.from_env, serve)


if __name__ == "__main__":
    sys.exit(main())
