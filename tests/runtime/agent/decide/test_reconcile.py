"""Reconciliation of Assignments and workers, as tables."""

from __future__ import annotations

import pytest

from gpufn_core.domain.devices.device import DeviceShare
from gpufn_core.domain.worker import Assignment, Desired
from gpufn_runtime.agent.decide.fleet import Fleet, Phase, WorkerRecord
from gpufn_runtime.agent.decide.reconcile import on_change, when_overdue


def assignment(epoch: int = 3, desired: Desired = Desired.RUN, worker: str = "w-1") -> Assignment:
    share = DeviceShare("cpu", 1.0, 1 << 20)
    return Assignment(
        worker=worker, node="n", function="f", revision=1, share=share, epoch=epoch, created_at=1.0, desired=desired
    )


def record(phase: Phase) -> WorkerRecord:
    return WorkerRecord("w-1", "f", 1, assignment(), phase)


RUN, DRAIN, OLD = assignment(), assignment(desired=Desired.DRAIN), assignment(epoch=2, desired=Desired.DRAIN)
PARK = assignment(desired=Desired.PARK)


@pytest.mark.parametrize(
    ("known", "wanted", "has_ended", "action"),
    [
        (None, RUN, False, "Launch"),
        (None, RUN, True, "DeleteAssignment"),
        (None, DRAIN, False, "DeleteAssignment"),
        (None, PARK, False, "DeleteAssignment"),
        (None, OLD, False, "Refuse"),
        (None, None, False, "NoneType"),
        (Phase.LAUNCHING, RUN, False, "NoneType"),
        (Phase.LAUNCHING, DRAIN, False, "Drain"),
        (Phase.LAUNCHING, OLD, False, "Refuse"),
        (Phase.LAUNCHING, None, False, "Stop"),
        (Phase.RUNNING, RUN, False, "NoneType"),
        (Phase.RUNNING, DRAIN, False, "Drain"),
        (Phase.RUNNING, PARK, False, "NoneType"),
        (Phase.RUNNING, OLD, False, "Refuse"),
        (Phase.RUNNING, None, False, "Stop"),
        (Phase.ENDED, RUN, False, "NoneType"),
        (Phase.ENDED, DRAIN, False, "NoneType"),
        (Phase.ENDED, None, False, "NoneType"),
    ],
)
def test_a_change_of_an_assignment(
    known: Phase | None, wanted: Assignment | None, has_ended: bool, action: str
) -> None:
    found = on_change(record(known) if known else None, wanted, newest_epoch=3, has_ended=has_ended)
    assert type(found).__name__ == action


@pytest.mark.parametrize(
    ("phase", "drain_by", "asked_at", "killed", "action"),
    [
        (Phase.RUNNING, None, None, False, "NoneType"),
        (Phase.RUNNING, 101.0, None, False, "NoneType"),
        (Phase.RUNNING, 100.0, None, False, "Stop"),
        (Phase.RUNNING, 90.0, 96.0, False, "NoneType"),
        (Phase.RUNNING, None, 95.0, False, "Kill"),
        (Phase.RUNNING, None, 95.0, True, "NoneType"),
        (Phase.LAUNCHING, 90.0, 90.0, False, "NoneType"),
        (Phase.ENDED, 90.0, 90.0, False, "NoneType"),
    ],
)
def test_a_worker_that_must_have_ended_by_100(
    phase: Phase, drain_by: float | None, asked_at: float | None, killed: bool, action: str
) -> None:
    worker = record(phase)
    worker.drain_by, worker.end_requested_at, worker.killed = drain_by, asked_at, killed
    assert type(when_overdue(worker, 100.0, 5.0)).__name__ == action


@pytest.mark.parametrize(
    ("phase", "over_at", "asked_at", "killed", "action"),
    [
        (Phase.RUNNING, None, None, False, "NoneType"),
        (Phase.RUNNING, 96.0, None, False, "NoneType"),
        (Phase.RUNNING, 95.0, None, False, "Kill"),
        (Phase.RUNNING, 95.0, 99.0, False, "Kill"),
        (Phase.RUNNING, 95.0, None, True, "NoneType"),
        (Phase.LAUNCHING, 90.0, None, False, "NoneType"),
        (Phase.ENDED, 90.0, None, False, "NoneType"),
    ],
)
def test_a_worker_reported_as_ended_that_runs_at_100(
    phase: Phase, over_at: float | None, asked_at: float | None, killed: bool, action: str
) -> None:
    worker = record(phase)
    worker.reported_ended_at, worker.end_requested_at, worker.killed = over_at, asked_at, killed
    assert type(when_overdue(worker, 100.0, 5.0)).__name__ == action


def test_the_newest_epoch_is_the_epoch_of_present_assignments() -> None:
    fleet = Fleet()
    assert fleet.newest_epoch == 0
    fleet.add(assignment(epoch=7))
    fleet.add(assignment(epoch=5, worker="w-2"))
    assert fleet.newest_epoch == 7
    fleet.forget("w-1")
    assert (fleet.newest_epoch, fleet.has_ended("w-1"), fleet.has_ended("w-2")) == (5, True, False)
