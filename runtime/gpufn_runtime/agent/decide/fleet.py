"""State of this node's workers: the running processes, and the existing Assignments. `reconcile` decides on actions.

LAUNCHING → RUNNING → ENDED;  LAUNCHING → ENDED
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from gpufn_core.domain.devices.device import Share
from gpufn_core.domain.revision import RevisionKey
from gpufn_core.domain.worker import Assignment, ParkedMemory
from gpufn_runtime.agent.decide.parking_check import Claim
from gpufn_runtime.agent.workers.processes import Process

_MAX_ENDED = 4096  # ids of ended workers, kept so that a late message does not start one of them again


class Phase(enum.StrEnum):
    LAUNCHING = "launching"
    RUNNING = "running"
    ENDED = "ended"  # the process has ended; folder and Assignment are being removed


@dataclass
class WorkerRecord:
    """One worker on this node. Times are monotonic seconds, except `started_at`."""

    worker: str
    function: str
    revision: int
    assignment: Assignment | None  # None: deleted from the bus
    phase: Phase = Phase.LAUNCHING
    process: Process | None = None
    started_at: float = 0.0  # unix seconds
    was_ready: bool = False  # as reported by the runner
    drain_by: float | None = None  # set when the assignment says drain
    end_requested_at: float | None = None
    killed: bool = False
    killed_for: str = ""  # why the agent killed it
    stopping: bool = False  # because the agent stops
    device_fault: str = ""  # why its GPU is no longer usable
    claim: Claim | None = None  # memory that the parked worker reports
    parked: ParkedMemory | None = None  # memory that was verified
    reported_ended_at: float | None = None  # when its runner first reported it as over although its process runs

    def __str__(self) -> str:
        return f"{self.worker} of {self.function}@{self.revision}"

    @property
    def key(self) -> RevisionKey:
        return self.function, self.revision

    @property
    def gpus(self) -> tuple[str, ...]:
        return self.assignment.share.gpus if self.assignment is not None else ()

    @property
    def shares_by_mps(self) -> bool:
        return self.assignment is not None and self.assignment.share.mode is Share.MPS


@dataclass
class Fleet:
    records: dict[str, WorkerRecord] = field(default_factory=dict)
    _ended: dict[str, None] = field(default_factory=dict)

    @property
    def newest_epoch(self) -> int:
        """The controller's fencing token, as known on this node. It derives from the current Assignments, so that a new
        bus, which counts from one again, is not refused forever."""
        return max((record.assignment.epoch for record in self.records.values() if record.assignment), default=0)

    def revisions(self) -> set[RevisionKey]:
        """Return the revisions that have workers here."""
        return {record.key for record in self.records.values()}

    def workers(self) -> list[tuple[str, RevisionKey]]:
        """Return the workers with their revisions."""
        return [(worker, record.key) for worker, record in self.records.items()]

    def add(self, assignment: Assignment) -> WorkerRecord:
        record = WorkerRecord(assignment.worker, assignment.function, assignment.revision, assignment)
        self.records[record.worker] = record
        return record

    def forget(self, worker: str) -> None:
        self.records.pop(worker, None)
        self._ended[worker] = None
        while len(self._ended) > _MAX_ENDED:
            del self._ended[next(iter(self._ended))]

    def has_ended(self, worker: str) -> bool:
        return worker in self._ended
