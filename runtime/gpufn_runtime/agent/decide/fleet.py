"""What runs on this node, and what the bus wants to run here. Facts only; `reconcile` draws the conclusions.

LAUNCHING → RUNNING → GONE;  LAUNCHING → GONE
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from gpufn_core.domain.device import Share
from gpufn_core.domain.revision import RevisionKey
from gpufn_core.domain.worker import Assignment, ParkedMemory
from gpufn_runtime.agent.decide.parking_proof import Claim
from gpufn_runtime.agent.workers.processes import Process

_REMEMBERED = 4096  # ids of workers that have been here; a late message must not start one again


class Phase(enum.StrEnum):
    LAUNCHING = "launching"
    RUNNING = "running"
    GONE = "gone"  # its process has ended; its folder and its Assignment are being removed


@dataclass
class WorkerRecord:
    """One worker on this node. Times are monotonic seconds, except `started_at`."""

    worker: str
    function: str
    revision: int
    assignment: Assignment | None  # None: it is gone from the bus
    phase: Phase = Phase.LAUNCHING
    process: Process | None = None
    started_at: float = 0.0  # unix seconds
    was_ready: bool = False  # as its runner reports
    drain_by: float | None = None  # set once the assignment said drain
    asked_to_end_at: float | None = None
    killed: bool = False
    killed_for: str = ""  # why its agent did that
    stopping: bool = False  # its agent stops
    device_fault: str = ""  # why its GPU is of no use any more
    claim: Claim | None = None  # what it says that it holds, parked
    parked: ParkedMemory | None = None  # and what it was proven to hold
    given_up_at: float | None = None  # since when its runner reports it as over, though its process runs

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
        """The controller's fencing token, as far as this node knows. Derived from what is assigned now, so that a bus
        that begins anew, and counts from one again, is not refused for ever."""
        return max((record.assignment.epoch for record in self.records.values() if record.assignment), default=0)

    def revisions(self) -> set[RevisionKey]:
        """Of which there are workers here."""
        return {record.key for record in self.records.values()}

    def add(self, assignment: Assignment) -> WorkerRecord:
        record = WorkerRecord(assignment.worker, assignment.function, assignment.revision, assignment)
        self.records[record.worker] = record
        return record

    def forget(self, worker: str) -> None:
        self.records.pop(worker, None)
        self._ended[worker] = None
        while len(self._ended) > _REMEMBERED:
            del self._ended[next(iter(self._ended))]

    def has_ended(self, worker: str) -> bool:
        return worker in self._ended
