"""`gpufn doctor`, `version` and `down`."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from gpufn_local import doctor
from gpufn_local.bus_authority import own_certificate
from gpufn_local.doctor import CHECKS
from gpufn_platform.sandbox.support import Support
from tests.sdk.cli.commands import command
from tests.sdk.conftest import StubGateway


def test_version_has_a_json_form() -> None:
    assert {"gpufn", "python"} <= set(json.loads(command("version", "--json").stdout))


def test_doctor_names_a_remedy_for_each_finding(gateway: StubGateway, tmp_path: Path) -> None:
    findings = [finding for check in CHECKS for finding in check()]
    assert [finding for finding in findings if finding.state == "bad" and not finding.do] == []
    result = command("doctor", "--json")
    assert {finding["check"] for finding in json.loads(result.stdout)} >= {"Python", "nats-server", "GPUFN_HOME"}


@pytest.mark.parametrize(("name", "value"), [("GPUFN_API_KEY", "s3cret\r"), ("GPUFN_URL", "ftp://x")])
def test_doctor_continues_with_an_invalid_address_or_key(
    gateway: StubGateway, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    checks = {finding["check"]: finding for finding in json.loads(command("doctor", "--json").stdout)}
    assert (checks["gateway"]["state"], checks["gateway"]["do"]) == ("bad", "fix GPUFN_URL or GPUFN_API_KEY")


@pytest.mark.parametrize(
    ("setting", "support", "states"),
    [
        ("", Support(), ["ok"]),
        ("", Support(namespaces="refused", network="refused"), ["note", "note"]),
        ("strict", Support(signals="too old"), ["bad"]),
        ("", Support(processes="refused"), ["note"]),
        ("off", Support(), ["note"]),
        ("on", Support(), ["bad"]),
    ],
)
def test_doctor_reports_each_part_of_the_sandbox_that_does_not_work(
    monkeypatch: pytest.MonkeyPatch, setting: str, support: Support, states: list[str]
) -> None:
    monkeypatch.setenv("GPUFN_ISOLATION", setting)
    monkeypatch.setattr("gpufn_platform.sandbox.support.probe", lambda: support)
    findings = list(doctor._sandbox())
    assert [finding.state for finding in findings] == states
    assert all(finding.do for finding in findings if finding.state != "ok")


@pytest.mark.parametrize(
    ("answer", "detail"),
    [
        ({"status": "not ready", "reason": "the disk is full"}, "responds but is not ready: the disk is full"),
        (b"of something else", "responds but is not ready"),
    ],
)
def test_doctor_has_the_gateways_reason(gateway: StubGateway, answer: Any, detail: str) -> None:
    gateway.on("GET /healthz", {})
    gateway.on("GET /readyz", answer, 503)
    found = {finding["check"]: finding for finding in json.loads(command("doctor", "--json").stdout)}
    assert (found["gateway"]["state"], found["gateway"]["found"]) == ("bad", f"{gateway.url} {detail}")


@pytest.mark.parametrize(("age_years", "states"), [(0, ["ok", "ok"]), (1.95, ["note", "ok"]), (9.99, ["bad", "note"])])
def test_doctor_reports_certificates_of_the_bus_near_their_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, age_years: float, states: list[str]
) -> None:
    monkeypatch.setenv("GPUFN_HOME", str(tmp_path))
    (tmp_path / "nats" / "join").mkdir(parents=True)
    made_at = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=365 * age_years)
    own_certificate(tmp_path / "nats" / "tls", ["10.0.0.1"], made_at)
    findings = list(doctor._bus())
    assert [finding.state for finding in findings] == states
    assert [bool(finding.do) for finding in findings] == [state != "ok" for state in states]


def test_down_without_a_platform_reports_it(gateway: StubGateway, tmp_path: Path) -> None:
    result = command("down")
    assert (result.exit_code, result.stdout.endswith(f"not running in {tmp_path / 'home'}\n")) == (0, True)


def test_a_file_of_a_dead_platform_is_not_believed(gateway: StubGateway, tmp_path: Path) -> None:
    import os

    home = tmp_path / "home"
    home.mkdir()
    (home / "up.lock").touch()
    (home / "up.json").write_text(json.dumps({"pid": os.getppid(), "url": "http://x", "nats_url": "", "node": "n"}))
    assert "not running" in command("down").stdout
