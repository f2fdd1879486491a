"""`gpufn teams`."""

from __future__ import annotations

from typing import Any

from tests.sdk.cli.commands import command
from tests.sdk.conftest import StubGateway

TEAM: dict[str, Any] = {"name": "search", "owns": ["prod/search/*"], "limits": {"gpus": 4, "stored_bytes": 50 << 30}}


def test_teams_are_listed_with_their_use(gateway: StubGateway) -> None:
    use = {"gpus": 2.5, "borrowed_gpus": 0.5, "workers": 3, "stored_bytes": 1 << 30}
    gateway.on("GET /v1/teams", {"teams": [TEAM | {"use": use}]})
    row = command("teams", "ls").stdout.splitlines()[1]
    for text in ("search", "prod/search/*", "2.5 of 4, 0.5 borrowed", "1 GiB of 50 GiB"):
        assert text in row


def test_options_of_a_team(gateway: StubGateway) -> None:
    gateway.on("PUT /v1/teams/search", TEAM)
    result = command("teams", "set", "search", "--owns", "prod/search/*", "--storage", "50Gi", "--gpus", "4")
    assert "50 GiB stored" in result.stdout
    assert gateway.requests[-1].json["limits"] == TEAM["limits"]
    for each in ("--trust-domain ours", "--isolation sandbox"):
        assert command("teams", "set", "search", "--owns", "prod/search/*", *each.split()).exit_code == 0
    assert (gateway.requests[-2].json["trust_domains"], gateway.requests[-1].json["isolation"]) == (["ours"], "sandbox")
    assert command("teams", "set", "search", "--owns", "prod/search/*", "--storage", "much").exit_code == 2
