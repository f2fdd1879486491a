"""Scopes and limits of API keys. The first key closes the platform to callers without one, so this file has its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from gpufn_core.errors import Unauthorized
from tests.conftest import Platform, running_platform
from tests.e2e.test_bad_input import refusal

pytestmark = pytest.mark.e2e

APP = Path(__file__).parent / "apps" / "picky.py"
CALL = "/v1/functions/add/invoke"


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    with running_platform(tmp_path_factory.mktemp("keys") / "home") as platform:
        platform.gpufn("deploy", APP, "--name", "add", "--name", "echo")
        yield platform


@pytest.fixture(scope="module")
def admin(own: Platform) -> dict[str, str]:
    """The headers of the administrator, whose key is the first."""
    wrong = own.try_gpufn("keys", "create", "--rate=-5/s")
    assert (wrong.returncode, "is not a rate" in wrong.stderr) == (2, True)
    return {"authorization": f"Bearer {own.gpufn('keys', 'create', 'boss').strip()}"}


def caller(own: Platform, admin: dict[str, str], **limits: float) -> dict[str, str]:
    """Return the headers of a caller who may only invoke `add`."""
    wanted = {"scopes": ["invoke:add"]} | ({"limits": limits} if limits else {})
    made = own.client.post("/v1/keys", json=wanted, headers=admin)
    assert made.status_code == 201, made.text
    return {"authorization": f"Bearer {made.json()['key']}"}


def test_wrong_keys_and_scopes(own: Platform, admin: dict[str, str]) -> None:
    client = own.client
    allowed = caller(own, admin)
    said = Unauthorized().message
    answer = client.post(CALL, json={"x": 1})
    assert refusal(answer) == (401, "unauthorized", said, None)
    assert answer.headers["www-authenticate"] == "Bearer"
    for wrong in ("Bearer", "Basic dTpw", "Bearer gpufn_nobody_xyz", f"{admin['authorization']}x", "Bearer \xff"):
        answer = client.post(CALL, json={"x": 1}, headers=[(b"authorization", wrong.encode("latin-1"))])
        assert refusal(answer)[:2] == (401, "unauthorized"), wrong

    assert client.post(CALL, json={"x": 1}, headers=allowed).json() == 2
    for verb in ("invoke", "submit"):  # for this key the function does not exist
        answer = client.post(f"/v1/functions/echo/{verb}", json={}, headers=allowed)
        assert refusal(answer)[:2] == (404, "function_not_found")
    for method, path, scope in (
        ("GET", "/v1/functions", "'read'"),
        ("DELETE", "/v1/functions/add", "'deploy'"),
        ("PUT", f"/v1/bundles/{'0' * 64}", "'deploy'"),
        ("POST", "/v1/keys", "'admin'"),
    ):
        answer = client.request(method, path, json={}, headers=allowed)
        needed = f"This request needs an API key with the scope {scope}."
        assert refusal(answer) == (403, "forbidden", needed, None), path
    assert client.get("/readyz").status_code == 200, "probes need no key"
    assert client.post(CALL, json={"x": 2}, headers=admin).json() == 3


def test_a_key_is_held_to_its_limits(own: Platform, admin: dict[str, str]) -> None:
    limited = caller(own, admin, rate=0.05, burst=3, queued=10)  # so slow that no token returns during the test
    with httpx.Client(base_url=own.url, headers=limited) as client:
        urgent = client.post(CALL, json={"x": 1}, headers={"x-gpufn-priority": "hi"})
        assert (urgent.status_code, urgent.json()["code"]) == (403, "forbidden")
        answers = [client.post(CALL, json={"x": 1}) for _ in range(4)]
    assert [answer.status_code for answer in answers] == [200, 200, 429, 429]
    refused = answers[2]
    assert refused.json()["code"] == "rate_limited"
    assert refused.headers["ratelimit-policy"] == '"rate";q=3;w=60'
    assert 1 <= int(refused.headers["retry-after"]) <= 20
