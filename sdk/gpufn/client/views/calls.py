"""Submitted calls, maps, dead letters and results (docs/http.md)."""

from __future__ import annotations

from typing import Any

import msgspec

from gpufn.notebook import html
from gpufn_core.domain.invocation import InvocationState
from gpufn_core.errors import ErrorInfo
from gpufn_core.protocol.messages import Progress
from gpufn_core.protocol.records import AttemptRecord
from gpufn_core.protocol.reports import Waiting
from gpufn_core.spec.priority import Priority
from gpufn_core.spec.units import format_duration


class MapView(msgspec.Struct, frozen=True, kw_only=True):
    """A map, with the numbers of accepted items, ended items, and items with a dead letter.

    `state` is open (accepts more items), running, ended or cancelled.
    """

    id: str
    function: str = ""
    revision: int = 0
    state: str = "open"
    submitted_at: float = 0.0
    accepted: int = 0
    ended: int = 0
    failed: int = 0

    def _repr_html_(self) -> str:
        return html.progress(f"{self.function} {self.state}", self.ended, self.accepted)


class InvocationView(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    state: InvocationState
    function: str = ""
    revision: int = 0
    submitted_at: float | None = None
    started_at: float | None = None
    ended_at: float | None = None
    attempt: int = 1
    priority: Priority = Priority.NORMAL
    key: str = ""  # the id of the API key that made it
    parent: str | None = None  # the invocation that made this one
    trace: str | None = None  # W3C traceparent
    progress: Progress | None = None
    queue_s: float | None = None
    run_s: float | None = None
    gpu_s: float = 0.0  # GPU seconds charged for its attempts
    error: dict[str, Any] | None = None
    waiting: Waiting | None = None
    attempts: tuple[AttemptRecord, ...] = ()
    worker: str = ""
    timings: dict[str, float] = {}
    place: int | None = None
    eta_s: float | None = None
    size: int = 0
    links: dict[str, str] = {}

    @property
    def cause(self) -> str:
        """The error on one line, or "" if the call has not failed."""
        return _cause(self.error)

    def _repr_html_(self) -> str:
        progress = self.progress
        return html.fields(
            self.id,
            [
                ("function", f"{self.function}@{self.revision}" if self.revision else self.function),
                ("state", self.state.value),
                ("waits", self.waiting and self.waiting.detail),
                ("place in the queue", self.place),
                ("starts in", _seconds(self.eta_s)),
                ("progress", progress and f"{progress.fraction:.0%} {progress.message}".rstrip()),
                ("waited", _seconds(self.queue_s)),
                ("ran", _seconds(self.run_s)),
                ("attempts", self.attempt if self.attempt > 1 else None),
                ("error", self.cause),
            ],
        )


class CallsView(msgspec.Struct, frozen=True, kw_only=True):
    """A page of calls. `next` leads to older ones; None: there are none. A page may have no calls and still lead on."""

    calls: tuple[InvocationView, ...] = ()
    next: str | None = None


class DeadLetterView(msgspec.Struct, frozen=True, kw_only=True):
    """A submitted call that failed permanently. `size` is the size of its payload in bytes."""

    id: str
    function: str
    revision: int
    state: InvocationState
    submitted_at: float
    died_at: float
    method: str = ""
    content_type: str = ""
    error: dict[str, Any] | None = None
    attempts: tuple[AttemptRecord, ...] = ()
    size: int = 0

    @property
    def cause(self) -> str:
        """The error, or else the state, on one line."""
        return _cause(self.error) or self.state.value


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """A dead letter and the new call that replays it."""

    letter: str
    invocation: str


class RawResult(msgspec.Struct, frozen=True, kw_only=True):
    """An encoded result, and the time that each phase took, in milliseconds."""

    content_type: str
    body: bytes
    invocation: str = ""
    revision: str = ""
    timings: dict[str, float] = {}


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else format_duration(seconds)


def _cause(error: dict[str, Any] | None) -> str:
    if error is None:
        return ""
    info = ErrorInfo(str(error.get("code", "")), str(error.get("message", "")), error_type=error.get("error_type"))
    return (info.summary.splitlines() or [info.code])[0]
