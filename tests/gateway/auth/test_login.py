"""Tokens of users, workloads and API keys, with a stand-in for the OpenID provider."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import hashlib
import hmac
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from gpufn_core.errors import IssuerUnavailable, Unauthorized
from gpufn_gateway.auth.access import Access, new_key, rotated
from gpufn_gateway.auth.issuer import Fetcher, Issuer
from gpufn_gateway.auth.login import user_id
from gpufn_gateway.auth.token_store import ROTATION_S, TokenStore
from gpufn_gateway.auth.tokens import MAX_TTL_S, Token, sign
from gpufn_gateway.settings import GatewaySettings
from gpufn_platform.bus.storage.key_value import KeyValue
from tests.gateway.conftest import ManualClock
from tests.gateway.whole import Whole, gateway_on
from tests.issuer import CLIENT, Key, StandInIssuer, serving
from tests.waiting import until_async

ROLES = """
[groups]
devs = ["invoke:*", "read"]
ops = ["admin"]

[[workloads]]
issuer = "{issuer}"
audience = "ci"
subject = "repo:acme/*:main"
scopes = ["deploy"]

[limits]
rate = 1000
"""


@pytest.fixture
def issuer() -> Iterator[StandInIssuer]:
    with serving() as issuer:
        yield issuer


@pytest.fixture
def settings(issuer: StandInIssuer, tmp_path: Path) -> GatewaySettings:
    roles = tmp_path / "roles.toml"
    roles.write_text(ROLES.format(issuer=issuer.url))
    return GatewaySettings(oidc_issuer=issuer.url, oidc_client_id=CLIENT, oidc_roles=str(roles))


@contextlib.asynccontextmanager
async def protected(nats: Any, settings: GatewaySettings, name: str = "gw-test") -> AsyncIterator[Whole]:
    """Start a gateway with an API key that only this gateway knows."""
    async with gateway_on(nats, name, settings=settings) as gateway:
        key, _ = new_key("first", ("admin",), 0.0)
        gateway.access.put(key)
        yield gateway


async def exchange(gateway: Whole, token: str, **body: Any) -> Any:
    return await gateway.http.post("/v1/auth/token", json={"jwt": token, **body})


def bearer(credential: str) -> dict[str, str]:
    return {"authorization": f"Bearer {credential}"}


async def test_a_user_gets_a_token_with_the_scopes_of_the_groups(
    nats: Any, issuer: StandInIssuer, settings: GatewaySettings, problem: Any
) -> None:
    async with protected(nats, settings) as gateway, gateway_on(nats, "gw-other", settings=settings) as other:
        other.access.put(new_key("other", ("admin",), 0.0)[0])
        shown = (await gateway.http.get("/v1/auth")).json()["provider"]
        assert (shown["issuer"], shown["client_id"]) == (issuer.url, CLIENT)
        issued = await exchange(gateway, issuer.token())
        assert issued.status_code == 201
        token = issued.json()["token"]
        for each in (gateway, other):  # the other gateway has not seen the login
            me = (await each.http.get("/v1/auth/me", headers=bearer(token))).json()
            assert (me["id"], me["scopes"]) == (user_id(issuer.url, "alice"), ["invoke:*", "read"])
            assert me["limits"] == {"rate": 1000.0}
        assert (await gateway.http.get("/v1/functions", headers=bearer(token))).status_code == 200
        assert problem(await gateway.http.get("/v1/keys", headers=bearer(token))) == (403, "forbidden")
        fewer = await exchange(gateway, issuer.token(), scopes=["invoke:f"], expires_in_s=60)
        assert fewer.json()["scopes"] == ["invoke:f"]
        assert 0 < fewer.json()["expires_at"] - time.time() <= 60
        assert problem(await exchange(gateway, issuer.token(), scopes=["deploy"])) == (403, "forbidden")
        assert problem(await exchange(gateway, issuer.token(), scopes=["nonsense"])) == (422, "invalid_input")
        assert problem(await exchange(gateway, issuer.token(), expires_in_s=90_000)) == (422, "invalid_input")
        longer = await exchange(gateway, issuer.token(), expires_in_s=7200)  # the groups are looked up each hour
        assert 3590 < longer.json()["expires_in_s"] <= 3600
        issuer.groups = ("guests",)
        assert problem(await exchange(gateway, issuer.token())) == (403, "forbidden")


@pytest.mark.parametrize("algorithm", ["RS256", "PS256", "ES384", "EdDSA"])
async def test_keys_of_other_kinds_and_new_keys(
    nats: Any, issuer: StandInIssuer, settings: GatewaySettings, algorithm: str
) -> None:
    async with protected(nats, settings) as gateway:
        issuer.keys = [Key(algorithm, "k2"), Key("ES256", "k3")]
        assert (await exchange(gateway, issuer.token())).status_code == 201
        assert (await exchange(gateway, issuer.token(issuer.keys[1]))).status_code == 201


def unsigned(issuer: StandInIssuer) -> str:
    head, payload, _ = issuer.token().split(".")
    del head
    return f"{encoded({'alg': 'none', 'kid': 'k1'})}.{payload}."


def confused(issuer: StandInIssuer) -> str:
    """A token signed with HMAC, with the public key as the secret."""
    public = issuer.keys[0].private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    signed = f"{encoded({'alg': 'HS256', 'kid': 'k1'})}.{issuer.token().split('.')[1]}"
    mac = base64.urlsafe_b64encode(hmac.digest(public, signed.encode(), hashlib.sha256)).rstrip(b"=").decode()
    return f"{signed}.{mac}"


def encoded(value: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()


def changed(token: str) -> str:
    head, payload, mac = token.split(".")
    claims = json.loads(base64.urlsafe_b64decode(payload + "=="))
    return f"{head}.{encoded(claims | {'groups': ['ops']})}.{mac}"


BAD: dict[str, Callable[[StandInIssuer], str]] = {
    "expired": lambda issuer: issuer.token(exp=int(time.time()) - 120),
    "not valid yet": lambda issuer: issuer.token(nbf=int(time.time()) + 600),
    "issued in the future": lambda issuer: issuer.token(iat=int(time.time()) + 600),
    "another audience": lambda issuer: issuer.token(aud="another"),
    "another issuer": lambda issuer: issuer.token(iss="https://another.example"),
    "another client": lambda issuer: issuer.token(azp="another"),
    "several audiences": lambda issuer: issuer.token(aud=[CLIENT, "another"]),
    "no end": lambda issuer: issuer.token(exp=None),
    "no subject": lambda issuer: issuer.token(sub=None),
    "a number as subject": lambda issuer: issuer.token(sub=7),
    "no audience": lambda issuer: issuer.token(aud=None),
    "a key of somebody else": lambda issuer: issuer.token(Key("ES256", "k1")),
    "an unknown key": lambda issuer: issuer.token(Key("ES256", "k9")),
    "another algorithm than the key's": lambda issuer: issuer.token(Key("RS256", "k1")),
    "alg none": unsigned,
    "HS256 with the public key": confused,
    "changed claims": lambda issuer: changed(issuer.token()),
    "a number as key id": lambda issuer: f"{encoded({'alg': 'ES256', 'kid': 1})}.{issuer.token().split('.')[1]}.x",
    "no JSON": lambda issuer: "a.b.c",
    "deep JSON": lambda issuer: f"{base64.urlsafe_b64encode(b'[' * 9000).decode()}.{'e30'}.x",
    "empty parts": lambda issuer: "..",
    "not ASCII": lambda issuer: "é" * 100,
    "too long": lambda issuer: issuer.token(padding="x" * 20_000),
    "a gateway's own token": lambda issuer: "gpufnt_e30.x",
}  # fmt: skip


async def test_bad_tokens_of_the_provider_are_refused(
    nats: Any, issuer: StandInIssuer, settings: GatewaySettings, problem: Any
) -> None:
    async with protected(nats, settings) as gateway:
        for name, make in BAD.items():
            assert problem(await exchange(gateway, make(issuer))) == (401, "unauthorized"), name
        assert (await exchange(gateway, issuer.token())).status_code == 201
        assert issuer.requests.count("/keys") == 1  # unknown keys cause no further requests


@pytest.mark.parametrize(
    ("path", "reply"),
    [
        ("/keys", (500, b"")),
        ("/keys", (200, b"garbage")),
        ("/keys", (200, b'{"keys": []}')),
        ("/keys", (200, b'{"keys": [{"kty": "oct", "k": "eA", "kid": "k1"}]}')),
        ("/keys", (200, b" " * (600 << 10))),
        ("/keys", (302, b"")),
        ("/.well-known/openid-configuration", (404, b"")),
        ("/.well-known/openid-configuration", (200, b'{"issuer": "https://another.example", "jwks_uri": ""}')),
    ],
)
async def test_without_the_keys_of_the_provider_only_logins_fail(
    nats: Any, issuer: StandInIssuer, settings: GatewaySettings, path: str, reply: tuple[int, bytes]
) -> None:
    issuer.replies[path] = reply
    async with protected(nats, settings) as gateway:
        for _ in range(2):
            refused = await exchange(gateway, issuer.token())
            assert (refused.status_code, refused.json()["code"]) == (503, "issuer_unavailable")
        assert issuer.requests.count(path) == 1
        assert (await gateway.http.get("/healthz")).status_code == 200


async def test_a_slow_provider_delays_only_logins(
    nats: Any, issuer: StandInIssuer, settings: GatewaySettings, problem: Any
) -> None:
    asked, answers = asyncio.Event(), asyncio.Event()

    async def fetch(url: str) -> bytes:
        asked.set()
        await answers.wait()
        raise TimeoutError

    async with protected(nats, settings) as gateway:
        key, secret = new_key("robot", ("read",), 0.0)
        gateway.access.put(key)
        gateway.login._fetch = fetch
        logins = [asyncio.create_task(exchange(gateway, issuer.token())) for _ in range(3)]
        await asked.wait()
        assert (await gateway.http.get("/v1/functions", headers=bearer(secret))).status_code == 200
        assert not any(login.done() for login in logins)
        answers.set()
        assert [problem(login) for login in await asyncio.gather(*logins)] == [(503, "issuer_unavailable")] * 3


async def test_keys_at_another_address_need_the_setting(
    nats: Any, issuer: StandInIssuer, settings: GatewaySettings, problem: Any
) -> None:
    with serving() as elsewhere:
        document = json.dumps({"issuer": issuer.url, "jwks_uri": f"{elsewhere.url}/keys"}).encode()
        issuer.replies["/.well-known/openid-configuration"] = (200, document)
        elsewhere.keys = issuer.keys
        async with protected(nats, settings) as gateway:
            assert problem(await exchange(gateway, issuer.token())) == (503, "issuer_unavailable")
            assert elsewhere.requests == []
        allowed = {**{name: getattr(settings, name) for name in ("oidc_issuer", "oidc_client_id", "oidc_roles")}}
        async with protected(nats, GatewaySettings(**allowed, oidc_jwks_url=f"{elsewhere.url}/keys")) as gateway:
            assert (await exchange(gateway, issuer.token())).status_code == 201


async def test_a_workload_has_the_scopes_of_its_subject(
    nats: Any, issuer: StandInIssuer, settings: GatewaySettings, problem: Any
) -> None:
    async with protected(nats, settings) as gateway:
        job: dict[str, Any] = {"aud": "ci", "groups": ["ops"], "azp": None}
        issued = await exchange(gateway, issuer.token(sub="repo:acme/search:main", **job))
        assert issued.json()["scopes"] == ["deploy"]  # no groups: the token was made for another audience
        assert problem(await exchange(gateway, issuer.token(sub="repo:acme/search:main2", **job))) == (403, "forbidden")


async def test_a_changed_role_table_applies_to_the_next_login(
    nats: Any, issuer: StandInIssuer, settings: GatewaySettings
) -> None:
    file = Path(settings.oidc_roles)

    def write(text: str) -> None:
        file.write_text(text)

    async with protected(nats, settings) as gateway:
        write('[groups]\ndevs = ["read"]\n')
        assert (await exchange(gateway, issuer.token())).json()["scopes"] == ["read"]
        write("[groups]\ndevs = [no TOML")
        assert (await exchange(gateway, issuer.token())).json()["scopes"] == ["read"]


async def test_tokens_end_when_their_user_is_signed_out(
    nats: Any, issuer: StandInIssuer, settings: GatewaySettings, problem: Any
) -> None:
    async with protected(nats, settings) as gateway:
        tokens = {}
        for subject, groups in (("alice", ["devs"]), ("olga", ["ops"])):
            tokens[subject] = (await exchange(gateway, issuer.token(sub=subject, groups=groups))).json()["token"]
        users = (await gateway.http.get("/v1/users", headers=bearer(tokens["olga"]))).json()["users"]
        assert {user["subject"] for user in users if user["issuer"] == issuer.url} == {"alice", "olga"}
        path = f"/v1/users/{user_id(issuer.url, 'alice')}/tokens"
        assert problem(await gateway.http.delete(path, headers=bearer(tokens["alice"]))) == (403, "forbidden")
        assert (await gateway.http.delete(path, headers=bearer(tokens["olga"]))).status_code == 204
        assert problem(await gateway.http.get("/v1/auth/me", headers=bearer(tokens["alice"]))) == (401, "unauthorized")
        renewed = (await exchange(gateway, issuer.token())).json()["token"]
        assert (await gateway.http.get("/v1/auth/me", headers=bearer(renewed))).status_code == 200
        assert (await gateway.http.delete("/v1/auth/tokens", headers=bearer(tokens["olga"]))).status_code == 204
        for token in (renewed, tokens["olga"]):
            assert problem(await gateway.http.get("/v1/auth/me", headers=bearer(token))) == (401, "unauthorized")
        missing = await gateway.http.delete("/v1/users/user-none/tokens", headers=bearer(tokens["olga"]))
        assert problem(missing) == (401, "unauthorized")


@pytest.mark.parametrize("of_all", [False, True])
async def test_a_token_of_the_provider_from_before_the_sign_out_is_not_exchanged(
    nats: Any, issuer: StandInIssuer, settings: GatewaySettings, problem: Any, of_all: bool
) -> None:
    """Regression: the old token has the old groups, so a user who had lost a group got a new token with its scopes."""
    async with protected(nats, settings) as gateway:
        replayed = issuer.token(iat=int(time.time()) - 5)
        assert (await exchange(gateway, replayed)).status_code == 201
        assert (await exchange(gateway, replayed)).status_code == 201  # until then, it may be exchanged again
        store = gateway.login._store
        await (store.revoke_all() if of_all else store.revoke(user_id(issuer.url, "alice")))
        assert problem(await exchange(gateway, replayed)) == (401, "unauthorized")
        assert (await exchange(gateway, issuer.token())).status_code == 201
        assert problem(await exchange(gateway, replayed)) == (401, "unauthorized")


async def test_an_api_key_yields_tokens_that_end_with_it(nats: Any, problem: Any) -> None:
    async with gateway_on(nats) as gateway:
        assert problem(await gateway.http.post("/v1/auth/token", json={})) == (422, "invalid_input")  # needs no token
        now = gateway.clock.time()
        key, secret = new_key("robot", ("invoke:f", "read"), now, expires_in_s=50)
        gateway.access.put(key)

        async def token(credential: str, **body: Any) -> Any:
            return await gateway.http.post("/v1/auth/token", json=body, headers=bearer(credential))

        async def status(credential: str) -> int:
            return (await gateway.http.get("/v1/auth/me", headers=bearer(credential))).status_code

        issued = (await token(secret, scopes=["invoke:f"])).json()
        assert (issued["id"], issued["name"], issued["scopes"]) == (key.id, "robot", ["invoke:f"])
        assert issued["expires_at"] == key.expires_at
        assert problem(await token(secret, scopes=["deploy"])) == (403, "forbidden")
        assert problem(await token(issued["token"], scopes=["read"])) == (403, "forbidden")
        assert (await token(issued["token"], expires_in_s=5)).json()["expires_at"] <= now + 10
        assert problem(await token("gpufn_x_y")) == (401, "unauthorized")
        assert await status(issued["token"]) == 200

        lasting, lasting_secret = new_key("nightly", ("read",), now)
        gateway.access.put(lasting)
        assert (await token(lasting_secret)).json()["expires_in_s"] == pytest.approx(3600, abs=10)
        longest = await token(lasting_secret, expires_in_s=12 * 3600)  # more than the default
        assert longest.json()["expires_in_s"] == pytest.approx(12 * 3600, abs=10)
        derived = (await token(longest.json()["token"], expires_in_s=12 * 3600)).json()
        assert derived["expires_at"] == longest.json()["expires_at"]
        assert problem(await token(lasting_secret, expires_in_s=12 * 3600 + 1)) == (422, "invalid_input")

        replaced, new_secret = rotated(key, now, overlap_s=0)
        gateway.access.put(replaced)
        assert await status(issued["token"]) == 401
        fresh = (await token(new_secret)).json()["token"]
        overlapping, _ = rotated(replaced, now, overlap_s=30)
        gateway.access.put(overlapping)
        assert await status(fresh) == 200
        gateway.access.put(new_key("other", ("admin",), now)[0])
        gateway.access.remove(key.id)
        assert await status(fresh) == 401


async def test_without_a_provider_there_is_no_login(nats: Any, issuer: StandInIssuer, problem: Any) -> None:
    async with protected(nats, GatewaySettings()) as gateway:
        assert (await gateway.http.get("/v1/auth")).json() == {"provider": None}
        assert problem(await exchange(gateway, issuer.token())) == (401, "unauthorized")
        assert issuer.requests == []


def test_the_stand_in_signs_as_a_provider_does() -> None:
    """PyJWT verifies its tokens without the gateway, so that a refusal shows a check of the gateway."""
    key = Key("ES256", "k1")
    token = StandInIssuer("https://x", [key]).token()
    assert jwt.decode(token, key.private.public_key(), ["ES256"], audience=CLIENT)["sub"] == "alice"


async def test_signing_keys_rotate_with_overlap(nats: Any, clock: ManualClock) -> None:
    async with gateway_on(nats) as gateway:
        bucket = await KeyValue.open(gateway.bus, "test_rotation_of_token_keys")
        buckets = dataclasses.replace(gateway.buckets, token_keys=bucket)
        first, second = (Access(loopback=True, now=clock.time) for _ in range(2))
        one, other = TokenStore(buckets, first.tokens, clock), TokenStore(buckets, second.tokens, clock)
        await asyncio.gather(one.start(), other.start())
        assert (await one.signing_key()) == (await other.signing_key())  # both have started with the same key
        old = sign(await one.signing_key(), Token(0, "user-1", ("read",), clock.time(), clock.time() + 2 * ROTATION_S))
        clock.now += ROTATION_S + 1
        assert (await one.signing_key()).number == 1  # the other gateways get the new key first
        await until_async(lambda: 2 in second.tokens.signing_keys)
        clock.now += 11
        assert [(await each.signing_key()).number for each in (one, other)] == [2, 2]
        assert second.tokens.authenticate(old.encode()).id == "user-1"
        clock.now += MAX_TTL_S
        assert (await one.signing_key()).number == 2
        await until_async(lambda: 1 not in second.tokens.signing_keys)
        with pytest.raises(Unauthorized):
            second.tokens.authenticate(old.encode())
        one.stop()
        other.stop()


async def test_keys_of_the_provider_are_cached(issuer: StandInIssuer, clock: ManualClock) -> None:
    provider = Issuer(issuer.url, Fetcher(), clock.monotonic)

    async def is_valid() -> bool:
        with contextlib.suppress(Unauthorized, IssuerUnavailable):
            return bool(await provider.verify(issuer.token(), [CLIENT]))
        return False

    assert await asyncio.gather(*(is_valid() for _ in range(5))) == [True] * 5
    assert issuer.requests.count("/keys") == 1
    issuer.keys = [Key("ES256", "k2")]
    assert not await is_valid()  # fetched just now
    clock.now += 11
    assert await is_valid()
    issuer.replies["/keys"] = (500, b"")
    clock.now += 3601
    assert await is_valid()  # an earlier key, while the provider is away
    clock.now += 86_400
    assert not await is_valid()
    del issuer.replies["/keys"]
    clock.now += 11
    assert await is_valid()


_FIRST_LOGIN = """
import asyncio, sys, threading, time
from gpufn_gateway.auth.issuer import Fetcher, Issuer, issuer_of

late = set()

class Watch:
    def find_spec(self, name, path=None, target=None):
        if threading.current_thread() is threading.main_thread():
            late.add(name)

async def login(url, token, audience):
    sys.meta_path.insert(0, Watch())
    assert await issuer_of(token) == url
    await Issuer(url, Fetcher(), time.monotonic).verify(token, [audience])

asyncio.run(login(*sys.argv[1:]))
print(*sorted(late))
"""


def test_the_first_login_imports_no_library_in_the_event_loop(issuer: StandInIssuer) -> None:
    """Bug: it stopped all calls of the gateway for 0.1 s."""
    arguments = (sys.executable, "-c", _FIRST_LOGIN, issuer.url, issuer.token(), CLIENT)
    late = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout.split()
    assert not {name.partition(".")[0] for name in late} - sys.stdlib_module_names
