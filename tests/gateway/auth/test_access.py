from __future__ import annotations

from typing import Any

import pytest

from gpufn_core.errors import Conflict, Forbidden, InvalidInput, Unauthorized
from gpufn_core.protocol.records import KeyLimits
from gpufn_gateway.auth.access import Access, NotProtected, Principal, new_key, rotated

GOOD = b'{"texts":["a"]}'
URL = "/v1/functions/embed/invoke"


def give_key(gateway: Any, *scopes: str) -> str:
    key, secret = new_key("test", scopes, 0.0)
    gateway.access.put(key)
    return f"Bearer {secret}"


async def test_with_keys_every_route_needs_one(gateway: Any, problem: Any) -> None:
    key = give_key(gateway, "admin")
    for path in ("/v1/functions", "/v1/nodes", "/v1/keys", "/metrics", "/openapi.json", "/v1/nothing"):
        assert problem(await gateway.get(path)) == (401, "unauthorized"), path
    answer = await gateway.post(URL, GOOD)
    assert (problem(answer), answer.headers["www-authenticate"]) == ((401, "unauthorized"), "Bearer")
    assert (await gateway.post(URL, GOOD, authorization=key)).status_code == 200
    for path in ("/", "/healthz", "/readyz"):
        assert (await gateway.get(path)).status_code == 200


async def test_the_response_to_a_wrong_key_reveals_nothing(gateway: Any, problem: Any) -> None:
    good = give_key(gateway, "admin")
    wrong = [
        "Bearer",
        "Bearer x",
        "Basic YTpi",
        good[:-1],
        good + "x",
        good.replace("gpufn_", "gpufn_0"),
        "Bearer gpufn__",
    ]
    for authorization in wrong:
        assert problem(await gateway.post(URL, GOOD, authorization=authorization)) == (401, "unauthorized")
    assert gateway.queue.calls == []


@pytest.mark.parametrize(
    ("scopes", "invoke", "read", "deploy", "keys"),
    [
        (("admin",), 200, 200, 422, 200),
        (("invoke:embed",), 200, 403, 403, 403),
        (("invoke:*",), 200, 403, 403, 403),
        (("invoke:other",), 404, 403, 403, 403),
        (("read",), 403, 200, 403, 403),
        (("deploy",), 403, 200, 422, 403),
        (("invoke:embed", "read"), 200, 200, 403, 403),
    ],
)
async def test_scopes_decide(
    gateway: Any, *, scopes: tuple[str, ...], invoke: int, read: int, deploy: int, keys: int
) -> None:
    key = give_key(gateway, *scopes)
    assert (await gateway.post(URL, GOOD, authorization=key)).status_code == invoke
    assert (await gateway.post("/v1/functions/EMBED/invoke", GOOD, authorization=key)).status_code == invoke
    assert (await gateway.get("/v1/functions", authorization=key)).status_code == read
    assert (await gateway.post("/v1/functions", b"{}", authorization=key)).status_code == deploy
    assert (await gateway.get("/v1/keys", authorization=key)).status_code == keys


@pytest.mark.parametrize(
    ("host", "origin", "is_served"),
    [
        ("127.0.0.1:8090", None, True),
        ("localhost:8090", None, True),
        ("[::1]:8090", None, True),
        ("127.8.8.8", None, True),
        ("localhost:8090", "http://localhost:8090", False),  # only a web function has pages there
        ("evil.example", None, False),
        ("localhost.evil.example:8090", None, False),
        ("127.0.0.1.nip.io", None, False),
        ("", None, False),
        ("[::1].evil.com", None, False),
        ("localhost:80:evil", None, False),
        ("localhost:", None, True),
        ("localhost:evil", None, False),
        ("[localhost]", None, False),
        ("::1", None, False),
        ("192.168.1.1:8090", None, False),
        ("localhost:8090", "http://evil.example", False),
        ("localhost:8090", "http://localhost:3000", False),
        ("localhost:8090", "null", False),
        ("localhost:8090", "", False),
        ("evil.example", "http://evil.example", False),
    ],
)
async def test_without_keys_only_this_machine_and_no_web_page_is_served(
    gateway: Any, connection: Any, host: str, origin: str | None, is_served: bool
) -> None:
    headers = {"host": host} | ({} if origin is None else {"origin": origin})
    for method, path in (("POST", URL), ("GET", "/v1/functions"), ("DELETE", "/v1/nothing"), ("PUT", "/v1/nothing")):
        client = connection(path, GOOD, **headers)
        client.scope["method"] = method
        await client.start(gateway.app)
        assert (client.sent[0]["status"] != 403) is is_served, (method, client.body)


