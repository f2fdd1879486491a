"""The skew of a node's clock in `gpufn nodes` and `gpufn doctor`."""

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


def test_doctor_does_not_judge_the_clock_of_another_machine(gateway: StubGateway) -> None:
    gateway.on("GET /v1/nodes", {"nodes": [node(9.0) | {"hostname": "elsewhere"}]})
    checks = {finding["check"]: finding for finding in json.loads(command("doctor", "--json").stdout)}
    assert (checks["clock"]["state"], checks["clock"]["found"].partition(":")[0]) == ("note", "skew unknown")
