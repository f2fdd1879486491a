"""Dashboards for Grafana: the fleet, one function, one GPU.

A panel states the condition under which its queries return data: only a running platform with calls, or also a GPU, or
a fault. The test of the queries creates these conditions.
"""

from __future__ import annotations

import enum
from typing import Any, Final, NamedTuple

_WIDTH: Final = 8  # of 24 columns: three panels in a row
_HEIGHT: Final = 7
_RATE: Final = "$__rate_interval"
_OF_FUNCTION: Final = 'function=~"$function"'
_OF_GPU: Final = 'node=~"$node", gpu=~"$gpu"'
_BY_GPU: Final = "node, gpu"


class Needs(enum.StrEnum):
    """A precondition of the data of a query."""

    CALLS = "calls"
    GPU = "gpu"
    FAULT = "fault"
    CLUSTER = "cluster"  # three NATS servers
    TLS = "tls"
    LIMITS = "limits"  # a key with limits


class Panel(NamedTuple):
    """`queries` are pairs of an expression and its legend."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    needs: Needs = Needs.CALLS


class Dashboard(NamedTuple):
    name: str
    title: str
    variables: dict[str, str]  # name -> the query of its values
    panels: tuple[Panel, ...]


def _quantiles(metric: str, labels: str = "") -> tuple[tuple[str, str], ...]:
    rates = f"sum by (le) (rate({metric}_bucket{{{labels}}}[{_RATE}]))"
    return tuple((f"histogram_quantile({part}, {rates})", f"p{round(part * 100)}") for part in (0.5, 0.95, 0.99))


FLEET: Final = Dashboard("fleet", "gpufn fleet", {}, (
    Panel("Ended calls by outcome", "reqps", (
        (f"sum by (outcome) (rate(gpufn_calls_total[{_RATE}]))", "{{outcome}}"),
    )),
    Panel("Attempts of all calls", "reqps", (
        (f"sum by (function) (rate(gpufn_attempts_total[{_RATE}]))", "{{function}}"),
    )),
    Panel("Refused requests", "reqps", (
        (f"sum by (code) (rate(gpufn_refusals_total[{_RATE}]))", "{{code}}"),
    ), Needs.FAULT),
    Panel("Latency of calls", "s", _quantiles("gpufn_call_seconds")),
    Panel("Calls in flight and queued", "short", (
        ("sum(gpufn_calls_in_flight)", "wait for a result"),
        ("sum(max by (function) (gpufn_function_queued_calls))", "queued"),
        ("sum(max by (function) (gpufn_function_running_calls))", "running"),
    )),
    Panel("Oldest wait", "s", (("topk(10, max by (function) (gpufn_function_oldest_wait_seconds))", "{{function}}"),)),
    Panel("Nodes", "short", (("max by (state) (gpufn_nodes)", "{{state}}"),)),
    Panel("Workers", "short", (("sum by (state) (max by (function, state) (gpufn_workers))", "{{state}}"),)),
    Panel("Starts", "ops", ((f"sum by (result) (rate(gpufn_starts_total[{_RATE}]))", "{{result}}"),)),
    Panel("Error ratio by function", "percentunit", (("gpufn:call_error_ratio:rate5m", "{{function}}"),)),
    Panel("Controller", "s", (
        *_quantiles("gpufn_controller_step_seconds"),
        ("sum(gpufn_controller_leading)", "leaders"),
        ("max(gpufn_controller_epoch)", "term"),
    )),
    Panel("Bus: response time", "s", (("max(gpufn_bus_response_seconds)", "JetStream"),)),
    Panel("Bus: streams", "bytes", (("topk(10, max by (stream) (gpufn_bus_stream_bytes))", "{{stream}}"),)),
    Panel("Bus: disk", "bytes", (
        ("min(gpufn_bus_disk_free_bytes)", "free"),
        ("max by (storage) (gpufn_bus_storage_bytes)", "{{storage}}"),
    )),
    Panel("Bus: lag of replicas", "short", (("max by (stream) (gpufn_bus_stream_lag)", "{{stream}}"),), Needs.CLUSTER),
    Panel("Object stores", "bytes", (("max by (store) (gpufn_object_store_bytes)", "{{store}}"),)),
    Panel("Builds", "short", (
        ("max by (state) (gpufn_builds)", "{{state}}"),
        ("max(gpufn_build_oldest_wait_seconds)", "oldest wait, s"),
    )),
    Panel("Used parts of limits", "percentunit", (
        ("topk(10, max by (holder, limit) (gpufn_limit_used_ratio))", "{{holder}} {{limit}}"),
    ), Needs.LIMITS),
    Panel("Audit and logs", "short", (
        ("sum(gpufn_audit_records_waiting)", "audit records that wait"),
        (f"sum(rate(gpufn_audit_failures_total[{_RATE}]))", "failed audit writes per second"),
        (f"sum(rate(gpufn_log_dropped_lines_total[{_RATE}]))", "dropped log lines per second"),
    )),
    Panel("Days until a certificate ends", "d", (
        ("min by (certificate) (gpufn_certificate_expiry_timestamp_seconds - time()) / 86400", "{{certificate}}"),
    ), Needs.TLS),
    Panel("Health of nodes", "percentunit", (("min by (node) (gpufn_node_health_ratio)", "{{node}}"),)),
))  # fmt: skip
FUNCTION: Final = Dashboard(
    "function", "gpufn function", {"function": "label_values(gpufn_workers, function)"}, (
    Panel("Ended calls by outcome", "reqps", (
        (f"sum by (outcome) (rate(gpufn_calls_total{{{_OF_FUNCTION}}}[{_RATE}]))", "{{outcome}}"),
    )),
    Panel("Latency", "s", _quantiles("gpufn_call_seconds", _OF_FUNCTION)),
    Panel("Time in the queue", "s", _quantiles("gpufn_queue_seconds", _OF_FUNCTION)),
    Panel("Time of the run", "s", _quantiles("gpufn_run_seconds", _OF_FUNCTION)),
    Panel("Queue", "short", (
        (f"max by (function) (gpufn_function_queued_calls{{{_OF_FUNCTION}}})", "queued {{function}}"),
        (f"max by (function) (gpufn_function_running_calls{{{_OF_FUNCTION}}})", "running {{function}}"),
    )),
    Panel("Oldest wait", "s", (
        (f"max by (function) (gpufn_function_oldest_wait_seconds{{{_OF_FUNCTION}}})", "{{function}}"),
    )),
    Panel("Workers", "short", (
        (f"max by (function, state) (gpufn_workers{{{_OF_FUNCTION}}})", "{{function}} {{state}}"),
        (f"max by (function) (gpufn_function_wanted_workers{{{_OF_FUNCTION}}})", "{{function}} wanted"),
    )),
    Panel("Starts", "ops", ((f"sum by (result) (rate(gpufn_starts_total{{{_OF_FUNCTION}}}[{_RATE}]))", "{{result}}"),)),
    Panel("Time of starts, by phase", "s", ((
        f"sum by (phase) (increase(gpufn_start_phase_seconds_total{{{_OF_FUNCTION}}}[1h]))"
        f' / ignoring (phase) group_left () sum(increase(gpufn_starts_total{{{_OF_FUNCTION}, result="ready"}}[1h]))',
        "{{phase}}",
    ),)),
    Panel("Error ratio and budget", "percentunit", (
        (f"gpufn:call_error_ratio:rate5m{{{_OF_FUNCTION}}}", "5 minutes {{function}}"),
        (f"gpufn:call_error_ratio:rate1h{{{_OF_FUNCTION}}}", "1 hour {{function}}"),
        (f"gpufn:call_error_ratio:rate6h{{{_OF_FUNCTION}}}", "6 hours {{function}}"),
    )),
    Panel("Attempts, failures, retries", "ops", (
        (f"sum(rate(gpufn_attempts_total{{{_OF_FUNCTION}}}[{_RATE}]))", "attempts"),
        (f"sum(rate(gpufn_attempts_failed_total{{{_OF_FUNCTION}}}[{_RATE}]))", "failed"),
        (f"sum(rate(gpufn_retries_total{{{_OF_FUNCTION}}}[{_RATE}]))", "retries"),
    )),
    Panel("GPU seconds per second", "short", (
        (f"sum by (function) (rate(gpufn_gpu_seconds_total{{{_OF_FUNCTION}}}[{_RATE}]))", "{{function}}"),
    ), Needs.GPU),
    Panel("GPU memory", "bytes", (
        (f"max by (function, node, gpu) (gpufn_function_gpu_memory_bytes{{{_OF_FUNCTION}}})", "{{function}} {{gpu}}"),
    ), Needs.GPU),
    Panel("Busy GPUs", "short", (
        (f"sum by (function) (max by (function, node) (gpufn_function_gpus_busy{{{_OF_FUNCTION}}}))", "{{function}}"),
    ), Needs.GPU),
    Panel("Refused requests", "reqps", (
        (f"sum by (code) (rate(gpufn_refusals_total{{{_OF_FUNCTION}}}[{_RATE}]))", "{{code}}"),
    ), Needs.FAULT),
))  # fmt: skip


def _gauge(title: str, unit: str, *metrics: str, needs: Needs = Needs.GPU) -> Panel:
    queries = tuple((f"max by ({_BY_GPU}) ({metric}{{{_OF_GPU}}})", _legend(metric, metrics)) for metric in metrics)
    return Panel(title, unit, queries, needs)


def _rate(title: str, unit: str, *metrics: str) -> Panel:
    queries = tuple(
        (f"sum by ({_BY_GPU}) (rate({metric}{{{_OF_GPU}}}[{_RATE}]))", _legend(metric, metrics)) for metric in metrics
    )
    return Panel(title, unit, queries, Needs.GPU)


def _legend(metric: str, metrics: tuple[str, ...]) -> str:
    own = "" if len(metrics) == 1 else f" {metric.removeprefix('gpufn_gpu_')}"
    return "{{node}} {{gpu}}" + own


GPU: Final = Dashboard(
    "gpu", "gpufn GPUs",
    {"node": "label_values(gpufn_gpu_health, node)", "gpu": 'label_values(gpufn_gpu_health{node=~"$node"}, gpu)'}, (
    _gauge("Utilisation", "percentunit", "gpufn_gpu_utilisation_ratio"),
    _gauge("Memory busy", "percentunit", "gpufn_gpu_memory_busy_ratio"),
    _gauge("Memory", "bytes", "gpufn_gpu_memory_used_bytes", "gpufn_gpu_memory_total_bytes"),
    Panel("Memory by function", "bytes", (
        (f"max by (function, node, gpu) (gpufn_function_gpu_memory_bytes{{{_OF_GPU}}})", "{{function}} {{gpu}}"),
    ), Needs.GPU),
    _gauge("Temperature", "celsius", "gpufn_gpu_temperature_celsius", "gpufn_gpu_temperature_limit_celsius"),
    _gauge("Power", "watt", "gpufn_gpu_power_watts", "gpufn_gpu_power_limit_watts"),
    _gauge("Clocks", "hertz", "gpufn_gpu_sm_clock_hertz", "gpufn_gpu_memory_clock_hertz"),
    Panel("Reasons that limit the clocks", "short", (
        (f"max by ({_BY_GPU}, by) (gpufn_gpu_clock_limited{{{_OF_GPU}}})", "{{gpu}} {{by}}"),
    ), Needs.GPU),
    _rate("Power by energy", "watt", "gpufn_gpu_energy_joules_total"),
    _rate("Memory errors", "ops", "gpufn_gpu_ecc_corrected_errors_total", "gpufn_gpu_ecc_uncorrected_errors_total"),
    Panel("Xids", "short", (
        (f"sum by ({_BY_GPU}, xid) (gpufn_gpu_xid_errors_total{{{_OF_GPU}}})", "{{gpu}} Xid {{xid}}"),
    ), Needs.GPU),
    _gauge("PCIe", "Bps", "gpufn_gpu_pcie_sent_bytes_per_second", "gpufn_gpu_pcie_received_bytes_per_second"),
    _rate("NVLink", "Bps", "gpufn_gpu_nvlink_sent_bytes_total", "gpufn_gpu_nvlink_received_bytes_total"),
    Panel("Health", "short", (
        (f'max by ({_BY_GPU}, state) (gpufn_gpu_health{{{_OF_GPU}, state!="healthy"}})', "{{gpu}} {{state}}"),
    ), Needs.GPU),
    _gauge("Health score", "percentunit", "gpufn_gpu_health_ratio"),
    Panel("Fragmentation", "percentunit", (
        ('max by (node) (gpufn_node_gpu_fragmentation_ratio{node=~"$node"})', "{{node}}"),
    ), Needs.GPU),
))  # fmt: skip
DASHBOARDS: Final = (FLEET, FUNCTION, GPU)


def document(dashboard: Dashboard) -> dict[str, Any]:
    """Return a dashboard in Grafana's JSON model."""
    return {
        "uid": f"gpufn-{dashboard.name}",
        "title": dashboard.title,
        "tags": ["gpufn"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": [_DATASOURCE, *(_variable(*each) for each in dashboard.variables.items())]},
        "panels": [_panel(number, panel) for number, panel in enumerate(dashboard.panels)],
    }


_DATASOURCE: Final[dict[str, Any]] = {
    "name": "datasource",
    "label": "Data source",
    "type": "datasource",
    "query": "prometheus",
}
_SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(number, 24 // _WIDTH)
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "datasource": _SOURCE,
        "gridPos": {"x": column * _WIDTH, "y": row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {
                "refId": chr(65 + index),
                "datasource": _SOURCE,
                "expr": expression,
                "legendFormat": legend,
                "exemplar": True,
            }
            for index, (expression, legend) in enumerate(panel.queries)
        ],
    }


def for_api(expression: str, window: str) -> str:
    """Return an expression without Grafana's variables, for Prometheus itself.

    >>> for_api('rate(x{function=~"$function"}[$__rate_interval])', "1m")
    'rate(x{function=~".*"}[1m])'
    """
    for variable in ("function", "node", "gpu"):
        expression = expression.replace(f'"${variable}"', '".*"')
    return expression.replace(_RATE, window)
