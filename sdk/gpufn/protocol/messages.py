"""Every message on the bus, one frozen struct each.

Messages with user bytes (Invocation, the replies) are packed by `codec.pack`, header and body; the rest are plain
msgpack (`encode`, and a decoder of their own here). Times that travel are unix seconds; durations are seconds.
"""

from __future__ import annotations

import enum
from typing import ClassVar

import msgspec

from gpufn.device import Device, DeviceLink, DeviceShare, NodeFacts
from gpufn.device_metrics import DeviceMetrics
from gpufn.errors import ErrorInfo
from gpufn.invocation import InvocationState, OutcomeKind
from gpufn.priority import Priority, QueueKind
from gpufn.protocol import subjects
from gpufn.protocol.codec import Unpacker
from gpufn.schedule import Schedule
from gpufn.workers import ColdStart, Exit, ParkedMemory, StartFailure, WorkerState


class _Wire(msgspec.Struct, frozen=True, array_like=True, gc=False):
    pass


class AttemptRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """How one Attempt of a submitted Invocation ended, and where. `code` and `message` are its error's, shortened."""

    number: int
    outcome: OutcomeKind
    ended_at: float
    started_at: float | None = None
    worker: str = ""
    code: str = ""
    message: str = ""
    gpu_s: float = 0.0  # GPU seconds that it is charged


# --- the data path ---------------------------------------------------------------------------------------------------


class Webhook(_Wire, frozen=True, array_like=True, gc=False):
    """Where the end of a submitted call is told. `owner`'s secret signs it: an API key's id, or the platform."""

    PLATFORM: ClassVar = subjects.PLATFORM

    url: str
    owner: str = PLATFORM


class InvocationMessage(_Wire, frozen=True, array_like=True, gc=False):
    """One Invocation in a queue. `reply` is empty for one that nobody waits for; `deadline` 0 means none.

    `digest` tells a repeated submission from another one under the same id, and `attempts` are those before this one;
    both are empty for a call that somebody waits for.

    A submitted one without an id of its own is stored with a stem (`gpufn.ids`), which its place in the queue
    completes: `gpufn.bus.queued_calls` reads it. `keep_s` is for how long its record is kept after its end.

    `parcels` is the caller's folder in `Home.parcels`, if it can take the result as a parcel. `parcel` is the body's
    name in it, when the body is not beside this header.
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
    keep_s: float = 86400.0
    priority: Priority = Priority.NORMAL
    owner: str = subjects.PLATFORM  # the id of the API key that made it

    @property
    def queue(self) -> QueueKind:
        return QueueKind(self.priority, is_sync=bool(self.reply))

    def has_expired(self, queue_timeout_s: float | None, now: float) -> bool:
        """Whether nobody wants it any more, before it has started."""
        if self.deadline and now >= self.deadline:
            return True
        return queue_timeout_s is not None and self.attempt == 1 and now - self.submitted_at > queue_timeout_s


class ResultReply(_Wire, tag=1, frozen=True, array_like=True, gc=False):
    """The end of an Invocation, to who waits for it. `queue_s` runs from submission to the attempt's start. `parcel` is
    the result's name in the caller's folder, when it is not beside this header.
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


class ItemReply(_Wire, tag=2, frozen=True, array_like=True, gc=False):
    """Item `number` (from 0) of a stream. `credit_to` is where the reader asks for more (a StreamCredit)."""

    invocation: str
    number: int
    content_type: str
    credit_to: str


class StreamCredit(_Wire, frozen=True, array_like=True, gc=False):
    invocation: str
    items: int


Reply = ResultReply | ItemReply

unpack_invocation: Unpacker[InvocationMessage] = Unpacker(InvocationMessage)
unpack_reply: Unpacker[Reply] = Unpacker(Reply)


class CallRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is kept of a submitted Invocation; packed with its result as body. The first end wins.

    `attempts` are the last ones that ended. A queued one is not taken before `not_before`; an ended one is kept for
    `keep_s`. `blob` is the Digest of a result that is too large to be the body, `size` the bytes of either.
    """

    id: str
    function: str
    revision: int
    method: str = ""
    state: InvocationState
    submitted_at: float
    queue_seq: int = 0  # place in ASYNC, while queued
    started_at: float | None = None
    ended_at: float | None = None
    attempt: int = 1
    error: ErrorInfo | None = None
    content_type: str = ""
    queue_s: float | None = None
    run_s: float | None = None
    gpu_s: float = 0.0  # that its attempts are charged
    cold_start: ColdStart | None = None
    worker: str = ""
    digest: str = ""
    attempts: tuple[AttemptRecord, ...] = ()
    not_before: float = 0.0
    keep_s: float = 86400.0
    blob: str = ""
    size: int = 0
    webhook: Webhook | None = None
    priority: Priority = Priority.NORMAL


unpack_record: Unpacker[CallRecord] = Unpacker(CallRecord)


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """A submitted Invocation that ended without a result, and why; packed with its payload as body. `size` is the
    payload's, in bytes.
    """

    id: str
    function: str
    revision: int
    method: str
    content_type: str
    accept: str
    state: InvocationState
    submitted_at: float
    died_at: float
    error: ErrorInfo | None = None
    attempts: tuple[AttemptRecord, ...] = ()
    size: int = 0
    priority: Priority = Priority.NORMAL


unpack_letter: Unpacker[DeadLetter] = Unpacker(DeadLetter)


class MapEntry(msgspec.Struct, frozen=True, kw_only=True):
    """What was accepted of a Map until then: its items below `accepted`. Each Chunk's entry is stored right behind its
    items, those from `first` on; `digest` is of its body, so that it is known when it comes again.

    Nothing more is accepted of a map that is closed or cancelled. An entry that says that it was cancelled, or has
    ended, is no Chunk's: the rest of it is the one before.
    """

    id: str
    function: str
    revision: int
    method: str
    submitted_at: float  # its first item
    first: int
    accepted: int
    chunk: int  # counts them, from 1
    digest: str = ""
    is_closed: bool = False
    is_cancelled: bool = False
    is_ended: bool = False  # all its items have


class ScheduleRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A Schedule and how far it is: what is due until `done_until` has been submitted, the last as `invocation`.

    A function's own is `declared`, and its id is the function's name.
    """

    id: str
    function: str
    schedule: Schedule
    declared: bool = False
    paused: bool = False
    done_until: float
    created_at: float
    invocation: str = ""


class Cancel(_Wire, frozen=True, array_like=True, gc=False):
    """To all runners: end this invocation if it is yours; of a map's id, all of its items."""

    invocation: str


class WhereIs(_Wire, frozen=True, array_like=True, gc=False):
    """To all runners: who holds this invocation? Only that one answers. Empty: each tells all submitted ones it has."""

    invocation: str


class Progress(msgspec.Struct, frozen=True):
    """How far a call says that it is: `fraction` from 0 to 1."""

    fraction: float
    message: str = ""


class HeldBy(_Wire, frozen=True, array_like=True, gc=False):
    invocation: str
    worker: str
    node: str
    attempt: int
    started_at: float
    progress: Progress | None = None
    waits_on: str = ""  # the GPU that it waits for its turn on, and then it has not started


class Checkpoint(msgspec.Struct, frozen=True):
    """What a call left for its next attempt; packed with the value as body. `attempt` made it, at `at`."""

    content_type: str
    attempt: int
    at: float


unpack_checkpoint: Unpacker[Checkpoint] = Unpacker(Checkpoint)


# --- reports: broadcast each second and on change, kept in memory by who cares ----------------------------------------


class WorkerReport(msgspec.Struct, frozen=True):
    """A Worker as its Runner sees it."""

    worker: str
    function: str
    revision: int
    state: WorkerState
    slots: int
    in_use: int = 0
    poisoned: int = 0
    idle_since: float | None = None  # None while a slot is in use or before READY
    cold_start: ColdStart | None = None
    modules: tuple[str, ...] = ()
    waits_on: str = ""  # the GPU that its calls wait for their turn on
    parked: ParkedMemory | None = None  # as it says itself


class RevisionTraffic(msgspec.Struct, frozen=True):
    """Counters of a Revision on one Runner, since the runner started.

    `direct` is how many calls that no queue counts, for they came by the lane, run or stand in line there.
    """

    function: str
    revision: int
    started: int = 0
    ended: int = 0
    failed: int = 0
    run_seconds: float = 0.0
    gpu_seconds: float = 0.0  # as `Usage.gpu_s`
    direct: int = 0


class RunnerReport(msgspec.Struct, frozen=True):
    node: str
    runner: str
    sent_at: float
    workers: tuple[WorkerReport, ...] = ()
    traffic: tuple[RevisionTraffic, ...] = ()
    dropped_outcomes: int = 0  # of submitted calls that had ended already


class ProcessReport(msgspec.Struct, frozen=True):
    """A Worker's process as its Agent sees it. `parked` is proven: what it holds of its GPUs was looked at.

    `gpus_busy` is how many of its GPUs it kept busy in the last second, 0.5 for one half of the time, as measured; None
    where that is not told, as of a worker that shares a GPU by MPS. `gpu_bytes` is what it holds of each, by uuid, as
    far as that is told.
    """

    worker: str
    function: str
    revision: int
    pid: int
    started_at: float
    resident_bytes: int = 0
    share: DeviceShare | None = None
    parked: ParkedMemory | None = None
    gpus_busy: float | None = None
    gpu_bytes: dict[str, int] = {}


