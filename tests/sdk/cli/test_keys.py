"""`gpufn keys`."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from gpufn_core.protocol import subjects
from gpufn_local.nats_process import EmbeddedServer
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage.key_value import KeyValue
from tests.sdk.cli.commands import command
from tests.sdk.conftest import StubGateway


def test_a_new_key_is_on_standard_output_alone(gateway: StubGateway) -> None:
    gateway.on("POST /v1/keys", {"id": "k1", "key": "s3cret", "scopes": ["deploy"], "label": "ci"}, status=201)
    result = command("keys", "create", "ci", "--scope", "deploy")
    assert (result.stdout, gateway.requests[-1].json) == (
        "s3cret\n",
        {"label": "ci", "scopes": ["deploy"], "limits": {}},
    )


@pytest.mark.parametrize("own", ["", "gpufn_k0"])
def test_creating_the_first_key_warns_that_all_clients_need_a_key(
    gateway: StubGateway, monkeypatch: pytest.MonkeyPatch, own: str
) -> None:
    monkeypatch.setenv("GPUFN_API_KEY", own)
    gateway.on("POST /v1/keys", {"id": "k1", "key": "s3cret", "scopes": ["admin"]}, status=201)
    stderr = command("keys", "create").stderr
    assert "key k1 (admin: every permission)" in stderr
    assert ("the first key" in stderr) is (not own)
    assert ("keys rm k1" in stderr, "export GPUFN_API_KEY=..." in stderr) == (not own, not own)
    if not own:
        assert "the first key" in command("keys", "create", "--json").stderr


def test_a_key_is_made_with_limits_and_they_are_listed(gateway: StubGateway) -> None:
    limits = {"rate": 10.0, "burst": 100, "concurrency": 8, "queued": 1000, "gpu_s": 3600.0}
    gateway.on("POST /v1/keys", {"id": "k1", "key": "s3cret", "scopes": ["hi"], "limits": limits}, status=201)
    gateway.on("GET /v1/keys", {"keys": [{"id": "k1", "scopes": ["hi"], "created_at": 1.0, "limits": limits}]})
    options = ("--rate", "600/min", "--burst", "100", "--concurrency", "8", "--queued", "1000", "--gpu-seconds", "3600")
    assert command("keys", "create", "ci", "--scope", "hi", *options).exit_code == 0
    assert gateway.requests[-1].json == {"label": "ci", "scopes": ["hi"], "limits": limits}
    assert "10/s (burst 100), 8 in flight, 1,000 queued, 3,600 GPU s/day" in command("keys", "ls").stdout
    for wrong in (("--rate", "50"), ("--rate", "0/s"), ("--rate=-5/s",), ("--concurrency", "0"), ("--queued", "x")):
        assert command("keys", "create", *wrong).exit_code == 2


def test_a_key_expires_and_its_secret_is_replaced(gateway: StubGateway) -> None:
    scopes = ["deploy:prod/search/*", "read"]
    gateway.on("POST /v1/keys", {"id": "k1", "key": "s3cret", "scopes": scopes}, status=201)
    options = [option for scope in scopes for option in ("--scope", scope)]
    assert command("keys", "create", "ci", *options, "--expires", "30d").exit_code == 0
    assert gateway.requests[-1].json["scopes"] == scopes
    assert gateway.requests[-1].json["expires_in_s"] == 30 * 86_400
    gateway.on("POST /v1/keys/k1/rotate", {"id": "k1", "key": "n3w", "scopes": ["read"]})
    assert command("keys", "rotate", "k1", "--overlap", "24h").stdout == "n3w\n"
    assert gateway.requests[-1].json == {"overlap_s": 86_400.0}
    expired = {"id": "k1", "scopes": ["read"], "created_at": 1.0, "expires_at": 2.0}
    gateway.on("GET /v1/keys", {"keys": [expired, {"id": "k2", "scopes": ["read"], "created_at": 1.0}]})
    assert [line.split()[-1] for line in command("keys", "ls").stdout.splitlines()] == ["EXPIRES", "expired", "-"]
    for wrong in ("30", "soon", "-1d", "1.5h"):
        assert command("keys", "create", f"--expires={wrong}").exit_code == 2


def test_the_limits_of_a_key_are_changed(gateway: StubGateway) -> None:
    gateway.on("PUT /v1/keys/k1/limits", {"id": "k1", "scopes": ["hi"], "limits": {"rate": 0.5, "burst": 2}})
    assert command("keys", "limit", "k1", "--rate", "30/min").stdout == "key k1: 30/min (burst 2)\n"
    assert gateway.requests[-1].json == {"rate": 0.5}


def test_all_keys_can_be_reset_without_a_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GPUFN_HOME", str(tmp_path))
    monkeypatch.delenv("GPUFN_NATS_URL", raising=False)

    async def keys_of(server: EmbeddedServer, *new: str) -> list[str]:
        bus = await Bus.connect(server.url, name="test")
        try:
            keys = await KeyValue.open(bus, subjects.API_KEYS)
            for each in new:
                await keys.put(each, b"{}")
            return await keys.keys()
        finally:
            await bus.close()

    stderr = command("keys", "reset", "--yes").stderr
    assert str(tmp_path) in stderr
    assert "GPUFN_HOME" in stderr
    with EmbeddedServer.start(tmp_path / "nats") as server:
        assert asyncio.run(keys_of(server, "k1", "k2")) == ["k1", "k2"]
        assert command("keys", "reset", input="n\n").exit_code == 1
        assert asyncio.run(keys_of(server)) == ["k1", "k2"]
        assert command("keys", "reset", "--yes").stdout == "deleted 2 keys\n"
        assert asyncio.run(keys_of(server)) == []
        assert json.loads(command("keys", "reset", "--yes", "--json").stdout) == {"deleted": []}
