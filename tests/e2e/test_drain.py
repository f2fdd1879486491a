"""Drain of a node of a running platform: its workers move, no call fails, and restarts do not end it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import Platform, running_platform
from tests.e2e.node import Node
from tests.e2e.test_survival import Load
from tests.waiting import until

pytestmark = pytest.mark.e2e

APPS = Path(__file__).parent / "apps"
SECOND = "second"


def nodes(platform: Platform) -> dict[str, Any]:
    return {each["node"]: each for each in platform.client.get("/v1/nodes").json()["nodes"]}


def pids(platform: Platform) -> dict[str, int]:
    """Return the processes that run; the supervisor starts one again after a moment."""
    found: dict[str, int] = json.loads((platform.home / "up.json").read_bytes())["pids"]
    return found


def test_a_node_is_drained_under_load_and_stays_drained_after_restarts(tmp_path: Path) -> None:
    with running_platform(tmp_path / "home") as platform:
        platform.gpufn("deploy", APPS / "steady.py")
        platform.gpufn("scale", "steady", "--min", "1")
        until(lambda: platform.invoke("steady", {"number": 1}) == 1)
        [first] = nodes(platform)
        with Node(platform.home, tmp_path / SECOND, SECOND) as second:
            until(lambda: SECOND in nodes(platform))
            with Load(platform) as load:
                load.wait_for_answers(20, 30)
                assert platform.try_gpufn("nodes", "drain", "unknown").returncode == 4
                platform.gpufn("nodes", "drain", first)
                until(lambda: not nodes(platform)[first]["processes"])
                load.wait_for_answers(20, 30)
            assert (load.refused, load.wrong) == ([], [])
            assert nodes(platform)[SECOND]["processes"]
            assert "is drained" in platform.gpufn("nodes")
            killed = {role: pids(platform)[role] for role in ("gateway", "agent")}
            for pid in killed.values():
                os.kill(pid, signal.SIGKILL)
            until(lambda: all(pids(platform).get(role, pid) != pid for role, pid in killed.items()))
            until(lambda: _is_drained(platform, first))
            second.kill("agent")
            second.kill("runner")  # the drained node is the only one left
            until(lambda: f"{first}: it is drained" in platform.client.get("/v1/functions/steady/why").text)
            platform.gpufn("nodes", "undrain", first)
            assert platform.invoke("steady", {"number": 2}) == 2
            until(lambda: _drained_in_events(platform) == {f"node:{first}"})


def _drained_in_events(platform: Platform) -> set[str]:
    """Return the subjects of events. A gateway publishes them a moment later."""
    return {each["subject"] for each in platform.client.get("/v1/events?kind=node_drain").json()["events"]}


def _is_drained(platform: Platform, node: str) -> bool:
    """Return whether the restarted gateway has a report of the node, and its drain."""
    try:
        return nodes(platform).get(node, {}).get("drained") is not None
    except (httpx.TransportError, KeyError):  # it starts
        return False
