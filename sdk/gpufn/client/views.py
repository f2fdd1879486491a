"""Typed gateway responses (docs/http.md). Fields that a newer gateway adds are ignored."""

from __future__ import annotations

from typing import Any

import msgspec

from gpufn.notebook import html
from gpufn_core.domain.devices.engine import Accuracy, BuildStage, BuildState, Latency
from gpufn_core.domain.invocation import InvocationState
from gpufn_core.domain.revision import Check, Lease, RevisionState, Source, Variant
from gpufn_core.domain.team import Team, TeamUse
from gpufn_core.domain.traffic import HeaderRule, Mirror
from gpufn_core.domain.usage import Usage
from gpufn_core.errors import ErrorInfo
from gpufn_core.protocol.messages import Progress
from gpufn_core.protocol.records import AttemptRecord, KeyLimits
from gpufn_core.protocol.reports import LastStart, NextRevision, Waiting, WorkerCounts
from gpufn_core.spec.model_spec import ShapeProfile, TensorSpec
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
            return "a terminal" if self.variant.is_terminal else described("", self.variant.parameters)
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
    """A function, its active revision, and the revision that receives calls until that one is ready."""

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


class MapView(msgspec.Struct, frozen=True, kw_only=True):
    """A map, with the number of accepted items, of ended items, and of those that have a dead letter.

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


class BuildAhead(msgspec.Struct, frozen=True, kw_only=True):
    """The build that another one waits for. `function` is empty for a build without a function."""

    id: str
    model: str  # name of the ONNX file
    function: str = ""
    building_s: float = 0.0


class BuildView(msgspec.Struct, frozen=True, kw_only=True):
    """A Build: its progress and its end. `progress` is 0 to 1 over all stages; `change` increases with each change.
    `ahead` is the build that this one waits for."""

    id: str
    device: str
    state: BuildState
    stage: BuildStage | None = None
    progress: float = 0.0
    detail: str = ""
    engines: tuple[str, ...] = ()
    cached: bool = False
    error: ErrorInfo | None = None
    remarks: tuple[str, ...] = ()
    created_at: float | None = None
    started_at: float | None = None
    ended_at: float | None = None
    change: int = 0
    function: str = ""
    ahead: BuildAhead | None = None
    model: dict[str, Any] = {}

    @property
    def label(self) -> str:
        """The model's file and the DeviceKind, such as `resnet18.onnx on NVIDIA L4`."""
        files = self.model.get("files") or [{"name": self.model.get("parameter", "model")}]
        return f"{files[0]['name']} on {self.device}"


class EngineView(msgspec.Struct, frozen=True, kw_only=True):
    """A published engine and the revisions that use it. `model` is the name of the ONNX file."""

    key: str
    model: str
    backend: str
    device: str
    precision: str
    size: int
    accuracy: Accuracy | None = None
    latency: Latency | None = None
    remarks: tuple[str, ...] = ()
    built_at: float = 0.0
    used_by: tuple[str, ...] = ()


class ModelView(msgspec.Struct, frozen=True, kw_only=True):
    """A model of the revision that serves, and its engines by DeviceKind, best first."""

    name: str
    function: str
    revision: int
    file: str = ""
    parameter: str = ""
    precision: str = ""
    max_batch: int = 1
    batched: bool | None = None
    why_alone: str = ""
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    profiles: tuple[ShapeProfile, ...] = ()
    engines: dict[str, tuple[EngineView, ...]] = {}


class CollectedEngines(msgspec.Struct, frozen=True, kw_only=True):
    """Unused engines, and the number and bytes of the files that only they use."""

    engines: tuple[EngineView, ...] = ()
    files: int = 0
    bytes: int = 0
    dry_run: bool = False


class BuildingRevision(msgspec.Struct, frozen=True, kw_only=True):
    """An accepted revision that becomes active once its builds have succeeded. `builds` are their ids."""

    function: str
    revision: int
    state: RevisionState = RevisionState.BUILDING
    builds: tuple[str, ...] = ()


class RevisionProgress(msgspec.Struct, frozen=True, kw_only=True):
    """One revision and its builds. `error` is set if the revision failed."""

    number: int
    state: RevisionState
    active: bool = False
    check: Check | None = None
    builds: tuple[BuildView, ...] = ()
    error: ErrorInfo | None = None


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """`value` is what to set `option` to; "" if the figures only inform. `scale` are the arguments of `Client.scale`
    that follow the advice without a deploy; empty if it needs one."""

    option: str
    finding: str
    value: str = ""
    scale: dict[str, int] = {}


