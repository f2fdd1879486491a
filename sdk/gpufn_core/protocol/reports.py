"""Broadcasts: reports that processes send each second and on change, kept in memory by their readers; and worker
events, each sent once.

Times are unix seconds unless stated otherwise; durations are seconds.
"""

from __future__ import annotations

import enum
import re
from typing import Final

import msgspec

from gpufn_core.domain.devices.device import Device, DeviceLink, DeviceShare, NodeFacts
from gpufn_core.domain.devices.device_metrics import DeviceMetrics
from gpufn_core.domain.worker import ColdStart, Exit, ParkedMemory, StartFailure, WorkerState
from gpufn_core.errors import ErrorInfo


class WorkerReport(msgspec.Struct, frozen=True):
    """A worker as its runner sees it."""

    worker: str
    function: str
    revision: int
    state: WorkerState
    slots: int
    in_use: int = 0
    left_over: int = 0  # slots in use by calls of an earlier runner, which NATS has redelivered meanwhile
    poisoned: int = 0
    idle_since: float | None = None  # None while a slot is in use or before READY
    longest_call: str = ""  # id of the running call that began first
    longest_call_at: float | None = None  # when it began
    cold_start: ColdStart | None = None
    modules: tuple[str, ...] = ()
    waits_on: str = ""  # the GPU on which its calls wait for their turn
    waits_for_own: int = 0  # slots in use by calls that wait for other calls of the same function
    parked: ParkedMemory | None = None  # as reported by the worker itself


class RevisionTraffic(msgspec.Struct, frozen=True):
    """Counters of a revision on one runner, since the runner started.

    `direct` is the number of calls that came over the fast path and run or wait there. No queue counts them. `errors`
    are the failed calls that were not cancelled. `durations` counts the run times of split
    functions (`gpufn_core.domain.durations`). `batches` counts calls that were gathered, by the size of their batch,
    rounded up to a power of two.
    """

    function: str
    revision: int
    started: int = 0
    ended: int = 0
    failed: int = 0
    run_seconds: float = 0.0
    gpu_seconds: float = 0.0  # as `Usage.gpu_s`
    direct: int = 0
    errors: int = 0
    durations: dict[int, int] = {}
    batches: dict[int, int] = {}


class RunnerReport(msgspec.Struct, frozen=True):
    node: str
    runner: str
    sent_at: float
    workers: tuple[WorkerReport, ...] = ()
    traffic: tuple[RevisionTraffic, ...] = ()
    dropped_outcomes: int = 0  # outcomes of submitted calls that had already ended


class FunctionTotals(msgspec.Struct, frozen=True, array_like=True):
    """Counters of a function on one runner, of all its revisions. They never decrease while the runner lives.

    `failed` counts the attempts that did not succeed. A start is a cold start that became ready; a resume is none.
    """

    function: str
    attempts: int = 0
    failed: int = 0
    retries: int = 0
    run_seconds: float = 0.0
    gpu_seconds: float = 0.0
    starts: int = 0
    resumes: int = 0
    failed_starts: int = 0
    phase_seconds: dict[str, float] = {}


class TotalsReport(msgspec.Struct, frozen=True):
    """Counters of a runner, for metrics. Separate from the RunnerReport, which is sent at each change. Every gateway
    exposes them as they are, so the figure is the same at each and does not depend on when a gateway started."""

    node: str
    runner: str
    started_at: float
    sent_at: float
    functions: tuple[FunctionTotals, ...] = ()
    dropped_log_lines: int = 0


class ProcessReport(msgspec.Struct, frozen=True):
    """A worker's process as its agent sees it. `parked` is measured: the agent inspected the worker's remaining GPU
    memory.

    `gpus_busy` is the number of its GPUs that it kept busy in the last second, as measured; 0.5 means half of the time.
    None if unknown, as for a worker that shares a GPU by MPS. `gpu_bytes` is the memory that it holds on each GPU, by
    uuid, if known. `rank` is its rank in a gang.
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
    rank: int | None = None


class WeightsFetch(msgspec.Struct, frozen=True):
    """Weights that a node is fetching, by the digest of their manifest."""

    digest: str
    source: str
    done_bytes: int
    total_bytes: int


class WeightsReport(msgspec.Struct, frozen=True):
    """The weights on a node's disk. Counters start with the agent. A hit is a start that found its weights there.

    `complete` has the digests of the manifests whose files are all there. `bytes_per_s` is the rate of the last
    fetch of at least 64 MiB; None before the first.
    """

    hits: int = 0
    misses: int = 0
    fetched_bytes: int = 0
    evicted_bytes: int = 0
    stored_bytes: int = 0
    limit_bytes: int = 0
    fetches: tuple[WeightsFetch, ...] = ()
    complete: tuple[str, ...] = ()
    bytes_per_s: float | None = None


class NodeReport(msgspec.Struct, frozen=True):
    node: str
    sent_at: float
    devices: tuple[Device, ...]
    links: tuple[DeviceLink, ...] = ()
    facts: NodeFacts = NodeFacts()
    processes: tuple[ProcessReport, ...] = ()
    templates: tuple[str, ...] = ()  # the module sets of its template processes, as "a,b,c"
    park_bytes: int = 0  # host memory for all parked workers together
    hostname: str = ""
    python: str = ""
    platform: str = ""
    machine: str = ""  # its kind, such as x86_64
    pythons: tuple[str, ...] = ()  # versions of Python that environments can have, such as 3.12
    making_environments: tuple[str, ...] = ()  # digests of the images whose packages are being installed
    container_trouble: str = ""  # why the node cannot start containers
    gpu_container_trouble: str = ""  # why its containers cannot have GPUs
    isolation_trouble: dict[str, str] = {}  # why it does not offer a tier, or workers without a network (`none`)
    contains_all: bool = False  # functions without an image run in containers too
    weights: WeightsReport = WeightsReport()
    address: str = ""  # where other nodes reach this one
    clock_skew_s: float | None = None  # the node's wall clock minus the NATS server's; None: unknown


class DeviceReport(msgspec.Struct, frozen=True):
    """Metrics of a node's GPUs. Separate from the NodeReport, which placement reads: no decision depends on this
    one."""

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
    """An event in a worker's life; sent once."""

    kind: WorkerEventKind
    worker: str
    function: str
    revision: int
    node: str
    at: float
    cold_start: ColdStart | None = None
    failure: StartFailure | None = None
    exit: Exit | None = None
    needs_bytes: int = 0  # host memory that parking would have needed, if it failed for lack of memory
    refused_modules: str = ""  # why some modules of a STARTED worker were in no template, if they cannot be


