"""The rules and dashboards: their files are up to date, and each alert fires on its fault, in time, and ends."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from gpufn_gateway.monitoring import dashboards, rules
from gpufn_gateway.monitoring.rules import ALERTS, Alert
from tests.conftest import ROOT, missing

RULES = ROOT / "docs" / "monitoring" / "gpufn.rules.yaml"
STEADY_MIN, FAULT_MIN = 20, 90  # at one sample a minute
AFTER_MIN, AFTER_SLOW_MIN = 70, 400  # the longest window of the alerts is an hour, that of GpufnErrorBudgetSlow six
GPU = 'node="n1",gpu="GPU-1",kind="NVIDIA L4"'
GPU_LABELS = {"node": "n1", "gpu": "GPU-1", "kind": "NVIDIA L4"}


class Case(NamedTuple):
    """`series` have a notation of promtool before, during and after the fault: `0` stays, `5+2` grows by 2 a minute."""

    series: dict[str, tuple[str, str, str]]
    labels: Mapping[str, str] = MappingProxyType({})


def _steps(notations: tuple[str, str, str], after_min: int) -> str:
    """Join the three notations into promtool's: `a+bxn` adds b to a, n times."""
    return " ".join(
        f"{notation if '+' in notation else f'{notation}+0'}x{count - 1}"
        for notation, count in zip(notations, (STEADY_MIN, FAULT_MIN, after_min), strict=True)
    )


CALLS = 'gpufn_calls_total{function="f",instance="g1",outcome='
CASES = {
    # The series of a leader: at another gateway there is a zero.
    "GpufnNoLeader": Case({
        'gpufn_controller_leading{instance="g1"}': ("1", "0", "1"),
        'gpufn_controller_leading{instance="g2"}': ("0", "0", "0"),
    }),
    "GpufnBusDisconnected": Case({'gpufn_bus_connected{instance="g1"}': ("1", "0", "1")}, {"instance": "g1"}),
    "GpufnBusDiskFull": Case({
        'gpufn_bus_disk_free_bytes{instance="g1"}': ("50", "9", "50"),
        'gpufn_bus_disk_size_bytes{instance="g1"}': ("100", "100", "100"),
        'gpufn_bus_stream_bytes{stream="GPUFN_LOGS"}': ("100", "100", "100"),  # the oldest make room
        'gpufn_bus_stream_limit_bytes{stream="GPUFN_LOGS"}': ("100", "100", "100"),
    }),
    "GpufnErrorBudgetFast": Case({
        f'{CALLS}"succeeded"}}': ("0+600", "12000+600", "66000+600"),
        f'{CALLS}"raised"}}': ("0", "0+60", "5400"),
        f'{CALLS}"rejected"}}': ("0+600", "12000+600", "66000+600"),  # the mistakes of clients
    }, {"function": "f"}),
    "GpufnErrorBudgetSlow": Case({
        f'{CALLS}"succeeded"}}': ("0+1000", "20000+1000", "110000+1000"),
        f'{CALLS}"lost"}}': ("0", "0+50", "4500"),
    }, {"function": "f"}),
    "GpufnQueueGrows": Case({
        'gpufn_function_oldest_wait_seconds{function="f"}': ("0", "0+60", "0"),
        'gpufn_function_queued_calls{function="f"}': ("0", "0+10", "0"),
        'gpufn_function_oldest_wait_seconds{function="steady"}': ("900", "900", "900"),
        'gpufn_function_queued_calls{function="steady"}': ("9", "9", "9"),
    }, {"function": "f"}),
    "GpufnStartsFail": Case({
        'gpufn_starts_total{node="n1",function="f",result="failed"}': ("0", "0+1", "90"),
        'gpufn_starts_total{node="n1",function="f",result="ready"}': ("0+1", "20+1", "110"),
    }, {"function": "f"}),
    "GpufnNodeSilent": Case({'gpufn_node_up{node="n1"}': ("1", "0", "1")}, {"node": "n1"}),
    "GpufnGpuQuarantined": Case({
        f'gpufn_gpu_health{{{GPU},state="healthy"}}': ("1", "0", "1"),
        f'gpufn_gpu_health{{{GPU},state="failed"}}': ("0", "1", "0"),
    }, {**GPU_LABELS, "state": "failed"}),
    "GpufnGpuHot": Case({
        f"gpufn_gpu_temperature_celsius{{{GPU}}}": ("60", "86", "60"),
        'gpufn_gpu_temperature_celsius{node="n1",gpu="GPU-2",kind="NVIDIA L4"}': ("89", "89", "89"),
        'gpufn_gpu_temperature_limit_celsius{node="n1",gpu="GPU-2",kind="NVIDIA L4"}': ("92", "92", "92"),
    }, GPU_LABELS),
    "GpufnDrain": Case({f"gpufn_gpu_health_ratio{{{GPU}}}": ("1", "0.3", "1")}, GPU_LABELS),
    "GpufnCertificateEnds": Case({
        # promtool's clock starts at 0.
        'gpufn_certificate_expiry_timestamp_seconds{certificate="gateway"}': ("9000000", "86400", "9000000"),
    }, {"certificate": "gateway"}),
    "GpufnAuditFails": Case({
        'gpufn_audit_records_waiting{instance="g1"}': ("0", "3", "0"),
        'gpufn_audit_failures_total{instance="g1"}': ("0", "0+9", "810"),
    }),
    "GpufnBuildsWait": Case({"gpufn_build_oldest_wait_seconds": ("0", "0+60", "0")}),
    "GpufnLimitUsed": Case({
        'gpufn_limit_used_ratio{holder="k1",limit="queued"}': ("0.5", "0.95", "0.5"),
    }, {"holder": "k1", "limit": "queued"}),
    "GpufnLogsDropped": Case({'gpufn_log_dropped_lines_total{node="n1"}': ("0", "0+5", "450")}, {"node": "n1"}),
    "GpufnFragmented": Case({'gpufn_node_gpu_fragmentation_ratio{node="n1"}': ("0.1", "0.6", "0")}, {"node": "n1"}),
    "GpufnScaleOut": Case({f"gpufn_gpu_utilisation_ratio{{{GPU}}}": ("0.5", "0.95", "0.5")}),
    "GpufnScaleIn": Case({f"gpufn_gpu_utilisation_ratio{{{GPU}}}": ("0.5", "0.1", "0.5")}),
    "GpufnSeriesDropped": Case({'gpufn_metrics_dropped_series{instance="g1"}': ("0", "4", "0")}),
}  # fmt: skip


