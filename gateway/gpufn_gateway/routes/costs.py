"""Route of costs: what functions, apps, teams, keys and days cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gpufn_core.domain.usage import UsageKey
from gpufn_core.errors import InvalidInput
from gpufn_gateway.auth.access import Principal
from gpufn_gateway.auth.scopes import READ
from gpufn_gateway.costs.attribution import UNUSED, Cost
from gpufn_gateway.costs.budgets import Budgets, BudgetState
from gpufn_gateway.costs.focus import COLUMNS, focus_csv
from gpufn_gateway.costs.groups import grouped
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
        prices = self._ledger.prices()
        currency = None if prices is None else prices.currency
        teams = self._registry.teams.copy()
        budgets = [state for state in self._budgets.states.values() if self._may_read(state, principal)]

        def may_read(function: str) -> bool:
            return principal.has_scope(READ) if function == UNUSED else principal.may_read(function)

        def respond(costs: Mapping[UsageKey, Cost]) -> Response:
            if form == "focus":
                return Response(focus_csv(grouped(costs, COLUMNS, may_read, teams), currency), media_type=_CSV)
            rows = grouped(costs, columns, may_read, teams)
            return json_response({"currency": currency, "costs": rows, "budgets": budgets})

        wanted = requested_days(request, self._clock)
        return await self._ledger.query(wanted, respond, shares_unused=flag(request, "share_unused"))

    @staticmethod
    def _may_read(state: BudgetState, principal: Principal) -> bool:
        kind, _, name = state.subject.partition(":")
        return principal.has_scope(READ) if kind == "team" else principal.may_read(name)
