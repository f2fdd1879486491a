"""Actions of the state machine, which the edge executes in order. Pure."""

from __future__ import annotations

import msgspec

from gpufn_core.domain.invocation import Outcome, StartReason
from gpufn_core.domain.retry_policy import Settlement
from gpufn_core.errors import ErrorInfo
from gpufn_core.protocol import frames
from gpufn_core.protocol.messages import InvocationMessage
from gpufn_core.protocol.records import CallRecord
from gpufn_runtime.runner.core.attempt import Attempt
from gpufn_runtime.runner.core.views import DeliveryView, WorkerView


class Action(msgspec.Struct, eq=False, gc=False):
    pass


class AttemptAction(Action):
    attempt: Attempt


class DeliveryAction(Action):
    delivery: DeliveryView


class WorkerAction(Action):
    worker: WorkerView


class GetArguments(AttemptAction):
    """Link the arguments into the worker's folder, or fetch them. Answered by ArgumentsReady or ArgumentsFailed."""


class RequestTurn(AttemptAction):
    """Request a turn on the worker's GPU. Answered by TurnGranted."""


class CheckRecord(AttemptAction):
    """Look up whether a submitted call has ended or runs elsewhere. Answered by RecordChecked."""


class CheckCaller(AttemptAction):
    """Look up whether the caller still waits. Answered by CallerChecked."""


class SendRun(AttemptAction):
    """Start the attempt in its worker."""

    run: frames.Run
    body: bytes


class SendStop(AttemptAction):
    """Have the worker stop the attempt, and cancel its nested calls."""


class Adopt(AttemptAction):
    """Take over an attempt of an earlier runner, with its delivery."""


class StopUnfinished(WorkerAction):
    """Have the worker stop an attempt of an earlier runner that is not adopted. Its slot is in use until then."""

    number: int


class AnnounceStart(AttemptAction):
    """Notify the followers of the call that it has started."""


class NoteStart(AttemptAction):
    """Store a note of the start, for a runner that starts the call again."""


class Release(AttemptAction):
    """The attempt has no slot any longer: remove it from the index, and pass its turn on the GPU on."""


class DropBody(WorkerAction):
    """Remove a file from the worker's folder."""

    shared_body: str


class Touch(DeliveryAction):
    """Extend the ack deadline of the delivery."""


class Nak(DeliveryAction):
    """Return the delivery to its queue, not before `delay_s`."""

    delay_s: float = 0.0


class Term(DeliveryAction):
    """Drop the delivery."""


class CountReturned(Action):
    """Count a call that was returned to its queue. NATS's pending count does not include it yet."""

    message: InvocationMessage


class Refuse(DeliveryAction):
    """End a call that never got to a worker."""

    message: InvocationMessage
    outcome: Outcome


class Confirm(DeliveryAction):
    """Complete the settlement of a call whose record shows its end."""

    record: CallRecord


class AckSuperseded(DeliveryAction):
    """Acknowledge a delivery whose next attempt is already queued."""


class CollectResult(AttemptAction):
    """Take a large result from the worker's folder. Answered by ResultCollected."""

    result: frames.Result


class HandBack(AttemptAction):
    """Return an interrupted call to its queue, to start under its next number."""

    reason: StartReason
    message: str


class Settle(AttemptAction):
    """Reply to the caller or store the record; or publish the retry. Then acknowledge, and count the usage.

    `charged_s` is the attempt's share of its worker's time, `gpu_s` of its GPUs' time, both in seconds. A large result
    is named by `shared_body` in the caller's folder, or by `runner_file` in the runner's folder (of a submitted call,
    or for a caller on another host).
    """

    outcome: Outcome
    settlement: Settlement
    charged_s: float
    gpu_s: float
    content_type: str = ""
    body: bytes = b""
    shared_body: str = ""
    runner_file: str = ""
    run_s: float = 0.0
    gather_s: float = 0.0


class LogFailure(WorkerAction):
    """Write a failure to the function's log."""

    error: ErrorInfo | None
    message: InvocationMessage


class AwaitExit(Action):
    """Report the end of the worker's process by WorkerExited."""

    worker_id: str


class StopAwaiting(Action):
    """Do not report the end of the worker's process."""

    worker_id: str


class RevokeTurns(WorkerAction):
    """Withdraw the requests for a turn of a worker that is about to end."""


class SlotChanged(WorkerAction):
    """A slot is free or poisoned: request deliveries. An empty worker may have to drain, park or end."""


class WorkerSpent(WorkerAction):
    """The worker has begun the last call that it may run (`max_calls`): replace it when it is empty."""


class OfferCredits(Action):
    """Request deliveries for the free slots."""


class ShrinkCredits(Action):
    """Withdraw requests for slots that no longer exist."""


class ReportLimit(Action):
    """Notify the gateways of this host of the number of calls that the fast path may bring."""
