"""`gpufn login` and what follows from it, with stand-ins for the provider and the gateway."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner

from gpufn.cli import app
from gpufn.client.client import Client
from gpufn.client.login.device_flow import DeviceFlow
from gpufn.client.login.stored_logins import Login, Logins
from gpufn.client.views.access import ProviderView
from gpufn_core.errors import Forbidden, GatewayUnavailable, Unauthorized
from gpufn_core.home import Home
from tests.issuer import CLIENT, StandInIssuer, serving


@pytest.fixture
def issuer() -> Iterator[StandInIssuer]:
    with serving() as issuer:
        yield issuer


@pytest.fixture
def provider(gateway: Any, issuer: StandInIssuer) -> ProviderView:
    """The provider of a gateway that issues the tokens t1, t2, t3, ..."""
    gateway.on("GET /v1/auth", {"provider": {"issuer": issuer.url, "client_id": CLIENT}})
    for number, life_s in ((1, 3600), (2, 3600)):
        view = {"token": f"t{number}", "id": "user-1", "name": "alice", "scopes": ["read"], "expires_in_s": life_s}
        gateway.on("POST /v1/auth/token", view, status=201)
    gateway.on("GET /v1/functions", {"functions": []})
    return ProviderView(issuer=issuer.url, client_id=CLIENT)


def sent(gateway: Any, path: str) -> list[str | None]:
    return [each.headers.get("authorization") for each in gateway.requests if each.path == path]


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, arguments)


def test_a_login_is_stored_and_sent_until_logout(
    gateway: Any, issuer: StandInIssuer, provider: ProviderView, monkeypatch: pytest.MonkeyPatch
) -> None:
    issuer.polls = ["authorization_pending"]
    result = run("login", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["id"] == "user-1"
    assert "/verify?code=ABCD-EFGH" in result.stderr
    exchanged = next(each.json for each in gateway.requests if each.path == "/v1/auth/token")
    assert exchanged["jwt"].count(".") == 2
    path = Home.from_env().logins_file
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with Client() as client:
        client.functions()
    monkeypatch.setenv("GPUFN_API_KEY", "own")
    with Client() as client:
        client.functions()
    monkeypatch.delenv("GPUFN_API_KEY")
    assert run("logout").exit_code == 0
    with Client() as client:
        client.functions()
    assert sent(gateway, "/v1/functions") == ["Bearer t1", "Bearer own", None]
    assert issuer.forms[0]["grant_type"] == "urn:ietf:params:oauth:grant-type:device_code"


def test_a_token_is_renewed_before_it_expires(gateway: Any, issuer: StandInIssuer, provider: ProviderView) -> None:
    def store(**changes: Any) -> None:
        login = {"token": "t0", "expires_at": 0.0, "issuer": issuer.url, "client_id": CLIENT, "refresh_token": "r0"}
        Logins().put(gateway.url, Login(**{**login, **changes}))

    store()
    with Client() as one, Client() as other:
        for client in (one, one, other):  # the other finds the token that the first has renewed
            client.functions()
    assert sent(gateway, "/v1/functions") == ["Bearer t1"] * 3
    assert [form["refresh_token"] for form in issuer.forms] == ["r0"]
    stored = Logins().get(gateway.url)
    assert stored is not None
    assert stored.refresh_token == "r1"

    issuer.polls = ["invalid_grant"]
    store()
    with Client() as client, pytest.raises(Unauthorized):
        client.functions()
    issuer.replies["/token"] = (503, b"")
    store()
    with Client() as client, pytest.raises(GatewayUnavailable):
        client.functions()
    store(refresh_token="")
    with Client() as client, pytest.raises(Unauthorized):
        client.functions()


def test_a_token_that_is_still_valid_survives_a_failed_renewal(
    gateway: Any, issuer: StandInIssuer, provider: ProviderView, monkeypatch: pytest.MonkeyPatch
) -> None:
    issuer.replies["/token"] = (503, b"")
    monkeypatch.setattr("time.time", lambda: 1000.0)
    login = Login(token="t0", expires_at=1030.0, issuer=issuer.url, client_id=CLIENT, refresh_token="r0")
    Logins().put(gateway.url, login)
    with Client() as client:
        client.functions()
        client.functions()
    assert sent(gateway, "/v1/functions") == ["Bearer t0"] * 2
    assert issuer.requests.count("/token") == 1


def test_a_login_that_has_ended_is_replaced_by_the_next(
    gateway: Any, issuer: StandInIssuer, provider: ProviderView
) -> None:
    Logins().put(gateway.url, Login(token="t0", expires_at=0.0, issuer=issuer.url, client_id=CLIENT))
    assert run("whoami").exit_code == 5
    result = run("login")
    assert result.exit_code == 0, result.stderr
    stored = Logins().get(gateway.url)
    assert stored is not None
    assert (stored.token, stored.refresh_token) == ("t1", "r1")
    assert sent(gateway, "/v1/auth") == [None]


@pytest.mark.parametrize(
    ("polls", "expected"),
    [
        (["access_denied"], Forbidden),
        (["expired_token"], TimeoutError),
        (["authorization_pending"] * 50, TimeoutError),
        (["server_error"], GatewayUnavailable),
    ],
)
def test_a_login_ends_without_approval(issuer: StandInIssuer, polls: list[str], expected: type[Exception]) -> None:
    issuer.polls = polls
    waits: list[float] = []

    def now() -> float:
        return len(waits) * 10.0

    provider = ProviderView(issuer=issuer.url, client_id=CLIENT)
    with DeviceFlow(provider, wait=waits.append, now=now) as flow, pytest.raises(expected):
        flow.finish(flow.start())


def test_polls_slow_down_on_request(issuer: StandInIssuer) -> None:
    issuer.polls = ["slow_down", "authorization_pending", "slow_down"]
    waits: list[float] = []
    with DeviceFlow(ProviderView(issuer=issuer.url, client_id=CLIENT), wait=waits.append) as flow:
        grant = flow.finish(flow.start())
    assert (waits, grant.refresh_token) == ([0.0, 5.0, 5.0, 10.0], "r1")


@pytest.mark.parametrize(
    ("path", "reply"),
    [
        ("/.well-known/openid-configuration", (404, b"")),
        ("/.well-known/openid-configuration", (200, b"garbage")),
        ("/.well-known/openid-configuration", (200, b'{"issuer": "https://x", "token_endpoint": "https://x"}')),
        ("/device", (400, b'{"error": "invalid_client"}')),
        ("/device", (200, b"\xff")),
    ],
)
def test_a_provider_that_cannot_be_used(issuer: StandInIssuer, path: str, reply: tuple[int, bytes]) -> None:
    issuer.replies[path] = reply
    with pytest.raises(GatewayUnavailable), DeviceFlow(ProviderView(issuer=issuer.url, client_id=CLIENT)) as flow:
        flow.start()


def test_credentials_go_to_https_only() -> None:
    with pytest.raises(GatewayUnavailable):
        DeviceFlow(ProviderView(issuer="http://login.example.org", client_id=CLIENT))


def test_a_client_secret_is_sent_as_the_provider_supports_it(issuer: StandInIssuer) -> None:
    provider = ProviderView(issuer=issuer.url, client_id=CLIENT, client_secret="s")
    with DeviceFlow(provider) as flow:
        flow.refresh("r0")
    assert "client_secret" not in issuer.forms[0]  # the default of OpenID Connect: in a header


def test_the_commands_about_tokens(gateway: Any) -> None:
    gateway.on("GET /v1/auth/me", {"id": "k1", "name": "robot", "scopes": ["read"], "expires_at": None, "limits": None})
    gateway.on("POST /v1/auth/token", {"token": "gpufnt_a.b", "id": "k1"}, status=201)
    user = {"id": "user-1", "issuer": "https://login.example.org", "subject": "a", "name": "alice", "scopes": ["read"]}
    gateway.on("GET /v1/users", {"users": [user]})
    gateway.on("DELETE /v1/users/user-1/tokens", status=204)
    gateway.on("DELETE /v1/auth/tokens", status=204)
    assert "robot" in run("whoami").stdout
    assert run("token", "--scope", "invoke:f", "--expires", "15min").stdout == "gpufnt_a.b\n"
    body = next(each.json for each in gateway.requests if each.path == "/v1/auth/token")
    assert body == {"scopes": ["invoke:f"], "expires_in_s": 900.0}
    assert "alice" in run("users").stdout
    assert run("users", "revoke", "user-1").exit_code == 0
    assert run("users", "revoke", "--all").exit_code == 0
    assert run("users", "revoke").exit_code == 2


def test_a_gateway_without_a_provider(gateway: Any) -> None:
    gateway.on("GET /v1/auth", {"provider": None})
    assert run("login").exit_code == 1
    assert json.loads(run("logout", "--json").stdout) == {"logged_out": False}