def test_every_alert_has_its_case_and_its_section_in_the_runbook() -> None:
    sections = set(re.findall(r"^## (\w+)$", (ROOT / "docs" / "alerts.md").read_text(), re.MULTILINE))
    assert {alert.name for alert in ALERTS} == CASES.keys()
    assert sections >= CASES.keys()


def test_the_files_are_up_to_date_and_grafana_can_read_them() -> None:
    ended = subprocess.run(
        [sys.executable, ROOT / "scripts" / "monitoring", "--check"], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for board in dashboards.DASHBOARDS:
        model = json.loads((RULES.parent / f"gpufn-{board.name}.json").read_text())
        ids = [panel["id"] for panel in model["panels"]]
        assert len(ids) == len(set(ids)) == len(board.panels)
        places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in model["panels"]}
        assert len(places) == len(ids)


def test_each_alert_fires_in_time_and_ends(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        missing("promtool is not installed")
    files = [_written(tmp_path, alert.name, _test_of(alert, CASES[alert.name])) for alert in ALERTS]
    checked = subprocess.run([promtool, "check", "rules", RULES], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    ended = subprocess.run([promtool, "test", "rules", *files], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def _written(folder: Path, alert: str, test: dict[str, Any]) -> Path:
    """Write a test for promtool, with the rules that it needs: promtool evaluates all rules of a file each minute."""
    document = rules.document()
    for group in document["groups"]:
        group["rules"] = [each for each in group["rules"] if each.get("alert", alert) == alert]
    (folder / f"{alert}.rules.yaml").write_text(json.dumps(document))  # JSON is YAML
    path = folder / f"{alert}.test.yaml"
    content = {"rule_files": [f"{alert}.rules.yaml"], "evaluation_interval": "1m", "tests": [test]}
    path.write_text(json.dumps(content))
    return path


def _test_of(alert: Alert, case: Case) -> dict[str, Any]:
    firing = {
        "exp_labels": {"severity": alert.severity.value, **case.labels},
        "exp_annotations": {
            "summary": re.sub(r"{{ \$labels\.(\w+) }}", lambda match: case.labels.get(match[1], ""), alert.summary),
            "runbook": f"docs/alerts.md#{alert.name.lower()}",
        },
    }
    fault_ends = STEADY_MIN + FAULT_MIN
    after_min = AFTER_SLOW_MIN if alert.name == "GpufnErrorBudgetSlow" else AFTER_MIN
    expected: tuple[tuple[int, list[Any]], ...] = (
        (STEADY_MIN - 1, []),
        (fault_ends - 1, [firing]),
        (fault_ends + after_min - 1, []),
    )
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": _steps(values, after_min)} for name, values in case.series.items()],
        "alert_rule_test": [
            {"eval_time": f"{minute}m", "alertname": alert.name, "exp_alerts": alerts} for minute, alerts in expected
        ],
    }


@pytest.mark.parametrize(
    ("alert", "minutes"), [("GpufnNodeSilent", 2), ("GpufnQueueGrows", 5), ("GpufnErrorBudgetFast", 15)]
)
def test_urgent_faults_are_reported_within_minutes(tmp_path: Path, alert: str, minutes: int) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        missing("promtool is not installed")
    (found,) = [each for each in ALERTS if each.name == alert]
    test = _test_of(found, CASES[alert])
    _, firing, _ = test["alert_rule_test"]
    test["alert_rule_test"] = [{**firing, "eval_time": f"{STEADY_MIN + minutes}m"}]
    path = _written(tmp_path, alert, test)
    ended = subprocess.run([promtool, "test", "rules", path], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
