"""Search and order of the list of functions. Pure."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import msgspec

from gpufn_core.domain.revision import Function
from gpufn_core.protocol.reports import FunctionStatus
from gpufn_gateway.console.live.findings import of_function
from gpufn_gateway.console.live.rates import Rates


class Row(NamedTuple):
    function: Function
    status: FunctionStatus
    rates: Rates


class Show(enum.StrEnum):
    """Which functions a list has: with findings, with calls in the last minute, or with workers."""

    ALL = "all"
    FINDINGS = "findings"
    CALLED = "called"
    RUNNING = "running"


class Sort(enum.StrEnum):
    NAME = "name"
    CALLS = "calls"
    ERRORS = "errors"
    P99 = "p99"
    QUEUED = "queued"
    WORKERS = "workers"


class Query(msgspec.Struct, frozen=True):
    """`search` is a part of the name; words may stand in any order."""

    search: str = ""
    show: Show = Show.ALL
    sort: Sort = Sort.NAME
    offset: int = 0
    limit: int = 100

    def matches(self, row: Row) -> bool:
        name = row.function.name
        if not all(word in name for word in self.search.lower().split()):
            return False
        match self.show:
            case Show.ALL:
                return True
            case Show.FINDINGS:
                return bool(of_function(row.status, row.rates))
            case Show.CALLED:
                return row.rates.calls_per_s > 0
            case Show.RUNNING:
                return workers(row) > 0


def workers(row: Row) -> int:
    """Return the number of workers in any state."""
    return sum(msgspec.structs.astuple(row.status.workers))


# The largest first, but names in their order.
ORDERS: Final[dict[Sort, Callable[[Row], tuple[Any, ...]]]] = {
    Sort.NAME: lambda row: (row.function.name,),
    Sort.CALLS: lambda row: (-row.rates.calls_per_s, row.function.name),
    Sort.ERRORS: lambda row: (-(row.rates.error_share or 0.0), -row.rates.errors_per_s, row.function.name),
    Sort.P99: lambda row: (-(row.rates.p99_s or 0.0), row.function.name),
    Sort.QUEUED: lambda row: (-(row.status.queued or 0), row.function.name),
    Sort.WORKERS: lambda row: (-workers(row), row.function.name),
}
