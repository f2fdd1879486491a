"""OpenFaaS's routes, with the requests that faas-cli and its documentation show; faas-cli itself is a Go program."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import pytest

from gpufn_core.domain.invocation import InvocationState, OutcomeKind
from gpufn_core.errors import ErrorInfo
from gpufn_core.protocol.codec import encode
from gpufn_core.protocol.records import CallRecord
from gpufn_core.spec.function_spec import MethodSpec
from gpufn_gateway.auth.access import new_key
from gpufn_gateway.protocols.openfaas.adapter import callback
from gpufn_platform.bus.storage.key_value import Entry
from tests.gateway.conftest import ARGUMENTS
from tests.gateway.protocols.delivering import delivering
from tests.gateway.protocols.runner import running
from tests.gateway.webhooks.receiver import receiving
from tests.gateway.whole import DIGEST, gateway_on

TEXT = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
RAW = MethodSpec(
    parameters={"type": "object", "properties": {"data": {"type": "string", "contentEncoding": "base64"}}},
    raw_parameter="data",
)
CLI = {"content-type": "text/plain", "user_agent": "faas-cli/0.17.0"}  # as faas-cli invoke sends it


def answer(call: Any) -> None:
    fields = msgspec.json.decode(call.fields["body"])
    if fields.get("name") == "nobody":
        call.reply(kind=OutcomeKind.RAISED, error=ErrorInfo("function_raised", "there is nobody"))
    elif "name" in fields:
        call.reply(msgspec.json.encode(f"hello {fields['name']}"))
    elif "data" in fields:
        call.reply(base64.b64decode(fields["data"])[::-1], content_type="image/png")
    else:
        call.reply(msgspec.json.encode(fields))


@pytest.fixture(name="faas")
def functions_on_a_gateway(gateway: Any, make: Any) -> Any:
    for name, method in (("greet", MethodSpec(parameters=TEXT)), ("flip", RAW), ("prod/search/greet", RAW)):
        gateway.deploy(make.spec(name, method))
        gateway.report(make.status(name), partial=True)
    gateway.queue.answer = answer
    return gateway


async def test_a_body_is_text_bytes_or_json_and_so_is_the_result(faas: Any) -> None:
    said = await faas.post("/function/greet", b"Ada", **CLI)
    assert (said.status_code, said.text, said.headers["content-type"]) == (
        200, "hello Ada", "text/plain; charset=utf-8",
    )  # fmt: skip
    assert {"x-call-id", "x-start-time", "x-duration-seconds"} <= said.headers.keys()
    flipped = await faas.post("/function/flip", b"\xff\x01", **CLI)
    assert (flipped.content, flipped.headers["content-type"]) == (b"\x01\xff", "image/png")
    assert (await faas.post("/function/embed", b'{"texts": ["a"]}', **CLI)).json() == {"texts": ["a"]}
    assert (await faas.post("/function/greet", b'{"name": "Bo"}', content_type="application/json")).text == "hello Bo"
    assert (await faas.post("/function/prod/search/greet", b"ab", **CLI)).content == b"ba"


@pytest.mark.parametrize(
    ("path", "body", "status", "fact"),
    [
        ("/function/none", b"x", 404, "'none'"),
        ("/async-function/none", b"x", 404, "'none'"),
        ("/system/function/none", b"", 405, "not allowed"),
        ("/function/greet", b"nobody", 500, "there is nobody"),
        ("/function/greet", b"\xff", 400, "UTF-8"),
        ("/function/embed", b"[]", 400, "object"),
        ("/function/embed", b'{"texts": 1}', 400, "texts"),
        ("/function/embed", b'{"texts": [], "more": 1}', 400, "more"),
        ("/function/greet", b"", 400, "name"),
        ("/system/functions", b"", 405, "not allowed"),
    ],
)
async def test_an_error_is_a_line_of_text(faas: Any, path: str, body: bytes, status: int, fact: str) -> None:
    refused = await faas.post(path, body, **CLI)
    assert (refused.status_code, refused.headers["content-type"]) == (status, "text/plain; charset=utf-8")
    assert fact in refused.text


async def test_keys_are_basic_passwords_and_see_their_functions(faas: Any) -> None:
    key, secret = new_key("k", ("invoke:greet",), 0.0)
    faas.registry.on_key(key.id, Entry(key.id, encode(key), 1))
    basic = {"authorization": f"Basic {base64.b64encode(f'admin:{secret}'.encode()).decode()}"}
    listed = await faas.get("/system/functions", **basic)
    assert [(each["name"], each["image"], each["availableReplicas"]) for each in listed.json()] == [
        ("greet", "greet@1", 1),
    ]  # fmt: skip
    assert (await faas.post("/function/greet", b"Ada", **basic, **CLI)).text == "hello Ada"
    assert (await faas.post("/function/flip", b"Ada", **basic, **CLI)).status_code == 404
    for wrong in ("Basic !", "Basic YTpi"):
        assert (await faas.post("/function/greet", b"Ada", authorization=wrong)).status_code == 401


async def test_an_async_call_is_called_back(nats: Any, make: Any) -> None:
    async with gateway_on(nats) as gateway, receiving() as receiver:
        await gateway.deploys.deploy(make.spec("faas-later", MethodSpec(parameters=ARGUMENTS)), DIGEST)
        async with running(gateway, "faas-later"), delivering(gateway):
            accepted = await gateway.http.post(
                "/async-function/faas-later", content=b'{"texts": ["a"]}', headers={"x-callback-url": receiver.url()}
            )
            called = await receiver.requests.get()
        refused = await gateway.http.post(
            "/async-function/faas-later", json={"texts": []}, headers={"x-callback-url": "http://10.0.0.1/"}
        )
    assert (accepted.status_code, accepted.content, refused.status_code) == (202, b"", 400)
    assert (called.body, called.headers["x-call-id"]) == (b'["a"]', accepted.headers["x-call-id"])
    assert (called.headers["x-function-status"], called.headers["x-function-name"]) == ("200", "faas-later")


def test_callbacks_of_failed_and_of_large_calls() -> None:
    record = CallRecord(
        id="x", function="f", revision=1, state=InvocationState.TIMED_OUT, submitted_at=0.0, ended_at=2.0
    )  # fmt: skip
    failed = callback(record, b"")
    assert (failed.headers["x-function-status"], failed.headers["x-duration-seconds"]) == ("504", "2.000000")
    large = callback(msgspec.structs.replace(record, state=InvocationState.SUCCEEDED, blob="d", size=9), b"")
    assert large.headers["x-function-status"] == "413"
