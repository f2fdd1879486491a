"""Actions of the state machine, which the edge executes in order. Pure."""

from __future__ import annotations

import msgspec

from gpufn_core.domain.invocation import Outcome, Settlement, StartReason
from gpufn_core.errors import ErrorInfo
from gpufn_core.protocol import frames
from gpufn_core.protocol.messages import InvocationMessage
from gpufn_core.protocol.records import CallRecord
from gpufn_runtime.runner.core.attempt import Attempt
from gpufn_runtime.runner.core.views import DeliveryView, WorkerView


class Action(msgspec.Struct, eq=False, gc=False):
    pass


class GetArguments(Action):
    """Link the arguments into the worker's folder, or fetch them. Answered by ArgumentsReady or ArgumentsFailed."""

    attempt: Attempt


class RequestTurn(Action):
    """Request a turn on the worker's GPU. Answered by TurnGranted."""

    attempt: Attempt


class CheckRecord(Action):
    """Look up whether a submitted call has ended or runs elsewhere. Answered by RecordChecked."""

    attempt: Attempt
    is_repeated: bool


class CheckCaller(Action):
    """Look up whether the caller still waits. Answered by CallerChecked."""

    attempt: Attempt
    is_repeated: bool


class SendRun(Action):
    """Start the attempt in its worker."""

    attempt: Attempt
    run: frames.Run
    body: bytes


class SendStop(Action):
    """Have the worker stop the attempt, and cancel its nested calls."""

    attempt: Attempt


class Adopt(Action):
    """Take over an attempt of an earlier runner, with its delivery."""

    attempt: Attempt


class StopUnfinished(Action):
    """Have the worker stop an attempt of an earlier runner that is not adopted."""

    link: WorkerView
    number: int


class AnnounceStart(Action):
    """Tell the followers of the call that it has started."""

    attempt: Attempt


class NoteStart(Action):
    """Store a note of the start, for a runner that starts the call again."""

    attempt: Attempt


class Release(Action):
    """The attempt has no slot any longer: remove it from the index, and pass its turn on the GPU on."""

    attempt: Attempt


class DropBody(Action):
    """Remove a file from the worker's folder."""

    link: WorkerView
    shared_body: str


class Touch(Action):
    """Extend the ack deadline of the delivery."""

    delivery: DeliveryView


class Nak(Action):
    """Return the delivery to its queue, not before `delay_s`."""

    delivery: DeliveryView
    delay_s: float = 0.0


class Term(Action):
    """Drop the delivery."""

    delivery: DeliveryView


class CountReturned(Action):
    """Count a call that was returned to its queue. NATS's pending count does not include it yet."""

    message: InvocationMessage


class Refuse(Action):
    """End a call that never got to a worker."""

    delivery: DeliveryView
    message: InvocationMessage
    outcome: Outcome


class Confirm(Action):
    """Complete the settlement of a call whose record shows its end."""

    delivery: DeliveryView
    record: CallRecord


class AckSuperseded(Action):
    """Acknowledge a delivery whose next attempt is already queued."""

    delivery: DeliveryView


class CollectResult(Action):
    """Take a large result from the worker's folder. Answered by ResultCollected."""

    attempt: Attempt
    result: frames.Result


class HandBack(Action):
    """Return an interrupted call to its queue, to start under its next number."""

    attempt: Attempt
    reason: StartReason
    message: str


class Settle(Action):
    """Reply to the caller or store the record; or publish the retry. Then acknowledge."""

    attempt: Attempt
    outcome: Outcome
    settlement: Settlement
    content_type: str = ""
    body: bytes = b""
    shared_body: str = ""
    runner_file: str = ""
    run_s: float = 0.0
    gather_s: float = 0.0


class Charge(Action):
    """Add the attempt to the usage records."""

    attempt: Attempt
    is_failed: bool
    run_s: float


class LogFailure(Action):
    """Write a failure to the function's log."""

    link: WorkerView
    error: ErrorInfo | None
    invocation: str


class AwaitExit(Action):
    """Report the end of the worker's process by WorkerExited."""

    worker: str


class StopAwaiting(Action):
    """Do not report the end of the worker's process."""

    worker: str


class RevokeTurns(Action):
    """Withdraw the requests for a turn of a worker that is about to end."""

    link: WorkerView


class SlotChanged(Action):
    """A slot is free or poisoned: the worker may be empty now."""

    link: WorkerView


class OfferCredits(Action):
    """Request deliveries for the free slots."""


class ShrinkCredits(Action):
    """Withdraw requests for slots that are gone."""


class ReportRoom(Action):
    """Tell the gateways of this host how many calls the fast path may bring."""
