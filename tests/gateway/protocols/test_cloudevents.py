"""The package cloudevents, unmodified, against the gateway: both modes, both directions."""

from __future__ import annotations

import base64
import datetime
from typing import Any

import msgspec
import pytest
from cloudevents.core.bindings.http import (
    HTTPMessage,
    from_binary_event,
    from_structured_event,
    to_binary_event,
    to_structured_event,
)
from cloudevents.core.v1.event import CloudEvent

from gpufn_core.domain.invocation import InvocationState
from gpufn_core.errors import ErrorInfo
from gpufn_core.protocol.codec import encode
from gpufn_core.protocol.records import CallRecord
from gpufn_core.spec.function_spec import MethodSpec
from gpufn_gateway.auth.access import new_key
from gpufn_gateway.http.responses import USER_CONTENT
from gpufn_gateway.protocols.cloudevents.adapter import sent_event
from gpufn_platform.bus.storage.key_value import Entry
from tests.gateway.whole import DIGEST, gateway_on

ATTRIBUTES = {
    "id": "1", "source": "/orders", "type": "order.made", "subject": "Größe 5",
    "time": datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
}  # fmt: skip
WHOLE = MethodSpec(parameters={"type": "object", "properties": {"event": {}}})


@pytest.fixture(name="functions")
def functions_on_a_gateway(gateway: Any, make: Any) -> Any:
    gateway.deploy(make.spec("whole", WHOLE))
    gateway.report(make.status("whole"), partial=True)
    return gateway


async def sent(gateway: Any, path: str, message: HTTPMessage, **headers: str) -> Any:
    async with gateway.client() as client:
        return await client.post(path, content=message.body, headers={**message.headers, **headers})


@pytest.mark.parametrize("structured", [False, True])
async def test_the_data_are_arguments_and_the_result_is_an_event(functions: Any, structured: bool) -> None:
    event = CloudEvent({**ATTRIBUTES, "datacontenttype": "application/json"}, {"texts": ["a"]})
    write, read = (to_structured_event, from_structured_event) if structured else (to_binary_event, from_binary_event)
    answer = await sent(functions, "/cloudevents/embed", write(event))
    assert answer.status_code == 200, answer.text
    result = read(HTTPMessage(dict(answer.headers), answer.content))
    assert (result.get_data(), result.get_type(), result.get_source()) == (
        {"texts": ["a"]}, "dev.gpufn.result", "/cloudevents/embed",
    )  # fmt: skip
    assert result.get_id()


@pytest.mark.parametrize("structured", [False, True])
async def test_a_result_cannot_be_a_page_on_the_origin_of_the_api(functions: Any, structured: bool) -> None:
    functions.queue.answer = lambda call: call.reply(b"<script>", content_type="text/html\nset-cookie: a=b")
    event = CloudEvent({**ATTRIBUTES, "datacontenttype": "application/json"}, {"texts": []})
    write = to_structured_event if structured else to_binary_event
    answer = await sent(functions, "/cloudevents/embed", write(event))
    for name, value in USER_CONTENT:
        assert answer.headers[name.decode()] == value.decode()
    given = msgspec.json.decode(answer.content)["datacontenttype"] if structured else answer.headers["content-type"]
    assert (given, "set-cookie" in answer.headers) == ("application/octet-stream", False)


@pytest.mark.parametrize("structured", [False, True])
async def test_a_function_may_accept_the_whole_event(functions: Any, structured: bool) -> None:
    event = CloudEvent({**ATTRIBUTES, "datacontenttype": "text/plain", "more": "x"}, b"hi")
    answer = await sent(
        functions, "/cloudevents/whole", (to_structured_event if structured else to_binary_event)(event)
    )
    seen = msgspec.json.decode(answer.content)
    seen = seen["data"]["event"] if structured else seen["event"]
    assert (seen["subject"], seen["more"], seen["data_base64"]) == ("Größe 5", "x", "aGk=")
    assert seen["time"].startswith("2026-01-02T00:00:00")


async def test_data_without_a_content_type_reach_the_function(functions: Any) -> None:
    message = to_binary_event(CloudEvent(dict(ATTRIBUTES), {"texts": ["a"]}))
    assert "content-type" not in message.headers
    assert (await sent(functions, "/cloudevents/embed", message)).json() == {"texts": ["a"]}
    whole = (await sent(functions, "/cloudevents/whole", message)).json()["event"]
    assert base64.b64decode(whole["data_base64"]) == message.body