class NodeReport(msgspec.Struct, frozen=True):
    node: str
    sent_at: float
    devices: tuple[Device, ...]
    links: tuple[DeviceLink, ...] = ()
    facts: NodeFacts = NodeFacts()
    processes: tuple[ProcessReport, ...] = ()
    templates: tuple[str, ...] = ()  # the standbys' module sets, as "a,b,c"
    park_bytes: int = 0  # of the host's memory, for all parked workers together
    hostname: str = ""
    python: str = ""
    platform: str = ""
    runner_pid: int | None = None
    container_trouble: str = ""  # why no container can be started there
    contains_all: bool = False  # functions without an image live in containers there, too


class DeviceReport(msgspec.Struct, frozen=True):
    """How a node's GPUs are. Apart from the NodeReport, which placement reads: here nothing hangs on one of them."""

    node: str
    sent_at: float
    devices: tuple[DeviceMetrics, ...]


class WorkerEventKind(enum.StrEnum):
    STARTED = "started"
    READY = "ready"
    START_FAILED = "start_failed"
    NOT_PARKED = "not_parked"
    EXITED = "exited"


class WorkerEvent(msgspec.Struct, frozen=True):
    """Something happened to a Worker; sent once."""

    kind: WorkerEventKind
    worker: str
    function: str
    revision: int
    node: str
    at: float
    cold_start: ColdStart | None = None
    failure: StartFailure | None = None
    exit: Exit | None = None
    needs_bytes: int = 0  # of the host's memory, when it was not parked for lack of it


class WorkerCounts(msgspec.Struct, frozen=True):
    ready: int = 0
    starting: int = 0
    draining: int = 0
    parking: int = 0
    parked: int = 0
    resuming: int = 0


class WaitReason(enum.StrEnum):
    NO_CAPACITY = "no_capacity"
    STARTING = "starting"
    CRASH_LOOPING = "crash_looping"
    LIMIT = "limit"
    TURN = "turn"  # other functions have the GPU that it shares
    RETRY = "retry"  # the pause before its next attempt
    OTHERS = "others"  # calls before it have the slots
    UNKNOWN = "unknown"


class Waiting(msgspec.Struct, frozen=True):
    """Why calls of a function wait."""

    reason: WaitReason
    detail: str
    eta_s: float | None = None


class FunctionStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What the controller last knew and decided of a Function. `depth` None means unknown."""

    function: str
    serving: int
    workers: WorkerCounts
    queued: int | None = None
    running: int | None = None
    wanted: int = 0
    reason: str = ""
    terms: dict[str, float] = {}
    waiting: Waiting | None = None
    service_s: float | None = None  # what one call takes
    cold_start_s: float | None = None
    start_error: ErrorInfo | None = None  # set while the circuit is open


class ControllerReport(msgspec.Struct, frozen=True):
    controller: str
    epoch: int
    sent_at: float
    functions: tuple[FunctionStatus, ...] = ()
    partial: bool = False  # only the functions that changed


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


class KeyUse(_Wire, frozen=True, array_like=True, gc=False):
    """What a gateway let pass of an API key's calls: since it told last, and of those that are waited for, how many
    run."""

    key: str
    admitted: int
    running: int


class GatewayReport(msgspec.Struct, frozen=True):
    """To the other gateways, each second in which there is something to tell."""

    gateway: str
    uses: tuple[KeyUse, ...] = ()


class KeyLimits(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What an API key may use; None is no limit. `rate` is in calls per second, of which `burst` may come at once
    (else as many as in a second); `concurrency` is of calls that are waited for, `queued` of submitted ones that have
    not ended. `run_s` and `gpu_s` are seconds per day of UTC, as `gpufn.usage` counts them.
    """

    rate: float | None = None
    burst: int | None = None
    concurrency: int | None = None
    queued: int | None = None
    run_s: float | None = None
    gpu_s: float | None = None


class ApiKey(msgspec.Struct, frozen=True):
    """A key as stored: the sha256 of its secret, never the secret. `scopes` are ``invoke:<function>``, ``invoke:*``,
    ``hi``, ``deploy``, ``read`` or ``admin``."""

    id: str
    sha256: str
    scopes: tuple[str, ...]
    created_at: float
    label: str = ""
    limits: KeyLimits = KeyLimits()


encode = msgspec.msgpack.Encoder().encode
