"""Checkpoints of running calls: the state that a call stores, and reads again in its next attempt."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from gpufn_core.errors import BusUnavailable, PayloadTooLarge
from gpufn_core.protocol import frames
from gpufn_core.protocol.limits import CHECKPOINT_BYTES
from gpufn_core.protocol.records import Checkpoint
from gpufn_platform.bus.connection import Bus
from gpufn_platform.process.clock import Clock
from gpufn_platform.queue.records import checkpoints
from gpufn_runtime.runner.core.attempt import Attempt
from gpufn_runtime.runner.workers.shared_bodies import NodeSharedBodies

log = logging.getLogger(__name__)

_RETRY_S: Final = 0.2


class CallCheckpoints:
    def __init__(self, bus: Bus, shared_bodies: NodeSharedBodies, clock: Clock) -> None:
        self._bus = bus
        self._shared_bodies = shared_bodies
        self._clock = clock

    async def store(self, worker: str, call: frames.Call, body: bytes, parent: Attempt) -> None:
        """Store a checkpoint that a worker sent. Retries while the bus is away, because the call may run for hours.

        Raises PayloadTooLarge.
        """
        if call.shared_body:
            path = self._shared_bodies.kept_path(self._shared_bodies.accept(worker, call.shared_body))
            try:
                size = path.stat().st_size
                body = path.read_bytes() if size <= CHECKPOINT_BYTES else b""
            finally:
                path.unlink(missing_ok=True)
            if size > CHECKPOINT_BYTES:
                raise _too_large(size)
        if len(body) > CHECKPOINT_BYTES:
            raise _too_large(len(body))
        checkpoint = Checkpoint(call.content_type, parent.message.attempt, self._clock.time())
        while True:
            try:
                parent.run.checkpoint_seq = await checkpoints.store(self._bus, parent.message.id, checkpoint, body)
                return
            except BusUnavailable as error:
                log.info("cannot store a checkpoint of %s yet: %s", parent.message.id, error)
                await asyncio.sleep(_RETRY_S)

    async def last(self, parent: Attempt) -> tuple[str, bytes]:
        """Return the content type and the bytes of the last checkpoint. An empty content type means that there is
        none."""
        stored = await checkpoints.last(self._bus, parent.message.id)
        if stored is None:
            return "", b""
        parent.run.checkpoint_seq = stored.seq
        return stored.checkpoint.content_type, stored.body


def _too_large(size: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"a checkpoint of {size:,} bytes is larger than the {CHECKPOINT_BYTES:,} bytes allowed")
