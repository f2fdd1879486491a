"""Functions, their revisions, apps and schedules (docs/http.md)."""

from __future__ import annotations

from typing import Any

import msgspec

from gpufn.client.views.models import BuildView
from gpufn.notebook import html
from gpufn_core.domain.revision import Check, Lease, RevisionState, Source, Variant
from gpufn_core.domain.traffic import HeaderRule, Mirror
from gpufn_core.errors import ErrorInfo
from gpufn_core.protocol.reports import LastStart, NextRevision, Waiting, WorkerCounts
from gpufn_core.spec.naming.variant_names import described
from gpufn_core.spec.priority import Priority
from gpufn_core.spec.schedule import Missed


class SplitView(msgspec.Struct, frozen=True, kw_only=True):
    """How the calls of a function are divided between its revisions. `weights` are in percent."""

    weights: dict[int, int]
    headers: tuple[HeaderRule, ...] = ()
    mirror: Mirror | None = None

    def __str__(self) -> str:
        """
        >>> str(SplitView(weights={1: 90, 2: 10}, mirror=Mirror(3, 5.0)))
        '1=90%, 2=10%, copies of 5% to 3'
        """
        parts = [f"{number}={weight}%" for number, weight in self.weights.items()]
        parts += [f"copies of {self.mirror.percent:g}% to {self.mirror.revision}"] if self.mirror else []
        return ", ".join(parts)


class FunctionView(msgspec.Struct, frozen=True, kw_only=True):
    """A Function, its active spec, and its last status from the controller.

    `queued` and `running` are None while unknown. `env` has the names of its environment variables. `spec["env"]` has
    their values only if the request included them.
    """

    name: str
    active: int
    serving: int
    latest: int
    updated_at: float = 0.0
    min_workers: int | None = None
    max_workers: int | None = None
    spec: dict[str, Any] = {}
    env: tuple[str, ...] = ()
    workers: WorkerCounts = WorkerCounts()
    queued: int | None = None
    running: int | None = None
    wanted: int = 0
    reason: str = ""
    waiting: Waiting | None = None
    service_s: float | None = None
    cold_start_s: float | None = None
    last_start: LastStart | None = None
    start_error: ErrorInfo | None = None
    next: NextRevision | None = None
    check: Check | None = None  # of the active revision
    source: Source | None = None  # of the active revision
    deployed_at: float | None = None  # of the active revision
    lease: Lease | None = None  # of a temporary function or a variant
    variant: Variant | None = None  # what the active revision of a variant copies
    traffic: SplitView | None = None  # None: the serving revision gets all calls
    canary: int | None = None  # the revision that a deploy gave a part of the calls

    @property
    def note(self) -> str:
        """The reason why workers do not start or calls wait, on one line, or ""."""
        if self.start_error:
            reason, _, _ = self.start_error.summary.partition("\n")
            return f"does not start: {reason}"
        if self.variant:
            variant = self.variant
            return "a terminal" if variant.is_terminal else described("", variant.parameters, variant.options)
        return f"calls wait: {self.waiting.detail}" if self.waiting else ""

    def _repr_html_(self) -> str:
        return html.fields(
            f"{self.name}@{self.active}",
            [
                ("serving", None if self.serving == self.active else f"{self.name}@{self.serving}"),
                ("traffic", self.traffic),
                ("workers", f"{self.workers}; {self.wanted} wanted"),
                ("calls", _calls(self.queued, self.running)),
                ("reason", self.reason),
                ("calls wait", self.waiting and self.waiting.detail),
                ("start error", self.start_error and self.start_error.summary),
            ],
        )

    def __repr__(self) -> str:
        serving = "" if self.serving == self.active else f", {self.serving} serves"
        return f"<FunctionView {self.name}@{self.active}{serving}, {self.workers.ready} ready>"


class FunctionViews(list[FunctionView]):
    """A list that a notebook shows as a table."""

    def _repr_html_(self) -> str:
        return html.rows(
            ["function", "workers", "calls", "note"],
            [(f"{one.name}@{one.active}", one.workers, _calls(one.queued, one.running), one.note) for one in self],
        )


class AppView(msgspec.Struct, frozen=True, kw_only=True):
    """The functions of one app in one environment, by full name. `deployed_at` is in unix seconds."""

    environment: str
    app: str
    functions: tuple[str, ...] = ()
    deploy_id: str = ""
    deployed_at: float | None = None


class ActiveRevision(msgspec.Struct, frozen=True, kw_only=True):
    """A function, its active revision, and the revision that receives calls until the active one is ready."""

    name: str
    active: int
    serving: int


class RevisionView(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    created_at: float
    bundle: str
    code: str = ""
    deploy_id: str = ""
    signed_by: str = ""
    state: str
    active: bool = False
    serving: bool = False


class BuildingRevision(msgspec.Struct, frozen=True, kw_only=True):
    """An accepted revision that becomes active once its builds have succeeded. `builds` are their ids."""

    function: str
    revision: int
    state: RevisionState = RevisionState.BUILDING
    builds: tuple[str, ...] = ()


class RevisionProgress(msgspec.Struct, frozen=True, kw_only=True):
    """One revision and its builds. `error` is set if the revision failed. `spec["env"]` is there only if the request
    included its values."""

    number: int
    state: RevisionState
    bundle: str = ""
    code: str = ""
    signed_by: str = ""
    spec: dict[str, Any] = {}
    active: bool = False
    check: Check | None = None
    builds: tuple[BuildView, ...] = ()
    error: ErrorInfo | None = None


class WhyView(msgspec.Struct, frozen=True, kw_only=True):
    """The reason for a function's number of workers. `terms` are the numbers behind the decision.

    `classes` counts the queued and running calls by priority class; None while unknown.
    """

    function: str
    workers: WorkerCounts = WorkerCounts()
    queued: int | None = None
    running: int | None = None
    classes: dict[Priority, int] | None = None
    wanted: int = 0
    reason: str = ""
    terms: dict[str, float] = {}
    waiting: Waiting | None = None
    last_start: LastStart | None = None
    start_error: ErrorInfo | None = None
    next: NextRevision | None = None

    def _repr_html_(self) -> str:
        return html.fields(
            self.function,
            [
                ("workers", f"{self.workers}; {self.wanted} wanted"),
                ("reason", self.reason),
                ("calls", _calls(self.queued, self.running)),
                ("calls wait", self.waiting and f"{self.waiting.detail} ({self.waiting.reason})"),
                ("start error", self.start_error and self.start_error.summary),
            ],
        )


class ScheduleView(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule of a function. `next_at` is None while it is paused; `invocation` is its last call."""

    id: str
    function: str
    method: str = ""
    cron: str | None = None
    timezone: str = "UTC"
    missed: Missed = Missed.ONCE
    arguments: dict[str, Any] = {}
    priority: Priority | None = None
    paused: bool = False
    declared: bool = False
    created_at: float = 0.0
    next_at: float | None = None
    invocation: str | None = None


def _calls(queued: int | None, running: int | None) -> str:
    return "" if queued is None or running is None else f"{queued} queued, {running} running"
