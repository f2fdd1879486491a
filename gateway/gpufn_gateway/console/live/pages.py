"""The live pages of the console. A page returns a snapshot: values of JSON, for one principal.

A page reads what the gateway has in memory, so a snapshot costs no request to the bus. With 10,000 functions it takes
some 30 milliseconds.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gpufn_core.domain.revision import Function
from gpufn_core.protocol.reports import FunctionStatus, WorkerCounts
from gpufn_core.spec.naming.names import HOME
from gpufn_core.spec.naming.variant_names import is_variant
from gpufn_gateway.auth.access import Principal
from gpufn_gateway.auth.scopes import READ
from gpufn_gateway.console.live import findings as found
from gpufn_gateway.console.live.findings import Finding
from gpufn_gateway.console.live.function_order import ORDERS, Query, Row, Sort
from gpufn_gateway.console.live.rates import IDLE
from gpufn_gateway.console.live.views import (
    View,
    counts_view,
    drain_view,
    function_row,
    gpus_view,
    node_view,
    rates_view,
    split_view,
    sum_of,
    workers_of,
)
from gpufn_gateway.console.live.window import Window
from gpufn_gateway.functions.registry import Registry

_MAX_FINDINGS: Final = 50
_MAX_APPS: Final = 50
_BUSIEST: Final = 20
_DEFAULT_APP: Final = "/".join(HOME)
_NO_WORKERS: Final = WorkerCounts()


@dataclass(kw_only=True, eq=False)
class Pages:
    """`why_not_ready` returns the reason why calls cannot be served yet, or None."""

    registry: Registry
    window: Window
    why_not_ready: Callable[[], str | None]

    def overview(self, principal: Principal) -> View:
        """Return the totals, the findings, and the apps and functions with the most calls."""
        rows = self._readable(principal)
        findings = [each for row in rows for each in found.of_function(row.status, row.rates)]
        nodes: View | None = None
        if principal.has_scope(READ):
            findings += self._of_the_platform()
            nodes = {"count": len(self.registry.live_nodes()), "gpus": self._gpus()}
        apps: dict[str, list[Row]] = {}
        for row in rows:
            apps.setdefault(row.function.name.rpartition("/")[0] or _DEFAULT_APP, []).append(row)
        sums = {name: self._sum(group) for name, group in apps.items()}
        first = heapq.nsmallest(_MAX_APPS, sums, key=lambda name: (-sums[name]["calls_per_s"], name))
        return {
            "total": self._sum(rows) | {"apps": len(apps)},
            "nodes": nodes,
            "findings": found.sorted_by_severity(findings)[:_MAX_FINDINGS],
            "apps": {name: sums[name] for name in first},
            "busiest": self._views(heapq.nsmallest(_BUSIEST, rows, key=ORDERS[Sort.CALLS])),
        }

    def functions(self, principal: Principal, query: Query) -> View:
        """Return the part of the list of functions that the query names."""
        rows = self._readable(principal)
        matching = [row for row in rows if query.matches(row)]
        matching.sort(key=ORDERS[query.sort])
        shown = matching[query.offset : query.offset + query.limit]
        return {
            "all": len(rows),
            "matching": len(matching),
            "offset": query.offset,
            "order": [row.function.name for row in shown],
            "rows": self._views(shown),
        }

    def function(self, principal: Principal, name: str) -> View:
        """Return what changes by itself on the page of a function. Raises FunctionNotFound."""
        function = self.registry.function(name)
        status = self._status(function, principal)
        rates = self.window.of(name)
        return {
            "active": function.active,
            "serving": function.serving,
            "split": split_view(function),
            "updated_at": function.updated_at,
            "min_workers": function.min_workers,
            "max_workers": function.max_workers,
            "workers": counts_view(status.workers),
            "wanted": status.wanted,
            "queued": status.queued,
            "running": status.running,
            "reason": status.reason,
            "terms": status.terms,
            "waiting": status.waiting,
            "service_s": status.service_s,
            "cold_start_s": status.cold_start_s,
            "last_start": status.last_start,
            "next": status.next,
            "findings": found.of_function(status, rates),
            "processes": workers_of(name, self.registry.live_runners(), self.registry.live_nodes()),
            **rates_view(rates),
        }

    def nodes(self) -> View:
        """Return the nodes that report, with their GPUs and workers, and the drained nodes that do not."""
        reports = self.registry.live_nodes()
        views = {
            node.node: node_view(
                node,
                self.registry.device_reports.of(node.node),
                self.registry.trends,
                self.registry.drains.get(node.node),
            )
            for node in reports
        }
        silent = {drain.node: drain_view(drain) for drain in self.registry.silent_drains()}
        return {"findings": self._of_the_platform(), "nodes": views, "not_reporting": silent}

    def _readable(self, principal: Principal) -> list[Row]:
        """Return the functions that the principal may read. A variant belongs to the page of its function."""
        may_read_all = principal.has_scope(READ)
        return [
            Row(function, self._status(function, principal), self.window.of(name))
            for name, function in self.registry.functions.items()
            if not is_variant(name) and (may_read_all or principal.may_read(name))
        ]

    def _status(self, function: Function, principal: Principal) -> FunctionStatus:
        status = self.registry.status_for(principal, function.name)
        return status or FunctionStatus(function=function.name, serving=function.serving, workers=_NO_WORKERS)

    def _views(self, rows: Sequence[Row]) -> dict[str, View]:
        views = {}
        for function, status, rates in rows:
            revision = self.registry.revisions.get(function.name, {}).get(function.serving)
            findings = found.of_function(status, rates)
            views[function.name] = function_row(function, revision, status, rates, findings)
        return views

    def _sum(self, rows: Sequence[Row]) -> View:
        return {
            "functions": len(rows),
            "workers": counts_view(sum_of(row.status.workers for row in rows)),
            "queued": sum(filter(None, (row.status.queued for row in rows))),
            "running": sum(filter(None, (row.status.running for row in rows))),
            **rates_view(self.window.of_all(row.function.name for row in rows if row.rates is not IDLE)),
        }

    def _of_the_platform(self) -> list[Finding]:
        nodes = self.registry.live_nodes()
        return [*found.of_platform(self.why_not_ready()), *(each for node in nodes for each in found.of_node(node))]

    def _gpus(self) -> dict[str, Any]:
        pairs = []
        for node in self.registry.live_nodes():
            metrics = {each.uuid: each for each in self.registry.device_reports.of(node.node)}
            pairs += [(device, metrics.get(device.uuid)) for device in node.devices]
        return gpus_view(pairs)
