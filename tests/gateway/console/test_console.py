"""The console's document, its files and its sessions."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gpufn_core.protocol.codec import encode
from gpufn_gateway.auth.access import new_key
from tests.gateway.whole import Whole, gateway_on
from tests.waiting import until_async

NAVIGATION = {"sec-fetch-dest": "document", "sec-fetch-mode": "navigate", "sec-fetch-site": "none"}
FETCH = {"sec-fetch-dest": "empty", "sec-fetch-mode": "cors", "sec-fetch-site": "same-origin"}
PAGE = "x-gpufn-page"


@contextlib.asynccontextmanager
async def console_on(nats: Any, tmp_path: Path) -> AsyncIterator[Whole]:
    """A gateway whose console is built: a document and one script."""
    (tmp_path / "static").mkdir()
    (tmp_path / "static" / "index-abc.js").write_text("let answer = 42;" * 100)
    (tmp_path / "index.html").write_text('<meta name="gpufn-page-token" content="{{page-token}}">')
    async with gateway_on(nats, site=tmp_path) as whole:
        yield whole
        for key in whole.access.keys:
            await whole.keys.delete(key.id)


async def page_token(http: httpx.AsyncClient, headers: dict[str, str] = NAVIGATION) -> str:
    found = re.search('content="(.*?)"', (await http.get("/console", headers=headers)).text)
    assert found is not None
    return found[1]


async def add_key(gateway: Whole, *scopes: str) -> tuple[str, str]:
    key, secret = new_key("", scopes, 0.0)
    await gateway.keys.create(key.id, encode(key))
    await until_async(lambda: gateway.access.knows(key.id))
    return key.id, secret


async def sign_in(gateway: Whole, *scopes: str) -> tuple[str, str]:
    """Return the id of a key, and the page token of a session with it. The client keeps the cookie."""
    key, secret = await add_key(gateway, *scopes)
    headers = {**FETCH, PAGE: await page_token(gateway.http)}
    response = await gateway.http.post("/console/session", json={"key": secret}, headers=headers)
    assert response.status_code == 201, response.text
    return key, await page_token(gateway.http)


async def test_the_document_runs_no_foreign_script_and_is_in_no_frame_and_no_cache(nats: Any, tmp_path: Path) -> None:
    async with console_on(nats, tmp_path) as gateway:
        response = await gateway.http.get("/console/functions/prod/search/predict", headers=NAVIGATION)
        policy = dict(each.strip().split(" ", 1) for each in response.headers["content-security-policy"].split(";"))
        assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert policy["require-trusted-types-for"] == "'script'"
        assert response.headers["cross-origin-opener-policy"] == "same-origin"


async def test_files_are_compressed_and_cached_by_their_hash(nats: Any, tmp_path: Path) -> None:
    async with console_on(nats, tmp_path) as gateway:
        compressed = await gateway.http.get("/console/static/index-abc.js", headers={"accept-encoding": "gzip"})
        plain = await gateway.http.get("/console/static/index-abc.js", headers={"accept-encoding": "identity"})
        assert compressed.headers["content-encoding"] == "gzip"
        assert compressed.text == plain.text
        assert "immutable" in plain.headers["cache-control"]
        assert plain.headers["x-content-type-options"] == "nosniff"
        assert plain.headers["content-type"].startswith("text/javascript")


@pytest.mark.parametrize(
    "path", ["/console/static/../index.html", "/console/static/%2e%2e/index.html", "/console/static/"]
)
async def test_only_files_of_the_console_are_served(nats: Any, tmp_path: Path, path: str) -> None:
    async with console_on(nats, tmp_path) as gateway:
        response = await gateway.http.get(f"/console/static/{path}", headers={"accept-encoding": "identity"})
        assert "let answer" not in response.text


async def test_a_console_that_is_not_built_names_the_build_command(nats: Any, tmp_path: Path) -> None:
    async with gateway_on(nats, site=tmp_path / "nothing") as whole:
        response = await whole.http.get("/console", headers=NAVIGATION)
        assert (response.status_code, "scripts/console" in response.text) == (200, True)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        FETCH,
        {**NAVIGATION, "sec-fetch-dest": "iframe"},
        {**NAVIGATION, "sec-purpose": "prefetch"},
        {**NAVIGATION, "sec-fetch-mode": "cors"},
    ],
)
async def test_only_a_navigation_gets_a_page_token(nats: Any, tmp_path: Path, headers: dict[str, str]) -> None:
    async with console_on(nats, tmp_path) as gateway:
        assert await page_token(gateway.http, headers) == ""


async def test_without_keys_the_pages_of_the_console_use_the_api_and_others_do_not(nats: Any, tmp_path: Path) -> None:
    async with console_on(nats, tmp_path) as gateway:
        token = await page_token(gateway.http)
        allowed = await gateway.http.get("/console/api/v1/functions", headers={**FETCH, PAGE: token})
        assert allowed.status_code == 200
        for headers in (FETCH, {**FETCH, PAGE: "1.x"}, {**FETCH, PAGE: ""}, {**FETCH, PAGE: "9" * 5000 + "."}):
            assert (await gateway.http.get("/console/api/v1/functions", headers=headers)).status_code == 401
        foreign = {**FETCH, "sec-fetch-site": "same-site", PAGE: token}
        assert (await gateway.http.get("/console/api/v1/functions", headers=foreign)).status_code == 401
        assert (await gateway.http.get("/v1/functions", headers={**FETCH, PAGE: token})).status_code == 403
        assert (await gateway.http.get("/console", headers={**NAVIGATION, "host": "evil.example"})).status_code == 403


async def test_a_session_has_the_rights_of_its_key_until_the_key_is_deleted(nats: Any, tmp_path: Path) -> None:
    async with console_on(nats, tmp_path) as gateway:
        key, token = await sign_in(gateway, "admin")
        headers = {**FETCH, PAGE: token}
        me = await gateway.http.get("/console/api/v1/auth/me", headers=headers)
        assert (me.json()["id"], me.json()["scopes"]) == (key, ["admin"])
        assert (await gateway.http.get("/v1/auth/me")).status_code == 401, "the API knows no cookies"
        await gateway.keys.delete(key)
        await until_async(lambda: not gateway.access.knows(key))
        await add_key(gateway, "admin")
        ended = await gateway.http.get("/console/api/v1/auth/me", headers=headers)
        assert (ended.status_code, ended.json()["code"]) == (401, "unauthorized")


async def test_a_session_may_not_do_more_than_its_key(nats: Any, tmp_path: Path) -> None:
    async with console_on(nats, tmp_path) as gateway:
        _, token = await sign_in(gateway, "read:prod/*")
        headers = {**FETCH, PAGE: token}
        assert (await gateway.http.get("/console/api/v1/console/overview", headers=headers)).status_code == 200
        assert (await gateway.http.get("/console/api/v1/keys", headers=headers)).status_code == 403
        refused = await gateway.http.post("/console/api/v1/keys", json={"scopes": ["admin"]}, headers=headers)
        assert refused.status_code == 403


async def test_the_cookie_is_for_the_console_of_this_site_only(nats: Any, tmp_path: Path) -> None:
    async with console_on(nats, tmp_path) as gateway:
        _, secret = await add_key(gateway, "admin")
        for host, is_secure in (("127.0.0.1:8090", False), ("gpu.example.org", True)):
            headers = {**NAVIGATION, "host": host}
            token = await page_token(gateway.http, headers)
            response = await gateway.http.post(
                "/console/session", json={"key": secret}, headers={**FETCH, PAGE: token, "host": host}
            )
            cookie = response.headers["set-cookie"]
            name, *attributes = cookie.split("; ")
            assert {"HttpOnly", "SameSite=Strict", "Path=/console"} <= set(attributes)
            assert ("Secure" in attributes) is is_secure
            assert name.startswith("gpufn_console_8090=" if ":" in host else "__Http-gpufn_console=")
            age = next(int(each.partition("=")[2]) for each in attributes if each.startswith("Max-Age="))
            assert 0 < age <= 43_200


async def test_a_page_token_is_for_one_session(nats: Any, tmp_path: Path) -> None:
    async with console_on(nats, tmp_path) as gateway:
        signed_out = await page_token(gateway.http)
        _, token = await sign_in(gateway, "admin")
        assert signed_out != token
        assert (await gateway.http.get("/console/api/v1/keys", headers={**FETCH, PAGE: signed_out})).status_code == 401
        left = await gateway.http.delete("/console/session", headers={**FETCH, PAGE: token})
        assert left.status_code == 204
        assert not gateway.http.cookies
        assert (await gateway.http.get("/console/api/v1/keys", headers={**FETCH, PAGE: token})).status_code == 401


@pytest.mark.parametrize("key", ["", "gpufn_1_2", "x" * 5000, "a b", "gpufnt_x.y", "ü"])
async def test_a_wrong_key_yields_no_session(nats: Any, tmp_path: Path, key: str) -> None:
    async with console_on(nats, tmp_path) as gateway:
        await add_key(gateway, "admin")
        headers = {**FETCH, PAGE: await page_token(gateway.http)}
        response = await gateway.http.post("/console/session", json={"key": key}, headers=headers)
        assert (response.status_code, "set-cookie" in response.headers) == (401, False)


async def test_a_followed_link_of_another_site_is_loaded_again_with_the_cookie(nats: Any, tmp_path: Path) -> None:
    async with console_on(nats, tmp_path) as gateway:
        headers = {**NAVIGATION, "sec-fetch-site": "cross-site"}
        first = await gateway.http.get("/console/functions", headers=headers)
        assert 'http-equiv="refresh"' in first.text
        await sign_in(gateway, "admin")
        assert "gpufn-page-token" in (await gateway.http.get("/console/functions", headers=headers)).text


async def test_there_is_no_ticket_for_a_console_that_is_not_built(nats: Any, tmp_path: Path) -> None:
    async with gateway_on(nats, site=tmp_path) as gateway:
        refused = await gateway.http.post("/v1/console/ticket")
        assert refused.status_code == 404
        assert "scripts/console" in refused.json()["detail"]


async def test_a_ticket_signs_in_and_is_no_token(nats: Any, tmp_path: Path) -> None:
    async with console_on(nats, tmp_path) as gateway:
        key, secret = await add_key(gateway, "admin")
        issued = await gateway.http.post("/v1/console/ticket", headers={"authorization": f"Bearer {secret}"})
        ticket = issued.json()["ticket"]
        assert (await gateway.http.get("/v1/auth/me", headers={"authorization": f"Bearer {ticket}"})).status_code == 401
        headers = {**FETCH, PAGE: await page_token(gateway.http)}
        authorization = {"authorization": f"Bearer {secret}"}
        token = (await gateway.http.post("/v1/auth/token", json={}, headers=authorization)).json()["token"]
        of_token = await gateway.http.post("/v1/console/ticket", headers={"authorization": f"Bearer {token}"})
        body = {"ticket": of_token.json()["ticket"]}
        assert (await gateway.http.post("/console/session", json=body, headers=headers)).status_code == 201
        gateway.http.cookies.clear()
        signed_in = await gateway.http.post("/console/session", json={"ticket": ticket}, headers=headers)
        assert (signed_in.status_code, signed_in.json()["id"]) == (201, key)
        for wrong in (ticket[:-2], "x", "é", f"{ticket}.", "a.b", "A" * 3001):
            refused = await gateway.http.post("/console/session", json={"ticket": wrong}, headers={**headers})
            assert refused.status_code == 401
        await gateway.keys.delete(key)
        await until_async(lambda: not gateway.access.knows(key))


async def test_a_ticket_ends_after_half_a_minute(nats: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with console_on(nats, tmp_path) as gateway:
        _, secret = await add_key(gateway, "admin")
        issued = await gateway.http.post("/v1/console/ticket", headers={"authorization": f"Bearer {secret}"})
        now = gateway.clock.time()
        monkeypatch.setattr(gateway.clock, "time", lambda: now + 31, raising=False)
        headers = {**FETCH, PAGE: await page_token(gateway.http)}
        refused = await gateway.http.post("/console/session", json={"ticket": issued.json()["ticket"]}, headers=headers)
        assert refused.status_code == 401


async def test_sign_ins_are_in_the_audit_log(nats: Any, tmp_path: Path) -> None:
    async with console_on(nats, tmp_path) as gateway:
        key, token = await sign_in(gateway, "admin")
        headers = {**FETCH, PAGE: token}
        answer = await gateway.http.get("/console/api/v1/audit?limit=1000", headers=headers)
        records = [each for each in answer.json()["records"] if each["action"] == "POST /console/session"]
        assert (key, 201) in [(each.get("principal"), each["status"]) for each in records]


async def test_pages_can_only_be_read(nats: Any, tmp_path: Path) -> None:
    async with console_on(nats, tmp_path) as gateway:
        assert (await gateway.http.post("/console/functions")).status_code == 405
        assert (
            await gateway.http.put("/console/session", headers={PAGE: await page_token(gateway.http)})
        ).status_code == 405
