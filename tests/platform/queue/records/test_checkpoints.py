from __future__ import annotations

from typing import Any

from gpufn_core.protocol.records import Checkpoint
from gpufn_local.nats_process import EmbeddedServer
from gpufn_platform.bus.storage import streams
from gpufn_platform.queue.records import checkpoints


async def test_a_runner_keeps_replaces_and_forgets_the_checkpoint_of_a_call(nats: EmbeddedServer, connect: Any) -> None:
    await streams.ensure_streams(await connect(nats))
    bus = await connect(nats, "runner")
    assert await checkpoints.last(bus, "a") is None
    for attempt, body in ((1, b"older"), (2, b"newer")):
        await checkpoints.store(bus, "a", Checkpoint("x/y", attempt, 5.0), body)
    await checkpoints.store(bus, "b", Checkpoint("x/y", 1, 5.0), b"another call's")
    kept = await checkpoints.last(bus, "a")
    assert kept is not None
    assert (kept.checkpoint, kept.body) == (Checkpoint("x/y", 2, 5.0), b"newer")
    await checkpoints.forget(bus, kept.seq)
    await checkpoints.forget(bus, kept.seq)
    assert await checkpoints.last(bus, "a") is None
    assert await checkpoints.last(bus, "b") is not None
