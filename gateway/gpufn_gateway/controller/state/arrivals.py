"""The arrivals of functions with `prewarm`. Pure.

A call counts when it starts, as runners report it. Every controller counts, so a new leader knows the last minutes; the
leader stores (`gpufn_gateway.controller.arrival_store`).
"""

from __future__ import annotations

from collections.abc import Set
from typing import Final

from gpufn_gateway.controller.decide.scaling.prewarm import ArrivalHistory, Forecast, expected_call, forecast, slot_of

_AHEAD_SLOTS: Final = 4  # an hour


class Arrivals:
    """`now` is monotonic seconds, as everywhere in the World. Slots are in Unix time, which `observe` receives."""

    def __init__(self) -> None:
        self.histories: dict[str, ArrivalHistory] = {}
        self._forecasts: dict[str, Forecast] = {}
        self._unix_s_at_zero = 0.0

    def observe(self, functions: Set[str], now: float, unix_s: float) -> None:
        """Record that the calls of these functions are observed now. Forget other functions."""
        self._unix_s_at_zero = unix_s - now
        for name in self.histories.keys() - functions:
            del self.histories[name]
            self._forecasts.pop(name, None)
        slot = slot_of(unix_s)
        for name in functions:
            self.histories[name] = self.histories.get(name, ArrivalHistory()).record(slot, is_call=False)

    def record_call(self, function: str, now: float) -> None:
        history = self.histories.get(function)
        if history is not None:
            self.histories[function] = history.record(slot_of(self._unix_s_at_zero + now), is_call=True)

    def merge(self, function: str, stored: ArrivalHistory) -> None:
        """Add the arrivals that an earlier leader stored, unless its clock was ahead."""
        history = self.histories.get(function)
        if history is not None and stored.last <= history.last + _AHEAD_SLOTS:
            self.histories[function] = history.merge(stored)
            self._forecasts.pop(function, None)

    def expected(self, function: str, now: float, lead_s: float) -> str:
        """Return why a call is expected within `lead_s`; "" if none is."""
        history = self.histories.get(function)
        if history is None:
            return ""
        unix_s = self._unix_s_at_zero + now
        known = self._forecasts.get(function)
        if known is None or known.slot != slot_of(unix_s):
            known = self._forecasts[function] = forecast(history, slot_of(unix_s))
        return expected_call(known, history, unix_s, lead_s)
