"""MCP's client, unmodified, against a gateway's port."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gpufn_core.domain.invocation import OutcomeKind
from gpufn_core.errors import ErrorInfo
from gpufn_core.protocol.codec import encode
from gpufn_core.spec.function_spec import MethodSpec
from gpufn_gateway.auth.access import new_key
from gpufn_platform.bus.storage.key_value import Entry
from tests.gateway.listening import serving

NAME = {
    "type": "object",
    "properties": {"name": {"type": "string"}},
    "required": ["name"],
    "additionalProperties": False,
}


def answer(call: Any) -> None:
    name = msgspec.json.decode(call.fields["body"])["name"]
    if name == "nobody":
        error = ErrorInfo("function_raised", "there is nobody", error_type="ValueError")
        call.reply(kind=OutcomeKind.RAISED, error=error)
    else:
        call.reply(msgspec.json.encode({"hello": name}))


@pytest.fixture(name="tools")
def tools_on_a_gateway(gateway: Any, make: Any) -> Any:
    for name in ("greet", "prod/search/greet"):
        gateway.deploy(make.spec(name, MethodSpec(parameters=NAME, doc="Greet somebody.")))
        gateway.report(make.status(name), partial=True)
    gateway.queue.answer = answer
    return gateway


async def test_the_client_works_unmodified(tools: Any) -> None:
    import mcp.client.streamable_http  # it takes a second, which each process of a run would pay

    async with (
        serving(tools.app) as (_, port),
        mcp.client.streamable_http.streamable_http_client(f"http://127.0.0.1:{port}/mcp") as streams,
        mcp.ClientSession(streams[0], streams[1]) as session,
    ):
        assert (await session.initialize()).server_info.name == "gpufn"
        listed = [tool for tool in (await session.list_tools()).tools if tool.name != "embed"]  # the fixture's
        assert [(tool.name, tool.description, tool.input_schema) for tool in listed] == [
            ("greet", "Greet somebody.", NAME),
            ("prod__search__greet", "Greet somebody.", NAME),
        ]
        called = await session.call_tool("prod__search__greet", {"name": "Ada"})
        assert (called.is_error, called.structured_content) == (False, {"hello": "Ada"})
        for arguments in ({"name": "nobody"}, {"name": 1}, {"other": "x"}):
            assert (await session.call_tool("greet", arguments)).is_error, arguments
        with pytest.raises(mcp.MCPError):
            await session.call_tool("none", {})


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, -32700),
        (b"[]", 400, -32600),
        (b'{"id": 1}', 400, -32600),
        (b'{"id": 1, "method": "nothing"}', 200, -32601),
        (b'{"id": 1, "method": "tools/list", "params": {"cursor": "x"}}', 200, -32602),
        (b'{"id": 1, "method": "tools/call", "params": {"name": 1}}', 200, -32602),
    ],
)
async def test_bad_messages_are_errors_of_json_rpc(tools: Any, body: bytes, status: int, code: int) -> None:
    refused = await tools.post("/mcp", body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (status, code)


async def test_a_notification_has_no_response(tools: Any) -> None:
    accepted = await tools.post("/mcp", b'{"jsonrpc": "2.0", "method": "notifications/initialized"}')
    assert (accepted.status_code, accepted.content) == (202, b"")
    assert (await tools.get("/mcp")).status_code == 405


async def test_a_key_sees_the_tools_that_it_may_call(tools: Any) -> None:
    key, secret = new_key("k", ("invoke:prod/search/*",), 0.0)
    tools.registry.on_key(key.id, Entry(key.id, encode(key), 1))
    listing = b'{"id": 1, "method": "tools/list"}'
    refused = await tools.post("/mcp", listing)
    assert (refused.status_code, refused.json()["error"]["code"]) == (401, -32000)
    headers = {"authorization": f"Bearer {secret}"}
    listed = (await tools.post("/mcp", listing, **headers)).json()["result"]["tools"]
    assert [tool["name"] for tool in listed] == ["prod__search__greet"]
    foreign = b'{"id": 1, "method": "tools/call", "params": {"name": "greet", "arguments": {"name": "x"}}}'
    assert (await tools.post("/mcp", foreign, **headers)).json()["error"]["code"] == -32602
