"""Sign-in with a stand-in for the OpenID provider: the session that it begins, and what is refused."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

import httpx
import msgspec
import pytest

from gpufn_gateway.console import sign_ins
from gpufn_gateway.console.browser_login import FLOW_S
from gpufn_gateway.settings import GatewaySettings
from tests.gateway.console.test_console import FETCH, NAVIGATION, PAGE, add_key, page_token
from tests.gateway.whole import Whole, gateway_on
from tests.issuer import CLIENT, StandInIssuer, serving

RETURN = {**NAVIGATION, "sec-fetch-site": "cross-site"}
ROLES = '[groups]\ndevs = ["read"]\n'


@pytest.fixture(scope="module")
def running() -> Iterator[StandInIssuer]:
    with serving() as issuer:
        yield issuer


@pytest.fixture
def issuer(running: StandInIssuer) -> StandInIssuer:
    running.codes.clear()
    running.claims.clear()
    running.replies.clear()
    running.requests.clear()
    running.groups = ("devs",)
    return running


Start = Callable[..., contextlib.AbstractAsyncContextManager[Whole]]


@pytest.fixture
def start(nats: Any, issuer: StandInIssuer, tmp_path: Path) -> Start:
    return functools.partial(gateway_with, nats, issuer, tmp_path)


@contextlib.asynccontextmanager
async def gateway_with(
    nats: Any, issuer: StandInIssuer, tmp_path: Path, client_secret: str = ""
) -> AsyncIterator[Whole]:
    """A gateway with a key, a provider and a console."""
    (tmp_path / "roles.toml").write_text(ROLES)
    (tmp_path / "site" / "static").mkdir(parents=True)
    (tmp_path / "site" / "index.html").write_text('<meta name="gpufn-page-token" content="{{page-token}}">')
    settings = GatewaySettings(
        oidc_issuer=issuer.url,
        oidc_client_id=CLIENT,
        oidc_client_secret=client_secret,
        oidc_roles=str(tmp_path / "roles.toml"),
    )
    async with gateway_on(nats, settings=settings, site=tmp_path / "site") as gateway:
        await add_key(gateway, "admin")
        yield gateway
        for key in gateway.access.keys:
            await gateway.keys.delete(key.id)


async def begin(gateway: Whole, next_page: str = "/console/functions/f?tab=logs") -> httpx.Response:
    headers = {**FETCH, PAGE: await page_token(gateway.http)}
    return await gateway.http.post("/console/login", json={"next": next_page}, headers=headers)


async def returned(gateway: Whole, address: str, headers: dict[str, str] = RETURN) -> httpx.Response:
    """Follow the redirect of the provider."""
    parts = urlsplit(address)
    return await gateway.http.get(f"{parts.path}?{parts.query}", headers=headers)


async def test_a_login_begins_a_session_with_the_roles_of_the_user(start: Start, issuer: StandInIssuer) -> None:
    async with start() as gateway:
        began = await begin(gateway)
        flow = began.headers["set-cookie"]
        assert all(each in flow for each in ("HttpOnly", "SameSite=Lax", "Path=/console/login"))
        url = began.json()["url"]
        request = dict(parse_qsl(urlsplit(url).query))
        assert url.startswith(f"{issuer.url}/authorize?")
        assert (request["code_challenge_method"], request["scope"]) == ("S256", "openid email groups")
        assert request["redirect_uri"].endswith("/console/login/callback")
        response = await returned(gateway, issuer.authorize(url))
        assert (response.status_code, response.headers["location"]) == (303, "/console/functions/f?tab=logs")
        session = next(each for each in response.headers.get_list("set-cookie") if each.startswith("gpufn_console"))
        assert all(each in session for each in ("HttpOnly", "SameSite=Strict", "Path=/console;"))
        headers = {**FETCH, PAGE: await page_token(gateway.http)}
        me = (await gateway.http.get("/console/api/v1/auth/me", headers=headers)).json()
        assert (me["name"], me["scopes"]) == ("alice@example.org", ["read"])
        assert (await gateway.http.get("/console/api/v1/keys", headers=headers)).status_code == 403
        assert (await returned(gateway, f"{request['redirect_uri']}?code=c0&state={request['state']}")).headers[
            "location"
        ] == "/console#login=expired", "a flow ends once"


async def test_the_page_after_the_redirect_loads_itself_again_to_send_its_strict_cookie(
    start: Start, issuer: StandInIssuer
) -> None:
    async with start() as gateway:
        response = await gateway.http.get("/console/functions/f?tab=logs", headers=RETURN)
        assert 'http-equiv="refresh"' in response.text


@pytest.mark.parametrize(
    "next_page",
    [
        "https://evil.example",
        "//evil.example/console",
        "/console.evil.example",
        "/console@evil.example",
        "/console\\evil",
        "/consolex",
        "/",
        "/web/default/default/site/",
        "/console/\r\nset-cookie: a=b",
        "/console/" + "a" * 3000,
    ],
)
async def test_a_login_continues_only_in_the_console(
    start: Start, issuer: StandInIssuer, problem: Any, next_page: str
) -> None:
    async with start() as gateway:
        assert problem(await begin(gateway, next_page)) == (422, "invalid_input")


async def test_only_the_console_begins_a_login(start: Start, issuer: StandInIssuer) -> None:
    async with start() as gateway:
        for headers in (FETCH, {**FETCH, PAGE: "1.x"}, {}):
            response = await gateway.http.post("/console/login", json={}, headers=headers)
            assert response.status_code == 401


def with_parameters(**changes: str) -> Callable[[str], str]:
    def changed(address: str) -> str:
        parts = urlsplit(address)
        return f"{parts.path}?{urlencode(dict(parse_qsl(parts.query)) | changes)}"

    return changed


@pytest.mark.parametrize(
    ("change", "headers", "outcome"),
    [
        (with_parameters(state="x" * 32), RETURN, "expired"),
        (with_parameters(state=""), RETURN, "expired"),
        (lambda address: f"{address}&state=x", RETURN, "expired"),
        (lambda address: address.partition("?")[0], RETURN, "expired"),
        (with_parameters(), FETCH, "expired"),
        (with_parameters(error="access_denied"), RETURN, "denied"),
        (with_parameters(code=""), RETURN, "denied"),
        (with_parameters(code="other"), RETURN, "failed"),
        (with_parameters(iss="https://evil.example"), RETURN, "failed"),
    ],
)
async def test_a_response_that_is_not_of_this_login_begins_no_session(
    start: Start,
    issuer: StandInIssuer,
    change: Callable[[str], str],
    headers: dict[str, str],
    outcome: str,
) -> None:
    async with start() as gateway:
        address = change(issuer.authorize((await begin(gateway)).json()["url"]))
        response = await returned(gateway, address, headers)
        assert response.headers["location"] == f"/console#login={outcome}"
        assert not any(each.startswith("gpufn_console") for each in response.headers.get_list("set-cookie"))


@pytest.mark.parametrize(
    ("claims", "groups", "outcome"),
    [
        ({"nonce": "of another login"}, ("devs",), "failed"),
        ({"nonce": None}, ("devs",), "failed"),
        ({"aud": "another-client"}, ("devs",), "failed"),
        ({"azp": "another-client"}, ("devs",), "failed"),
        ({"exp": 1}, ("devs",), "failed"),
        ({}, ("strangers",), "no-role"),
    ],
)
async def test_an_id_token_that_is_not_of_this_login_begins_no_session(
    start: Start, issuer: StandInIssuer, claims: dict[str, Any], groups: tuple[str, ...], outcome: str
) -> None:
    issuer.claims, issuer.groups = claims, groups
    async with start() as gateway:
        response = await returned(gateway, issuer.authorize((await begin(gateway)).json()["url"]))
        assert response.headers["location"] == f"/console#login={outcome}"
        assert not any(each.startswith("gpufn_console") for each in response.headers.get_list("set-cookie"))


async def test_a_flow_of_another_browser_or_an_old_one_begins_no_session(
    start: Start, issuer: StandInIssuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start() as gateway:
        stolen = issuer.authorize((await begin(gateway)).json()["url"])
        await begin(gateway)  # the cookie is of this flow
        assert (await returned(gateway, stolen)).headers["location"] == "/console#login=expired"
        address = issuer.authorize((await begin(gateway)).json()["url"])
        later = gateway.clock.time() + FLOW_S + 1
        monkeypatch.setattr(type(gateway.clock), "time", lambda self: later)
        assert (await returned(gateway, address)).headers["location"] == "/console#login=expired"


@pytest.mark.parametrize("sealed", ["", "x", "1.e30.e30", "9.e30.e30", "1.!.!", "0." * 3])
async def test_a_flow_that_no_gateway_has_sealed_is_unknown(start: Start, issuer: StandInIssuer, sealed: str) -> None:
    async with start() as gateway:
        cookie = (await begin(gateway)).headers["set-cookie"].partition("=")[0]
        gateway.http.cookies.clear()
        headers = {**RETURN, "cookie": f"{cookie}={sealed}"}
        response = await returned(gateway, "/console/login/callback?code=c&state=s", headers)
        assert response.headers["location"] == "/console#login=expired"


async def test_a_provider_that_is_away_or_wrong_is_reported(start: Start, issuer: StandInIssuer, problem: Any) -> None:
    async with start() as gateway:
        issuer.replies["/.well-known/openid-configuration"] = (500, b"")
        for _ in range(3):
            assert problem(await begin(gateway)) == (503, "issuer_unavailable")
        assert issuer.requests.count("/.well-known/openid-configuration") == 1, "one request in 10 s"


async def test_a_login_over_plain_http_to_another_host_is_refused(
    start: Start, issuer: StandInIssuer, problem: Any
) -> None:
    async with start() as gateway:
        other = f'{{"issuer": "{issuer.url}", "authorization_endpoint": "http://evil.example/a"}}'
        issuer.replies["/.well-known/openid-configuration"] = (200, other.encode())
        assert problem(await begin(gateway)) == (503, "issuer_unavailable")


@pytest.mark.parametrize("endpoint", ["https://evil.example/token", "https://evil.example:99999/", "{url}/\x01", ""])
async def test_codes_go_only_to_the_host_of_the_issuer(start: Start, issuer: StandInIssuer, endpoint: str) -> None:
    """Bug: an address with an impossible port or character was an internal error."""
    document = {"issuer": issuer.url, "authorization_endpoint": f"{issuer.url}/authorize"}
    body = msgspec.json.encode(document | {"token_endpoint": endpoint.replace("{url}", issuer.url)})
    issuer.replies["/.well-known/openid-configuration"] = (200, body)
    async with start() as gateway:
        response = await returned(gateway, issuer.authorize((await begin(gateway)).json()["url"]))
        assert response.headers["location"] == "/console#login=unavailable"


async def test_the_client_secret_is_sent_if_there_is_one(start: Start, issuer: StandInIssuer) -> None:
    async with start("s3") as gateway:
        await returned(gateway, issuer.authorize((await begin(gateway)).json()["url"]))
        assert issuer.forms[-1]["client_secret"] == "s3"


async def test_the_log_has_the_reason_of_a_failed_login_without_its_code(
    start: Start, issuer: StandInIssuer, caplog: pytest.LogCaptureFixture
) -> None:
    """Bug: the console refers to the log of the gateway, which said nothing."""
    async with start() as gateway:
        address = with_parameters(code="c-unknown")(issuer.authorize((await begin(gateway)).json()["url"]))
        await returned(gateway, address)
    (warning,) = [record for record in caplog.records if record.name == sign_ins.__name__]
    assert f"{issuer.url}/token returned 400" in warning.getMessage()
    assert "c-unknown" not in warning.getMessage()


async def test_a_login_is_audited_without_its_code(start: Start, issuer: StandInIssuer) -> None:
    async with start() as gateway:
        await returned(gateway, issuer.authorize((await begin(gateway)).json()["url"]))
        records = [msgspec.json.decode(each) async for each in gateway.audit.records(0, 10_000)]
        ended = [each for each in records if each["action"] == "GET /console/login/callback"]
        assert re.fullmatch(r"user-[a-z0-9]{20}", ended[-1]["principal"])
        assert ended[-1]["status"] == 303
        assert "code" not in str(ended[-1])
