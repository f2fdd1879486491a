"""Totals of the runners: the latest report of each node's newest runner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from gpufn_core.protocol import subjects
from gpufn_core.protocol.reports import TotalsReport
from gpufn_gateway.nodes.latest_reports import LatestReports
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.typed_handler import decoded
from gpufn_platform.process.clock import Clock

FRESH_S: Final = 10.0


class TotalsReports:
    """`on_report` is called with each report of a newest runner.

    An old runner may report for a moment beside its successor. If both were used in turns, each change would look like
    a reset of the counters, and all of their value would count again.
    """

    def __init__(self, clock: Clock) -> None:
        self._latest = LatestReports[TotalsReport](clock, FRESH_S)
        self.on_report: Callable[[TotalsReport], None] = lambda report: None

    def start(self, bus: Bus) -> None:
        bus.subscribe(subjects.TOTALS_REPORTS, decoded(msgspec.msgpack.Decoder(TotalsReport), self.receive))

    def receive(self, report: TotalsReport) -> None:
        known = self._latest.get(report.node)
        if known is None or report.runner == known.runner or report.started_at > known.started_at:
            self._latest.put(report)
            self.on_report(report)

    def all(self) -> list[TotalsReport]:
        return self._latest.all()
