"""Web functions at a gateway with a stub of the queue: access, endpoints, and what applications may send."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from gpufn_core.domain.traffic import Split
from gpufn_core.errors import BusUnavailable, FunctionRaised
from gpufn_core.protocol.codec import pack
from gpufn_core.protocol.streams import web_session
from gpufn_core.protocol.streams.web_session import BodyPart, ResponseStart, WebRequest
from gpufn_core.spec.function_spec import SESSIONS, MethodSpec
from gpufn_core.spec.web_spec import WebKind, WebSpec
from gpufn_gateway.auth.access import new_key
from gpufn_gateway.web.headers import to_application, to_client

AREA = MethodSpec(
    parameters={
        "type": "object",
        "properties": {"width": {"type": "number"}, "label": {"type": "string"}},
        "required": ["width"],
    }
)
ROOT = "/web/prod/shop/site"
OK = [pack(ResponseStart(200, ((b"cache-control", b"max-age=9"), (b"connection", b"close")), False), b"hi")]


class Session:
    """A session in the stub of the queue, whose worker sends `payloads`."""

    has_begun = True

    def __init__(self, call: Any, payloads: list[bytes]) -> None:
        self._call = call
        self._payloads = payloads

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    def send_now(self, payload: bytes) -> None: ...

    async def send(self, payload: bytes) -> None:
        raise BusUnavailable("no bus")

    def interrupt(self, error: Exception) -> None:
        self._call.future.set_exception(error)

    async def payloads(self) -> Any:
        await asyncio.sleep(0)
        for payload in self._payloads:
            yield payload


@pytest.fixture
def deploy(gateway: Any, make: Any) -> Callable[..., None]:
    def deploy(name: str, kind: WebKind, *, public: bool = False, methods: tuple[str, ...] = ()) -> None:
        method = AREA if kind is WebKind.ENDPOINT else SESSIONS[0]
        gateway.deploy(make.spec(name, method, web=WebSpec(kind, public, methods)))
        gateway.report(make.status(name), make.status())

    return deploy


@pytest.fixture
def answers(gateway: Any) -> Callable[[list[bytes]], None]:
    """Let the worker of each session send these events."""

    def answers(payloads: list[bytes]) -> None:
        gateway.queue.open_session = lambda request: Session(gateway.queue.invoke(request), payloads)

    return answers


def give_key(gateway: Any, *scopes: str) -> str:
    key, secret = new_key("test", scopes, 0.0)
    gateway.access.put(key)
    return f"Bearer {secret}"


def request_of(gateway: Any) -> WebRequest:
    request, _ = web_session.unpack_request(gateway.queue.calls[-1].fields["body"])
    return request


async def test_a_public_function_needs_no_key_and_another_one_does(gateway: Any, deploy: Any, answers: Any) -> None:
    deploy("open", WebKind.ASGI, public=True)
    deploy("closed", WebKind.ASGI)
    answers(OK)
    key = give_key(gateway, "invoke:closed")
    statuses = {
        (name, sends_key): (
            await gateway.get(f"/web/default/default/{name}/a", **({"authorization": key} if sends_key else {}))
        ).status_code
        for name in ("open", "closed", "missing", "embed")
        for sends_key in (False, True)
    }
    assert statuses == {
        ("open", False): 200, ("open", True): 200,
        ("closed", False): 401, ("closed", True): 200,
        ("missing", False): 401, ("missing", True): 404,
        ("embed", False): 401, ("embed", True): 404,  # for this key it does not exist
    }  # fmt: skip
    assert (await gateway.get("/v1/functions")).status_code == 401  # nothing else is open


async def test_the_request_of_an_application(gateway: Any, deploy: Any, answers: Any) -> None:
    deploy("site", WebKind.ASGI)
    answers(OK)
    response = await gateway.get("/web/-/-/site/a%20b?q=1", range="bytes=0-9", te="trailers")
    assert (response.status_code, response.text, response.headers["cache-control"]) == (200, "hi", "max-age=9")
    assert "connection" not in response.headers
    request = request_of(gateway)
    assert (request.root_path, request.path, request.query) == ("/web/-/-/site", "/web/-/-/site/a b", b"q=1")
    assert dict(request.headers)[b"range"] == b"bytes=0-9"
    assert b"te" not in dict(request.headers)


async def test_a_browser_stays_with_its_revision_while_an_application_is_split(
    gateway: Any, deploy: Any, answers: Any, make: Any
) -> None:
    deploy("site", WebKind.ASGI)
    answers(OK)
    assert "set-cookie" not in (await gateway.get("/web/-/-/site/")).headers
    split = Split(weights={1: 50, 2: 50}, set_at=1.0)
    spec = make.spec("site", SESSIONS[0], web=WebSpec(WebKind.ASGI, False, ()))
    for number in (2, 1):
        gateway.deploy(spec, number, traffic=split)
    seen: dict[str, set[int]] = {}
    for _ in range(20):
        cookie = (await gateway.get("/web/-/-/site/")).headers["set-cookie"]
        assert cookie.endswith("; Path=/web/-/-/site/; HttpOnly; SameSite=Lax")
        visitor, _, _ = cookie.partition(";")
        for _ in range(3):
            seen.setdefault(visitor, set()).add(gateway.queue.calls[-1].fields["revision"].number)
            assert "set-cookie" not in (await gateway.get("/web/-/-/site/", cookie=f"a=b; {visitor}")).headers
    assert {len(revisions) for revisions in seen.values()} == {1}
    assert set.union(*seen.values()) == {1, 2}


async def test_without_keys_pages_use_web_functions_only(gateway: Any, deploy: Any, answers: Any) -> None:
    deploy("site", WebKind.ASGI)
    answers(OK)
    own = {"origin": "http://127.0.0.1:8090", "sec-fetch-site": "same-origin"}
    assert (await gateway.get("/web/-/-/site/", **own)).status_code == 200
    assert (await gateway.get("/v1/functions", **own)).status_code == 403
    for headers in ({"origin": "http://evil.example"}, {"sec-fetch-site": "cross-site"}, {"host": "evil.example"}):
        assert (await gateway.get("/web/-/-/site/", **headers)).status_code == 403, headers


async def test_a_public_function_of_a_gateway_without_keys_is_for_this_machine(
    gateway: Any, deploy: Any, answers: Any
) -> None:
    deploy("open", WebKind.ASGI, public=True)
    answers(OK)
    assert (await gateway.get("/web/-/-/open/", origin="http://other.example")).status_code == 200
    assert (await gateway.get("/web/-/-/open/", host="evil.example")).status_code == 403


@pytest.mark.parametrize(
    ("payloads", "status"),
    [
        ([], 500),
        ([pack(BodyPart(False), b"a")], 500),
        ([pack(ResponseStart(101, (), False))], 500),
        ([pack(ResponseStart(200, ((b"a", b"b\r\nc: d"),), False))], 500),
        ([pack(ResponseStart(204, (), False))], 204),
    ],
)
async def test_the_responses_of_an_application(
    gateway: Any, deploy: Any, answers: Any, payloads: list[bytes], status: int
) -> None:
    deploy("site", WebKind.ASGI)
    answers(payloads)
    assert (await gateway.get("/web/-/-/site/")).status_code == status


async def test_arguments_of_an_endpoint(gateway: Any, deploy: Any, problem: Any) -> None:
    deploy("area", WebKind.ENDPOINT, methods=("GET", "PUT"))
    path = "/web/-/-/area/"
    assert (await gateway.get(f"{path}?width=2&label=3")).json() == {"width": 2, "label": "3"}
    async with gateway.client() as client:
        assert (await client.put(f"{path}?label=a", json={"width": 1})).json() == {"width": 1, "label": "a"}
        assert problem(await client.put(f"{path}?width=1", json={"width": 1})) == (422, "invalid_input")
        assert problem(await client.put(f"{path}?width=1", json=[])) == (422, "invalid_input")
        refused = await client.post(f"{path}?width=1")
    assert (refused.status_code, refused.headers["allow"]) == (405, "GET, HEAD, PUT")
    assert problem(await gateway.get(f"{path}?wide=1")) == (422, "invalid_input")
    assert problem(await gateway.get(f"{path}below?width=1")) == (404, "bad_request")


async def test_a_body_that_cannot_be_sent_ends_the_session(
    gateway: Any, deploy: Any, answers: Any, problem: Any
) -> None:
    deploy("site", WebKind.ASGI)
    answers([])
    gateway.queue.answer = lambda call: None  # the worker waits for the body

    async def parts() -> Any:
        yield b"a"

    async with gateway.client() as client:
        response = await client.post("/web/-/-/site/", content=parts())
    assert problem(response) == (503, "bus_unavailable")


async def test_the_document_has_web_functions(gateway: Any, deploy: Any) -> None:
    deploy("area", WebKind.ENDPOINT, methods=("GET", "PUT"))
    deploy("site", WebKind.ASGI, public=True)
    paths = (await gateway.get("/openapi.json")).json()["paths"]
    assert set(paths["/web/default/default/area/"]) == {"get", "put"}
    assert paths["/web/default/default/site/{path}"]["get"]["security"] == []
    assert "/v1/functions/site/invoke" not in paths


def test_a_key_is_not_shown_and_another_credential_is() -> None:
    ours, other = (b"authorization", b"bearer gpufn_a_b"), (b"authorization", b"Basic YTpi")
    assert to_application([ours], is_public=True) == to_application([other], is_public=False) == ()
    assert to_application([other], is_public=True) == (other,)


def test_fields_of_a_response() -> None:
    fields = [(b"Set-Cookie", b"a"), (b"Service-Worker-Allowed", b"/"), (b"Transfer-Encoding", b"chunked")]
    assert to_client(fields, ROOT) == [(b"set-cookie", b"a")]
    assert to_client([(b"sec-websocket-accept", b"a")], ROOT, is_socket=True) == []
    with pytest.raises(FunctionRaised):
        to_client([(b"a b", b"c")], ROOT)


@pytest.mark.parametrize(
    "field", ["Clear-Site-Data", "Alt-Svc", "NEL", "Report-To", "Strict-Transport-Security", "X-Request-Id"]
)
def test_an_application_sends_no_field_about_the_whole_origin(field: str) -> None:
    """Bug: an application deleted the cookies of the others, and let browsers report all requests to its author."""
    assert to_client([(field.encode(), b"x")], ROOT) == []


@pytest.mark.parametrize(
    "cookie",
    [
        b"id=1; Path=/", b"id=1; path=/web/prod/ads/site/", b"id=1;PATH = /console", b"id=1; Path=", b"id=1; Path=x",
        b"id=1; Path=/web/prod/shop/site2/", b"id=1; Path=/web/prod/shop/site/; Path=/", b"id=1; Domain=example.org",
    ],
)  # fmt: skip
def test_a_cookie_of_an_application_is_for_its_own_paths(cookie: bytes) -> None:
    """Bug: browsers sent it to the applications of others, and it could replace the session of the console."""
    ((_, value),) = to_client([(b"Set-Cookie", cookie)], ROOT)
    pair, *attributes = value.split(b"; ")
    assert pair == b"id=1"
    assert {each for each in attributes if not each.startswith(b"Path=/web/prod/shop/site/")} == set()


def test_a_cookie_keeps_its_other_attributes() -> None:
    cookie = b'id="a; Path=/web/prod/shop/site/cart; HttpOnly; SameSite=Lax; Expires=Wed, 21 Oct 2026 07:28:00 GMT'
    assert to_client([(b"set-cookie", cookie)], ROOT) == [(b"set-cookie", cookie)]


async def test_a_websocket_ends_with_the_key_that_opened_it(gateway: Any, deploy: Any) -> None:
    """Bug: a client whose key had ended could use the application until the timeout of the session."""
    deploy("site", WebKind.ASGI)
    key, secret = new_key("test", ("invoke:*",), 0.0)
    gateway.access.put(key)
    give_key(gateway, "admin")

    class Open(Session):
        async def payloads(self) -> Any:
            yield pack(web_session.Accept(None, ()))
            gateway.access.remove(key.id)
            yield pack(web_session.MessagePart(True, False), b"secret")

    gateway.queue.open_session = lambda request: Open(gateway.queue.invoke(request), [])
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if not sent:
            return {"type": "websocket.connect"}
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    async def send(event: dict[str, Any]) -> None:
        sent.append(event)

    path = "/web/default/default/site/"
    await gateway.app(
        {
            "type": "websocket", "scheme": "ws", "http_version": "1.1", "path": path, "raw_path": path.encode(),
            "query_string": b"", "headers": [(b"authorization", f"Bearer {secret}".encode())],
        },
        receive,
        send,
    )  # fmt: skip
    assert [event["type"] for event in sent] == ["websocket.accept", "websocket.close"]
    assert sent[1]["reason"].startswith("unauthorized")


async def test_open_websockets_of_a_team_are_limited(gateway: Any, deploy: Any, answers: Any) -> None:
    deploy("site", WebKind.ASGI, public=True)
    gateway.access.streams.limit = 0
    sent: list[dict[str, Any]] = []

    async def send(event: dict[str, Any]) -> None:
        sent.append(event)

    path = "/web/default/default/site/"
    scope = {"type": "websocket", "path": path, "headers": [(b"host", b"localhost")], "query_string": b""}
    await gateway.app(scope, asyncio.Event().wait, send)
    assert sent[0]["status"] == 429