class ReplayedTimeout(msgspec.Struct, frozen=True, kw_only=True):
    """The calls of two days with an `idle_timeout`: cold starts, and seconds of the worker."""

    idle_timeout_s: float
    cold_starts: int
    worker_s: float
    is_current: bool = False


class SeenView(msgspec.Struct, frozen=True, kw_only=True):
    """What the history has of a function, of thirty days. `batches` counts gathered calls by the size of their batch,
    rounded up to a power of two."""

    calls: float = 0.0
    memory_max: float = 0.0
    gpu_memory_max: float = 0.0
    gpu_held_s: float = 0.0
    gpu_used_s: float = 0.0
    batches: dict[int, float] = {}


class AdviceView(msgspec.Struct, frozen=True, kw_only=True):
    """Advice about the options of a function, and its calls with other idle timeouts."""

    function: str
    advice: tuple[Advice, ...] = ()
    idle_timeout: tuple[ReplayedTimeout, ...] = ()
    seen: SeenView = SeenView()


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


class KeyView(msgspec.Struct, frozen=True, kw_only=True):
    """An API key. `key`, its secret, is only in the response that creates or rotates it. `expires_at`,
    `last_used_at` (up to five minutes late) and `replaced_until`, until when the previous secret is valid, are in UNIX
    seconds. The verbs of a key with a `team` hold for the functions of the team."""

    id: str
    scopes: tuple[str, ...] = ()
    label: str = ""
    created_at: float | None = None
    limits: KeyLimits = KeyLimits()
    team: str = ""
    expires_at: float | None = None
    replaced_until: float | None = None
    last_used_at: float | None = None
    key: str | None = None


class ProviderView(msgspec.Struct, frozen=True, kw_only=True):
    """The OpenID provider of `gpufn login`. `scopes` are the scopes to request; "" leaves the choice
    to the client."""

    issuer: str
    client_id: str
    client_secret: str = ""
    scopes: str = ""


class TokenView(msgspec.Struct, frozen=True, kw_only=True):
    """A new token, and the id and name of its principal. `expires_at` is in UNIX seconds of the gateway's clock."""

    token: str
    id: str
    name: str = ""
    scopes: tuple[str, ...] = ()
    expires_at: float = 0.0
    expires_in_s: float = 0.0


class PrincipalView(msgspec.Struct, frozen=True, kw_only=True):
    """The sender of a request: an API key, a user, or, with an empty `id`, a client of a gateway without keys."""

    id: str = ""
    name: str = ""
    scopes: tuple[str, ...] = ()
    expires_at: float | None = None
    limits: KeyLimits | None = None


class UserView(msgspec.Struct, frozen=True, kw_only=True):
    """A user or a workload that has logged in. The last login was at `seen_at` in UNIX seconds, with `scopes`.
    `generation` counts how often the user's tokens were ended."""

    id: str
    issuer: str
    subject: str
    name: str = ""
    scopes: tuple[str, ...] = ()
    seen_at: float = 0.0
    generation: int = 0


