"""`gpufn signing`, and `gpufn deploy --sign`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpufn_core.signing.ed25519 import Signer, parse_public_key
from tests.sdk.cli.commands import APP, VIEW, command
from tests.sdk.conftest import Project, StubGateway

KEY: dict[str, Any] = {"name": "ci", "id": "ab12", "patterns": ["prod/*"], "added_at": 1.0, "functions": ["prod/a/f"]}


def test_keygen_writes_a_private_key_for_its_owner_and_a_public_key(tmp_path: Path) -> None:
    path = tmp_path / "ci.pem"
    made = command("signing", "keygen", "--out", str(path), "--json")
    assert json.loads(made.stdout)["id"] == Signer.read(path).id
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(parse_public_key((tmp_path / "ci.pem.pub").read_text())) == 32
    assert "PRIVATE" not in (tmp_path / "ci.pem.pub").read_text() + made.output
    assert command("signing", "keygen", "--out", str(path)).exit_code == 2


def test_trust_sends_the_public_key_and_its_patterns(gateway: StubGateway, tmp_path: Path) -> None:
    gateway.on("PUT /v1/signing/keys/ci", KEY)
    public = tmp_path / "ci.pub"
    public.write_text(Signer.new().public_pem())
    assert command("signing", "trust", "ci", "--public-key", str(public), "--for", "prod/*").exit_code == 0
    assert gateway.requests[-1].json == {"public_key": public.read_text(), "patterns": ["prod/*"]}
    assert command("signing", "trust", "ci", "--public-key", str(public)).exit_code == 0
    assert gateway.requests[-1].json["patterns"] == ["*"]
    assert command("signing", "trust", "ci", "--public-key", str(tmp_path / "none")).exit_code == 2


def test_rules_are_listed_changed_and_removed(gateway: StubGateway) -> None:
    rules = {"keys": [KEY], "required": ["prod"]}
    gateway.on("GET /v1/signing", rules)
    assert command("signing", "ls").stdout.splitlines()[1].split()[:2] == ["ci", "ab12"]
    gateway.on("PUT /v1/signing/required/prod", rules)
    assert command("signing", "require", "prod", "--force").exit_code == 0
    assert gateway.requests[-1].json == {"force": True}
    gateway.on("DELETE /v1/signing/required/prod", rules)
    assert command("signing", "allow-unsigned", "prod").exit_code == 0
    gateway.on("DELETE /v1/signing/keys/ci", KEY)
    assert "prod/a/f" in command("signing", "rm", "ci", "--yes").stderr


def test_a_deploy_says_by_which_key_it_is_signed(gateway: StubGateway, project: Project) -> None:
    pytest.importorskip("cryptography")
    project(APP)
    gateway.any_bundle = True
    gateway.on("GET /v1/nodes", {"nodes": []})
    gateway.on("POST /v1/functions", VIEW | {"serving": 3}, status=201)
    gateway.on("GET /v1/functions/f", {"code": "function_not_found"}, status=404)
    assert command("signing", "keygen", "--out", "ci.pem", "--json").exit_code == 0
    result = command("deploy", "app.py", "--no-wait", "--sign", "ci.pem")
    sent = next(request for request in gateway.requests if request.method == "POST").json
    assert (result.exit_code, sent["signature"]["key"] in result.stdout) == (0, True)
    assert "signed" not in command("deploy", "app.py", "--no-wait").stdout


@pytest.mark.parametrize("by_variable", [False, True])
def test_a_deploy_with_an_unreadable_key_sends_nothing(
    gateway: StubGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_variable: bool
) -> None:
    missing, app = tmp_path / "none", tmp_path / "app.py"
    app.write_text("")
    options = () if by_variable else ("--sign", str(missing))
    if by_variable:
        monkeypatch.setenv("GPUFN_SIGNING_KEY", str(missing))
    assert command("deploy", str(app), *options).exit_code == 2
    assert not gateway.requests
