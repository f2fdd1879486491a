"""Figures of this gateway's process: its controller, its audit log, its certificates."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from gpufn_gateway.audit.log import AuditLog
from gpufn_gateway.controller.loop import Controller
from gpufn_gateway.metrics.families import Families
from gpufn_gateway.metrics.histogram import Histogram
from gpufn_gateway.metrics.telemetry import Fill
from gpufn_platform.bus.connection import Bus


@dataclass(frozen=True, kw_only=True)
class GatewaySeries:
    """`limits_used` returns the used part of each limit, by holder and name, of the holders that this gateway knows.
    `certificate_ends_at` returns when the gateway's own certificate ends, in unix seconds; None without TLS. `store`
    is the folder of a bus on this machine. If its disk is full, nothing leads, so each gateway there exposes its size.
    """

    controller: Controller
    audit: AuditLog
    bus: Bus
    limits_used: Callable[[], Iterable[tuple[str, str, float]]]
    certificate_ends_at: Callable[[], float | None]
    store: Path | None

    def snapshot(self) -> Fill:
        """A histogram and the limits are copied: the rest are single values."""
        return functools.partial(self._fill, self.controller.step_seconds.copy(), tuple(self.limits_used()))

    def _fill(self, step_seconds: Histogram, limits: tuple[tuple[str, str, float], ...], families: Families) -> None:
        add = families.add
        for holder, limit, ratio in limits:
            add("gpufn_limit_used_ratio", ratio, holder, limit)
        add("gpufn_controller_leading", self.controller.leads())
        families.add_histogram("gpufn_controller_step_seconds", step_seconds)
        add("gpufn_bus_connected", self.bus.connected)
        add("gpufn_audit_records_waiting", self.audit.waiting)
        add("gpufn_audit_failures", self.audit.failures)
        add("gpufn_certificate_expiry_timestamp_seconds", self.certificate_ends_at(), "gateway")
        add("gpufn_certificate_expiry_timestamp_seconds", self.bus.certificate_ends_at, "bus")
        if self.store is not None:
            with contextlib.suppress(OSError):
                disk = os.statvfs(self.store)
                add("gpufn_bus_disk_free_bytes", disk.f_bavail * disk.f_frsize)
                add("gpufn_bus_disk_size_bytes", disk.f_blocks * disk.f_frsize)
