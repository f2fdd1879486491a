from __future__ import annotations

from typing import Any

import pytest

from gpufn_core.domain.revision import Function, Revision
from gpufn_core.errors import CapacityError, ErrorInfo, FunctionStartFailed, InvocationExpired, NoCapacity
from gpufn_core.ids import Digest
from gpufn_core.protocol.reports import FunctionStatus, Waiting, WaitReason, WorkerCounts
from gpufn_core.spec.function_spec import Batch, ScalingPolicy
from gpufn_gateway.calls.admission import explain_expiry, refusal, retry_after_s, too_large


def function(**fields: Any) -> Function:
    return Function(name="embed", active=1, serving=1, latest=1, updated_at=0.0, **fields)


def revision(make: Any, **fields: Any) -> Revision:
    return Revision(function="embed", number=1, spec=make.spec(**fields), bundle=Digest("0" * 64), created_at=0.0)


CANNOT_START = "embed cannot start: ModuleNotFoundError: No module named 'torch' (`gpufn logs embed` has the traceback)"
BROKEN = ErrorInfo(
    "function_raised", "No module named 'torch'", error_type="ModuleNotFoundError", traceback="Traceback ..."
)


@pytest.mark.parametrize(
    ("fields", "status", "expected"),
    [
        ({}, None, None),
        ({}, {}, None),
        ({"max_workers": 0}, {}, (CapacityError, "embed has max_workers=0")),
        (
            {},
            {"ready": 0, "start_error": BROKEN},
            (FunctionStartFailed, CANNOT_START),
        ),
        ({}, {"ready": 1, "start_error": BROKEN}, None),
        ({}, {"ready": 0, "serving": 2, "start_error": BROKEN}, None),
    ],
)
def test_calls_that_no_worker_would_serve_are_refused(make: Any, fields: Any, status: Any, expected: Any) -> None:
    known = None if status is None else make.status(**status)
    refused = refusal(function(**fields), revision(make), known)
    if expected is None:
        assert refused is None
    else:
        assert isinstance(refused, expected[0])
        assert refused.message.startswith(expected[1])


def test_the_spec_can_switch_a_function_off_and_scale_can_switch_it_on(make: Any) -> None:
    off = revision(make, scaling=ScalingPolicy(max_workers=0))
    assert refusal(function(), off, None) is not None
    assert refusal(function(max_workers=1), off, None) is None


def test_an_open_circuit_has_the_time_of_a_retry(make: Any) -> None:
    refused = refusal(function(), revision(make), make.status(ready=0, start_error=BROKEN))
    assert refused is not None
    assert refused.info().retry_after_s == 15.0


def test_retry_after_counts_the_calls_that_a_batching_worker_runs_and_none_that_gather(make: Any) -> None:
    status = make.status(queued=160, ready=1, service_s=1.0)
    assert retry_after_s(revision(make, batch=Batch(8)), status) == 10.0


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (None, 5.0),
        ({"queued": None}, 5.0),
        ({"queued": 100, "ready": 5, "service_s": 0.5}, 5.0),
        ({"queued": 100, "ready": 50, "service_s": 0.001}, 1.0),
        ({"queued": 2000, "ready": 1, "service_s": 10.0}, 120.0),
        ({"queued": 10, "ready": 0, "wanted": 1, "service_s": 1.0, "cold_start_s": 20.0}, 25.0),
    ],
)
def test_retry_after_follows_depth_workers_and_service_time(make: Any, status: Any, expected: float) -> None:
    assert retry_after_s(revision(make), None if status is None else make.status(**status)) == expected


def test_the_limit_is_named() -> None:
    unknown = too_large("a call's arguments", 7_864_320).message
    assert all(fact in unknown for fact in ("a call's arguments", "7.5 MiB"))
    known = too_large("a call's arguments", 7_864_320, 9_000_000).message
    assert all(fact in known for fact in ("9,000,000 bytes", "a call's arguments", "7.5 MiB"))


@pytest.mark.parametrize(
    ("waiting", "message"),
    [
        (None, "too late"),
        (Waiting(WaitReason.NO_CAPACITY, "vm: it has no L4 GPU"), "too late: embed waits, vm: it has no L4 GPU"),
    ],
)
def test_an_expired_call_names_the_reason_of_its_wait(waiting: Waiting | None, message: str) -> None:
    status = FunctionStatus(function="embed", serving=1, workers=WorkerCounts(), waiting=waiting)
    assert explain_expiry("embed", InvocationExpired("too late"), status).message == message


@pytest.mark.parametrize(
    ("timeout_s", "ready", "reason", "refuses"),
    [
        (0.5, 0, WaitReason.NO_CAPACITY, True),
        (1.0, 0, WaitReason.NO_CAPACITY, False),
        (None, 0, WaitReason.NO_CAPACITY, False),
        (0.5, 1, WaitReason.NO_CAPACITY, False),
        (0.5, 0, WaitReason.STARTING, False),
    ],
)
def test_a_call_without_time_to_wait_for_room_is_refused(
    make: Any, timeout_s: float | None, ready: int, reason: WaitReason, refuses: bool
) -> None:
    detail = "a: it has no L4 GPU"
    refused = refusal(function(), revision(make), make.status(ready=ready, waiting=Waiting(reason, detail)), timeout_s)
    assert isinstance(refused, NoCapacity) is refuses
    assert refused is None or detail in refused.message


def test_a_traceback_is_promised_where_there_is_one(make: Any) -> None:
    hung = make.status(ready=0, start_error=ErrorInfo("worker_lost", "it was not ready after 3 s"))
    refused = refusal(function(), revision(make), hung)
    assert refused is not None
    assert hung.start_error.message in refused.message
    assert "gpufn logs" not in refused.message
