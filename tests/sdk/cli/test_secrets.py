"""`gpufn secrets`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.sdk.cli.commands import command
from tests.sdk.conftest import StubGateway

VIEW: dict[str, Any] = {"name": "TOKEN", "version": 2, "updated_at": 1.0, "functions": ["f"]}


@pytest.mark.parametrize(("text", "value"), [("abc", "abc"), ("abc\n", "abc"), ("a\nb\n\n", "a\nb\n")])
def test_the_value_is_standard_input_without_its_last_newline(gateway: StubGateway, text: str, value: str) -> None:
    gateway.on("PUT /v1/secrets/TOKEN", VIEW)
    result = command("secrets", "set", "TOKEN", input=text)
    assert (result.exit_code, gateway.requests[-1].json) == (0, {"value": value})
    assert "abc" not in result.output


def test_a_file_is_the_value_as_it_is(gateway: StubGateway, tmp_path: Path) -> None:
    gateway.on("PUT /v1/secrets/TOKEN", VIEW)
    file = tmp_path / "key.pem"
    file.write_text("-----\n")
    assert command("secrets", "set", "TOKEN", "--file", str(file)).exit_code == 0
    assert gateway.requests[-1].json == {"value": "-----\n"}
    assert command("secrets", "set", "TOKEN", "--file", str(tmp_path / "none")).exit_code == 2


def test_a_value_is_never_an_argument(gateway: StubGateway) -> None:
    assert command("secrets", "set", "TOKEN", "abc").exit_code == 2
    assert not gateway.requests


def test_secrets_are_listed_deleted_and_rotated(gateway: StubGateway) -> None:
    gateway.on("GET /v1/secrets", {"secrets": [VIEW]})
    assert command("secrets", "ls").stdout.splitlines()[1].split()[:4] == ["TOKEN", "all", "functions", "2"]
    gateway.on("DELETE /v1/secrets/TOKEN", None, status=204)
    assert command("secrets", "rm", "TOKEN", "--yes").exit_code == 0
    gateway.on("POST /v1/secrets/rotate", {"encrypted": 3})
    assert "3" in command("secrets", "rotate").stdout


def test_a_secret_of_an_app(gateway: StubGateway) -> None:
    scope = ("--env", "prod", "--app", "search")
    gateway.on("PUT /v1/secrets/TOKEN", VIEW | {"scope": "prod/search/*"})
    gateway.on("DELETE /v1/secrets/TOKEN", None, status=204)
    gateway.on("GET /v1/secrets", {"secrets": [VIEW | {"scope": "prod/*"}]})
    for arguments in (("set", "TOKEN", *scope), ("rm", "TOKEN", "--yes", *scope)):
        assert "prod/search/*" in command("secrets", *arguments, input="abc").stdout
        assert gateway.requests[-1].path.endswith("?scope=prod%2Fsearch%2F%2A")
    assert "prod/*" in command("secrets", "ls").stdout
    assert command("secrets", "set", "TOKEN", "--app", "search", input="abc").exit_code == 2
