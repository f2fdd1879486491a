"""The place of a call in a trace (W3C Trace Context), with ids that every process derives. Pure.

The `trace` of a message is the traceparent of the caller's span. A gateway that traces appends ``;`` and the seconds
from which a call is slow, so that each process knows both the decision and the threshold without its own settings. The
client's tracestate follows after a space::

    00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01               passed through: the platform does not trace
    00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01;2.5           traced
    00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01;2.5 vendor=1  traced, with a tracestate

The parent id is zero if the trace begins with the call. An item of a map has its own trace, with a link to the span of
its map: a viewer cannot show a million items in a trace.
"""

from __future__ import annotations

import hashlib
import math
from typing import Final, NamedTuple

from gpufn_core.ids import item_of

NO_SPAN: Final = "0" * 16
_NO_TRACE: Final = "0" * 32
LENGTH: Final = 55  # characters of a traceparent
SAMPLED: Final = "13579bdf"  # last digits of the flags
_RANDOM: Final = 1 << 56  # a trace id has this many random values in its last seven bytes (W3C Trace Context 2)


class CallTrace(NamedTuple):
    """The place of a traced call. `parent` is the id of the span above it, "" if there is none. `link` is the trace id
    and span id of the map that it belongs to."""

    trace: str
    span: str
    parent: str
    link: tuple[str, str] | None = None


def span_id(*names: str | int) -> str:
    """Return the id of the span that belongs to an invocation, to one of its attempts, or to a part of either.

    >>> span_id("01k9xq3zr7c8m2v5t000000011") == span_id("01k9xq3zr7c8m2v5t000000011", 1)
    False
    """
    return hashlib.blake2b("\0".join(map(str, names)).encode(), digest_size=8).hexdigest()


def trace_id(name: str) -> str:
    """Return the id of the trace that begins with an invocation or a map."""
    return hashlib.blake2b(name.encode(), digest_size=16).hexdigest()


def is_traceparent(text: str) -> bool:
    """Return whether a text of the form of a traceparent is one: its ids are not zero, and its version exists."""
    return text[3:35] != _NO_TRACE and text[36:52] != NO_SPAN and not text.startswith("ff")


def is_traced(trace: str) -> bool:
    """Return whether the platform records spans of a message with this `trace`."""
    return trace[LENGTH : LENGTH + 1] == ";"


def traced(trace: str, slow_s: float) -> str:
    """Return the `trace` of a message whose caller has sent a traceparent, perhaps with a tracestate."""
    slow = "" if math.isinf(slow_s) else f"{slow_s:.3f}"
    return f"00{trace[2:LENGTH]};{slow}{trace[LENGTH:]}"


def tracestate(trace: str) -> str:
    """Return the tracestate that the caller has sent, "" if there is none.

    >>> tracestate("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01;2.5 a=1,b=2")
    'a=1,b=2'
    """
    return trace[LENGTH:].partition(" ")[2]


def without_state(trace: str) -> str:
    """Return a `trace` without the tracestate, which belongs to the trace of its caller."""
    return trace.partition(" ")[0]


def begun(trace: str, ratio: float, slow_s: float) -> str:
    """Return the `trace` of a message whose caller sent no traceparent: trace id `trace`, sampled at `ratio`."""
    flags = "01" if ratio and int(trace[18:], 16) < ratio * _RANDOM else "00"
    return traced(f"00-{trace}-{NO_SPAN}-{flags}", slow_s)


def of_call(invocation: str, trace: str) -> CallTrace:
    """Return the trace context of an invocation, from the `trace` of its message, which must be traced."""
    own, parent = trace[3:35], trace[36:52]
    if (item := item_of(invocation)) is not None:
        return CallTrace(trace_id(invocation), span_id(invocation), "", (own, span_id(item[0])))
    return CallTrace(own, span_id(invocation), "" if parent == NO_SPAN else parent)


def is_sampled(trace: str) -> bool:
    return trace[54] in SAMPLED


def keeps(trace: str, *, is_error: bool, took_s: float) -> bool:
    """Return whether spans of a traced call are recorded: its trace is sampled, or the call failed or was slow."""
    if trace[54] in SAMPLED or is_error:
        return True
    slow = trace[LENGTH + 1 :].partition(" ")[0]
    return slow != "" and took_s >= float(slow)


def of_attempt(invocation: str, attempt: int, trace: str) -> str:
    """Return the traceparent of an attempt, for its spans and nested calls. `trace` must be traced."""
    own = trace_id(invocation) if "-" in invocation else trace[3:35]  # only ids of items have a dash
    return f"00-{own}-{span_id(invocation, attempt)}-{trace[53:55]}"


def seen_by_attempt(invocation: str, attempt: int, trace: str) -> str:
    """Return the traceparent that user code sees: of its attempt, or of the caller if the platform does not trace."""
    return of_attempt(invocation, attempt, trace) if is_traced(trace) else trace[:LENGTH]


def of_nested_call(invocation: str, attempt: int, trace: str) -> str:
    """Return the `trace` of the message of a call that an attempt makes. `trace` is the trace of its own message."""
    return of_attempt(invocation, attempt, trace) + trace[LENGTH:] if is_traced(trace) else trace


def traceparent(invocation: str, trace: str) -> str:
    """Return the traceparent to show for a call: its own span if the platform traces it, or else its caller's."""
    if not is_traced(trace):
        return trace[:LENGTH]
    own = trace_id(invocation) if "-" in invocation else trace[3:35]
    return f"00-{own}-{span_id(invocation)}-{trace[53:55]}"


def call_name(function: str, method: str) -> str:
    """Return the name of the span of a call."""
    return f"{function}.{method}" if method else function


def attributes(invocation: str, function: str, revision: int) -> dict[str, str | int | float | bool]:
    """Return the attributes that all spans of a call have, named by OpenTelemetry's conventions for functions."""
    return {"faas.name": function, "faas.version": str(revision), "faas.invocation_id": invocation}
