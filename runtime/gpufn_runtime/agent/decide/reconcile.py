"""What to do about the difference between what is wanted and what runs. Pure.

| assignment | no record | LAUNCHING, RUNNING | GONE |
|---|---|---|---|
| run | Launch, once per worker id | nothing | nothing |
| park | Forget | nothing: it is for the runner, and `proofs` looks at it | nothing |
| drain | Forget | Drain: the runner empties it, and a deadline starts | nothing |
| of an older epoch | Refuse | Refuse | nothing |
| absent | nothing | Stop | nothing |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gpufn_core.domain.worker import Assignment, Desired
from gpufn_runtime.agent.decide.fleet import Phase, WorkerRecord

KILL_AFTER_S = 5.0  # between SIGTERM, or being given up by the runner, and SIGKILL
DRAIN_GRACE_S = 30.0  # on top of the function's own timeout


@dataclass(frozen=True)
class Launch:
    assignment: Assignment


@dataclass(frozen=True)
class Drain:
    """The runner drains it; the agent only starts the clock."""

    assignment: Assignment


@dataclass(frozen=True)
class Stop:
    """SIGTERM, and SIGKILL later."""

    worker: str
    reason: str


@dataclass(frozen=True)
class Kill:
    worker: str
    reason: str


@dataclass(frozen=True)
class Forget:
    """Nothing runs for it: delete the Assignment."""

    assignment: Assignment
    reason: str


@dataclass(frozen=True)
class Refuse:
    """A controller that has been replaced wrote it."""

    assignment: Assignment
    newest_epoch: int


Action = Launch | Drain | Stop | Kill | Forget | Refuse


def on_change(  # noqa: PLR0911 - the table above, row by row
    record: WorkerRecord | None, assignment: Assignment | None, *, newest_epoch: int, has_ended: bool
) -> Action | None:
    """What a change of one Assignment asks for. `record` is how the worker was known before."""
    if assignment is None:
        if record is None or record.phase is Phase.GONE:
            return None
        return Stop(record.worker, "its assignment is gone")
    if record is None:
        if has_ended:
            return Forget(assignment, "it has ended before")
        if assignment.epoch < newest_epoch:
            return Refuse(assignment, newest_epoch)
        if assignment.desired is not Desired.RUN:
            return Forget(assignment, f"it was to {assignment.desired.value}, and is not here")
        return Launch(assignment)
    if record.phase is Phase.GONE or record.assignment == assignment:
        return None
    if assignment.epoch < newest_epoch:
        return Refuse(assignment, newest_epoch)
    if assignment.desired is Desired.DRAIN:
        return Drain(assignment)
    return None


def when_overdue(record: WorkerRecord, now: float, kill_after_s: float = KILL_AFTER_S) -> Stop | Kill | None:
    """What a worker that still runs at `now` has earned."""
    if record.phase is not Phase.RUNNING or record.killed:
        return None
    if record.given_up_at is not None and now >= record.given_up_at + kill_after_s:
        return Kill(record.worker, "its runner has given it up")  # a kill order is sent once, and may be lost
    if record.asked_to_end_at is not None:
        if now >= record.asked_to_end_at + kill_after_s:
            return Kill(record.worker, f"it did not end within {kill_after_s:g} s of SIGTERM")
        return None
    if record.drain_by is not None and now >= record.drain_by:
        return Stop(record.worker, "it did not end by itself when it was drained")
    return None


@dataclass(frozen=True)
class Found:
    """A folder that was there before us. `is_running`: its process lives, and is the one that was recorded.
    `was_begun`: an agent has worked on it; else only the runner has, which is not to wait for us."""

    worker: str
    is_running: bool
    was_begun: bool = True


@dataclass(frozen=True)
class Adopt:
    worker: str


@dataclass(frozen=True)
class Bury:
    """It died while nobody looked: say so, remove what it left, delete its Assignment."""

    worker: str


@dataclass(frozen=True)
class Sweep:
    """Nobody asks for it and nothing runs: remove its folder."""

    worker: str


def at_start(found: Iterable[Found], assignments: Mapping[str, Assignment]) -> list[Adopt | Bury | Sweep]:
    """What to do with each folder. One that runs is adopted even without an Assignment: it is then stopped like any
    other whose Assignment is gone. One that is assigned and was not begun is launched like any other."""
    actions: list[Adopt | Bury | Sweep] = []
    for folder in found:
        if folder.is_running:
            actions.append(Adopt(folder.worker))
        elif folder.worker not in assignments:
            actions.append(Sweep(folder.worker))
        elif folder.was_begun:
            actions.append(Bury(folder.worker))
    return actions
