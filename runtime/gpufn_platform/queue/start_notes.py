"""The last start of each submitted call that runs, or was interrupted: where, when and why its user code was started.

It is stored beside the call's checkpoint until the call has ended. A runner that receives the call's message again
reads it, to number the next start and to record the one before.
"""

from __future__ import annotations

import msgspec

from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import encode
from gpufn_core.protocol.records import StartNote
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import streams

_note = msgspec.msgpack.Decoder(StartNote)


async def keep(bus: Bus, invocation: str, note: StartNote) -> int:
    """Store it in place of the one before; returns its place. Raises BusUnavailable."""
    return (await bus.publish_stored(subjects.start_note(invocation), encode(note))).seq


async def last(bus: Bus, invocation: str) -> StartNote | None:
    message = await streams.last_message(bus, subjects.CHECKPOINTS, subjects.start_note(invocation))
    return None if message is None else _note.decode(message.payload)


async def drop(bus: Bus, invocation: str) -> None:
    """Remove it. Absent is fine."""
    message = await streams.last_message(bus, subjects.CHECKPOINTS, subjects.start_note(invocation))
    if message is not None:
        await forget(bus, message.seq)


async def forget(bus: Bus, seq: int) -> None:
    """Remove the one that is stored there. Absent is fine."""
    await streams.delete_message(bus, subjects.CHECKPOINTS, seq)