@pytest.mark.parametrize(
    ("site", "mode", "is_served"),
    [
        ("same-origin", "cors", False),
        ("same-origin", "navigate", False),
        ("none", "navigate", True),
        ("cross-site", "navigate", True),
        ("cross-site", "no-cors", False),
        ("same-site", "no-cors", False),
        ("cross-site", None, False),
    ],
)
async def test_without_keys_a_web_page_of_another_origin_loads_nothing(
    gateway: Any, site: str, mode: str | None, is_served: bool
) -> None:
    """A browser sends no Origin for images and scripts."""
    headers = {"sec-fetch-site": site} | ({} if mode is None else {"sec-fetch-mode": mode})
    assert (await gateway.get("/v1/functions", **headers)).status_code == (200 if is_served else 403)


async def test_a_client_without_a_key_or_beyond_its_limits_is_refused_before_its_body_is_read(
    gateway: Any, connection: Any
) -> None:
    key, secret = new_key("", ("invoke:*",), 0.0, KeyLimits(rate=1.0))
    gateway.access.put(key)
    authorization = f"Bearer {secret}"
    statuses = []
    for headers in ({}, {"authorization": authorization}, {"authorization": authorization}):
        client = connection(URL, GOOD, **headers)
        await client.start(gateway.app)
        statuses.append((client.sent[0]["status"], bool(client._body)))
    assert statuses == [(401, True), (200, False), (429, True)]


def test_with_keys_only_the_allowed_hosts_are_served() -> None:
    access = Access(loopback=True, now=lambda: 0.0, hosts=("gpu.example.org",))
    key, secret = new_key("", ("admin",), 0.0)

    def is_served(host: str) -> bool:
        try:
            access.authenticate({b"host": host.encode(), b"authorization": f"Bearer {secret}".encode()})
        except Forbidden:
            return False
        return True

    access.put(key)
    hosts = ("gpu.example.org", "GPU.example.org:8090", "localhost:8090", "evil.example", "gpu.example.org.evil", "")
    assert [is_served(host) for host in hosts] == [True, True, True, False, False, False]
    access.remove(key.id)
    assert [is_served(host) for host in hosts] == [False, False, True, False, False, False], "as if none were allowed"


def test_beyond_loopback_a_key_is_needed_to_start() -> None:
    access = Access(loopback=False, now=lambda: 0.0)
    with pytest.raises(NotProtected, match=r"0\.0\.0\.0 .*gpufn keys create"):
        access.check_protected("0.0.0.0")
    with pytest.raises(Unauthorized):
        access.authenticate({b"host": b"localhost"})
    key, secret = new_key("", ("admin",), 0.0)
    access.put(key)
    access.check_protected("0.0.0.0")
    assert access.authenticate({b"authorization": f"bearer {secret}".encode()}).id == key.id
    access.remove(key.id)
    with pytest.raises(Unauthorized):
        access.authenticate({b"authorization": f"bearer {secret}".encode()})


