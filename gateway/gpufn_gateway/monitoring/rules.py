"""Rules for Prometheus: recorded error ratios, and alerts.

Figures of the platform come from one gateway. For up to a scrape interval after a change of the leader, the last
sample of the old leader is still visible beside the first of the new one. So gauges are joined by `max`, not `sum`.
"""

from __future__ import annotations

import enum
from typing import Any, Final, NamedTuple

RUNBOOK: Final = "docs/alerts.md"
OBJECTIVE: Final = 0.999  # share of the calls of a function
_BUDGET: Final = 1 - OBJECTIVE
GOOD: Final = "succeeded|rejected|cancelled|invocation_cancelled"  # outcomes that do not count against the error budget
_MIN_CALLS: Final = 20  # with fewer calls in the long window, a ratio is meaningless
WINDOWS: Final = ("5m", "30m", "1h", "6h")

DEFAULT_TEMPERATURE_C: Final = 85  # for a GPU that reports no limit
SCALE_OUT: Final = 0.9
SCALE_IN: Final = 0.3
FRAGMENTED: Final = 0.3
DRAIN_BELOW: Final = 0.5
_GPU: Final = "node, gpu, kind"


class Severity(enum.StrEnum):
    CRITICAL = "critical"  # calls fail or will soon: wake somebody
    WARNING = "warning"  # look at it today
    INFO = "info"  # for capacity planning


class Recorded(NamedTuple):
    name: str
    expression: str


class Alert(NamedTuple):
    """`duration` is how long the condition must hold. `fault` is the fault that makes it fire, for its test."""

    name: str
    expression: str
    duration: str
    severity: Severity
    summary: str
    fault: str


def _recorded(window: str) -> Recorded:
    calls = f"sum by (function) (rate(gpufn_calls_total[{window}]))"
    # `or 0 *` makes the ratio 0, not absent, for a function without errors.
    bad = f'(sum by (function) (rate(gpufn_calls_total{{outcome!~"{GOOD}"}}[{window}])) or 0 * {calls})'
    return Recorded(f"gpufn:call_error_ratio:rate{window}", f"{bad} / ({calls} > 0)")


def _burns(long: str, short: str, times: float) -> str:
    """Both windows burn: the long window shows that the failures matter, the short window that they continue."""
    limit = f"{times * _BUDGET:.4g}"
    return (
        f"gpufn:call_error_ratio:rate{long} > {limit} and gpufn:call_error_ratio:rate{short} > {limit}"
        f" and sum by (function) (increase(gpufn_calls_total[{long}])) > {_MIN_CALLS}"
    )


