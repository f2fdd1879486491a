"""Which worker is profiled: the choice in the request, and the first slow call in the reports of runners."""

from __future__ import annotations

import msgspec
import pytest

from gpufn_core.domain.worker import WorkerState
from gpufn_core.protocol.reports import RunnerReport, WorkerReport
from gpufn_gateway.openapi.request_bodies import Profile
from gpufn_gateway.routes.profiles import ProfiledWorker, slow_call


def report(sent_at: float, began: float | None, function: str = "f") -> RunnerReport:
    call = "" if began is None else "01k9xq3zr7c8m2v5t000000011"
    worker = WorkerReport("w-1", function, 1, WorkerState.READY, 1, longest_call=call, longest_call_at=began)
    return RunnerReport("node", "runner", sent_at, (worker,))


@pytest.mark.parametrize(
    ("reports", "is_chosen"),
    [
        ([], False),
        ([report(100.0, None)], False),
        ([report(100.0, 98.5)], False),
        ([report(100.0, 98.0)], True),
        ([report(100.0, 90.0, "other")], False),
        ([report(100.0, None), report(50.0, 40.0)], True),  # the clocks of nodes may differ
    ],
)
def test_the_first_call_that_ran_for_so_long_is_chosen(reports: list[RunnerReport], is_chosen: bool) -> None:
    chosen = ProfiledWorker("w-1", "node", "01k9xq3zr7c8m2v5t000000011") if is_chosen else None
    assert slow_call(reports, "f", 2.0) == chosen


@pytest.mark.parametrize(
    "body",
    [
        b'{"seconds": 0}',
        b'{"seconds": 61}',
        b'{"kind": "disk"}',
        b'{"kind": "gpu", "seconds": 11}',
        b'{"slower_than_s": -1}',
        b'{"slower_than_s": 2, "wait_s": 301}',
        b'{"slower_than_s": 2, "worker": "w-1"}',
        b'{"worker": "w-1", "call": "01k9xq3zr7c8m2v5t000000011"}',
    ],
)
def test_a_request_that_cannot_be_met_is_refused(body: bytes) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(body, type=Profile)