@pytest.mark.parametrize(
    ("loopback", "others", "said"),
    [
        (False, [], "listens on the network, where every request needs a key"),
        (False, [("read",)], "the last API key with the scope admin"),
        (False, [("read",), ("admin",)], None),
        (True, [("invoke:*", "deploy")], "the last API key with the scope admin"),
        (True, [], None),
    ],
)
def test_the_last_key_that_may_make_others_stays_unless_none_is_needed(
    loopback: bool, others: list[tuple[str, ...]], said: str | None
) -> None:
    access = Access(loopback=loopback, now=lambda: 0.0)
    boss, _ = new_key("", ("admin",), 0.0)
    for key in (boss, *(new_key("", scopes, 1.0)[0] for scopes in others)):
        access.put(key)
    if said is None:
        access.check_remaining_keys([key for key in access.keys if key.id != boss.id])
        return
    with pytest.raises(Conflict, match=said) as refused:
        access.check_remaining_keys([key for key in access.keys if key.id != boss.id])
    assert "create another" in refused.value.message


async def test_over_http_too_the_last_key_stays_where_the_gateway_listens_on_the_network(
    make: Any, clock: Any, problem: Any
) -> None:
    gateway = make.Gateway(clock, loopback=False)
    key, secret = new_key("", ("admin",), 0.0)
    gateway.access.put(key)
    async with gateway.client(authorization=f"Bearer {secret}") as client:
        answer = await client.delete(f"/v1/keys/{key.id}")
    assert problem(answer) == (409, "conflict")


def _is_accepted(access: Access, secret: str) -> bool:
    try:
        access.authenticate({b"authorization": f"Bearer {secret}".encode()})
    except Unauthorized:
        return False
    return True


def test_a_key_is_refused_once_it_has_expired() -> None:
    now = [100.0]
    access = Access(loopback=True, now=lambda: now[0])
    key, secret = new_key("", ("read",), 100.0, expires_in_s=10.0)
    access.put(key)
    accepted = []
    for now[0] in (109.9, 110.0, 1e9):
        accepted.append(_is_accepted(access, secret))
    assert accepted == [True, False, False]


def test_a_replaced_secret_is_valid_for_the_overlap_only() -> None:
    now = [100.0]
    access = Access(loopback=True, now=lambda: now[0])
    key, first = new_key("ci", ("read",), 0.0, expires_in_s=1000.0)
    second_key, second = rotated(key, 100.0, 10.0)
    access.put(second_key)
    assert [_is_accepted(access, secret) for secret in (first, second, f"gpufn_{key.id}_wrong")] == [True, True, False]
    now[0] = 110.0
    assert [_is_accepted(access, secret) for secret in (first, second)] == [False, True]
    third_key, third = rotated(second_key, 110.0, 0.0)
    access.put(third_key)
    assert [_is_accepted(access, secret) for secret in (first, second, third)] == [False, False, True]
    assert (third_key.id, third_key.label, third_key.scopes, third_key.expires_at) == (key.id, "ci", ("read",), 1000.0)


def test_an_admin_key_that_expires_does_not_count_as_the_one_that_remains() -> None:
    access = Access(loopback=True, now=lambda: 0.0)
    with pytest.raises(Conflict):
        access.check_remaining_keys([new_key("", ("admin",), 0.0, expires_in_s=1e9)[0]])


def test_the_secret_is_not_stored() -> None:
    key, secret = new_key("laptop", ("read", "read"), 5.0)
    assert secret not in repr(key)
    assert (key.scopes, key.label, key.created_at) == (("read",), "laptop", 5.0)
    assert secret.startswith(f"gpufn_{key.id}_")


@pytest.mark.parametrize(
    "scopes",
    [
        (),
        ("root",),
        ("invoke:",),
        ("invoke:A b",),
        ("invoke:../x",),
        ("read:prod/search",),
        ("admin:*",),
        ("deploy:prod/a*",),
    ],
)
def test_scopes_must_be_known(scopes: tuple[str, ...]) -> None:
    with pytest.raises(InvalidInput) as caught:
        new_key("", scopes, 0.0)
    assert caught.value.field == "scopes"


def test_a_principal_has_the_rights_of_its_scopes() -> None:
    with pytest.raises(Forbidden, match="'invoke:b'"):
        Principal("k", frozenset({"invoke:a"})).require_invoke("b")
    with pytest.raises(Forbidden, match="'deploy'"):
        Principal("k", frozenset({"read"})).require("deploy")
