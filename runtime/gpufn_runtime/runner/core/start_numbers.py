"""Attempt number of the next start of an Invocation, and the reason for that start. Pure.

A message holds the number of its first start. NATS counts the deliveries of a message, and each start needs its own
delivery. A number that grows with that count is therefore never used twice. Gaps are possible: a runner that died may
have received a message without starting it. They are rare: deliveries that this runner returned unused do not count,
and the count continues from the note of the last start (`gpufn_platform.queue.records.start_notes`).
"""

from __future__ import annotations

import msgspec

from gpufn_core.domain.invocation import OutcomeKind, StartReason
from gpufn_core.errors import DeviceFailed, PlatformStopping, WorkerLost
from gpufn_core.protocol.limits import MAX_ATTEMPT_RECORDS
from gpufn_core.protocol.messages import InvocationMessage
from gpufn_core.protocol.records import AttemptRecord, StartNote

_AFTER = {
    OutcomeKind.RAISED: StartReason.RAISED,
    OutcomeKind.TIMED_OUT: StartReason.TIMED_OUT,
    OutcomeKind.LOST: StartReason.WORKER_LOST,
}
_CODES = {StartReason.DEVICE_FAILED: DeviceFailed.code, StartReason.STOPPED: PlatformStopping.code}
LOST_MESSAGE = "its runner or its node ended before this attempt"


def first_reason(message: InvocationMessage) -> StartReason:
    """Return the reason for the first start of this message."""
    if message.attempt == 1:
        return StartReason.FIRST
    last_outcome = message.attempts[-1].outcome if message.attempts else OutcomeKind.RAISED
    return _AFTER.get(last_outcome, StartReason.RAISED)


def next_start(
    message: InvocationMessage, note: StartNote | None, unknown: int, now: float
) -> tuple[InvocationMessage, StartReason]:
    """Return the message, with the number of its next start and the attempts before it, and the reason for the start.

    `note` describes the last known start of this message. Up to `unknown` later deliveries may have started it too.
    """
    unknown += message.may_have_begun and note is None
    if note is None:
        reason = StartReason.RUNNER_LOST if unknown else first_reason(message)
        return _numbered(message, message.attempt + unknown, message.attempts), reason
    reason = note.interrupted if note.interrupted is not None and not unknown else StartReason.RUNNER_LOST
    attempts = (*note.attempts, interrupted(note, now))[-MAX_ATTEMPT_RECORDS:]
    return _numbered(message, note.attempt + 1 + unknown, attempts), reason


def interrupted(note: StartNote, now: float) -> AttemptRecord:
    """Return the record of the noted attempt: it was interrupted, or its end is unknown at `now`."""
    reason = note.interrupted or StartReason.RUNNER_LOST
    return AttemptRecord(
        number=note.attempt,
        outcome=OutcomeKind.LOST,
        ended_at=note.ended_at or now,
        started_at=note.started_at,
        worker=note.worker,
        code=_CODES.get(reason, WorkerLost.code),
        message=note.message or LOST_MESSAGE,
        node=note.node,
        reason=note.reason,
    )


def adopted(
    message: InvocationMessage, note: StartNote | None, number: int, delivered: int
) -> tuple[InvocationMessage, StartReason]:
    """Like `next_start`, for an attempt that has already begun. Its worker reports `number`; the delivery count limits
    it."""
    highest = message.attempt + delivered - 1 + message.may_have_begun
    number = min(max(number, message.attempt), highest)
    reason = first_reason(message) if number == message.attempt else StartReason.RUNNER_LOST
    attempts = message.attempts
    if note is not None and note.attempt == number:
        attempts, reason = note.attempts, note.reason
    elif note is not None and note.attempt < number:
        attempts = (*note.attempts, interrupted(note, note.started_at))
    return _numbered(message, number, attempts), reason


def _numbered(message: InvocationMessage, number: int, attempts: tuple[AttemptRecord, ...]) -> InvocationMessage:
    return msgspec.structs.replace(message, attempt=number, attempts=attempts, retried=message.retries_used)
