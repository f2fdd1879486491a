"""A Worker's states and the record that says it shall run.

STARTING → READY → DRAINING → STOPPED;  READY → PARKING → PARKED → RESUMING → READY;  any live state → FAILED
"""

from __future__ import annotations

import enum
import signal as signals
from typing import Final

import msgspec

from gpufn_core.domain.device import DeviceShare
from gpufn_core.errors import ErrorInfo


class WorkerState(enum.StrEnum):
    STARTING = "starting"
    READY = "ready"
    PARKING = "parking"
    PARKED = "parked"  # what it had on its GPU waits in the memory of the host
    RESUMING = "resuming"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"

    @property
    def live(self) -> bool:
        return self not in (WorkerState.STOPPED, WorkerState.FAILED)


_NEXT: dict[WorkerState, frozenset[WorkerState]] = {
    # A worker that comes back to a new runner may be parked.
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
    PARK = "park"  # give the GPU up, and wait in the memory of the host
    DRAIN = "drain"  # take nothing new, finish what runs, stop


class ParkedMemory(msgspec.Struct, frozen=True):
    """What a parked Worker holds: memory of the host, and what is left on each of its GPUs."""

    host_bytes: int
    device_bytes: int = 0


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """The controller's record that a Worker shall run on a Node: desired state, lease, epoch.

    While it exists its share is leased; the agent deletes it after the worker's process is gone. Of a worker that is
    parked only what it still holds is leased, from its agent's proof on until `desired` is `run` again. It may take
    `park_bytes` of the host for that. `epoch` is the controller's fencing token: agents refuse an older one.
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
    park_bytes: int = 0


# So soon after a worker's end its agent has said how it was, or that it cannot tell; runners wait a little longer.
END_TOLD_WITHIN_S: Final = 8.0


class Exit(msgspec.Struct, frozen=True):
    """How a worker's process ended, as far as the agent could see. With `code` and `signal` it was one of both: a
    container's end is told as a number, which is the same for 128 + a signal as for a code of that size."""

    code: int | None = None
    signal: int | None = None
    out_of_memory: bool = False
    tail: str = ""  # the last lines that it wrote to its standard error
    memory_limit_bytes: int | None = None  # what it was allowed, when it was killed for using more
    device_fault: str = ""  # why its GPU was of no use any more, when it was ended for that
    untold: str = ""  # why nobody could see how
    stopping: bool = False  # its agent ended it because the node stops
    killed_for: str = ""  # why its agent ended it, if that did: a worker that closes its socket is no crash

    def describe(self) -> str:
        """One line, such as ``was killed by SIGSEGV`` or ``exited with code 3``."""
        why = f" ({self.killed_for})" if self.killed_for and self.signal == signals.SIGKILL else ""
        if self.device_fault:
            return f"was ended because of its GPU: {self.device_fault}"
        if self.out_of_memory:
            limit = self.memory_limit_bytes
            than = "memory than allowed" if limit is None else f"than its {_mebibytes(limit)} of memory"
            return f"was killed because it used more {than} (memory=... sets it)"
        if self.signal is not None:
            either = f", or exited with code {self.code}" if self.code is not None and not why else ""
            try:
                return f"was killed by {signals.Signals(self.signal).name}{why}{either}"
            except ValueError:
                return f"was killed by signal {self.signal}{either}"
        if self.code is not None:
            return f"exited with code {self.code}"
        return f"ended ({self.untold})" if self.untold else "ended"


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"


class ColdStart(msgspec.Struct, frozen=True):
    """Where the time went, in seconds: decide and place; launch the process; load the code; warm up. Of a worker that
    was parked it is `resume_s`."""

    place_s: float = 0.0
    launch_s: float = 0.0
    load_s: float = 0.0
    warm_s: float = 0.0
    standby: bool = False
    resume_s: float | None = None

    @property
    def phases(self) -> dict[str, float]:
        """Seconds, by the phase's name."""
        if self.resume_s is not None:
            return {"resume": self.resume_s}
        return {"place": self.place_s, "launch": self.launch_s, "load": self.load_s, "warm": self.warm_s}

    @property
    def total_s(self) -> float:
        return sum(self.phases.values())


OF_THE_NODE: Final = "node"  # the phase of a start that fails on its node, whatever is started there


class StartFailure(msgspec.Struct, frozen=True):
    phase: str
    error: ErrorInfo