RECORDED: Final = tuple(_recorded(window) for window in WINDOWS)
ALERTS: Final = (
    Alert("GpufnNoLeader", "(max(gpufn_controller_leading) or vector(0)) == 0", "30s", Severity.CRITICAL,
          "No controller leads: no worker is started or stopped", "the lease cannot be stored, or no gateway runs"),
    Alert("GpufnBusDisconnected", "min by (instance) (gpufn_bus_connected) == 0", "1m", Severity.CRITICAL,
          "Gateway {{ $labels.instance }} is not connected to the bus", "the bus is stopped"),
    Alert("GpufnBusDiskFull",
          "min(gpufn_bus_disk_free_bytes / gpufn_bus_disk_size_bytes) < 0.1"
          " or max(gpufn_bus_storage_bytes / gpufn_bus_storage_limit_bytes) > 0.9"
          ' or max(gpufn_bus_stream_bytes{stream=~"GPUFN_(SYNC|ASYNC|QUEUES)"} / gpufn_bus_stream_limit_bytes) > 0.9',
          "1m", Severity.CRITICAL, "The disk of the bus, or one of its queues, is almost full", "the disk is filled"),
    Alert("GpufnErrorBudgetFast", _burns("1h", "5m", 14.4), "2m", Severity.CRITICAL,
          "{{ $labels.function }} uses up its error budget of a month in two days", "a function raises"),
    Alert("GpufnErrorBudgetSlow", _burns("6h", "30m", 6), "15m", Severity.WARNING,
          "{{ $labels.function }} uses up its error budget of a month in five days", "a function raises now and then"),
    Alert("GpufnQueueGrows",
          "max by (function) (gpufn_function_oldest_wait_seconds) > 60"
          " and max by (function) (delta(gpufn_function_queued_calls[5m])) > 0",
          "2m", Severity.WARNING, "Calls of {{ $labels.function }} wait, and their queue grows",
          "more calls than capacity"),
    Alert("GpufnStartsFail",
          "max by (function) (gpufn_function_start_blocked) == 1"
          ' or sum by (function) (increase(gpufn_starts_total{result="failed"}[10m])) >= 3',
          "1m", Severity.WARNING, "Workers of {{ $labels.function }} fail to start",
          "a module that cannot be imported"),
    Alert("GpufnNodeSilent", "max by (node) (gpufn_node_up) == 0", "1m", Severity.WARNING,
          "Node {{ $labels.node }} does not report", "the agent is killed"),
    Alert("GpufnGpuQuarantined", f'max by ({_GPU}, state) (gpufn_gpu_health{{state=~"degraded|failed"}}) == 1', "1m",
          Severity.WARNING, "GPU {{ $labels.gpu }} of node {{ $labels.node }} is {{ $labels.state }}", "a failed GPU"),
    Alert("GpufnGpuHot",
          f"max by ({_GPU}) (gpufn_gpu_temperature_celsius) >= (max by ({_GPU}) (gpufn_gpu_temperature_limit_celsius)"
          f" or max by ({_GPU}) (gpufn_gpu_temperature_celsius) * 0 + {DEFAULT_TEMPERATURE_C})",
          "2m", Severity.WARNING, "GPU {{ $labels.gpu }} of node {{ $labels.node }} is hot", "a hot GPU"),
    Alert("GpufnDrain",
          f"min by ({_GPU}) (gpufn_gpu_health_ratio) < {DRAIN_BELOW} or min by (node) (gpufn_node_health_ratio)"
          f" < {DRAIN_BELOW}",
          "5m", Severity.WARNING, "{{ $labels.gpu }} of node {{ $labels.node }}: drain it, see `gpufn nodes`",
          "a sick GPU"),
    Alert("GpufnCertificateEnds",
          "min by (certificate) (gpufn_certificate_expiry_timestamp_seconds) - time() < 14 * 86400", "10m",
          Severity.WARNING, "The TLS certificate of the {{ $labels.certificate }} ends within 14 days",
          "a short certificate"),
    Alert("GpufnAuditFails",
          "max(gpufn_audit_records_waiting) > 0 and sum(increase(gpufn_audit_failures_total[5m])) > 0",
          "1m", Severity.WARNING, "Audit records cannot be stored: administrative requests are refused",
          "the bus stores nothing"),
    Alert("GpufnBuildsWait", "max(gpufn_build_oldest_wait_seconds) > 1800", "5m", Severity.WARNING,
          "A build has waited for half an hour", "no builder runs"),
    Alert("GpufnLimitUsed", "max by (holder, limit) (gpufn_limit_used_ratio) > 0.9", "5m", Severity.INFO,
          "{{ $labels.holder }} has used 90 % of its limit {{ $labels.limit }}", "a key at its limit"),
    Alert("GpufnLogsDropped", "sum by (node) (increase(gpufn_log_dropped_lines_total[10m])) > 0", "1m", Severity.INFO,
          "Node {{ $labels.node }} drops log lines of functions", "a function that prints without end"),
    Alert("GpufnFragmented", f"max by (node) (gpufn_node_gpu_fragmentation_ratio) > {FRAGMENTED}", "15m", Severity.INFO,
          "Free GPU memory of node {{ $labels.node }} is on GPUs in use", "small shares on each GPU"),
    Alert("GpufnScaleOut", f"avg(max by ({_GPU}) (gpufn_gpu_utilisation_ratio)) > {SCALE_OUT}", "10m", Severity.INFO,
          "The GPUs are busy: add some", "busy GPUs"),
    Alert("GpufnScaleIn", f"avg(max by ({_GPU}) (gpufn_gpu_utilisation_ratio)) < {SCALE_IN}", "1h", Severity.INFO,
          "The GPUs are mostly idle: remove some", "idle GPUs"),
    Alert("GpufnSeriesDropped", "max(gpufn_metrics_dropped_series) > 0", "5m", Severity.INFO,
          "There are more series than the bounds of /metrics allow", "more than 1,000 functions"),
)  # fmt: skip


def document() -> dict[str, Any]:
    """Return the content of the rule file."""
    return {
        "groups": [
            {
                "name": "gpufn-recorded",
                "interval": "30s",
                "rules": [{"record": each.name, "expr": each.expression} for each in RECORDED],
            },
            {"name": "gpufn-alerts", "rules": [_alert(each) for each in ALERTS]},
        ]
    }


def _alert(alert: Alert) -> dict[str, Any]:
    return {
        "alert": alert.name,
        "expr": alert.expression,
        "for": alert.duration,
        "labels": {"severity": alert.severity.value},
        "annotations": {"summary": alert.summary, "runbook": f"{RUNBOOK}#{alert.name.lower()}"},
    }
