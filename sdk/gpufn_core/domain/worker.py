"""The states of a worker, and the record that assigns it to a node.

STARTING → READY → DRAINING → STOPPED;  READY → PARKING → PARKED → RESUMING → READY;  any live state → FAILED
"""

from __future__ import annotations

import enum
import signal as signals
from typing import Final

import msgspec

from gpufn_core.domain.devices.device import DeviceShare
from gpufn_core.errors import ErrorInfo
from gpufn_core.spec.units import format_bytes


class WorkerState(enum.StrEnum):
    STARTING = "starting"
    READY = "ready"
    PARKING = "parking"
    PARKED = "parked"  # its GPU memory was moved to host memory
    RESUMING = "resuming"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"

    @property
    def live(self) -> bool:
        return self not in (WorkerState.STOPPED, WorkerState.FAILED)


_NEXT: dict[WorkerState, frozenset[WorkerState]] = {
    # A worker that reconnects to a new runner may be parked.
    WorkerState.STARTING: frozenset({WorkerState.READY, WorkerState.PARKED, WorkerState.STOPPED, WorkerState.FAILED}),
    WorkerState.READY: frozenset({WorkerState.PARKING, WorkerState.DRAINING, WorkerState.FAILED}),
    WorkerState.PARKING: frozenset({WorkerState.READY, WorkerState.PARKED, WorkerState.DRAINING, WorkerState.FAILED}),
    WorkerState.PARKED: frozenset({WorkerState.RESUMING, WorkerState.DRAINING, WorkerState.FAILED}),
    WorkerState.RESUMING: frozenset({WorkerState.READY, WorkerState.FAILED}),
    WorkerState.DRAINING: frozenset({WorkerState.STOPPED, WorkerState.FAILED}),
    WorkerState.STOPPED: frozenset(),
    WorkerState.FAILED: frozenset(),
}


def can_become(old: WorkerState, new: WorkerState) -> bool:
    return new in _NEXT[old]


class Desired(enum.StrEnum):
    RUN = "run"
    PARK = "park"  # release the GPU and move its memory to host memory
    DRAIN = "drain"  # accept no new calls, finish the running ones, stop


class Cause(enum.StrEnum):
    """Why a worker is parked, resumed or ended. The hooks of its class receive it."""

    IDLE = "idle"  # fewer workers are needed
    DEPLOY = "deploy"  # calls go to another revision
    DELETE = "delete"  # its function was deleted
    ROOM = "room"  # another worker needs its place
    MAX_CALLS = "max_calls"  # it has run as many calls as it may
    STOP = "stop"  # its node or the platform stops it
    ERROR = "error"  # its GPU failed, its gang broke, or it lost its runner
    CALLS = "calls"  # calls wait for it
    CAPACITY = "capacity"  # it is needed before a call comes: `min_workers`, `buffer_workers`, `prewarm`


class ParkedMemory(msgspec.Struct, frozen=True):
    """The memory of a parked worker: on the host, and the remaining memory on each of its GPUs."""

    host_bytes: int
    device_bytes: int = 0


class Rank(msgspec.Struct, frozen=True):
    """One process of a gang."""

    worker: str
    node: str


class Gang(msgspec.Struct, frozen=True):
    """A worker that consists of one process on each of several nodes. Its assignments share this record.

    `ranks` lists the processes by rank. Rank 0 is the worker that takes calls. It listens on `port` for the other
    ranks, which know `secret`; `address` is its node. The user's code may listen on the next port (MASTER_PORT).
    """

    ranks: tuple[Rank, ...]
    address: str
    port: int
    secret: str

    @property
    def rank_0(self) -> str:
        """The worker that is rank 0."""
        return self.ranks[0].worker

    @property
    def master_port(self) -> int:
        return self.port + 1

    def rank_of(self, worker: str) -> int:
        return next(rank for rank, each in enumerate(self.ranks) if each.worker == worker)

    def describe(self, rank: int) -> str:
        """Return the words for a rank in messages."""
        return f"rank {rank} on {self.ranks[rank].node}"


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """The controller's record that a worker has to run on a node: desired state, lease, epoch.

    While the record exists, its share is leased; the agent deletes it after the worker's process has ended. Once the
    agent has measured the remaining memory of a parked worker, only that is leased, until `desired` is `run` again. A
    parked worker may use `park_bytes` of host memory. `epoch` is the controller's fencing token: agents refuse an older
    one. Each process of a gang has its own assignment.
    """

    worker: str
    node: str
    function: str
    revision: int
    share: DeviceShare
    epoch: int
    created_at: float  # unix seconds
    desired: Desired = Desired.RUN
    reason: str = ""
    cause: Cause | None = None  # of the last change of `desired`
    park_bytes: int = 0
    gang: Gang | None = None

    @property
    def rank(self) -> int:
        """The rank in its gang. Ranks above 0 take their calls from rank 0, not from a runner."""
        return 0 if self.gang is None else self.gang.rank_of(self.worker)

    @property
    def gpus_charged(self) -> float:
        """The GPU seconds that each second of the worker costs. The ranks of a gang have equal shares."""
        return self.share.gpus_charged * (1 if self.gang is None else len(self.gang.ranks))


