"""One Attempt on its way through a worker, and when it has to end."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from gpufn.bus.delivery import Delivery
from gpufn.invocation import OutcomeKind
from gpufn.protocol.frames import STREAM_WINDOW
from gpufn.protocol.messages import InvocationMessage, Progress
from gpufn.spec import MethodSpec
from gpufn_runtime.runner.lane import DirectDelivery

if TYPE_CHECKING:
    from gpufn_runtime.runner.worker_link import WorkerLink


class Attempt:
    """`ending` is set once the runner has decided how it ends and waits for the worker to let go of it."""

    __slots__ = (
        "began", "busy_from", "busy_s", "calls", "checkpoint_seq", "cold", "delivery", "ending", "granted", "items",
        "link", "lost_at", "message", "method", "must_end_at", "number", "parcel", "progress", "started_at",
        "touched_at", "waits_on", "while_ending_until",
    )  # fmt: skip

    def __init__(
        self,
        number: int,
        delivery: Delivery | DirectDelivery,
        message: InvocationMessage,
        method: MethodSpec,
        link: WorkerLink,
    ) -> None:
        self.number = number  # on its link
        self.delivery = delivery
        self.message = message
        self.method = method
        self.link = link
        self.started_at = 0.0  # unix seconds, for others; what follows is monotonic
        self.began = 0.0
        self.touched_at = 0.0
        self.must_end_at = math.inf
        self.lost_at = math.inf  # when its worker was
        self.parcel = ""  # its input's name in the worker's folder, when it is one
        self.busy_from: float | None = None  # as its link's BusyTime says, while it runs
        self.busy_s = 0.0  # of its worker's time, once it has ended
        self.items = 0  # sent to the reader of its stream
        self.granted = 0  # items that it may have sent by now
        self.waits_on = ""  # the GPU that it waits for its turn on; until then nothing of it has begun
        self.cold = False  # it waited for a worker to start
        self.calls: set[int] = set()  # that it has made of the platform and waits for
        self.progress: Progress | None = None  # as it said last
        self.checkpoint_seq = 0  # where the last one is stored, of this attempt or of one before it
        self.ending: OutcomeKind | None = None
        self.while_ending_until = math.inf

    @property
    def gpu_s(self) -> float:
        """GPU seconds that it is charged, once it has ended."""
        return self.busy_s * self.link.gpus_charged

    @property
    def is_direct(self) -> bool:
        """It came by the lane: the credit of its slot may stand in the queue all the same."""
        return isinstance(self.delivery, DirectDelivery)

    @property
    def is_cancelled(self) -> bool:
        """Nobody wants it, and its message is out of the queue; it has not stopped yet."""
        return self.ending is OutcomeKind.CANCELLED

    @property
    def is_submitted(self) -> bool:
        """Nobody waits for a reply: the outcome goes into a record."""
        return not self.message.reply

    @property
    def is_looked_up(self) -> bool:
        """It may have ended before: whether it has is being read, and so far nothing of it has begun."""
        return not self.started_at and not self.waits_on

    def grant(self, taken: int) -> int:
        """The reader of its stream has taken so many of its items, in all: so many more it may send now."""
        more = STREAM_WINDOW + min(taken, self.items) - self.granted
        if not self.granted or more <= 0:
            return 0
        self.granted += more
        return more


def may_run_s(message: InvocationMessage, timeout_s: float, now: float) -> float:
    """Until the earlier of the function's timeout and the caller's deadline; `now` in unix seconds."""
    return min(timeout_s, message.deadline - now) if message.deadline else timeout_s
