"""The power of GPUs in `gpufn nodes`, and the skew of a node's clock there and in `gpufn doctor`."""

from __future__ import annotations

import json
import platform
from typing import Any

import pytest

from tests.sdk.cli.commands import command
from tests.sdk.conftest import StubGateway


def node(skew_s: float | None) -> dict[str, Any]:
    return {"node": "n1", "sent_at": 1.0, "devices": [], "hostname": platform.node(), "clock_skew_s": skew_s}


@pytest.mark.parametrize(
    ("skew_s", "listed", "state", "found"),
    [
        (
            -2.5,
            "the clock of node n1 is 2.5 s behind the message bus: ",
            "bad",
            "node n1: 2.5 s behind the message bus",
        ),
        (0.1, "", "ok", "node n1: 0.1 s ahead of the message bus"),
        (None, "", "note", "skew of node n1 unknown: its agent has not measured it yet"),
    ],
)
def test_nodes_and_doctor_show_the_skew(
    gateway: StubGateway, skew_s: float | None, listed: str, state: str, found: str
) -> None:
    gateway.on("GET /v1/nodes", {"nodes": [node(skew_s)]})
    shown = command("nodes").stdout
    assert ("the clock of" in shown, listed in shown) == (bool(listed), True)
    checks = {finding["check"]: finding for finding in json.loads(command("doctor", "--json").stdout)}
    assert (checks["clock"]["state"], checks["clock"]["found"]) == (state, found)
    assert ("NTP" in checks["clock"]["do"]) is (state == "bad")


def test_nodes_show_why_a_power_limit_is_not_the_setting(gateway: StubGateway) -> None:
    facts = {"power_limit_notices": ["GPU-1: its power limit cannot be set"]}
    gateway.on("GET /v1/nodes", {"nodes": [node(0.0) | {"facts": facts}]})
    assert "node n1: GPU-1: its power limit cannot be set" in command("nodes").stdout.splitlines()


def test_a_drained_node_that_does_not_report_is_listed(gateway: StubGateway) -> None:
    """Bug: no list had it, so nobody saw which drain to end."""
    drain = {"node": "gone-3", "since": 1.0, "by": "key-1"}
    gateway.on("GET /v1/nodes", {"nodes": [], "not_reporting": [drain]})
    shown = command("nodes").stdout
    assert ("gone-3" in shown, "gpufn nodes undrain gone-3" in shown) == (True, True)
    (listed,) = json.loads(command("nodes", "--json").stdout)
    assert (listed["node"], listed["drained"]) == ("gone-3", drain)


def test_doctor_does_not_judge_the_clock_of_another_machine(gateway: StubGateway) -> None:
    gateway.on("GET /v1/nodes", {"nodes": [node(9.0) | {"hostname": "elsewhere"}]})
    checks = {finding["check"]: finding for finding in json.loads(command("doctor", "--json").stdout)}
    assert (checks["clock"]["state"], checks["clock"]["found"].partition(":")[0]) == ("note", "skew unknown")


@pytest.mark.parametrize(("metrics", "power"), [({"power_w": 71.5}, "72 W"), ({}, "-")])
def test_nodes_show_the_power_of_a_gpu(gateway: StubGateway, metrics: dict[str, Any], power: str) -> None:
    gpu = {"uuid": "GPU-1", "type": "gpu", "kind": "NVIDIA L4", "memory_bytes": 24 << 30}
    measured = [{"uuid": "GPU-1", "memory_used_bytes": 1 << 30, **metrics}]
    gateway.on("GET /v1/nodes", {"nodes": [node(0.0) | {"devices": [gpu], "metrics": measured}]})
    head, row = command("nodes").stdout.splitlines()
    assert row[head.index("POWER") :].startswith(power)


def test_nodes_show_health_scores_and_the_advice_to_drain(gateway: StubGateway) -> None:
    gpu = {"uuid": "GPU-1", "type": "gpu", "kind": "NVIDIA L4", "memory_bytes": 24 << 30}
    scores = {"GPU-1": {"value": 0.3, "drain": True, "reasons": ["2 Xid errors", "it is hot"]}}
    scored = {"devices": [gpu], "score": {"value": 0.7, "drain": False, "reasons": ["x"]}, "gpu_scores": scores}
    gateway.on("GET /v1/nodes", {"nodes": [node(0.0) | scored]})
    head, row, *advice = command("nodes").stdout.splitlines()
    assert row[head.index("SCORE") :].startswith("0.30")
    assert advice == ["drain GPU-1 of node n1: 2 Xid errors, it is hot"]


def test_nodes_are_drained_and_shown_as_drained(gateway: StubGateway) -> None:
    drained = {"node": "n1", "since": 1.0, "by": ""}
    cpu = {"uuid": "cpu", "type": "cpu", "kind": "x86", "memory_bytes": 8 << 30}
    shown = node(0.0) | {"drained": drained, "devices": [cpu], "score": {"value": 0.3, "drain": True, "reasons": ["x"]}}
    gateway.on("PUT /v1/nodes/n1/drain", drained)
    gateway.on("DELETE /v1/nodes/n1/drain", b"", status=204)
    gateway.on("GET /v1/nodes", {"nodes": [shown]})
    assert json.loads(command("nodes", "drain", "n1", "--json").stdout) == {"drained": "n1"}
    assert command("nodes", "undrain", "n1").stdout == "n1 accepts workers\n"
    lines = command("nodes").stdout.splitlines()
    assert lines[1].endswith("drained, healthy")
    assert lines[2].startswith("node n1 is drained since ")
    assert lines[2].endswith(": 0 workers left")
    assert len(lines) == 3, "no advice to drain it"


def test_an_unknown_node_cannot_be_drained(gateway: StubGateway) -> None:
    gateway.on("PUT /v1/nodes/nn/drain", {"code": "bad_request", "detail": "No node of this name."}, status=404)
    assert command("nodes", "drain", "nn").exit_code == 4
