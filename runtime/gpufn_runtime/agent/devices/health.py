"""Health of a GPU, from its error events and metrics. Pure.

The driver reports errors by number (Xid). Errors that a program causes do not indicate a fault of the GPU. All others
concern the GPU; an unknown error keeps new workers away for a while. From release 565 on, the driver also reports the
recovery that it requests. Sources: NVIDIA, "GPU Debug Guidelines" and "XID Errors"; NVML's
nvmlDeviceGpuRecoveryAction_t.
"""

from __future__ import annotations

import enum

from gpufn_core.domain.devices.device import Health
from gpufn_core.domain.devices.device_metrics import DeviceMetrics
from gpufn_runtime.agent.devices.base import HealthCondition
from gpufn_runtime.agent.devices.sampling import HARDWARE_THERMAL

QUIET_S = 600.0  # a GPU is degraded for this time after a non-final error
COOLING_S = 30.0  # and for this time after it was too hot, so that one degree up and down does not change its health
RECOVERY_ACTION_CHANGED = 154  # the Xid


class XidKind(enum.Enum):
    PROGRAM = "program"  # caused by a program
    NOTICE = "notice"  # no error
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
    RECOVERY_ACTION_CHANGED: (XidKind.NOTICE, "its recovery action changed"),
}
_RECOVERY_ACTIONS = {  # that concern workers
    "gpu_reset": HealthCondition(Health.FAILED, "the driver requests a reset of it"),
    "bus_reset": HealthCondition(Health.FAILED, "the driver requests a reset of its bus"),
    "drain_and_reset": HealthCondition(Health.FAILED, "the driver requests to drain and reset it"),
    "node_reboot": HealthCondition(Health.FAILED, "the driver requests a reboot of the node"),
    "system_reboot": HealthCondition(Health.FAILED, "the driver requests a reboot of the system"),
    "drain_p2p": HealthCondition(Health.DEGRADED, "the driver requests to drain its peer-to-peer traffic"),
    "recover_imex_domain": HealthCondition(Health.DEGRADED, "the driver requests a recovery of its IMEX domain"),
}
NO_RECOVERY = "none"


def kind_of(xid: int) -> XidKind:
    return XIDS[xid][0] if xid in XIDS else XidKind.PASSING


def describe(xid: int) -> str:
    return f"Xid {xid}: {XIDS[xid][1]}" if xid in XIDS else f"Xid {xid}"


class HealthRecord:
    """Errors and metrics of one GPU. A final error stays while the agent runs. `failure` is its reason, which an
    earlier agent may have recorded."""

    def __init__(self, failure: str = "") -> None:
        self.xids: dict[str, int] = {}
        self.last_xid: int | None = None
        self.failure = failure
        self._passing = ""
        self._passing_at = 0.0
        self._hot = ""
        self._hot_at = 0.0
        self._trouble: HealthCondition | None = None
        self._metrics: DeviceMetrics | None = None
        self._uncorrected: int | None = None  # memory errors, as last reported

    def on_xid(self, xid: int, now: float) -> None:
        self.xids[str(xid)] = self.xids.get(str(xid), 0) + 1
        self.last_xid = xid
        match kind_of(xid):
            case XidKind.FINAL:
                self.failure = self.failure or describe(xid)
            case XidKind.PASSING:
                self._passing, self._passing_at = describe(xid), now
            case XidKind.PROGRAM | XidKind.NOTICE:
                pass

    def on_sample(self, metrics: DeviceMetrics | None, trouble: HealthCondition | None, now: float) -> None:
        self._metrics, self._trouble = metrics, trouble
        if metrics is None:
            return
        if (count := metrics.ecc_uncorrected) is not None:
            if self._uncorrected is not None and count > self._uncorrected:
                self._passing, self._passing_at = "an uncorrected memory error", now
            self._uncorrected = count
        if reason := _too_hot(metrics):
            self._hot, self._hot_at = reason, now

    def evaluate(self, now: float) -> tuple[Health, str]:
        """Return the health and its reason, which is empty for a healthy GPU."""
        if self.failure:
            return Health.FAILED, self.failure
        if (condition := self._trouble or _condition(self._metrics)) is not None:
            return condition.health, condition.reason
        if self._hot and now - self._hot_at < COOLING_S:
            return Health.DEGRADED, self._hot
        if self._passing and now - self._passing_at < QUIET_S:
            return Health.DEGRADED, self._passing
        return Health.HEALTHY, ""


def _condition(metrics: DeviceMetrics | None) -> HealthCondition | None:
    if metrics is None:
        return None
    if metrics.rows_failed:
        return HealthCondition(Health.FAILED, "memory rows cannot be remapped")
    return _RECOVERY_ACTIONS.get(metrics.recovery_action or NO_RECOVERY)


def _too_hot(metrics: DeviceMetrics) -> str:
    """Return why the GPU counts as hot; empty if it does not. A GPU that reports no limit is hot if the hardware slows
    it down."""
    if HARDWARE_THERMAL in metrics.clock_limits:
        return "the hardware slows it down because of heat"
    temperature_c, limit_c = metrics.temperature_c, metrics.temperature_limit_c
    if temperature_c is not None and limit_c is not None and temperature_c >= limit_c:
        return f"it is hot: {limit_c} °C or more"
    return ""
