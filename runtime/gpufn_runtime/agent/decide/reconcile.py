"""Reconciliation: which actions bring the running workers in line with the Assignments. Pure.

| assignment | no record | LAUNCHING, RUNNING | ENDED |
|---|---|---|---|
| run | Launch, once per worker id | nothing | nothing |
| park | DeleteAssignment | nothing: the runner parks it, and `parking_proof` checks it | nothing |
| drain | DeleteAssignment | Drain: the runner drains it; the agent sets a deadline | nothing |
| from an older epoch | Refuse | Refuse | nothing |
| absent | nothing | Stop | nothing |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gpufn_core.domain.worker import Assignment, Desired
from gpufn_runtime.agent.decide.fleet import Phase, WorkerRecord

KILL_AFTER_S = 5.0  # from SIGTERM, or from the runner's report that the worker is over, to SIGKILL
DRAIN_GRACE_S = 30.0  # added to the function's timeout


@dataclass(frozen=True)
class Launch:
    assignment: Assignment


@dataclass(frozen=True)
class Drain:
    """Set a drain deadline. The runner does the draining."""

    assignment: Assignment


@dataclass(frozen=True)
class Stop:
    """Send SIGTERM, and SIGKILL later."""

    worker: str
    reason: str


@dataclass(frozen=True)
class Kill:
    worker: str
    reason: str


@dataclass(frozen=True)
class DeleteAssignment:
    """Delete the Assignment: no process runs for it."""

    assignment: Assignment
    reason: str


@dataclass(frozen=True)
class Refuse:
    """Refuse an Assignment: a controller that has been replaced wrote it."""

    assignment: Assignment
    newest_epoch: int


Action = Launch | Drain | Stop | Kill | DeleteAssignment | Refuse


def on_change(  # noqa: PLR0911 - the table above, row by row
    record: WorkerRecord | None, assignment: Assignment | None, *, newest_epoch: int, has_ended: bool
) -> Action | None:
    """Return the action for a change of one Assignment. `record` is the worker's state before the change."""
    if assignment is None:
        if record is None or record.phase is Phase.ENDED:
            return None
        return Stop(record.worker, "its assignment was deleted")
    if record is None:
        if has_ended:
            return DeleteAssignment(assignment, "it has already ended")
        if assignment.epoch < newest_epoch:
            return Refuse(assignment, newest_epoch)
        if assignment.desired is not Desired.RUN:
            return DeleteAssignment(assignment, f"desired state is {assignment.desired.value}, but it does not run")
        return Launch(assignment)
    if record.phase is Phase.ENDED or record.assignment == assignment:
        return None
    if assignment.epoch < newest_epoch:
        return Refuse(assignment, newest_epoch)
    if assignment.desired is Desired.DRAIN:
        return Drain(assignment)
    return None


def when_overdue(record: WorkerRecord, now: float, kill_after_s: float = KILL_AFTER_S) -> Stop | Kill | None:
    """Return the action for a worker that still runs at `now` although a deadline has passed."""
    if record.phase is not Phase.RUNNING or record.killed:
        return None
    if record.reported_ended_at is not None and now >= record.reported_ended_at + kill_after_s:
        return Kill(record.worker, "its runner has given it up")  # the runner sends a kill order once; it may be lost
    if record.end_requested_at is not None:
        if now >= record.end_requested_at + kill_after_s:
            return Kill(record.worker, f"it did not end within {kill_after_s:g} s of SIGTERM")
        return None
    if record.drain_by is not None and now >= record.drain_by:
        return Stop(record.worker, "it did not end by itself after draining")
    return None


@dataclass(frozen=True)
class ExistingFolder:
    """A worker folder that an earlier agent or the runner created. `is_running`: the recorded process still runs.
    `was_begun`: an agent has started work in it. If not, only the runner has, which does not wait for the agent."""

    worker: str
    is_running: bool
    was_begun: bool = True


@dataclass(frozen=True)
class Adopt:
    worker: str


@dataclass(frozen=True)
class CleanUp:
    """Report the end of a worker that died without an agent, remove its resources, and delete its Assignment."""

    worker: str


@dataclass(frozen=True)
class Sweep:
    """Remove a folder that has neither an Assignment nor a process."""

    worker: str


def at_start(folders: Iterable[ExistingFolder], assignments: Mapping[str, Assignment]) -> list[Adopt | CleanUp | Sweep]:
    """Return what to do with each folder. A running worker is adopted even without an Assignment, and is stopped then.
    An assigned worker whose folder was not begun needs no action here: it is launched like any other."""
    actions: list[Adopt | CleanUp | Sweep] = []
    for folder in folders:
        if folder.is_running:
            actions.append(Adopt(folder.worker))
        elif folder.worker not in assignments:
            actions.append(Sweep(folder.worker))
        elif folder.was_begun:
            actions.append(CleanUp(folder.worker))
    return actions
