"""GPU reports of all nodes: the latest report of each, for `/v1/nodes` and for metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from gpufn_core.domain.devices.device_metrics import DeviceMetrics
from gpufn_core.protocol import subjects
from gpufn_core.protocol.reports import DeviceReport
from gpufn_gateway.nodes.latest_reports import LatestReports
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.typed_handler import decoded
from gpufn_platform.process.clock import Clock

FRESH_S: Final = 10.0


class DeviceReports:
    """`on_report` is called with each report."""

    def __init__(self, clock: Clock) -> None:
        self.latest = LatestReports[DeviceReport](clock, FRESH_S)
        self.on_report: Callable[[DeviceReport], None] = lambda report: None

    def start(self, bus: Bus) -> None:
        bus.subscribe(subjects.DEVICE_REPORTS, decoded(msgspec.msgpack.Decoder(DeviceReport), self.receive))

    def receive(self, report: DeviceReport) -> None:
        self.latest.put(report)
        self.on_report(report)

    def of(self, node: str) -> tuple[DeviceMetrics, ...]:
        """Return the metrics of a node's GPUs. Empty without GPUs, or without a recent report."""
        report = self.latest.get(node)
        return () if report is None else report.devices
