"""Names of volumes, queues and dicts on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.sdk.cli.commands import command
from tests.sdk.conftest import StubGateway

_VERSION = {"number": 1, "manifest": "0" * 64, "files": 0, "bytes": 0, "created_at": 1.0}
_NAMES = ("prod/shop/weights", "models", "prod/shop/models", "dev/a/both", "dev/b/both")


def _volumes(gateway: StubGateway) -> None:
    for name in _NAMES:
        record: dict[str, Any] = {"name": name, "versions": [_VERSION], "stored_bytes": 0}
        gateway.on(f"GET /v1/volumes/{name}", record)
        gateway.on(f"GET /v1/volumes/{name}/tree", {"volume": name, "version": 1, "files": []})
        gateway.on(f"DELETE /v1/volumes/{name}", status=204)
        gateway.on(f"POST /v1/volumes/{name}/commits", _VERSION, status=201)
    records = [{"name": name, "versions": [_VERSION], "stored_bytes": 0} for name in _NAMES]
    gateway.on("GET /v1/volumes", {"volumes": records})


@pytest.mark.parametrize(
    ("written", "meant"),
    [("weights", "prod/shop/weights"), ("prod/shop/weights", "prod/shop/weights"), ("models", "models")],
)
def test_a_short_name_means_the_volume_that_a_function_would_be(
    gateway: StubGateway, tmp_path: Path, written: str, meant: str
) -> None:
    _volumes(gateway)
    for words in (("get", written, "--to", str(tmp_path)), ("ls", written), ("versions", written)):
        assert command("volume", *words).exit_code == 0
    assert command("volume", "rm", written, "a.bin").stdout.startswith(f"{meant} version 1")
    assert command("volume", "rm", written, "--yes").stdout == f"deleted the volume {meant}\n"


def test_a_name_of_several_volumes_is_refused_with_their_names(gateway: StubGateway) -> None:
    _volumes(gateway)
    result = command("volume", "rm", "both", "--yes")
    assert (result.exit_code, "dev/a/both, dev/b/both" in result.stderr) == (2, True)
    assert [request.method for request in gateway.requests] == ["GET"]


def test_an_environment_narrows_the_names(gateway: StubGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    _volumes(gateway)
    monkeypatch.setenv("GPUFN_ENV", "prod")
    assert json.loads(command("volume", "ls", "models", "--json").stdout)["volume"] == "prod/shop/models"


def test_put_does_not_write_to_another_app_and_creates_no_stray_volume(gateway: StubGateway, tmp_path: Path) -> None:
    _volumes(gateway)
    result = command("volume", "put", "weights", str(tmp_path))
    assert result.exit_code == 2
    assert "prod/shop/weights" in result.stderr
    assert "default/default/weights" in result.stderr
    assert {request.method for request in gateway.requests} == {"GET"}


@pytest.mark.parametrize("kind", ["queue", "dict"])
def test_a_short_name_of_a_queue_or_a_dict_is_deleted(gateway: StubGateway, kind: str) -> None:
    gateway.on(f"GET /v1/{kind}s", {f"{kind}s": [{"name": "prod/shop/jobs", "items": 1, "entries": 1}]})
    gateway.on(f"DELETE /v1/{kind}s/prod/shop/jobs", status=204)
    assert command(kind, "rm", "jobs", "--yes").exit_code == 0


@pytest.mark.parametrize("kind", ["queue", "dict", "volume"])
def test_a_missing_name_is_an_error_that_suggests_another(gateway: StubGateway, kind: str) -> None:
    missing = {"code": "data_not_found", "detail": f"There is no {kind} job: see `gpufn {kind} ls`."}
    gateway.on(f"DELETE /v1/{kind}s/-/-/job", missing, status=404)
    gateway.on(f"DELETE /v1/{kind}s/job", missing, status=404)
    result = command(kind, "rm", "job", "--yes")
    assert (result.exit_code, result.stdout) == (4, "")
    item = {"items": 1, "entries": 1, "versions": [_VERSION], "stored_bytes": 0}
    gateway.on(f"GET /v1/{kind}s", {f"{kind}s": [{"name": "prod/shop/jobs", **item}]})
    result = command(kind, "rm", "job", "--yes")
    assert (result.exit_code, result.stdout) == (4, "")
    assert result.stderr.endswith(f"no {kind} job; did you mean 'prod/shop/jobs'?\n")


def test_a_key_that_may_not_read_looks_for_no_similar_name(
    gateway: StubGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUFN_API_KEY", "secret")
    gateway.on("GET /v1/auth/me", {"id": "k", "scopes": ["invoke:*"]})
    missing = {"code": "function_not_found", "detail": "There is no function 'f'."}
    gateway.on("POST /v1/functions/f/invoke", missing, status=404)
    assert command("invoke", "f").exit_code == 4
    assert "GET /v1/functions" not in {f"{each.method} {each.path}" for each in gateway.requests}


def test_get_copies_to_a_folder_and_knows_what_is_missing(gateway: StubGateway, tmp_path: Path) -> None:
    _volumes(gateway)
    (tmp_path / "taken").write_text("mine")
    result = command("volume", "get", "models", "--to", str(tmp_path / "taken"))
    assert (result.exit_code, gateway.requests) == (2, [])
    assert command("volume", "get", "models", "nothing.bin", "--to", str(tmp_path)).exit_code == 4
