"""The language of scopes, and what a key of one team can learn about the functions of another."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gpufn_core.errors import InvalidInput
from gpufn_core.protocol.codec import encode
from gpufn_core.protocol.records import ApiKey
from gpufn_core.protocol.reports import HELD_BY, Waiting, WaitReason, WorkerCounts
from gpufn_gateway.auth import scopes
from gpufn_gateway.auth.access import Access, Principal, new_key
from gpufn_gateway.auth.scopes import DEPLOY, EXEC, INVOKE, READ, VERBS
from gpufn_gateway.buckets import decode_key

OWN, SAME_APP, FOREIGN = "prod/search/predict", "prod/search/other", "prod/ads/predict"


def principal_of(*own: str) -> Principal:
    access = Access(loopback=True, now=lambda: 0.0)
    key, secret = new_key("", own, 0.0)
    access.put(key)
    return access.authenticate({b"authorization": f"Bearer {secret}".encode()})


@pytest.mark.parametrize(
    ("scope", "verbs"),
    [
        ("admin", {INVOKE, READ, DEPLOY, EXEC}),
        ("deploy", {READ, DEPLOY}),
        ("deploy:*", {READ, DEPLOY}),
        ("read", {READ}),
        ("read:*/*/*", {READ}),
        ("invoke:*", {INVOKE}),
        ("invoke:prod/*", {INVOKE}),
        ("deploy:prod/search/*", {READ, DEPLOY}),
        ("read:*/search/*", {READ}),
        (f"deploy:{OWN}", {READ, DEPLOY}),
        ("invoke:dev/*", set()),
        ("deploy:prod/ads/*", set()),
        ("invoke:predict", set()),
        ("hi", set()),
        ("exec", {EXEC}),
        ("exec:prod/search/*", {EXEC}),
        ("exec:dev/*", set()),
    ],
)
def test_a_scope_allows_verbs_on_a_function(scope: str, verbs: set[str]) -> None:
    principal = principal_of(scope)
    assert {verb for verb in VERBS if principal.may(verb, OWN)} == verbs
    assert (principal.may_invoke(OWN), principal.may_read(OWN)) == (INVOKE in verbs, READ in verbs)
    assert principal.may_see(OWN) is bool(verbs)


def test_a_bare_name_is_the_function_of_the_default_app() -> None:
    principal = principal_of("invoke:predict")
    assert [principal.may_invoke(name) for name in ("predict", OWN, "other")] == [True, False, False]
    assert principal_of("read:default/*").may_read("predict")


@pytest.mark.parametrize(("scope", "is_all"), [("read:*", True), ("invoke:*/*/*", True), ("read:prod/*", False)])
def test_the_right_to_see_every_function_is_computed_when_the_key_is_read(scope: str, is_all: bool) -> None:
    assert principal_of(scope).sees_all is is_all


@pytest.mark.parametrize("scope", ["deploy:prod", "deploy:prod/*", "read:*/search/*", "invoke:prod/search/predict"])
def test_a_pattern_grants_no_right_to_objects_without_a_function(scope: str) -> None:
    principal = principal_of(scope)
    assert not any(principal.has_scope(each) for each in ("read", "deploy", "admin"))


@pytest.mark.parametrize("scope", ["deploy:prod/search", "invoke:prod/*/predict", "read:", "deploy:PROD/*", "read:*/*"])
def test_a_wrong_pattern_is_explained(scope: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        new_key("", (scope,), 0.0)
    assert caught.value.field == "scopes"
    verb = scope.partition(":")[0]
    assert all(f"{verb}:{pattern}" in caught.value.message for pattern in ("ENV/*", "ENV/APP/*", "*/APP/*", "FUNCTION"))


def test_a_key_of_an_earlier_release_keeps_its_rights() -> None:
    stored = {"id": "k", "sha256": "0" * 64, "scopes": ["invoke:embed", "read"], "created_at": 1.0}
    key = decode_key(msgspec.msgpack.encode(stored))
    assert decode_key(encode(key)) == key == ApiKey("k", "0" * 64, ("invoke:embed", "read"), 1.0)
    own = scopes.effective(key.scopes)
    assert (scopes.has_on(own, INVOKE, "embed"), scopes.has_on(own, INVOKE, "other")) == (True, False)
    assert scopes.sees_all(own)


async def test_patterns_are_evaluated_once_per_function(gateway: Any, make: Any) -> None:
    """A call of a key with a pattern costs a lookup, and one of a key that sees everything does not reach the cache."""
    key, secret = new_key("", ("invoke:default/*",), 0.0)
    every, everybody = new_key("", ("invoke:*",), 0.0)
    for each in (key, every):
        gateway.access.put(each)
    url, body = "/v1/functions/embed/invoke", b'{"texts":["a"]}'
    assert (await gateway.post(url, body, authorization=f"Bearer {secret}")).status_code == 200
    before = scopes.has_on.cache_info()
    assert (await gateway.post(url, body, authorization=f"Bearer {secret}")).status_code == 200
    again = scopes.has_on.cache_info()
    assert (again.misses, again.hits) == (before.misses, before.hits + 1)
    assert (await gateway.post(url, body, authorization=f"Bearer {everybody}")).status_code == 200
    assert scopes.has_on.cache_info() == again


async def test_why_calls_wait_does_not_name_foreign_functions(gateway: Any, make: Any) -> None:
    gateway.deploy(make.spec(OWN))
    detail = f"n: it has no free core{HELD_BY}{FOREIGN} (4 workers)"
    status = make.status(OWN, ready=0)
    waiting = Waiting(WaitReason.NO_CAPACITY, detail)
    gateway.report(msgspec.structs.replace(status, workers=WorkerCounts(), waiting=waiting, reason=f"{detail}; parked"))
    for scope, is_named in ((f"deploy:{OWN}", False), ("deploy", True)):
        key, secret = new_key("", (scope, f"invoke:{OWN}"), 0.0)
        gateway.access.put(key)
        headers = {"authorization": f"Bearer {secret}"}
        url = f"/v1/functions/{OWN}"
        answers = [await gateway.get(url, **headers), await gateway.get("/v1/functions", **headers)]
        answers.append(await gateway.post(f"{url}/invoke", b'{"texts":["a"]}', x_gpufn_timeout="0.5", **headers))
        assert [answer.status_code for answer in answers] == [200, 200, 503]
        assert ["no free core" in answer.text for answer in answers] == [True] * 3
        assert [FOREIGN in answer.text for answer in answers] == [is_named] * 3
