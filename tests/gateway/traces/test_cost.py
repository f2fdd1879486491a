"""The cost of tracing for a call that is not recorded, in function calls, which do not depend on the machine."""

from __future__ import annotations

import gc
import sys
from types import FrameType
from typing import Any

from gpufn_gateway.traces.tracing import Sampling, Tracing
from tests.gateway.conftest import Connection
from tests.gateway.routes.test_invoke import GOOD, URL


async def function_calls(app: Any) -> int:
    """Return the number of function calls, in Python and in C, that one invoke takes."""
    count = 0

    def on_event(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    connection = Connection(URL, GOOD, content_type="application/json")
    task = connection.start(app)
    gc.collect()
    before = sys.getprofile()
    sys.setprofile(on_event)
    try:
        await task
    finally:
        sys.setprofile(before)
    assert connection.sent[0]["status"] == 200
    return count


async def test_a_call_that_is_not_recorded_costs_a_few_function_calls(gateway: Any) -> None:
    reporter: Any = None  # nothing is reported
    counts = []
    for tracing in (None, Tracing(Sampling(0.0, 60.0), reporter, gateway.clock), None):
        gateway.calls.tracing = tracing
        counts.append([await function_calls(gateway.app) for _ in range(2)][-1])  # the first one fills caches
    off, on, off_again = counts
    assert off == off_again
    assert off < on <= off + 15
