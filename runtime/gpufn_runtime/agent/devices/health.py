"""Whether a GPU can be used, from its error events and its metrics. Pure.

The driver tells of errors by number (Xid). Those that a program causes say nothing of the GPU; the rest are of the GPU,
and one that nobody has heard of keeps new workers away for a while.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

from gpufn_core.domain.device import Health
from gpufn_core.domain.device_metrics import DeviceMetrics
from gpufn_runtime.agent.devices.base import Trouble
from gpufn_runtime.agent.devices.sampling import HARDWARE_THERMAL

HOT_C = 85
QUIET_S = 600.0  # after the last error that is not final


class XidKind(enum.Enum):
    PROGRAM = "program"  # a fault of what runs there
    PASSING = "passing"  # of the GPU; it works on
    FINAL = "final"  # the GPU has to be reset, or replaced


XIDS: dict[int, tuple[XidKind, str]] = {
    8: (XidKind.PROGRAM, "a kernel ran for too long"),
    13: (XidKind.PROGRAM, "an illegal address or instruction in a kernel"),
    31: (XidKind.PROGRAM, "an access to memory that is not there"),
    32: (XidKind.PROGRAM, "broken commands from a program"),
    43: (XidKind.PROGRAM, "a program's channel was stopped"),
    45: (XidKind.PROGRAM, "a program was ended while it ran"),
    48: (XidKind.FINAL, "a double-bit memory error"),
    61: (XidKind.FINAL, "the GPU's own controller failed"),
    62: (XidKind.FINAL, "the GPU's own controller halted"),
    63: (XidKind.PASSING, "a row of memory is to be remapped"),
    64: (XidKind.FINAL, "a row of memory could not be remapped"),
    68: (XidKind.PROGRAM, "a video decoder was stopped"),
    69: (XidKind.PROGRAM, "a program used a class that is not there"),
    74: (XidKind.PASSING, "an NVLink failed"),
    79: (XidKind.FINAL, "it has fallen off the bus"),
    92: (XidKind.PASSING, "many single-bit memory errors"),
    94: (XidKind.PASSING, "a memory error that one program saw"),
    95: (XidKind.FINAL, "a memory error that any program may have seen"),
    109: (XidKind.PROGRAM, "a program's context switch took too long"),
    119: (XidKind.FINAL, "its firmware does not answer"),
    120: (XidKind.FINAL, "its firmware failed"),
    140: (XidKind.FINAL, "a memory error that was not recovered from"),
    143: (XidKind.FINAL, "it could not be started"),
}


_SIGNS: tuple[tuple[Callable[[DeviceMetrics], object], Health, str], ...] = (
    (lambda metrics: metrics.rows_failed, Health.FAILED, "rows of its memory cannot be remapped"),
    (lambda metrics: metrics.rows_pending, Health.DEGRADED, "rows of its memory are remapped at its next reset"),
    (
        lambda metrics: HARDWARE_THERMAL in metrics.clock_limits,
        Health.DEGRADED,
        "it is so hot that its hardware slows it down",
    ),
    (lambda metrics: (metrics.temperature_c or 0) >= HOT_C, Health.DEGRADED, f"it is hot, {HOT_C} °C or more"),
)


def kind_of(xid: int) -> XidKind:
    return XIDS[xid][0] if xid in XIDS else XidKind.PASSING


def describe(xid: int) -> str:
    return f"Xid {xid}: {XIDS[xid][1]}" if xid in XIDS else f"Xid {xid}"


class HealthRecord:
    """One GPU's. What is final stays until the agent starts again, which a reset of the GPU asks for anyway."""

    def __init__(self) -> None:
        self.xids: dict[str, int] = {}
        self._final = ""
        self._passing = ""
        self._passing_at = 0.0
        self._trouble: Trouble | None = None
        self._metrics: DeviceMetrics | None = None
        self._uncorrected: int | None = None  # memory errors, when they were last told

    def on_xid(self, xid: int, now: float) -> None:
        self.xids[str(xid)] = self.xids.get(str(xid), 0) + 1
        match kind_of(xid):
            case XidKind.FINAL:
                self._final = self._final or describe(xid)
            case XidKind.PASSING:
                self._passing, self._passing_at = describe(xid), now
            case XidKind.PROGRAM:
                pass

    def on_sample(self, metrics: DeviceMetrics | None, trouble: Trouble | None, now: float) -> None:
        self._metrics, self._trouble = metrics, trouble
        count = metrics.ecc_uncorrected if metrics is not None else None
        if count is not None:
            if self._uncorrected is not None and count > self._uncorrected:
                self._passing, self._passing_at = "its memory had an error that was not corrected", now
            self._uncorrected = count

    def judge(self, now: float) -> tuple[Health, str]:
        """With the reason, empty when there is nothing to say."""
        if self._final:
            return Health.FAILED, self._final
        if self._trouble is not None:
            return self._trouble.health, self._trouble.reason
        if self._metrics is not None:
            for shows, health, reason in _SIGNS:
                if shows(self._metrics):
                    return health, reason
        if self._passing and now - self._passing_at < QUIET_S:
            return Health.DEGRADED, self._passing
        return Health.HEALTHY, ""
