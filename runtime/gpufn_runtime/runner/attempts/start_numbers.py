"""Which number the next start of user code gets for an Invocation, and why it is started. Pure.

A message carries the number of its first start. The bus counts how often it handed the message over, and each start
needs a hand-over of its own. So a number that grows with that count is never used twice. A gap is possible: a runner
that died may have received the message and started nothing. Gaps are few: hand-overs that this runner returned unused
are not counted, and the count goes on from the note of the last start (`gpufn_platform.queue.start_notes`).
"""

from __future__ import annotations

import msgspec

from gpufn_core.domain.invocation import OutcomeKind, StartReason
from gpufn_core.errors import DeviceFailed, PlatformStopping, WorkerLost
from gpufn_core.protocol.limits import KEPT_ATTEMPTS
from gpufn_core.protocol.messages import InvocationMessage
from gpufn_core.protocol.records import AttemptRecord, StartNote

_AFTER = {
    OutcomeKind.RAISED: StartReason.RAISED,
    OutcomeKind.TIMED_OUT: StartReason.TIMED_OUT,
    OutcomeKind.LOST: StartReason.WORKER_LOST,
}
_CODES = {StartReason.DEVICE_FAILED: DeviceFailed.code, StartReason.STOPPED: PlatformStopping.code}
_UNEXPLAINED = "its runner or its node ended before this attempt did"


def first_reason(message: InvocationMessage) -> StartReason:
    """Why the first start of this message happens."""
    if message.attempt == 1:
        return StartReason.FIRST
    before = message.attempts[-1].outcome if message.attempts else OutcomeKind.RAISED
    return _AFTER.get(before, StartReason.RAISED)


def next_start(
    message: InvocationMessage, note: StartNote | None, unknown: int, now: float
) -> tuple[InvocationMessage, StartReason]:
    """The message with the number of its next start and the attempts before it, and the reason for the start.

    `note` is of the last known start of this message. After it, `unknown` hand-overs may have started the call as well.
    """
    unknown += message.may_have_begun and note is None
    if note is None:
        reason = StartReason.RUNNER_LOST if unknown else first_reason(message)
        return _numbered(message, message.attempt + unknown, message.attempts), reason
    reason = note.interrupted if note.interrupted is not None and not unknown else StartReason.RUNNER_LOST
    attempts = (*note.attempts, interrupted(note, now))[-KEPT_ATTEMPTS:]
    return _numbered(message, note.attempt + 1 + unknown, attempts), reason


def interrupted(note: StartNote, now: float) -> AttemptRecord:
    """The record of the attempt that the note is of: it was interrupted, or has no end that anybody knows at `now`."""
    why = note.interrupted or StartReason.RUNNER_LOST
    return AttemptRecord(
        number=note.attempt,
        outcome=OutcomeKind.LOST,
        ended_at=note.ended_at or now,
        started_at=note.started_at,
        worker=note.worker,
        code=_CODES.get(why, WorkerLost.code),
        message=note.message or _UNEXPLAINED,
        node=note.node,
        reason=note.reason,
    )


def adopted(
    message: InvocationMessage, note: StartNote | None, number: int, delivered: int
) -> tuple[InvocationMessage, StartReason]:
    """The same of an attempt that has begun: its worker says under which `number`, which the count of hand-overs
    bounds."""
    most = message.attempt + delivered - 1 + message.may_have_begun
    number = min(max(number, message.attempt), most)
    reason = first_reason(message) if number == message.attempt else StartReason.RUNNER_LOST
    attempts = message.attempts
    if note is not None and note.attempt == number:
        attempts, reason = note.attempts, note.reason
    elif note is not None and note.attempt < number:
        attempts = (*note.attempts, interrupted(note, note.started_at))
    return _numbered(message, number, attempts), reason


def _numbered(message: InvocationMessage, number: int, attempts: tuple[AttemptRecord, ...]) -> InvocationMessage:
    return msgspec.structs.replace(message, attempt=number, attempts=attempts, retried=message.retries_used)
