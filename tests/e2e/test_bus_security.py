"""A platform whose bus speaks TLS, whose store is encrypted, and which another machine has joined."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpufn_core.home import Home
from tests.conftest import Platform, running_platform
from tests.e2e.node import Node
from tests.waiting import until

pytestmark = pytest.mark.e2e

APP = Path(__file__).parent / "apps" / "steady.py"


def test_a_platform_with_tls_and_an_encrypted_store_serves_calls(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with running_platform(home, "--bus-listen", "127.0.0.1:0", environ={"GPUFN_STORE_CIPHER": "aes"}) as platform:
        platform.gpufn("deploy", APP)
        assert platform.invoke("steady", {"number": 3}) == 3
        assert json.loads((home / "up.json").read_bytes())["nats_url"].startswith("tls://127.0.0.1:")
        environ = dict(line.split("=", 1) for line in (Home(home).nats / "join" / "agent.env").read_text().splitlines())
        with Node(home, tmp_path / "other", "other", environ=environ, roles=("agent",)):
            until(lambda: "other" in nodes(platform), "another machine has joined")
        found = json.loads(platform.try_gpufn("doctor", "--json").stdout)
        assert [each["state"] for each in found if each["check"] == "bus"] == ["ok", "ok"]
        assert platform.gpufn("keys", "reset", "--yes")
    assert b"[ERR]" not in (Home(home).nats / "nats.log").read_bytes()
    with running_platform(home, environ={"GPUFN_STORE_CIPHER": "aes"}) as platform:  # no other machines any more
        assert platform.invoke("steady", {"number": 4}) == 4
        assert not (Home(home).nats / "join").exists()


def nodes(platform: Platform) -> list[str]:
    return [node["node"] for node in platform.client.get("/v1/nodes").json()["nodes"]]
