"""Tokens of the gateway: what they cost, their signing keys and their verification, without a bus."""

from __future__ import annotations

import base64
import gc
import sys
from types import FrameType
from typing import Any

import msgspec
import pytest

from gpufn_core.domain.team import Team
from gpufn_core.errors import InvalidInput, Unauthorized
from gpufn_gateway.auth.access import Access, new_key
from gpufn_gateway.auth.tokens import MAX_BYTES, SigningKey, Token, User, sign
from tests.gateway.conftest import Connection

SIGNING_KEY = SigningKey(1, b"s" * 32, 0.0)
GOOD = b'{"texts":["a"]}'
URL = "/v1/functions/embed/invoke"


def access_with(now: float = 100.0) -> Access:
    access = Access(loopback=False, now=lambda: now)
    access.put(new_key("first", ("admin",), 0.0)[0])
    access.tokens.put_signing_key(1, SIGNING_KEY)
    return access


def user_token(**changes: Any) -> str:
    token = Token(0, "user-1", ("read",), 100.0, 200.0)
    return sign(SIGNING_KEY, msgspec.structs.replace(token, **changes))


def scopes_of(access: Access, token: str) -> frozenset[str]:
    return access.authenticate({b"authorization": b"Bearer " + token.encode()}).scopes


async def test_a_call_with_a_token_costs_no_more_than_one_with_a_key(gateway: Any) -> None:
    key, secret = new_key("test", ("invoke:*",), 0.0)
    gateway.access.put(key)
    gateway.access.tokens.put_signing_key(1, SIGNING_KEY)
    token = sign(SIGNING_KEY, gateway.access.token_for(secret.encode(), 60.0))
    counts = {}
    for credential in (secret, token, secret, token):  # the first call of each fills caches
        counts[credential] = await _python_calls(gateway.app, credential)
    assert counts[token] <= counts[secret] + 1


async def _python_calls(app: Any, credential: str) -> int:
    """Return the number of function calls, in Python and in C, that one invoke takes."""
    count = 0

    def on_event(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    connection = Connection(URL, GOOD, authorization=f"Bearer {credential}", content_type="application/json")
    task = connection.start(app)
    gc.collect()
    before = sys.getprofile()
    sys.setprofile(on_event)
    try:
        await task
    finally:
        sys.setprofile(before)
    assert connection.sent[0]["status"] == 200
    return count


def test_a_token_is_valid_until_it_ends() -> None:
    assert scopes_of(access_with(100.0), user_token()) == {"read"}
    with pytest.raises(Unauthorized):
        scopes_of(access_with(200.0), user_token())


def test_an_altered_token_is_refused() -> None:
    access = access_with()
    good = user_token()
    head, payload, mac = good[:7], *good[7:].split(".")
    other_mac = sign(
        msgspec.structs.replace(SIGNING_KEY, secret=b"t" * 32), Token(0, "user-1", ("admin",), 100.0, 200.0)
    )
    admin = base64.urlsafe_b64encode(msgspec.json.encode(Token(1, "user-1", ("admin",), 100.0, 200.0))).decode()
    unknown_key = sign(msgspec.structs.replace(SIGNING_KEY, number=2), Token(0, "user-1", ("admin",), 100.0, 200.0))
    wrong = [
        other_mac, unknown_key, f"{head}{admin.rstrip('=')}.{mac}", f"{head}{payload}.", f"{head}{payload}",
        "gpufnt_", "gpufnt_.", good + "=", good + "A", good[:-1], f"{head}{payload}.{mac}.x", "gpufnt_é.é",
        "gpufnt_" + "x" * MAX_BYTES,
    ]  # fmt: skip
    for token in wrong:
        with pytest.raises(Unauthorized):
            scopes_of(access, token)
    assert scopes_of(access, good) == {"read"}


def test_a_token_ends_with_its_signing_key_and_when_its_user_is_signed_out() -> None:
    access = access_with()
    user = User(id="user-1", issuer="i", subject="s", name="n", seen_at=1.0)
    assert scopes_of(access, user_token()) == {"read"}
    access.tokens.put_user("user-1", user)
    assert scopes_of(access, user_token()) == {"read"}
    access.tokens.put_user("user-1", msgspec.structs.replace(user, generation=1))
    for issued_at in (100.0, 150.0):  # bug: a token of a gateway whose clock is fast stayed valid
        with pytest.raises(Unauthorized):
            scopes_of(access, user_token(issued_at=issued_at))
    later = user_token(generation=1)
    assert scopes_of(access, later) == {"read"}
    derived = access.token_for(later.encode(), 60.0)
    access.tokens.put_user("user-1", msgspec.structs.replace(user, generation=2))
    with pytest.raises(Unauthorized):  # another gateway made it from a token that was ended here
        scopes_of(access, sign(SIGNING_KEY, derived))
    later = user_token(generation=2)
    access.tokens.put_signing_key(1, None)
    with pytest.raises(Unauthorized):
        scopes_of(access, later)


def test_scopes_that_do_not_fit_a_token() -> None:
    with pytest.raises(InvalidInput):
        user_token(scopes=tuple(f"invoke:f{number}" for number in range(500)))


def test_verified_tokens_use_bounded_memory() -> None:
    access = access_with()
    for number in range(3000):
        scopes_of(access, user_token(principal=f"user-{number}"))
    assert len(access.tokens._verified) < 3000


def test_each_use_of_a_token_is_a_use_of_its_key() -> None:
    """Bug: only the first use counted, since further ones find the verified token."""
    access = access_with()
    key, secret = new_key("ci", ("read",), 0.0)
    access.put(key)
    token = sign(SIGNING_KEY, access.token_for(secret.encode(), 60.0))
    for _ in range(2):
        scopes_of(access, token)
        scopes_of(access, user_token())
        assert access.take_used() == {key.id}


def test_a_token_of_a_teams_key_follows_the_team() -> None:
    access = access_with()
    access.teams.put(Team(name="search", owns=("prod/search/*",)))
    key, secret = new_key("ci", ("deploy",), 0.0, team="search")
    access.put(key)
    token = sign(SIGNING_KEY, access.token_for(secret.encode(), 60.0))
    assert scopes_of(access, token) == {"deploy:prod/search/*"}
    access.teams.put(Team(name="search", owns=("prod/ads/*",)))
    access.on_team("search")
    assert scopes_of(access, token) == frozenset()