@pytest.mark.parametrize(
    ("headers", "body", "status", "field"),
    [
        ({"ce-id": "1", "ce-source": "/s", "ce-type": "t"}, b"{}", 422, "specversion"),
        ({"ce-id": "1", "ce-source": "/s", "ce-type": "t", "ce-specversion": "0.3"}, b"{}", 422, "specversion"),
        ({"ce-id": "1", "ce-source": "/s", "ce-type": "t", "ce-specversion": "1.0", "ce-a-b": "x"}, b"{}", 422, "a-b"),
        ({"content-type": "application/cloudevents+json"}, b"[]", 422, None),
        ({"content-type": "application/cloudevents+json"}, b'{"id": {}}', 422, "id"),
        (
            {"content-type": "application/cloudevents+json"},
            b'{"specversion":"1.0","id":"1","source":"/s","type":"t","data_base64":"?"}', 422, "data_base64",
        ),
        (
            {"content-type": "application/cloudevents+json"},
            b'{"specversion":"1.0","id":"1","source":"/s","type":"t","data":{"texts":1}}', 422, "texts",
        ),
        (
            {"content-type": "application/cloudevents+json"},
            b'{"specversion":"1.0","id":"1","source":"/s","type":"t","data":{"texts":[],"more":1}}', 422, "more",
        ),
        ({"content-type": "application/cloudevents-batch+json"}, b"[]", 415, None),
        ({"content-type": "application/cloudevents+avro"}, b"", 415, None),
    ],
)  # fmt: skip
async def test_an_invalid_event_is_refused(
    functions: Any, headers: dict[str, str], body: bytes, status: int, field: str | None
) -> None:
    refused = await sent(functions, "/cloudevents/embed", HTTPMessage(headers, body))
    assert (refused.status_code, refused.json().get("field")) == (status, field)


async def test_a_key_reaches_its_functions(functions: Any) -> None:
    key, secret = new_key("k", ("invoke:embed",), 0.0)
    functions.registry.on_key(key.id, Entry(key.id, encode(key), 1))
    message = to_binary_event(CloudEvent({**ATTRIBUTES, "datacontenttype": "application/json"}, {"texts": []}))
    statuses = [
        (await sent(functions, f"/cloudevents/{name}", message, **headers)).status_code
        for name in ("embed", "whole", "none")
        for headers in ({}, {"authorization": f"Bearer {secret}"})
    ]
    assert statuses == [401, 200, 401, 404, 401, 404]


async def test_an_event_that_is_sent_twice_is_one_call(nats: Any, make: Any) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("ce-later"), DIGEST)
        message = to_binary_event(CloudEvent({**ATTRIBUTES, "datacontenttype": "application/json"}, {"texts": []}))
        path = "/cloudevents/ce-later?sink=http://127.0.0.1:9/"
        answers = [await gateway.http.post(path, content=message.body, headers=message.headers) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [202, 202]
    assert answers[0].headers["x-gpufn-invocation"] == answers[1].headers["x-gpufn-invocation"]


def test_the_end_of_a_submitted_call_is_an_event() -> None:
    record = CallRecord(
        id="x", function="prod/a/f", revision=1, state=InvocationState.SUCCEEDED, submitted_at=0.0, ended_at=1.0,
        content_type="application/json",
    )  # fmt: skip
    payload = sent_event(record, b"[1]")
    event = from_structured_event(HTTPMessage(payload.headers, payload.body))
    data: Any = event.get_data()
    assert (event.get_id(), data) == ("x", [1])
    failed = msgspec.structs.replace(record, state=InvocationState.FAILED, error=ErrorInfo("function_raised", "no"))
    payload = sent_event(failed, b"")
    event = from_structured_event(HTTPMessage(payload.headers, payload.body))
    assert (event.get_type(), event.get_data()) == (
        "dev.gpufn.error", {"state": "failed", "code": "function_raised", "message": "no"},
    )  # fmt: skip
    large = sent_event(msgspec.structs.replace(record, blob="d"), b"")
    assert from_structured_event(HTTPMessage(large.headers, large.body)).get_data() is None