# The agent reports how a worker ended, or that this is unknown, within this time. Runners wait a little longer.
EXIT_REPORT_WITHIN_S: Final = 8.0


class Exit(msgspec.Struct, frozen=True):
    """How a worker's process ended, as far as its agent could determine. If `code` and `signal` are both set, only one
    of them is true: the exit status of a container is a number, and 128 + a signal is also a valid exit code."""

    code: int | None = None
    signal: int | None = None
    out_of_memory: bool = False
    tail: str = ""  # the last lines of its standard error
    memory_limit_bytes: int | None = None  # the limit that it exceeded, if it was killed for that
    device_fault: str = ""  # why its GPU became unusable, if it was stopped for that
    unknown_reason: str = ""  # why the exit status is unknown
    stopping: bool = False  # its agent stopped it because the node stops
    killed_for: str = ""  # why its agent killed it: a worker that closes its socket has not crashed

    @property
    def has_crashed(self) -> bool:
        """True if the process ended by itself, with an error.

        >>> Exit(code=1).has_crashed, Exit(code=0).has_crashed, Exit(signal=signals.SIGTERM).has_crashed
        (True, False, False)
        """
        if self.stopping or self.killed_for:
            return False
        return bool(self.out_of_memory or self.device_fault or self.code or self.signal not in (None, signals.SIGTERM))

    def describe(self) -> str:
        """Return one line, such as ``was killed by SIGSEGV`` or ``exited with code 3``."""
        reason = f" ({self.killed_for})" if self.killed_for and self.signal == signals.SIGKILL else ""
        if self.device_fault:
            return f"was ended because of its GPU: {self.device_fault}"
        if self.out_of_memory:
            limit = self.memory_limit_bytes
            than = "memory than allowed" if limit is None else f"than its {format_bytes(limit)} of memory"
            return f"was killed because it used more {than} (memory=... sets it)"
        if self.signal is not None:
            alternative = f", or exited with code {self.code}" if self.code is not None and not reason else ""
            try:
                return f"was killed by {signals.Signals(self.signal).name}{reason}{alternative}"
            except ValueError:
                return f"was killed by signal {self.signal}{alternative}"
        if self.code is not None:
            return f"exited with code {self.code}"
        return f"ended ({self.unknown_reason})" if self.unknown_reason else "ended"


class ColdStart(msgspec.Struct, frozen=True):
    """The phases of a cold start, in seconds: decide and place; fetch missing files (bundle, engines, weights); launch
    the process; load the code, with its imports; warm up. The start of a parked worker has only `resume_s`."""

    place_s: float = 0.0
    fetch_s: float = 0.0
    launch_s: float = 0.0
    load_s: float = 0.0
    warm_s: float = 0.0
    standby: bool = False
    resume_s: float | None = None

    @property
    def phases(self) -> dict[str, float]:
        """Seconds by the name of the phase."""
        if self.resume_s is not None:
            return {"resume": self.resume_s}
        return {
            "place": self.place_s,
            "fetch": self.fetch_s,
            "launch": self.launch_s,
            "load": self.load_s,
            "warm": self.warm_s,
        }

    @property
    def total_s(self) -> float:
        return sum(self.phases.values())


NODE_PHASE: Final = "node"  # the phase of a start failure that is caused by the node, not by the function


class StartFailure(msgspec.Struct, frozen=True):
    phase: str
    error: ErrorInfo
