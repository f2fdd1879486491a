"""Submitted Invocations that ended without a result, with their payload: to be looked at, run again, or dropped."""

from __future__ import annotations

import logging

from gpufn_core.errors import Conflict, PayloadTooLarge
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import pack
from gpufn_core.protocol.messages import InvocationMessage
from gpufn_core.protocol.records import CallRecord, DeadLetter, unpack_letter
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import streams
from gpufn_platform.bus.storage.header_summary import newest, summary, summary_of

log = logging.getLogger(__name__)


async def bury(bus: Bus, record: CallRecord, invocation: InvocationMessage, payload: bytes) -> None:
    """Keep the payload of a call whose `record` ended so, in place of one that had its id before; nothing else than
    before when it is kept already, and nothing of one that the bus does not take with its error."""
    if not record.state.leaves_dead_letter:
        return
    letter = DeadLetter(
        id=record.id,
        function=record.function,
        revision=record.revision,
        method=record.method,
        content_type=invocation.content_type,
        accept=invocation.accept,
        state=record.state,
        submitted_at=record.submitted_at,
        died_at=record.ended_at or record.submitted_at,
        error=record.error,
        attempts=record.attempts,
        size=len(payload) if invocation.reference is None else invocation.reference.size,
        priority=invocation.priority,
        webhook=invocation.webhook,
        reference=invocation.reference,
    )
    subject, packed, last = subjects.dead_letter(letter.function, letter.id), pack(letter, payload), 0
    while True:
        try:
            await bus.publish_stored(subject, packed, expected_last=last, headers=summary(letter))
        except Conflict:
            kept = await streams.last_message(bus, subjects.DEAD_LETTERS, subject)
            if kept is not None and unpack_letter(kept.payload)[0].died_at == letter.died_at:
                return
            last = 0 if kept is None else kept.seq
        except PayloadTooLarge as error:
            log.warning("no dead letter is kept of %s: %s", record.id, error)
            return
        else:
            return


async def read(bus: Bus, function: str, invocation: str) -> tuple[DeadLetter, bytes] | None:
    """The letter and its payload."""
    message = await streams.last_message(bus, subjects.DEAD_LETTERS, subjects.dead_letter(function, invocation))
    return None if message is None else unpack_letter(message.payload)


async def is_kept(bus: Bus, invocation: str) -> bool:
    """Whether there is a letter of this call, whichever function it called."""
    return await streams.last_message(bus, subjects.DEAD_LETTERS, subjects.dead_letter("*", invocation)) is not None


async def recent(bus: Bus, function: str, limit: int) -> list[DeadLetter]:
    """The last letters of a function (``*``: of all), newest first; their errors without traceback."""
    letters = summary_of(DeadLetter)
    return await newest(bus, subjects.DEAD_LETTERS, subjects.dead_letter(function, "*"), letters, limit=limit)


async def drop(bus: Bus, function: str, invocation: str = "*") -> int:
    """Remove a letter, or all of a function; returns how many there were."""
    return await streams.purge(bus, subjects.DEAD_LETTERS, subjects.dead_letter(function, invocation))
