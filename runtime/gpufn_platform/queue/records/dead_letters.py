"""Dead letters: submitted invocations that ended without a result, with their payload, to inspect, replay or drop."""

from __future__ import annotations

import logging
from collections.abc import Callable

from gpufn_core.errors import Conflict, PayloadTooLarge
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import pack
from gpufn_core.protocol.messages import InvocationMessage
from gpufn_core.protocol.records import CallRecord, DeadLetter, unpack_letter
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import streams
from gpufn_platform.bus.storage.header_summary import newest, summary, summary_of

log = logging.getLogger(__name__)


async def store(bus: Bus, record: CallRecord, invocation: InvocationMessage, payload: bytes) -> None:
    """Store the dead letter of a call that ended as in `record`, replacing an earlier call with its id.

    Does nothing if this end is already stored, or if the state leaves no dead letter. If the bus refuses the payload as
    too large, the dead letter is dropped with a warning."""
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
    subject, packed, last_seq = subjects.dead_letter(letter.function, letter.id), pack(letter, payload), 0
    while True:
        try:
            await bus.publish_stored(subject, packed, expected_last=last_seq, headers=summary(letter))
        except Conflict:
            existing = await streams.last_message(bus, subjects.DEAD_LETTERS, subject)
            if existing is not None and unpack_letter(existing.payload)[0].died_at == letter.died_at:
                return
            last_seq = 0 if existing is None else existing.seq
        except PayloadTooLarge as error:
            log.warning("invocation %s: no dead letter is stored: %s", record.id, error)
            return
        else:
            return


async def read(bus: Bus, function: str, invocation: str) -> tuple[DeadLetter, bytes] | None:
    """Return the dead letter and its payload."""
    message = await streams.last_message(bus, subjects.DEAD_LETTERS, subjects.dead_letter(function, invocation))
    return None if message is None else unpack_letter(message.payload)


async def is_kept(bus: Bus, invocation: str) -> bool:
    """Return whether this call has a dead letter, for any function."""
    return await streams.last_message(bus, subjects.DEAD_LETTERS, subjects.dead_letter("*", invocation)) is not None


async def recent(
    bus: Bus, function: str, limit: int, *, matches: Callable[[DeadLetter], bool] = lambda letter: True
) -> list[DeadLetter]:
    """Return the last matching dead letters of a function (``*``: of all), newest first; errors without traceback."""
    letters, subject = summary_of(DeadLetter), subjects.dead_letter(function, "*")
    return await newest(bus, subjects.DEAD_LETTERS, subject, letters, limit=limit, matches=matches)


async def drop(bus: Bus, function: str, invocation: str = "*") -> int:
    """Remove a dead letter, or all of a function; returns how many were removed."""
    return await streams.purge(bus, subjects.DEAD_LETTERS, subjects.dead_letter(function, invocation))
