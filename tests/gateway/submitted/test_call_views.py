"""The status of queued calls, as tables."""

from __future__ import annotations

from typing import Any

import pytest

from gpufn_core.domain.invocation import InvocationState
from gpufn_core.protocol.messages import CallLocation
from gpufn_core.protocol.records import CallRecord
from gpufn_core.protocol.reports import Waiting, WaitReason
from gpufn_core.spec.function_spec import Batch
from gpufn_gateway.submitted import call_views
from gpufn_gateway.submitted.call_views import event_number

NOW = 1000.0
STARTING = Waiting(WaitReason.STARTING, "a worker is starting", 2.0)
NO_ROOM = Waiting(WaitReason.NO_CAPACITY, "no node has room")


def record(**fields: Any) -> CallRecord:
    return CallRecord(
        **{
            "id": "1" * 26,
            "function": "f",
            "revision": 1,
            "state": InvocationState.QUEUED,
            "submitted_at": 990.0,
            **fields,
        }
    )


@pytest.mark.parametrize(
    ("place", "status", "eta_s"),
    [
        (1, {"ready": 2, "running": 0, "service_s": 0.5}, 0.0),
        (1, {"ready": 2, "running": 3}, 0.0),  # one of 4 slots is free
        (1, {"ready": 2, "running": 4, "service_s": 0.5}, 0.125),  # the first of 4 has to end
        (9, {"ready": 2, "running": 4, "service_s": 0.5}, 1.125),
        (9, {"ready": 2, "service_s": 0.5}, 1.125),
        (1, {"ready": 2, "running": 4}, None),
        (9, {"ready": 0, "wanted": 1, "service_s": 0.5, "waiting": STARTING}, 3.75),  # 2 slots
        (1, {"ready": 0, "wanted": 1, "cold_start_s": 3.0}, 3.0),
        (1, {"ready": 0, "wanted": 1}, None),
        (2, {"ready": 1}, None),  # the service time is not known
        (2, {"ready": 0, "service_s": 0.5, "cold_start_s": 3.0, "waiting": NO_ROOM}, None),
        (None, {"ready": 1, "service_s": 0.5}, None),
        (3, None, None),
    ],
)
def test_the_estimated_start_of_a_call_is_shown_if_it_is_known(
    make: Any, place: int | None, status: dict[str, Any] | None, eta_s: float | None
) -> None:
    known = None if status is None else make.status("f", **status)
    assert call_views.wait_fields(record(), place, make.spec("f", concurrency=2), known, NOW)["eta_s"] == eta_s


@pytest.mark.parametrize(
    ("queued", "running", "eta_s"),
    [
        (9, 8, 0.9),  # 8 gather: they and the call itself wait for runs of 8, of 0.8 s each
        (None, None, 0.9),
        (4, 8, 0.4),  # 3 gather
        (1, 0, 0.0),
    ],
)
def test_a_call_starts_after_the_gathering_calls_of_workers(
    make: Any, queued: int | None, running: int | None, eta_s: float
) -> None:
    known = make.status("f", ready=1, queued=queued, running=running, service_s=0.8)
    told = call_views.wait_fields(record(), 1, make.spec("f", batch=Batch(8)), known, NOW)
    assert told["eta_s"] == pytest.approx(eta_s)


@pytest.mark.parametrize(
    ("fields", "place", "status", "reason", "detail"),
    [
        ({"attempt": 2, "not_before": 1001.5}, 4, {}, "retry", "attempt 2 starts in 1.5 s"),
        ({}, 1, {"waiting": NO_ROOM}, "no_capacity", "no node has room"),
        ({}, 1, {}, "others", "it is next: it waits for a free slot"),
        ({}, 2, {}, "others", "1 call is before it"),
        ({}, 5001, {}, "others", "5,000 calls are before it"),
        ({}, None, {}, "unknown", "a runner is about to take it or to report it"),
        ({}, 1, None, "unknown", "the controller has not reported on its function yet"),
    ],
)
def test_a_queued_call_always_shows_the_reason_of_its_wait(
    make: Any, *, fields: dict[str, Any], place: int | None, status: dict[str, Any] | None, reason: str, detail: str
) -> None:
    known = None if status is None else make.status("f", **status)
    waiting = call_views.wait_fields(record(**fields), place, None, known, NOW)["waiting"]
    assert (waiting.reason.value, waiting.detail) == (reason, detail)


def test_a_call_that_waits_for_its_turn_on_a_gpu_is_queued_though_a_runner_has_it(make: Any) -> None:
    held = CallLocation("i", "w-1", "n", 1, 0.0, waits_on="GPU-0")
    assert call_views.status(record(), held)["state"] is InvocationState.QUEUED
    told = call_views.wait_fields(record(), 3, None, make.status("f"), NOW, holder=held)
    assert (told["waiting"].reason.value, "GPU-0" in told["waiting"].detail) == ("turn", True)
    assert (told["place"], told["eta_s"]) == (None, None)


def test_the_pause_before_an_attempt_is_its_eta(make: Any) -> None:
    waiting = record(attempt=2, not_before=1001.5)
    told = call_views.wait_fields(waiting, 7, make.spec("f"), make.status("f", service_s=1.0), NOW)
    assert (told["place"], told["eta_s"]) == (None, 1.5)


def test_events_are_numbered_along_a_life() -> None:
    life = [
        (InvocationState.QUEUED, 1),
        (InvocationState.RUNNING, 1),
        (InvocationState.QUEUED, 2),
        (InvocationState.RUNNING, 2),
        (InvocationState.CANCELLED, 2),
    ]
    numbers = [event_number(*each) for each in life]
    assert numbers == sorted(set(numbers))


def test_a_report_of_a_runner_does_not_change_an_ended_call() -> None:
    held = CallLocation("1" * 26, "w", "n", 1, 995.0)
    assert call_views.status(record(), held)["state"] is InvocationState.RUNNING
    assert call_views.status(record(), held)["timings"] == {"queue_s": 5.0}
    ended = record(state=InvocationState.CANCELLED)
    assert call_views.status(ended, held)["state"] is InvocationState.CANCELLED


def test_a_call_of_a_retired_revision_waits_for_workers_of_that_revision(make: Any) -> None:
    """Bug: it showed the wait reason and the estimate of the new revision."""
    status = make.status("f", serving=2, ready=2, running=0, service_s=0.5, waiting=STARTING, waiting_of={1: NO_ROOM})
    told = call_views.wait_fields(record(), 1, make.spec("f"), status, NOW)
    assert (told["waiting"], told["eta_s"]) == (NO_ROOM, None)


def test_the_phases_of_a_call_that_gathered_add_up() -> None:
    ended = record(state=InvocationState.SUCCEEDED, queue_s=0.5, gather_s=0.25, run_s=1.0)
    assert call_views._timings(ended) == {"queue_s": 0.5, "gather_s": 0.25, "run_s": 1.0}
    assert "gather_s" not in call_views._timings(record(queue_s=0.5, run_s=1.0))
