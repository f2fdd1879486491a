"""Route of costs: what functions, apps, teams, keys and days cost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gpufn_core.domain.usage import UsageKey
from gpufn_core.errors import InvalidInput
from gpufn_core.spec.naming.names import parts_of
from gpufn_gateway.auth.access import Principal
from gpufn_gateway.auth.scopes import READ
from gpufn_gateway.costs.attribution import UNUSED, Cost
from gpufn_gateway.costs.budgets import Budgets, BudgetState
from gpufn_gateway.costs.focus import COLUMNS, focus_csv
from gpufn_gateway.costs.ledger import Ledger
from gpufn_gateway.functions.registry import Registry
from gpufn_gateway.routes.access.usage import requested_days
from gpufn_gateway.routes.requests import flag, json_response, principal_of, route
from gpufn_platform.process.clock import Clock

_DEFAULT: Final = ("function",)
_FORMATS: Final = ("json", "focus")
_CSV: Final = "text/csv; charset=utf-8"


class CostRoutes:
    def __init__(self, ledger: Ledger, budgets: Budgets, registry: Registry, clock: Clock) -> None:
        self._ledger = ledger
        self._budgets = budgets
        self._registry = registry
        self._clock = clock

    def routes(self) -> list[Route]:
        return [route("GET", "/v1/costs", self.show, READ, of_functions=True, scans=True)]

    async def show(self, request: Request) -> Response:
        """Return the costs by the columns `by`. GPU time that no worker held is a row without a function, for keys that
        may read everything; with `share_unused` the other rows pay for it. `format=focus` is CSV, by all columns."""
        principal, form = principal_of(request), request.query_params.get("format", "json")
        if form not in _FORMATS:
            raise InvalidInput(f"`format` is json or focus, not {form[:40]!r}", field="format")
        columns = request.query_params.get("by", ",".join(_DEFAULT)).split(",")
        if unknown := [each for each in columns if each not in COLUMNS]:
            raise InvalidInput(f"`by` has {', '.join(COLUMNS)}, not {unknown[0][:40]!r}", field="by")
        rows = await self._rows(request, principal, COLUMNS if form == "focus" else columns)
        prices = self._ledger.prices()
        currency = None if prices is None else prices.currency
        if form == "focus":
            # In a thread: 100,000 rows take seconds.
            return Response(await asyncio.to_thread(focus_csv, rows, currency), media_type=_CSV)
        budgets = [
            msgspec.structs.asdict(state) for state in self._budgets.states.values() if self._may_read(state, principal)
        ]
        return json_response({"currency": currency, "costs": rows, "budgets": budgets})

    async def _rows(self, request: Request, principal: Principal, columns: Sequence[str]) -> list[dict[str, Any]]:
        found = await self._ledger.costs(
            requested_days(request, self._clock), shares_unused=flag(request, "share_unused")
        )
        groups: dict[tuple[str, ...], Cost] = {}
        for key, cost in found.items():
            if principal.has_scope(READ) if key.function == UNUSED else principal.may_read(key.function):
                groups.setdefault(tuple(self._value(key, column) for column in columns), Cost()).add(cost)
        return [
            dict(zip(columns, group, strict=True)) | msgspec.structs.asdict(cost) | {"total": cost.total}
            for group, cost in sorted(groups.items())
        ]

    def _value(self, key: UsageKey, column: str) -> str:
        if key.function == UNUSED:
            return key.day if column == "day" else UNUSED
        match column:
            case "team":
                return self._registry.teams.name_of(key.function)
            case "app":
                env, app, _ = parts_of(key.function)
                return f"{env}/{app}"
        return str(getattr(key, column))

    @staticmethod
    def _may_read(state: BudgetState, principal: Principal) -> bool:
        kind, _, name = state.subject.partition(":")
        return principal.has_scope(READ) if kind == "team" else principal.may_read(name)
