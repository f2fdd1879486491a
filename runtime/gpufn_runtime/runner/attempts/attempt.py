"""State of an Attempt in a worker, and its deadlines.

    Arrived ⇄ AwaitsTurn   its worker shares a GPU by time
    Arrived → Run          it has begun, and must end by `must_end_at`
    Run.ending             the runner has decided how it ends, and waits for the worker to stop it
    Run.lost_at            its worker is gone, and the reason is not known yet

Data that exists in one phase only belongs to that phase's struct.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Literal

import msgspec

from gpufn_core.domain.invocation import OutcomeKind, StartReason
from gpufn_core.protocol.frames import STREAM_WINDOW
from gpufn_core.protocol.messages import InvocationMessage, Progress
from gpufn_core.spec.function_spec import MethodSpec
from gpufn_platform.queue.delivery import Delivery
from gpufn_runtime.runner.dispatch.fast_path import DirectDelivery

if TYPE_CHECKING:
    from gpufn_runtime.runner.workers.worker_link import WorkerLink


Decided = Literal[OutcomeKind.TIMED_OUT, OutcomeKind.CANCELLED]  # by the runner


class Arrived(msgspec.Struct, frozen=True):
    """It has a slot but has not begun. While the runner looks up whether the call has already ended, it stays here."""

    is_cancelled: bool = False  # cancelled in this phase: it will not begin


ARRIVED = Arrived()


class AwaitsTurn(msgspec.Struct, frozen=True):
    """It waits for a turn on the GPU and has not begun."""

    gpu: str
    until: float  # monotonic: when it expires


class Ending(msgspec.Struct, frozen=True):
    """The runner's decision, which overrides the worker's result."""

    kind: Decided
    until: float  # monotonic: the worker must have stopped it by then


class Run(msgspec.Struct, kw_only=True, eq=False):
    """It has begun, and may have ended."""

    started_at: float  # unix seconds, for reports; the times below are monotonic
    began: float
    must_end_at: float
    lost_at: float = math.inf  # when its worker was lost
    ending: Ending | None = None
    is_cold: bool  # it waited for a worker to start
    busy_from: float | None  # value of the link's BusyTime, while it counts the attempt
    busy_s: float = 0.0  # the worker's time, set when BusyTime stops counting
    items: int = 0  # sent to the reader of its stream
    granted: int = 0  # number of items that it may send in total
    calls: set[int] = msgspec.field(default_factory=set)  # open nested calls
    own_calls: int = 0  # how many of them call its own function
    progress: Progress | None = None  # as last reported
    checkpoint_seq: int = 0  # position of the last checkpoint, of this attempt or an earlier one
    note: asyncio.Task[int] | None = None  # stores the start note and returns its position; 0 if it is not stored

    def grant(self, taken: int) -> int:
        """Return how many more items may be sent, after the stream's reader has taken `taken` items in total."""
        new_items = STREAM_WINDOW + min(taken, self.items) - self.granted
        if not self.granted or new_items <= 0:
            return 0
        self.granted += new_items
        return new_items


class Attempt(msgspec.Struct, eq=False):
    number: int  # on its link
    delivery: Delivery | DirectDelivery
    message: InvocationMessage
    method: MethodSpec
    link: WorkerLink
    parcel: str  # name of its input in the worker's folder, if the input is a shared body
    touched_at: float  # monotonic
    reason: StartReason = StartReason.FIRST  # why it was started
    phase: Arrived | AwaitsTurn | Run = ARRIVED

    @property
    def run(self) -> Run:
        """The Run of an attempt that has begun."""
        assert isinstance(self.phase, Run), f"attempt {self.number} of {self.message.id} has not begun"
        return self.phase

    @property
    def gpu_s(self) -> float:
        """GPU seconds to charge, once it has ended."""
        return self.run.busy_s * self.link.gpus_charged

    @property
    def is_direct(self) -> bool:
        """Whether it came by the fast path. The credit of its slot may still be granted to the queue."""
        return isinstance(self.delivery, DirectDelivery)

    @property
    def is_cancelled(self) -> bool:
        """Whether it is cancelled, with its message out of the queue, but has not stopped yet."""
        match self.phase:
            case Arrived(is_cancelled):
                return is_cancelled
            case Run(ending=Ending(kind)):
                return kind is OutcomeKind.CANCELLED
            case _:
                return False

    @property
    def waits_for_own(self) -> bool:
        """Whether it waits for a call of its own function, which may need its slot."""
        return isinstance(self.phase, Run) and self.phase.own_calls > 0

    @property
    def is_submitted(self) -> bool:
        """Whether no caller waits for a reply: the outcome goes into a record."""
        return not self.message.reply


def may_run_s(message: InvocationMessage, timeout_s: float, now: float) -> float:
    """Return the seconds until the function's timeout or the caller's deadline. `now` is in unix seconds."""
    return min(timeout_s, message.deadline - now) if message.deadline else timeout_s
