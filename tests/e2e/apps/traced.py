"""Functions whose calls are traced: one calls another for each item, which fails at first."""

from __future__ import annotations

import threading
from pathlib import Path

from opentelemetry import trace

import gpufn
from gpufn import Retry, gpu_function


@gpu_function(retries=Retry(2, delay_s=0.01), concurrency=4)
def flaky(number: int) -> list[str]:
    """The traceparent of the attempt, and the current span as OpenTelemetry knows it, with their tracestate. An odd
    number fails once."""
    ctx = gpufn.current()
    print("number", number)
    if number % 2 and ctx.attempt == 1:
        raise ValueError(f"{number} is odd")
    current = trace.get_current_span().get_span_context()
    states = [str(ctx.trace_state), current.trace_state.to_header()]
    return [str(ctx.trace), f"{current.trace_id:032x}", f"{current.span_id:016x}", *states]


@gpu_function
def fan_out(numbers: int) -> list[list[str]]:
    return list(flaky.map(range(numbers)))


@gpu_function
def gated(started: str, gate: str) -> None:
    """Create the file `started`, and wait for the file `gate`."""
    Path(started).touch()
    while not Path(gate).exists():
        threading.Event().wait(0.02)