class CostView(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of a group. Columns that the request did not name are empty. Without a function: what nobody held."""

    day: str = ""
    team: str = ""
    app: str = ""
    function: str = ""
    key: str = ""
    calls: int = 0
    gpu_used_s: float = 0.0
    gpu_idle_s: float = 0.0
    cpu_s: float = 0.0
    used: float = 0.0
    idle: float = 0.0
    cpu: float = 0.0
    unused: float = 0.0
    total: float = 0.0
    joules: float | None = None
    co2_g: float | None = None


class BudgetView(msgspec.Struct, frozen=True, kw_only=True):
    """A budget of this UTC month, and what is spent of it. If it `stops`, calls are refused once it is used up."""

    subject: str
    month: str
    limit: float
    spent: float
    stops: bool = False


class CostsView(msgspec.Struct, frozen=True, kw_only=True):
    """Costs in `currency`; None if the gateway has no prices."""

    currency: str | None = None
    costs: tuple[CostView, ...] = ()
    budgets: tuple[BudgetView, ...] = ()


class SeriesView(msgspec.Struct, frozen=True, kw_only=True):
    """One series: a value per step. None: nothing was recorded, or the value is unknown. Some series have a dict per
    step, such as counts by code."""

    name: str
    unit: str
    values: tuple[float | dict[str, float] | None, ...]


class SubjectView(msgspec.Struct, frozen=True, kw_only=True):
    """The series of one subject."""

    subject: str
    series: tuple[SeriesView, ...]


class HistoryView(msgspec.Struct, frozen=True, kw_only=True):
    """An answer of the history. `at` has the start of each step of `step` seconds, in UNIX seconds."""

    step: int
    resolution: int
    at: tuple[int, ...]
    results: tuple[SubjectView, ...]


class EventView(msgspec.Struct, frozen=True, kw_only=True):
    """A mark on the time line. `subject` is what it is about, such as ``function:prod/search/predict``."""

    id: int
    at: float
    kind: str
    subject: str
    text: str
    revision: int | None = None
    node: str = ""
    details: dict[str, Any] = {}


class EventsView(msgspec.Struct, frozen=True, kw_only=True):
    """A page of events, the newest first. `next` is `before` of the next page; None after the last."""

    events: tuple[EventView, ...] = ()
    next: int | None = None


class SpanError(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    message: str = ""


class SpanLink(msgspec.Struct, frozen=True, kw_only=True):
    """A span of another trace: that of the map to which a call belongs."""

    trace: str
    span: str


class SpanView(msgspec.Struct, frozen=True, kw_only=True):
    """A span. Times are in UNIX seconds; `attributes` have the names of OpenTelemetry's conventions, or ``gpufn.*``."""

    id: str
    parent: str | None = None
    name: str
    kind: str
    function: str = ""
    start: float
    end: float
    attributes: dict[str, str | int | float | bool] = {}
    error: SpanError | None = None
    link: SpanLink | None = None


class TraceView(msgspec.Struct, frozen=True, kw_only=True):
    """The spans of a trace. `left_out` counts those that the gateway did not keep."""

    id: str
    spans: tuple[SpanView, ...] = ()
    left_out: int = 0


class TraceSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A trace in a list. `name` and `invocation` are those of its first call."""

    id: str
    name: str = ""
    function: str = ""
    invocation: str = ""
    start: float
    end: float
    spans: int = 0
    errors: int = 0


class TracesView(msgspec.Struct, frozen=True, kw_only=True):
    """The traces that a gateway keeps, newest first. `enabled`: calls are traced."""

    enabled: bool = False
    traces: tuple[TraceSummary, ...] = ()


class AuditHead(msgspec.Struct, frozen=True, kw_only=True):
    """The last record of the audit log: its number, hash and time in UNIX seconds."""

    seq: int
    hash: str
    at: float


class AuditPage(msgspec.Struct, frozen=True, kw_only=True):
    """Records of the audit log as stored: the JSON of an `AuditRecord` each. `head` is None for an empty log."""

    records: tuple[msgspec.Raw, ...] = ()
    head: AuditHead | None = None


class SecretView(msgspec.Struct, frozen=True, kw_only=True):
    """A secret, without its value. `scope` is the pattern of the functions that it is for, `functions` are those that
    get it."""

    name: str
    version: int
    updated_at: float
    scope: str = "*"
    functions: tuple[str, ...] = ()


class TeamView(Team, frozen=True, kw_only=True):
    """A team, with what it uses now; `run_s` and `gpu_s` today."""

    use: TeamUse


class SignerView(msgspec.Struct, frozen=True, kw_only=True):
    """A key that is trusted to sign functions that match `patterns`. `functions` are those whose active revision it
    signed."""

    name: str
    id: str
    patterns: tuple[str, ...]
    added_at: float
    functions: tuple[str, ...] = ()


class SigningView(msgspec.Struct, frozen=True, kw_only=True):
    """The trusted keys, and the environments that require signatures."""

    keys: tuple[SignerView, ...] = ()
    required: tuple[str, ...] = ()


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


class UsageView(msgspec.Struct, frozen=True, kw_only=True):
    """The usage of one function's calls by one API key on one UTC day, such as 2026-11-21."""

    day: str
    function: str
    key: str
    usage: Usage


class RawResult(msgspec.Struct, frozen=True, kw_only=True):
    """An encoded result, and the time that each phase took, in milliseconds."""

    content_type: str
    body: bytes
    invocation: str = ""
    revision: str = ""
    timings: dict[str, float] = {}


class Problem(ErrorInfo, frozen=True, rename={"message": "detail"}):
    """An RFC 9457 problem with gpufn's extension members."""

    code: str = ""
    message: str = ""
    title: str = ""


def _calls(queued: int | None, running: int | None) -> str:
    return "" if queued is None or running is None else f"{queued} queued, {running} running"


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.3g} s"


def _cause(error: dict[str, Any] | None) -> str:
    if error is None:
        return ""
    info = ErrorInfo(str(error.get("code", "")), str(error.get("message", "")), error_type=error.get("error_type"))
    return (info.summary.splitlines() or [info.code])[0]
