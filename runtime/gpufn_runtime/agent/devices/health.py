"""Health of a GPU, from its error events and metrics. Pure.

The driver reports errors by number (Xid). Errors that a program causes say nothing about the GPU. All others concern
the GPU; an unknown error keeps new workers away for a while.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

from gpufn_core.domain.device import Health
from gpufn_core.domain.device_metrics import DeviceMetrics
from gpufn_runtime.agent.devices.base import HealthCondition
from gpufn_runtime.agent.devices.sampling import HARDWARE_THERMAL

HOT_C = 85
QUIET_S = 600.0  # a GPU is degraded for this time after a non-final error


class XidKind(enum.Enum):
    PROGRAM = "program"  # caused by a program
    PASSING = "passing"  # an error of the GPU, which keeps working
    FINAL = "final"  # the GPU must be reset or replaced


XIDS: dict[int, tuple[XidKind, str]] = {
    8: (XidKind.PROGRAM, "a kernel ran for too long"),
    13: (XidKind.PROGRAM, "an illegal address or instruction in a kernel"),
    31: (XidKind.PROGRAM, "an access to an invalid memory address"),
    32: (XidKind.PROGRAM, "invalid commands from a program"),
    43: (XidKind.PROGRAM, "a program's channel was stopped"),
    45: (XidKind.PROGRAM, "a program was killed while it ran"),
    48: (XidKind.FINAL, "a double-bit memory error"),
    61: (XidKind.FINAL, "the GPU's own controller failed"),
    62: (XidKind.FINAL, "the GPU's own controller halted"),
    63: (XidKind.PASSING, "a memory row will be remapped"),
    64: (XidKind.FINAL, "a memory row could not be remapped"),
    68: (XidKind.PROGRAM, "a video decoder was stopped"),
    69: (XidKind.PROGRAM, "a program used an unsupported class"),
    74: (XidKind.PASSING, "an NVLink failed"),
    79: (XidKind.FINAL, "it has fallen off the bus"),
    92: (XidKind.PASSING, "many single-bit memory errors"),
    94: (XidKind.PASSING, "a contained memory error, in one program"),
    95: (XidKind.FINAL, "an uncontained memory error, possibly in any program"),
    109: (XidKind.PROGRAM, "a program's context switch took too long"),
    119: (XidKind.FINAL, "its firmware does not answer"),
    120: (XidKind.FINAL, "its firmware failed"),
    140: (XidKind.FINAL, "an unrecovered memory error"),
    143: (XidKind.FINAL, "it could not be started"),
}


_CHECKS: tuple[tuple[Callable[[DeviceMetrics], object], Health, str], ...] = (
    (lambda metrics: metrics.rows_failed, Health.FAILED, "memory rows cannot be remapped"),
    (lambda metrics: metrics.rows_pending, Health.DEGRADED, "memory rows will be remapped at the next reset"),
    (
        lambda metrics: HARDWARE_THERMAL in metrics.clock_limits,
        Health.DEGRADED,
        "the hardware slows it down because of heat",
    ),
    (lambda metrics: (metrics.temperature_c or 0) >= HOT_C, Health.DEGRADED, f"it is hot, {HOT_C} °C or more"),
)


def kind_of(xid: int) -> XidKind:
    return XIDS[xid][0] if xid in XIDS else XidKind.PASSING


def describe(xid: int) -> str:
    return f"Xid {xid}: {XIDS[xid][1]}" if xid in XIDS else f"Xid {xid}"


class HealthRecord:
    """Errors and metrics of one GPU. A final error stays until the agent restarts, which a GPU reset requires
    anyway."""

    def __init__(self) -> None:
        self.xids: dict[str, int] = {}
        self._final = ""
        self._passing = ""
        self._passing_at = 0.0
        self._trouble: HealthCondition | None = None
        self._metrics: DeviceMetrics | None = None
        self._uncorrected: int | None = None  # memory errors, as last reported

    def on_xid(self, xid: int, now: float) -> None:
        self.xids[str(xid)] = self.xids.get(str(xid), 0) + 1
        match kind_of(xid):
            case XidKind.FINAL:
                self._final = self._final or describe(xid)
            case XidKind.PASSING:
                self._passing, self._passing_at = describe(xid), now
            case XidKind.PROGRAM:
                pass

    def on_sample(self, metrics: DeviceMetrics | None, trouble: HealthCondition | None, now: float) -> None:
        self._metrics, self._trouble = metrics, trouble
        count = metrics.ecc_uncorrected if metrics is not None else None
        if count is not None:
            if self._uncorrected is not None and count > self._uncorrected:
                self._passing, self._passing_at = "an uncorrected memory error", now
            self._uncorrected = count

    def evaluate(self, now: float) -> tuple[Health, str]:
        """Return the health and its reason, which is empty for a healthy GPU."""
        if self._final:
            return Health.FAILED, self._final
        if self._trouble is not None:
            return self._trouble.health, self._trouble.reason
        if self._metrics is not None:
            for applies, health, reason in _CHECKS:
                if applies(self._metrics):
                    return health, reason
        if self._passing and now - self._passing_at < QUIET_S:
            return Health.DEGRADED, self._passing
        return Health.HEALTHY, ""
