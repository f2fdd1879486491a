"""Messages: calls and replies, queries about calls in flight, orders to kill a worker, and log lines.

Messages with user bytes are packed by `codec.pack` into a header and a body. The others are plain msgpack
(`codec.encode`; each reader has its own decoder). Times are unix seconds; durations are seconds.
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
    """One invocation in a queue. `reply` is empty if no caller waits; a `deadline` of 0 means none.

    `digest` distinguishes a repeated submission from a different one under the same id. `attempts` are the earlier
    attempts. Both are empty for a call whose caller waits.

    A submitted invocation without a client-chosen id is stored with a stem (`gpufn_core.ids`), which its queue position
    completes; `gpufn_platform.queue.queued_calls` reads it. `keep_s` is how long its record is kept after its end.

    `shared_folder` is the caller's folder in `Home.shared_bodies`, if the caller can receive the result as a file.
    `shared_body` is the file name of the body in that folder, if the body does not follow this header. `reference`
    locates a body that is too large for the message.
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
    not_before: float = 0.0  # a retry starts at this time or later
    parent: str = ""  # the invocation that made this one
    trace: str = ""  # the caller's W3C traceparent (`gpufn_core.domain.trace_context`)
    shared_folder: str = ""
    shared_body: str = ""
    digest: str = ""
    attempts: tuple[AttemptRecord, ...] = ()
    webhook: Webhook | None = None
    keep_s: float = RETENTION_S
    priority: Priority = Priority.NORMAL
    owner: str = subjects.PLATFORM  # the id of the API key that made it
    gpu_s: float = 0.0  # GPU seconds charged for all earlier attempts, some of which may be missing in `attempts`
    may_have_begun: bool = False  # on the fast path, by a runner that has disconnected
    retried: int | None = None  # retries used of the function's policy; None in messages of older versions
    reference: BodyReference | None = None
    is_live: bool = False  # the items of a generator are also published as they come

    @property
    def retries_used(self) -> int:
        """Retries used of the function's policy. `attempt` may be higher: it counts every start of user code."""
        return self.attempt - 1 if self.retried is None else self.retried

    @property
    def queue(self) -> QueueKind:
        return QueueKind(self.priority, is_sync=bool(self.reply))

    def expires_at(self, queue_timeout_s: float | None, delivered: int = 1) -> float:
        """Return when the call expires unless it has started, in unix seconds; inf for never. After more than one
        delivery the queue timeout does not apply: an earlier runner may have started the call.
        """
        at = self.deadline or math.inf
        if queue_timeout_s is not None and self.attempt == 1 and delivered == 1 and not self.may_have_begun:
            at = min(at, self.submitted_at + queue_timeout_s)
        return at


class ResultReply(msgspec.Struct, tag=1, frozen=True, array_like=True, gc=False):
    """The end of an Invocation, sent to its caller.

    `queue_s` runs from submission to the attempt's start, `gather_s` from there until its batch runs. `shared_body` is
    the result's name in the caller's folder if the result is not beside this header. `reference` locates a result that
    is too large for the message and whose caller is on another host.
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
    shared_body: str = ""
    gpu_s: float = 0.0
    gather_s: float = 0.0
    reference: BodyReference | None = None


class ItemReply(msgspec.Struct, tag=2, frozen=True, array_like=True, gc=False):
    """Item `number` (from 0) of a stream. `credit_to` is the subject for the reader's StreamCredit."""

    invocation: str
    number: int
    content_type: str
    credit_to: str


class StreamCredit(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`taken` items of a stream were read in total: STREAM_WINDOW more may be sent. The credit is idempotent, and the
    next one makes up for a lost one."""

    invocation: str
    taken: int


class StartedReply(msgspec.Struct, tag=3, frozen=True, array_like=True, gc=False):
    """The call has started and no longer expires in the queue, whatever happens to its runner. Sent only for calls with
    a queue timeout."""

    invocation: str


class InputCredit(msgspec.Struct, tag=4, frozen=True, array_like=True, gc=False):
    """A call with input has begun, and receives it at the subject `send_to`. See `frames.InputTaken`. The credit is a
    total, and the next one makes up for a lost one."""

    invocation: str
    taken: int
    waits: bool
    send_to: str


class CallInput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Event `number` (from 0) for the input of a call, with its bytes. It is sent to the inbox of the call's runner,
    where it differs from a StreamCredit by its first byte (`codec.pack`)."""

    invocation: str
    number: int


Reply = ResultReply | ItemReply | StartedReply | InputCredit
unpack_input: Unpacker[CallInput] = Unpacker(CallInput)
unpack_invocation: Unpacker[InvocationMessage] = Unpacker(InvocationMessage)
unpack_reply: Unpacker[Reply] = Unpacker(Reply)


class Cancel(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """To all runners: cancel this invocation if you run it. The id of a map cancels all of its items."""

    invocation: str


class WaitCheck(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """From a runner to a caller: do you still wait for these invocations? The reply is of the same type and lists the
    ones that the caller still waits for. `anew`: the sender would run them again from the start."""

    invocations: tuple[str, ...]
    anew: bool = False


class LocateCall(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """To all runners: do you have this invocation? Only its runner replies; a runner that recently ended it resends the
    result to its caller. Empty: each runner replies with all submitted invocations that it has."""

    invocation: str


class Progress(msgspec.Struct, frozen=True):
    """The progress that a call reports: `fraction` is from 0 to 1."""

    fraction: float
    message: str = ""


class CallLocation(msgspec.Struct, frozen=True, array_like=True, gc=False):
    invocation: str
    worker: str
    node: str
    attempt: int
    started_at: float
    progress: Progress | None = None
    waits_on: str = ""  # the GPU on which the call waits for its turn; it has not started then


class KillOrder(msgspec.Struct, frozen=True):
    """From a runner to its node's agent: kill this worker's process now."""

    worker: str
    reason: str


class LogLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """Output of a worker. `stream` is ``stdout``, ``stderr``, ``log``, or ``error`` for the failure of a call or
    start. A line of a call has its `invocation`, `attempt` and the id of its `trace`."""

    at: float
    function: str
    revision: int
    worker: str
    stream: str
    text: str
    invocation: str = ""
    attempt: int = 0
    node: str = ""
    trace: str = ""


class VariantRequest(msgspec.Struct, frozen=True):
    """A runner's request for the variant of `function` that its selector chooses, for a call by the function `caller`.
    Both are full names."""

    function: str
    selector: str
    caller: str


class VariantReply(msgspec.Struct, frozen=True):
    """The full name of a variant and its serving revision, or why there is none. The variant stays at least for
    `valid_s` without a call."""

    name: str = ""
    revision: int = 0
    valid_s: float = 0.0
    error: ErrorInfo | None = None
