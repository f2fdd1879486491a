"""What is sent: calls and replies, what is asked about a call on its way, orders to end a worker, lines of output.

Messages with user bytes are packed by `codec.pack`, header and body; the rest are plain msgpack (`codec.encode`, and a
decoder of their own where they are read). Times that travel are unix seconds; durations are seconds.
"""

from __future__ import annotations

import math

import msgspec

from gpufn_core.domain.invocation import OutcomeKind
from gpufn_core.domain.worker import ColdStart
from gpufn_core.errors import ErrorInfo
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import Unpacker
from gpufn_core.protocol.records import AttemptRecord, BodyReference, Webhook
from gpufn_core.spec.function_spec import RETENTION_S
from gpufn_core.spec.priority import Priority, QueueKind


class InvocationMessage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One Invocation in a queue. `reply` is empty for one that nobody waits for; `deadline` 0 means none.

    `digest` tells a repeated submission from another one under the same id, and `attempts` are those before this one;
    both are empty for a call that somebody waits for.

    A submitted one without an id of its own is stored with a stem (`gpufn_core.ids`), which its place in the queue
    completes: `gpufn_platform.queue.queued_calls` reads it. `keep_s` is for how long its record is kept after its end.

    `parcels` is the caller's folder in `Home.parcels`, if it can take the result as a parcel. `parcel` is the body's
    name in it, when the body is not beside this header. `reference` is where a body is that is too large for the
    message.
    """

    id: str
    function: str
    revision: int
    method: str
    content_type: str
    accept: str
    reply: str
    submitted_at: float
    deadline: float = 0.0
    attempt: int = 1
    stream: bool = False
    not_before: float = 0.0  # a retry waits until then
    parent: str = ""  # the invocation that made this one
    trace: str = ""  # W3C traceparent
    parcels: str = ""
    parcel: str = ""
    digest: str = ""
    attempts: tuple[AttemptRecord, ...] = ()
    webhook: Webhook | None = None
    keep_s: float = RETENTION_S
    priority: Priority = Priority.NORMAL
    owner: str = subjects.PLATFORM  # the id of the API key that made it
    gpu_s: float = 0.0  # that all attempts before this one are charged: not all of them are in `attempts`
    may_have_begun: bool = False  # on the lane, with a runner that is gone
    retried: int | None = None  # how often its Retry policy was used; None in messages of older versions
    reference: BodyReference | None = None

    @property
    def retries_used(self) -> int:
        """Of the function's Retry policy. `attempt` may be further: it counts each start of user code."""
        return self.attempt - 1 if self.retried is None else self.retried

    @property
    def queue(self) -> QueueKind:
        return QueueKind(self.priority, is_sync=bool(self.reply))

    def expires_at(self, queue_timeout_s: float | None, delivered: int = 1) -> float:
        """When nobody wants it any more unless it has started, in unix seconds; inf for never. Who held a delivery
        before this one may have started it.
        """
        at = self.deadline or math.inf
        if queue_timeout_s is not None and self.attempt == 1 and delivered == 1 and not self.may_have_begun:
            at = min(at, self.submitted_at + queue_timeout_s)
        return at


class ResultReply(msgspec.Struct, tag=1, frozen=True, array_like=True, gc=False):
    """The end of an Invocation, sent to its caller.

    `queue_s` runs from submission to the attempt's start, `gather_s` from there until its batch runs. `parcel` is the
    result's name in the caller's folder if the result is not beside this header. `reference` locates a result that is
    too large for the message and whose caller is on another host.
    """

    invocation: str
    kind: OutcomeKind
    error: ErrorInfo | None
    content_type: str
    revision: int
    attempt: int
    queue_s: float
    run_s: float
    worker: str = ""
    cold_start: ColdStart | None = None
    items: int = 0  # how many ItemReplies came before
    parcel: str = ""
    gpu_s: float = 0.0
    gather_s: float = 0.0
    reference: BodyReference | None = None


class ItemReply(msgspec.Struct, tag=2, frozen=True, array_like=True, gc=False):
    """Item `number` (from 0) of a stream. `credit_to` is where the reader asks for more (a StreamCredit)."""

    invocation: str
    number: int
    content_type: str
    credit_to: str


class StreamCredit(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """So many items of a stream were read, in all: STREAM_WINDOW more may come. Said again it changes nothing, and the
    next one makes up for one that was lost."""

    invocation: str
    taken: int


class BegunReply(msgspec.Struct, tag=3, frozen=True, array_like=True, gc=False):
    """It runs now, and has not waited for too long, whatever becomes of its runner. Said where there is a limit."""

    invocation: str


Reply = ResultReply | ItemReply | BegunReply
unpack_invocation: Unpacker[InvocationMessage] = Unpacker(InvocationMessage)
unpack_reply: Unpacker[Reply] = Unpacker(Reply)


class Cancel(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """To all runners: end this invocation if it is yours; of a map's id, all of its items."""

    invocation: str


class WaitedFor(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """To a caller, by who runs these: does he still wait for them? The answer is of the same kind, with those for which
    he does. `anew`: by who would run them once more, from the start."""

    invocations: tuple[str, ...]
    anew: bool = False


class WhereIs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """To all runners: who holds this invocation? Only that one answers; one that has ended it lately replies to its
    caller once more. Empty: each tells all submitted ones it has."""

    invocation: str


class Progress(msgspec.Struct, frozen=True):
    """How far a call says that it is: `fraction` from 0 to 1."""

    fraction: float
    message: str = ""


class HeldBy(msgspec.Struct, frozen=True, array_like=True, gc=False):
    invocation: str
    worker: str
    node: str
    attempt: int
    started_at: float
    progress: Progress | None = None
    waits_on: str = ""  # the GPU that it waits for its turn on, and then it has not started


class KillOrder(msgspec.Struct, frozen=True):
    """From a Runner to its node's Agent: end this worker's process now."""

    worker: str
    reason: str


class LogLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """Text of a worker. `stream` is ``stdout``, ``stderr``, ``log``, or ``error`` for how a call or a start failed."""

    at: float
    function: str
    revision: int
    worker: str
    stream: str
    text: str
    invocation: str = ""
