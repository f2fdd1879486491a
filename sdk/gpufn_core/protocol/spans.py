"""Finished spans of traces, from the process that recorded them to the gateways. Times are unix seconds."""

from __future__ import annotations

import enum

import msgspec

from gpufn_core.errors import ErrorInfo

MAX_TEXT_CHARS = 400  # of an attribute, and of the message of an error

Attribute = str | int | float | bool


class SpanKind(enum.StrEnum):
    INTERNAL = "internal"
    SERVER = "server"  # a call whose caller waits
    PRODUCER = "producer"  # a request that queues calls
    CONSUMER = "consumer"  # a call from a queue


class SpanError(msgspec.Struct, frozen=True, array_like=True):
    code: str
    message: str


class Span(msgspec.Struct, frozen=True, array_like=True):
    """`trace`, `id` and `parent` are hexadecimal ids; `parent` is empty at the root. `function` is the full name of the
    function whose readers may see it. `link` is the trace id and span id of another span."""

    trace: str
    id: str
    parent: str
    name: str
    kind: SpanKind
    function: str
    start: float
    end: float
    attributes: dict[str, Attribute] = {}
    error: SpanError | None = None
    link: tuple[str, str] | None = None


class SpanBatch(msgspec.Struct, frozen=True, array_like=True):
    """Spans of one process. `dropped` is how many it could not send since it started."""

    sender: str
    spans: tuple[Span, ...]
    dropped: int = 0


def error_of(kind: str, error: ErrorInfo | None) -> SpanError:
    """Return the error of a span. `kind` is the outcome, for one without an error."""
    if error is None:
        return SpanError(kind, kind)
    return SpanError(error.code[:MAX_TEXT_CHARS], error.summary[:MAX_TEXT_CHARS])
