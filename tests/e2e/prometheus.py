"""The real Prometheus and Alertmanager, with a scrape interval of one second and shortened rules."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import httpx

from gpufn_gateway.monitoring import dashboards, rules
from gpufn_gateway.monitoring.dashboards import Needs
from tests.conftest import ROOT, http_client, missing
from tests.waiting import until

RULES = ROOT / "docs" / "monitoring" / "gpufn.rules.yaml"
_STOP_S = 20.0
_LISTENS = r'"Listening on" address=(\S+)'
# Times of the rules, longest first, and their values in a test.
_HURRIED = {
    "30s": "1s",
    "30m": "20s",
    "15m": "2s",
    "10m": "15s",
    "6h": "40s",
    "5m": "10s",
    "2m": "2s",
    "1m": "2s",
    "1h": "30s",
}


def hurried(text: str) -> str:
    """Return rules or a query with shorter windows and times, also in names of recorded series.

    >>> hurried("for: 1m"), hurried("gpufn:call_error_ratio:rate6h > 3 and rate(x[5m]) > 60")
    ('for: 2s', 'gpufn:call_error_ratio:rate40s > 3 and rate(x[10s]) > 3')
    """
    text = re.sub(r"(?<=[\[ e])(30s|30m|15m|10m|6h|5m|2m|1m|1h)\b", lambda found: _HURRIED[found[0]], text)
    return re.sub(r"> (60|1800)\b", "> 3", text)


def queries(*needs: Needs) -> dict[str, str]:
    """Return the queries of the panels with these needs, by dashboard and panel, and the series of their variables."""
    panels = [
        (f"{board.name}/{panel.title}/{number}", panel.needs, query)
        for board in dashboards.DASHBOARDS
        for panel in board.panels
        for number, (query, _) in enumerate(panel.queries)
    ]
    variables = [
        (f"{board.name}/${name}", Needs.GPU if board is dashboards.GPU else Needs.CALLS, _series_of(query))
        for board in dashboards.DASHBOARDS
        for name, query in board.variables.items()
    ]
    return {
        name: hurried(dashboards.for_api(query, "10s")) for name, need, query in (*panels, *variables) if need in needs
    }


def _series_of(label_values: str) -> str:
    """Return the series whose labels are the values of a variable, and which have that label.

    >>> _series_of('label_values(gpufn_gpu_health{node=~"$node"}, gpu)')
    'count by (gpu) (gpufn_gpu_health{node=~"$node"})'
    """
    found = re.fullmatch(r"label_values\((.+), (\w+)\)", label_values)
    assert found is not None, label_values
    return f"count by ({found[2]}) ({found[1]})"


class Prometheus:
    """`targets` are the addresses of gateways. With `alertmanager`, alerts are sent there."""

    def __init__(
        self,
        folder: Path,
        targets: Iterable[str],
        *,
        alertmanager: bool = False,
        features: Sequence[str] = ("exemplar-storage",),
    ) -> None:
        for program in ("prometheus", *(("prometheus-alertmanager",) if alertmanager else ())):
            if shutil.which(program) is None:
                missing(f"{program} is not installed")
        self._folder = folder
        self._targets = [httpx.URL(target) for target in targets]
        self._has_alertmanager = alertmanager
        self._features = ",".join(features)
        self._processes: list[subprocess.Popen[bytes]] = []
        self.client = http_client()
        self.alerts = http_client()  # of the Alertmanager

    def __enter__(self) -> Self:
        folder = self._folder
        (folder / "rules.yaml").write_text(hurried(RULES.read_text()))
        config: dict[str, Any] = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(folder / "rules.yaml")],
            "scrape_configs": [
                {
                    "job_name": f"gpufn-{scheme}",
                    "scheme": scheme,
                    "tls_config": {"insecure_skip_verify": True},
                    "static_configs": [
                        {"targets": [each.netloc.decode() for each in self._targets if each.scheme == scheme]}
                    ],
                }
                for scheme in ("http", "https")
            ],
        }
        if self._has_alertmanager:
            address = self._start_alertmanager()
            config["alerting"] = {"alertmanagers": [{"static_configs": [{"targets": [address]}]}]}
        (folder / "prometheus.yaml").write_text(json.dumps(config))
        address = self._start(
            "prometheus", f"--config.file={folder}/prometheus.yaml", f"--storage.tsdb.path={folder}/data",
            f"--enable-feature={self._features}", "--web.listen-address=127.0.0.1:0",
        )  # fmt: skip
        self.client.base_url = httpx.URL(f"http://{address}/api/v1/")
        until(lambda: self.client.get(f"http://{address}/-/ready").status_code == 200)
        return self

    def _start_alertmanager(self) -> str:
        (self._folder / "alertmanager.yaml").write_text(
            '{"route": {"receiver": "none"}, "receivers": [{"name": "none"}]}'
        )
        address = self._start(
            "prometheus-alertmanager", f"--config.file={self._folder}/alertmanager.yaml",
            f"--storage.path={self._folder}/alerts", "--cluster.listen-address=", "--web.listen-address=127.0.0.1:0",
        )  # fmt: skip
        self.alerts.base_url = httpx.URL(f"http://{address}/api/v2/")
        return address

    def _start(self, program: str, *options: str) -> str:
        """Start a program, and return the address on which it says that it listens."""
        path = self._folder / f"{program}.log"
        with path.open("wb") as log:
            self._processes.append(subprocess.Popen([program, *options], stdout=log, stderr=log))
        found = until(lambda: re.search(_LISTENS, path.read_text()), path.read_text)
        address: str = found[1]
        return address

    def query(self, expression: str) -> list[dict[str, Any]]:
        response = self.client.get("query", params={"query": expression})
        assert response.status_code == 200, f"{expression}: {response.text}"
        result: list[dict[str, Any]] = response.json()["data"]["result"]
        return result

    def value(self, expression: str) -> float | None:
        """Return the value of the only sample; None without one."""
        samples = self.query(expression)
        assert len(samples) < 2, f"{expression}: {samples}"
        return float(samples[0]["value"][1]) if samples else None

    def without_data(self, expressions: Mapping[str, str]) -> list[str]:
        """Return the names of the expressions without a number: NaN, as of a quantile without calls, is none."""
        return [name for name, expression in expressions.items() if not self._has_number(expression)]

    def _has_number(self, expression: str) -> bool:
        return any(math.isfinite(float(sample["value"][1])) for sample in self.query(expression))

    def firing(self) -> set[str]:
        alerts = self.client.get("alerts").json()["data"]["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}

    def received(self) -> set[str]:
        """Return the active alerts that the Alertmanager has."""
        return {alert["labels"]["alertname"] for alert in self.alerts.get("alerts").json()}

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.alerts.close()
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait(_STOP_S)


NAMES = tuple(alert.name for alert in rules.ALERTS)
