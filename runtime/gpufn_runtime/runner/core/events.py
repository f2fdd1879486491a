"""Events of the state machine: changes of calls and workers. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gpufn_core.domain.invocation import Outcome
from gpufn_core.domain.worker import Exit
from gpufn_core.errors import ErrorInfo
from gpufn_core.protocol.frames import Result, Unfinished
from gpufn_core.protocol.messages import InvocationMessage
from gpufn_core.protocol.records import CallRecord, StartNote
from gpufn_runtime.runner.core.attempt import Attempt
from gpufn_runtime.runner.core.views import DeliveryView, WorkerView


class Now(msgspec.Struct, frozen=True, gc=False):
    """The time of an event, in seconds."""

    monotonic: float
    unix: float


class Event(msgspec.Struct, eq=False, gc=False):
    pass


class Arrived(Event):
    """A call was delivered. `caller_was_away`: the bus has received no heartbeat of its caller recently."""

    delivery: DeliveryView
    message: InvocationMessage
    body: bytes
    caller_was_away: bool = False


class ArgumentsReady(Event):
    """The arguments are in the worker's folder under `shared_body`."""

    attempt: Attempt
    shared_body: str


class ArgumentsFailed(Event):
    """The arguments are lost, or cannot be fetched now."""

    attempt: Attempt
    error: ErrorInfo
    is_lost: bool


class TurnGranted(Event):
    """It is the worker's turn on the GPU."""

    attempt: Attempt


class TurnsRevoked(Event):
    """The worker leaves its GPU, and these attempts waited for its turn."""

    attempts: Sequence[Attempt]


class RecordChecked(Event):
    """The record of a submitted call, whether another runner has the call, and the note of its last start."""

    attempt: Attempt
    record: CallRecord | None = None
    is_elsewhere: bool = False
    note: StartNote | None = None


class CallerChecked(Event):
    """Whether the caller waits for the call (None: unknown), and whether another runner has the call."""

    attempt: Attempt
    is_waited_for: bool | None = None
    is_elsewhere: bool = False


class ResultReceived(Event):
    """The worker sent the result of an attempt."""

    attempt: Attempt
    result: Result
    body: bytes


class ResultCollected(Event):
    """A large result was moved from the worker's folder; its fields have the meaning that they have in
    `actions.Settle`. `outcome` is RAISED if it could not be taken."""

    attempt: Attempt
    result: Result
    outcome: Outcome
    shared_body: str = ""
    runner_file: str = ""


class SlotFreed(Event):
    """A slot that an attempt of an earlier runner had used is free."""

    worker: WorkerView
    shared_body: str = ""


class UnfinishedFound(Event):
    """A reconnected worker reported an attempt of an earlier runner. `delivery` is None if it cannot be adopted."""

    worker: WorkerView
    unfinished: Unfinished
    delivery: DeliveryView | None = None
    message: InvocationMessage | None = None
    note: StartNote | None = None
    counted: int = 0  # NATS's own count of the delivery


class Cancelled(Event):
    """The caller does not want the attempt any longer."""

    attempt: Attempt


class Withdrawn(Event):
    """The gateway of a fast-path call has disconnected, or has queued the call."""

    delivery: DeliveryView


class WorkerReady(Event):
    """A worker takes calls. `since` in unix seconds."""

    worker: WorkerView
    since: float


class CapacityIncreased(Event):
    """A worker takes calls again."""


class CapacityDecreased(Event):
    """A worker accepts no further calls."""


class WorkerLost(Event):
    """The worker's socket closed. The agent reports the exit within `explained_within_s`; then the process counts as
    dead."""

    worker: WorkerView
    explained_within_s: float


class WorkerExited(Event):
    """The worker's process is dead; `exit` describes the exit, if the agent reported it."""

    worker_id: str
    exit: Exit | None


class Ticked(Event):
    """A tenth of a second has passed. Frames that arrived before `cutoff` (monotonic) have been handled."""

    cutoff: float


class Closed(Event):
    """The queue is closed: nothing new begins."""
