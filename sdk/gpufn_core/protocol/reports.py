"""What processes tell all others: reports, each second and on change, kept in memory by who cares; and once, what
happened to a worker.

Times are unix seconds, unless they say otherwise; durations are seconds.
"""

from __future__ import annotations

import enum

import msgspec

from gpufn_core.domain.device import Device, DeviceLink, DeviceShare, NodeFacts
from gpufn_core.domain.device_metrics import DeviceMetrics
from gpufn_core.domain.worker import ColdStart, Exit, ParkedMemory, StartFailure, WorkerState
from gpufn_core.errors import ErrorInfo


class WorkerReport(msgspec.Struct, frozen=True):
    """A Worker as its Runner sees it."""

    worker: str
    function: str
    revision: int
    state: WorkerState
    slots: int
    in_use: int = 0
    left_over: int = 0  # of those in use: by calls of an earlier runner, which the queue has given out again by now
    poisoned: int = 0
    idle_since: float | None = None  # None while a slot is in use or before READY
    cold_start: ColdStart | None = None
    modules: tuple[str, ...] = ()
    waits_on: str = ""  # the GPU that its calls wait for their turn on
    waits_for_own: int = 0  # of those in use: by calls that wait for others of the same function
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
    container_trouble: str = ""  # why no container can be started there
    contains_all: bool = False  # functions without an image live in containers there, too
    clock_skew_s: float | None = None  # its wall clock minus the bus server's; None: unknown


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
    STORE = "store"  # the bus stores nothing: its disk may be full
    TURN = "turn"  # other functions have the GPU that it shares
    RETRY = "retry"  # the pause before its next attempt
    OTHERS = "others"  # calls before it have the slots
    UNKNOWN = "unknown"


class Waiting(msgspec.Struct, frozen=True):
    """Why calls of a function wait."""

    reason: WaitReason
    detail: str
    eta_s: float | None = None


class NextRevision(msgspec.Struct, frozen=True):
    """The revision that takes over from the one that serves. While `start_error` is set its starts fail, and calls stay
    where they are."""

    revision: int
    start_error: ErrorInfo | None = None


class FunctionStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What the controller last knew and decided of a Function. None means unknown. `waiting` is of the revision that
    serves, `waiting_of` of the others that have calls."""

    function: str
    serving: int
    workers: WorkerCounts
    queued: int | None = None
    running: int | None = None
    wanted: int = 0
    reason: str = ""
    terms: dict[str, float] = {}
    waiting: Waiting | None = None
    waiting_of: dict[int, Waiting] = {}
    service_s: float | None = None  # what one call takes
    cold_start_s: float | None = None
    start_error: ErrorInfo | None = None  # set while the circuit is open
    next: NextRevision | None = None  # while it is another than the one that serves


class ControllerReport(msgspec.Struct, frozen=True):
    """What is too large for one message is split by function, see `gpufn_core.protocol.report_parts`: `part` of `parts` of
    the full report with the number `sequence`."""

    controller: str
    epoch: int
    sent_at: float
    functions: tuple[FunctionStatus, ...] = ()
    partial: bool = False  # only some functions: those that changed, or a part of all
    sequence: int = 0
    part: int = 1
    parts: int = 1


class KeyUse(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a gateway let pass of an API key's calls: since it told last, and of those that are waited for, how many
    run."""

    key: str
    admitted: int
    running: int


class GatewayReport(msgspec.Struct, frozen=True):
    """To the other gateways, each second in which there is something to tell."""

    gateway: str
    uses: tuple[KeyUse, ...] = ()