class WorkerCounts(msgspec.Struct, frozen=True):
    ready: int = 0
    starting: int = 0
    draining: int = 0
    parking: int = 0
    parked: int = 0
    resuming: int = 0

    def __str__(self) -> str:
        """
        >>> str(WorkerCounts(ready=2, parked=1)), str(WorkerCounts())
        ('2 ready, 1 parked', '0')
        """
        parts = [f"{getattr(self, state)} {state}" for state in self.__struct_fields__ if getattr(self, state)]
        return ", ".join(parts) or "0"


class WaitReason(enum.StrEnum):
    NO_CAPACITY = "no_capacity"
    STARTING = "starting"
    WEIGHTS = "weights"  # a starting worker waits until its node has fetched its weights
    CRASH_LOOPING = "crash_looping"
    LIMIT = "limit"
    STORE = "store"  # NATS stores nothing; its disk may be full
    TURN = "turn"  # other functions are using the shared GPU
    RETRY = "retry"  # the delay before the next attempt
    OTHERS = "others"  # earlier calls occupy the slots
    UNKNOWN = "unknown"


class Waiting(msgspec.Struct, frozen=True):
    """The reason why calls of a function wait."""

    reason: WaitReason
    detail: str
    eta_s: float | None = None


class NextRevision(msgspec.Struct, frozen=True):
    """The revision that will replace the serving one. While `start_error` is set its workers fail to start, and calls
    stay with the serving revision."""

    revision: int
    start_error: ErrorInfo | None = None


class LastStart(msgspec.Struct, frozen=True):
    """The last cold start or resume of a function: the node, the unix seconds at which the worker was ready, and the
    seconds of each phase, in their order."""

    node: str
    at: float
    phases: dict[str, float]


class CallCounts(msgspec.Struct, frozen=True):
    """Ended attempts, and the percentiles of their run times; None without an attempt."""

    calls: int = 0
    errors: int = 0
    p50_s: float | None = None
    p99_s: float | None = None


class RevisionStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A revision that gets calls of a split function. `total` counts since the split was set, or since the present
    controller began to lead, and `recent` in the window of the split."""

    revision: int
    workers: WorkerCounts
    queued: int | None = None
    running: int | None = None
    total: CallCounts = CallCounts()
    recent: CallCounts = CallCounts()
    start_error: ErrorInfo | None = None  # while its workers fail to start


class FunctionStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The controller's latest knowledge and decision about a function. None means unknown. `waiting` is about the
    serving revision, `waiting_of` about other revisions with calls. `revisions` is empty without a split."""

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
    service_s: float | None = None  # duration of one call
    cold_start_s: float | None = None
    last_start: LastStart | None = None  # of the serving revision
    start_error: ErrorInfo | None = None  # set while the circuit breaker is open
    next: NextRevision | None = None  # set while another revision is about to serve
    revisions: tuple[RevisionStatus, ...] = ()
    split_at: float | None = None  # when the split was set that `revisions` is about

    def ready_workers(self, revision: int) -> int:
        """Return the READY workers of a revision that a split calls."""
        return next((each.workers.ready for each in self.revisions if each.revision == revision), 0)


HELD_BY: Final = "; held by "  # before the names of the functions that hold the room, in texts of a FunctionStatus
_HOLDERS: Final = re.compile(rf"{HELD_BY}[^;]*")


def without_holders(status: FunctionStatus) -> FunctionStatus:
    """Return a status for readers without access to other functions: its texts do not name the functions that hold the
    room."""

    def cut(waiting: Waiting) -> Waiting:
        return msgspec.structs.replace(waiting, detail=_HOLDERS.sub("", waiting.detail))

    return msgspec.structs.replace(
        status,
        reason=_HOLDERS.sub("", status.reason),
        waiting=None if status.waiting is None else cut(status.waiting),
        waiting_of={revision: cut(waiting) for revision, waiting in status.waiting_of.items()},
    )


class ControllerReport(msgspec.Struct, frozen=True):
    """Statuses of functions. A report that is too large for one message is split by function
    (`gpufn_core.protocol.report_parts`) into `parts` of the full report with the number `sequence`."""

    controller: str
    epoch: int
    sent_at: float
    functions: tuple[FunctionStatus, ...] = ()
    partial: bool = False  # only some functions: changed ones, or one part of all
    sequence: int = 0
    part: int = 1
    parts: int = 1


class KeyUse(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Calls of an API key that a gateway `admitted` since its last report, and how many calls with waiting callers it
    is `running`."""

    key: str
    admitted: int
    running: int


class GatewayReport(msgspec.Struct, frozen=True):
    """To the other gateways, each second in which there is something to report."""

    gateway: str
    uses: tuple[KeyUse, ...] = ()
