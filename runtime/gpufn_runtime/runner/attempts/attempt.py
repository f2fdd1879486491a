"""One Attempt on its way through a worker, and when it has to end.

    Arrived ⇄ AwaitsTurn   its worker shares a GPU by time
    Arrived → Run          it has begun, and has until `must_end_at`
    Run.ending             the runner has decided how it ends, and waits for its worker to let go of it
    Run.lost_at            its worker has gone, and why is not known yet

What is known of it in one phase only is in that phase's value.
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
    """Its slot is taken, and nothing of it has begun. It may have ended before: whether it has is being read, then."""

    is_cancelled: bool = False  # meanwhile: it will not begin


ARRIVED = Arrived()


class AwaitsTurn(msgspec.Struct, frozen=True):
    """On the GPU; nothing of it has begun."""

    gpu: str
    until: float  # monotonic: then it has expired


class Ending(msgspec.Struct, frozen=True):
    """As the runner has decided, whatever its worker says."""

    kind: Decided
    until: float  # monotonic: so long its worker has to let go of it


class Run(msgspec.Struct, kw_only=True, eq=False):
    """It has begun, and may have ended by now."""

    started_at: float  # unix seconds, for others; what follows is monotonic
    began: float
    must_end_at: float
    lost_at: float = math.inf  # when its worker was
    ending: Ending | None = None
    is_cold: bool  # it waited for a worker to start
    busy_from: float | None  # as its link's BusyTime says, while it is counted there
    busy_s: float = 0.0  # of its worker's time, once it is not
    items: int = 0  # sent to the reader of its stream
    granted: int = 0  # items that it may have sent by now
    calls: set[int] = msgspec.field(default_factory=set)  # that it has made of the platform and waits for
    own_calls: int = 0  # how many of these are of its own function
    progress: Progress | None = None  # as it said last
    checkpoint_seq: int = 0  # where the last one is stored, of this attempt or of one before it
    note: asyncio.Task[int] | None = None  # stores the note of this start, and returns its place; 0: it is not stored

    def grant(self, taken: int) -> int:
        """The reader of its stream has taken so many of its items, in all: so many more it may send now."""
        more = STREAM_WINDOW + min(taken, self.items) - self.granted
        if not self.granted or more <= 0:
            return 0
        self.granted += more
        return more


class Attempt(msgspec.Struct, eq=False):
    number: int  # on its link
    delivery: Delivery | DirectDelivery
    message: InvocationMessage
    method: MethodSpec
    link: WorkerLink
    parcel: str  # its input's name in the worker's folder, when it is one
    touched_at: float  # monotonic
    reason: StartReason = StartReason.FIRST  # why it is started
    phase: Arrived | AwaitsTurn | Run = ARRIVED

    @property
    def run(self) -> Run:
        """Of one that has begun."""
        assert isinstance(self.phase, Run), f"attempt {self.number} of {self.message.id} has not begun"
        return self.phase

    @property
    def gpu_s(self) -> float:
        """GPU seconds that it is charged, once it has ended."""
        return self.run.busy_s * self.link.gpus_charged

    @property
    def is_direct(self) -> bool:
        """It came by the lane: the credit of its slot may stand in the queue all the same."""
        return isinstance(self.delivery, DirectDelivery)

    @property
    def is_cancelled(self) -> bool:
        """Nobody wants it, and its message is out of the queue; it has not stopped yet."""
        match self.phase:
            case Arrived(is_cancelled):
                return is_cancelled
            case Run(ending=Ending(kind)):
                return kind is OutcomeKind.CANCELLED
            case _:
                return False

    @property
    def waits_for_own(self) -> bool:
        """For other calls of its own function, which may need its slot."""
        return isinstance(self.phase, Run) and self.phase.own_calls > 0

    @property
    def is_submitted(self) -> bool:
        """Nobody waits for a reply: the outcome goes into a record."""
        return not self.message.reply


def may_run_s(message: InvocationMessage, timeout_s: float, now: float) -> float:
    """Until the earlier of the function's timeout and the caller's deadline; `now` in unix seconds."""
    return min(timeout_s, message.deadline - now) if message.deadline else timeout_s
