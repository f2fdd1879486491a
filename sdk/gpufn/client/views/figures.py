"""Usage, costs, history, events and advice (docs/http.md)."""

from __future__ import annotations

from typing import Any

import msgspec

from gpufn_core.domain.usage import Usage


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """`value` is the proposed value of `option`; "" if the figures only inform. `scale` are the arguments of
    `Client.scale` that follow the advice without a deploy; empty if it needs one."""

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
    """Recorded figures of a function, of thirty days. `batches` counts gathered calls by the size of their batch,
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


class CostView(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of a group. Columns that the request did not name are empty. Without a function: the resources that no
    function held."""

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

    def __add__(self, other: CostView) -> CostView:
        """Return the sum of the amounts, in the group of `self`. Unknown energy counts as none beside known energy."""
        sums: dict[str, Any] = {}
        for name in self.__struct_fields__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if not isinstance(mine, str):
                sums[name] = mine if theirs is None else theirs if mine is None else mine + theirs
        return msgspec.structs.replace(self, **sums)


class BudgetView(msgspec.Struct, frozen=True, kw_only=True):
    """A budget of this UTC month, and the amount spent. If it `stops`, calls are refused once it is used up."""

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
    """A mark on the time line. `subject` is the object of the event, such as ``function:prod/search/predict``."""

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


class UsageView(msgspec.Struct, frozen=True, kw_only=True):
    """The usage of one function's calls by one API key on one UTC day, such as 2026-11-21."""

    day: str
    function: str
    key: str
    usage: Usage
