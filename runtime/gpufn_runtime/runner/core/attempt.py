"""An Attempt: its states, their transitions, and its data. Pure.

PREPARING   it has a slot; its arguments are on their way to the worker
WAITING     for a turn on its worker's GPU
CHECKING    the call may have ended, or its caller may be gone: the runner looks it up
RUNNING     the worker runs user code
STOPPING    the runner has decided how it ends (a timeout, a cancel), and the worker must stop it
LOST        its worker is gone, and how the process ended is not known yet
ENDED       its slot is free or poisoned; it never changes again
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from typing import Final, Literal

import msgspec

from gpufn_core.domain.invocation import OutcomeKind, StartReason
from gpufn_core.protocol.messages import InvocationMessage, Progress
from gpufn_core.protocol.streams.stream_window import STREAM_WINDOW, UnreadItems
from gpufn_core.spec.function_spec import MethodSpec
from gpufn_runtime.runner.core.views import DeliveryView, WorkerView


class AttemptState(enum.StrEnum):
    PREPARING = "preparing"
    WAITING = "waiting"
    CHECKING = "checking"
    RUNNING = "running"
    STOPPING = "stopping"
    LOST = "lost"
    ENDED = "ended"


_S = AttemptState
TRANSITIONS: Final[Mapping[AttemptState, frozenset[AttemptState]]] = {
    _S.PREPARING: frozenset({_S.WAITING, _S.CHECKING, _S.RUNNING, _S.ENDED}),
    _S.WAITING: frozenset({_S.CHECKING, _S.RUNNING, _S.ENDED}),
    _S.CHECKING: frozenset({_S.RUNNING, _S.ENDED}),
    _S.RUNNING: frozenset({_S.STOPPING, _S.LOST, _S.ENDED}),
    _S.STOPPING: frozenset({_S.LOST, _S.ENDED}),
    _S.LOST: frozenset({_S.ENDED}),
    _S.ENDED: frozenset(),
}

Decided = Literal[OutcomeKind.TIMED_OUT, OutcomeKind.CANCELLED]  # by the runner


class Stop(msgspec.Struct, frozen=True):
    """The runner's decision, which overrides the worker's result."""

    kind: Decided
    until: float  # monotonic: the worker must have stopped it by then


class Execution(msgspec.Struct, kw_only=True, eq=False):
    """The data of an attempt that has begun. Times are monotonic except `started_at`."""

    started_at: float  # unix seconds, for reports
    began: float
    must_end_at: float
    lost_at: float = math.inf  # when its worker was lost
    ending: Stop | None = None
    is_cold: bool  # it waited for a worker to start
    busy_from: float | None  # value of the worker's BusyTime, while that counts the attempt
    elapsed_s: float = 0.0  # from its start to its result
    run_s: float = 0.0  # of them, the seconds in user code
    busy_s: float = 0.0  # the worker's time, set when BusyTime stops counting
    items: int = 0  # sent to the reader of its stream
    granted: int = 0  # number of items that it may send in total
    unread: UnreadItems = msgspec.field(default_factory=UnreadItems)
    live_bytes: int = 0  # of published previews of items
    calls: set[int] = msgspec.field(default_factory=set)  # open nested calls
    own_calls: int = 0  # how many of them call its own function
    progress: Progress | None = None  # as last reported
    checkpoint_seq: int = 0  # position of the last checkpoint, of this attempt or an earlier one
    is_noted: bool = False  # a note of its start is stored, or on its way

    def grant(self, taken: int) -> int:
        """Return how many more items may be sent, after the stream's reader has taken `taken` items in total."""
        self.unread.read_until(min(taken, self.items))
        new_items = STREAM_WINDOW + min(taken, self.items) - self.granted
        if not self.granted or new_items <= 0:
            return 0
        self.granted += new_items
        return new_items


class Attempt(msgspec.Struct, eq=False):
    """One execution of a call. Only the state machine changes its state."""

    number: int  # on its worker
    delivery: DeliveryView
    message: InvocationMessage
    method: MethodSpec
    worker: WorkerView
    touched_at: float  # monotonic: when the ack deadline of its delivery was last extended
    reason: StartReason = StartReason.FIRST  # why it was started
    body: bytes = b""  # its arguments, until it begins
    shared_body: str = ""  # name of its arguments in the worker's folder, if they are a shared body
    state: AttemptState = AttemptState.PREPARING
    caller_was_away: bool = False  # when it arrived
    is_unwanted: bool = False  # cancelled before it began
    expires_at: float = math.inf  # monotonic, while it waits for a turn
    begun: Execution | None = None

    def move(self, state: AttemptState) -> None:
        """Change the state. Raises AssertionError if the table has no such transition."""
        assert state in TRANSITIONS[self.state], f"attempt of {self.message.id}: {self.state.name} to {state.name}"
        self.state = state

    @property
    def run(self) -> Execution:
        """The data of an attempt that has begun."""
        assert self.begun is not None, f"attempt {self.number} of {self.message.id} has not begun"
        return self.begun

    @property
    def gpu_s(self) -> float:
        """GPU seconds to charge, once it has ended."""
        return self.run.busy_s * self.worker.gpus_charged

    def gpu_s_until(self, now: float) -> float:
        """GPU seconds to charge so far. `now` is in monotonic seconds."""
        if self.run.busy_from is None:
            return self.gpu_s
        return self.worker.busy.so_far(self.run.busy_from, now) * self.worker.gpus_charged

    @property
    def is_repeated(self) -> bool:
        """Whether its delivery is a repeated one: the call may have been started before."""
        return self.delivery.delivered > 1

    @property
    def is_direct(self) -> bool:
        """Whether it came by the fast path. The credit of its slot may still be granted to the queue."""
        return self.delivery.is_direct

    @property
    def is_cancelled(self) -> bool:
        """Whether it is cancelled, with its message out of the queue, but has not stopped yet."""
        if self.begun is None:
            return self.is_unwanted
        return self.begun.ending is not None and self.begun.ending.kind is OutcomeKind.CANCELLED

    @property
    def waits_for_own(self) -> bool:
        """Whether it waits for a call of its own function, which may need its slot."""
        return self.begun is not None and self.begun.own_calls > 0

    @property
    def is_submitted(self) -> bool:
        """Whether no caller waits for a reply: the outcome goes into a record."""
        return not self.message.reply


def may_run_s(message: InvocationMessage, timeout_s: float, now: float) -> float:
    """Return the seconds until the function's timeout or the caller's deadline. `now` is in unix seconds."""
    return min(timeout_s, message.deadline - now) if message.deadline else timeout_s
