"""Budgets: compares the costs of this UTC month with them, marks the time line, and refuses calls if one says so.

Every gateway compares for itself once a minute: a budget can be exceeded by what is used within that minute, and within
the ten seconds until runners store usage.
"""

from __future__ import annotations

import asyncio
import datetime
import functools
import logging
from collections.abc import Mapping
from typing import Final

import msgspec

from gpufn_core.domain.usage import day_of, days
from gpufn_core.spec.units import format_money
from gpufn_gateway.background_loop import log_failures
from gpufn_gateway.costs.groups import spent_by_subject
from gpufn_gateway.costs.ledger import Ledger
from gpufn_gateway.costs.prices import Budget
from gpufn_gateway.functions.registry import Registry
from gpufn_gateway.history.blocks import Event, EventKind
from gpufn_gateway.history.index import Index
from gpufn_gateway.history.recorder import Recorder
from gpufn_gateway.problems import KeyLimitExceeded
from gpufn_platform.process.clock import Clock

log = logging.getLogger(__name__)

_INTERVAL_S: Final = 60.0
_FIRST_S: Final = 5.0  # by then the history is loaded
_EVENTS: Final = 5_000  # that are searched for earlier marks


class BudgetState(msgspec.Struct, frozen=True):
    """`subject` is ``team:NAME`` or ``function:NAME``."""

    subject: str
    month: str
    limit: float
    spent: float
    stops: bool

    @property
    def is_used_up(self) -> bool:
        return self.spent >= self.limit


class Budgets:
    def __init__(self, ledger: Ledger, registry: Registry, recorder: Recorder, clock: Clock) -> None:
        self._ledger = ledger
        self._registry = registry
        self._recorder = recorder
        self._clock = clock
        self.states: dict[str, BudgetState] = {}
        self._stopped: dict[str, BudgetState] = {}
        self._marked: set[tuple[str, str]] = set()  # subject and text
        self._knows_marks = False

    async def run(self) -> None:
        """Compare regularly until cancelled."""
        await asyncio.sleep(_FIRST_S)
        while True:
            with log_failures("the check of the budgets"):
                await self.check_all()
            await asyncio.sleep(_INTERVAL_S)

    def check(self, function: str) -> None:
        """Raise KeyLimitExceeded if a budget for this function is used up and stops its calls."""
        if not self._stopped:
            return
        subjects = f"function:{function}", f"team:{self._registry.teams.name_of(function)}"
        for subject in subjects:
            if (state := self._stopped.get(subject)) is not None:
                text = f"The budget of {subject} for {state.month} is used up; see `gpufn cost`."
                raise KeyLimitExceeded(text, self._seconds_to_next_month(), [])

    async def check_all(self) -> None:
        prices = self._ledger.prices()
        budgets = {} if prices is None else prices.budgets
        now = self._clock.time()
        month = day_of(now)[:7]
        spent: Mapping[str, float] = {}
        if budgets:
            read = functools.partial(spent_by_subject, teams=self._registry.teams.copy())
            spent = await self._ledger.query(list(days(f"{month}-01", day_of(now))), read)
        self.states = {
            subject: BudgetState(subject, month, budget.month, spent.get(subject, 0.0), budget.stop)
            for subject, budget in budgets.items()
        }
        self._stopped = {subject: state for subject, state in self.states.items() if state.stops and state.is_used_up}
        currency = "" if prices is None else prices.currency
        for subject, budget in budgets.items():
            await self._mark(subject, budget, currency)

    async def _mark(self, subject: str, budget: Budget, currency: str) -> None:
        state = self.states[subject]
        if state.spent < budget.warn * budget.month:
            return
        consequence = "; its calls are refused" if budget.stop else ""
        reached = f"used up{consequence}" if state.is_used_up else f"used to {budget.warn:.0%}"
        text = f"the budget of {format_money(budget.month)} {currency} for {state.month} is {reached}"
        if not self._knows_marks:
            earlier = await self._recorder.query(_marks)
            self._marked |= earlier
            self._knows_marks = True
        if (subject, text) not in self._marked:
            self._marked.add((subject, text))
            log.warning("%s: %s", subject, text)
            self._recorder.mark(Event(self._clock.time(), EventKind.BUDGET, subject, text))

    def _seconds_to_next_month(self) -> float:
        now = datetime.datetime.fromtimestamp(self._clock.time(), datetime.UTC)
        following = (now.replace(day=1) + datetime.timedelta(days=32)).replace(
            day=1, hour=0, minute=0, second=0, microsecond=0
        )
        return (following - now).total_seconds()


def _marks(index: Index) -> set[tuple[str, str]]:
    return {
        (event.subject, event.text) for _, event in index.events(1 << 53, _EVENTS) if event.kind is EventKind.BUDGET
    }
