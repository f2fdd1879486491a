"""The rule for a node's clock, and where the CLI shows it."""

from __future__ import annotations

import json
import platform
from typing import Any

import pytest

from gpufn.clock_skew import is_skewed, measured
from tests.sdk.commands import command
from tests.sdk.conftest import StubGateway


@pytest.mark.parametrize(
    ("sent_at", "server_at", "received_at", "skew_s", "skewed"),
    [
        (100.0, 100.25, 100.5, 0.0, False),
        (102.0, 100.25, 102.5, 2.0, True),
        (101.5, 100.25, 102.0, 1.5, False),
        (97.0, 100.25, 97.5, -3.0, True),
        (200.0, 100.0, 201.0, 100.5, True),
        (200.0, 100.0, 201.25, None, False),  # slow: the error may be more than half a second
        (200.0, 100.0, 199.0, None, False),  # set back meanwhile
    ],
)
def test_the_skew_is_the_nodes_time_minus_the_servers_in_the_middle_of_the_request(
    sent_at: float, server_at: float, received_at: float, skew_s: float | None, skewed: bool
) -> None:
    assert measured(sent_at, server_at, received_at) == skew_s
    assert is_skewed(skew_s) is skewed


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
