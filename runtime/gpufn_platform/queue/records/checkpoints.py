"""The latest checkpoint of each call that made one, on disk until the call has ended or for two weeks."""

from __future__ import annotations

from typing import NamedTuple

from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import pack
from gpufn_core.protocol.records import Checkpoint, unpack_checkpoint
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import streams


class StoredCheckpoint(NamedTuple):
    """A stored checkpoint. Pass `seq` to `forget`."""

    checkpoint: Checkpoint
    body: bytes
    seq: int


async def store(bus: Bus, invocation: str, checkpoint: Checkpoint, body: bytes) -> int:
    """Store a checkpoint in place of the previous one; returns its sequence. Raises BusUnavailable, PayloadTooLarge."""
    return (await bus.publish_stored(subjects.checkpoint(invocation), pack(checkpoint, body))).seq


async def last(bus: Bus, invocation: str) -> StoredCheckpoint | None:
    message = await streams.last_message(bus, subjects.CHECKPOINTS, subjects.checkpoint(invocation))
    return None if message is None else StoredCheckpoint(*unpack_checkpoint(message.payload), message.seq)


async def forget(bus: Bus, seq: int) -> None:
    """Remove the checkpoint stored at `seq`. A missing checkpoint is not an error."""
    await streams.delete_message(bus, subjects.CHECKPOINTS, seq)


async def drop(bus: Bus, invocation: str) -> None:
    """Remove a call's checkpoint when it ended without a runner: a later call with this id must not resume from it. A
    missing checkpoint is not an error."""
    if (kept := await last(bus, invocation)) is not None:
        await forget(bus, kept.seq)
