"""Start notes: where, when and why the user code of a submitted call was last started, while it runs or is interrupted.

A note is stored beside the call's checkpoint until the call has ended. A runner that receives the call's message again
reads it, to number the next start and to record the previous one.
"""

from __future__ import annotations

import msgspec

from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import encode
from gpufn_core.protocol.records import StartNote
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import streams
from gpufn_platform.queue.records import checkpoints

_note = msgspec.msgpack.Decoder(StartNote)


async def store(bus: Bus, invocation: str, note: StartNote) -> int:
    """Store a note in place of the previous one; returns its sequence. Raises BusUnavailable."""
    return (await bus.publish_stored(subjects.start_note(invocation), encode(note))).seq


async def last(bus: Bus, invocation: str) -> StartNote | None:
    message = await streams.last_message(bus, subjects.CHECKPOINTS, subjects.start_note(invocation))
    return None if message is None else _note.decode(message.payload)


async def drop(bus: Bus, invocation: str) -> None:
    """Remove the note. A missing note is not an error."""
    message = await streams.last_message(bus, subjects.CHECKPOINTS, subjects.start_note(invocation))
    if message is not None:
        await checkpoints.forget(bus, message.seq)
