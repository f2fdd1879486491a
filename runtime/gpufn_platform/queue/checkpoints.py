"""The last checkpoint of each call that made one: on disk, until the call has ended or two weeks have passed."""

from __future__ import annotations

from typing import NamedTuple

from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import pack
from gpufn_core.protocol.records import Checkpoint, unpack_checkpoint
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import streams


class Kept(NamedTuple):
    """`seq` is where it is stored, to `forget` it."""

    checkpoint: Checkpoint
    body: bytes
    seq: int


async def keep(bus: Bus, invocation: str, checkpoint: Checkpoint, body: bytes) -> int:
    """In place of the one before; returns where. Raises BusUnavailable, PayloadTooLarge."""
    return (await bus.publish_stored(subjects.checkpoint(invocation), pack(checkpoint, body))).seq


async def last(bus: Bus, invocation: str) -> Kept | None:
    message = await streams.last_message(bus, subjects.CHECKPOINTS, subjects.checkpoint(invocation))
    return None if message is None else Kept(*unpack_checkpoint(message.payload), message.seq)


async def forget(bus: Bus, seq: int) -> None:
    """Absent is fine."""
    await streams.delete_message(bus, subjects.CHECKPOINTS, seq)


async def drop(bus: Bus, invocation: str) -> None:
    """Of a call that ended where nobody runs it: whoever has its id next must not go on from there. Absent is fine."""
    if (kept := await last(bus, invocation)) is not None:
        await forget(bus, kept.seq)
