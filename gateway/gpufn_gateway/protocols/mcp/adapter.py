"""MCP's path, `/mcp`: JSON-RPC over streamable HTTP, without sessions and without messages from the server."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gpufn_core.errors import GpufnError, InvalidInput
from gpufn_gateway.problems import CallFailed, Problem
from gpufn_gateway.protocols.adapter import Adapter, JsonErrors
from gpufn_gateway.protocols.mcp import messages
from gpufn_gateway.protocols.mcp.messages import RpcError
from gpufn_gateway.protocols.platform import json_of
from gpufn_gateway.routes.requests import json_response, route

_PATH: Final = "/mcp"
_VERSIONS: Final = ("2025-11-25", "2025-06-18", "2025-03-26")  # of the protocol, the newest first
_TOOLS_AT_ONCE: Final = 200


class _RpcErrors(JsonErrors):
    """Errors of a whole request, such as a missing key, as JSON-RPC errors without an id."""

    def body(self, problem: Problem) -> object:
        return messages.failure(None, RpcError(messages.SERVER_ERROR, problem.info.message))


class Mcp(Adapter):
    errors = _RpcErrors()

    def owns(self, path: str) -> bool:
        return path == _PATH

    def routes(self) -> list[Route]:
        return [route("POST", _PATH, self.respond)]

    async def respond(self, request: Request) -> Response:
        """Respond to one message. A notification has no response."""
        try:
            message = messages.parse(await self.platform.body(request))
        except RpcError as error:
            return json_response(messages.failure(None, error), 400)
        if message.id is None:
            return Response(status_code=202)
        try:
            result = await self._result(message, request)
        except RpcError as error:
            return json_response(messages.failure(message.id, error))
        return json_response({"jsonrpc": "2.0", "id": message.id, "result": result})

    async def _result(self, message: messages.Message, request: Request) -> dict[str, Any]:
        """Raises RpcError."""
        methods: dict[str, Callable[[Mapping[str, Any], Request], Awaitable[dict[str, Any]]]] = {
            "initialize": self._initialize,
            "ping": self._ping,
            "tools/list": self._list,
            "tools/call": self._call,
        }
        method = methods.get(message.method)
        if method is None:
            raise RpcError(messages.METHOD_NOT_FOUND, f"There is no method {message.method[:100]!r}.")
        return await method(message.params, request)

    async def _initialize(self, params: Mapping[str, Any], request: Request) -> dict[str, Any]:
        wanted = params.get("protocolVersion")
        return {
            "protocolVersion": wanted if wanted in _VERSIONS else _VERSIONS[0],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "gpufn", "version": importlib.metadata.version("gpufn")},
        }

    async def _ping(self, params: Mapping[str, Any], request: Request) -> dict[str, Any]:
        return {}

    async def _list(self, params: Mapping[str, Any], request: Request) -> dict[str, Any]:
        """List the functions that the client may call; `cursor` is the number of the first."""
        cursor = params.get("cursor", "0")
        if not isinstance(cursor, str) or not cursor.isascii() or not cursor.isdecimal():
            raise RpcError(messages.INVALID_PARAMS, "cursor must be one that tools/list returned")
        first = int(cursor[:9])
        targets = list(self.platform.functions(request))
        page: dict[str, Any] = {
            "tools": [messages.tool(each.path, each.method) for each in targets[first : first + _TOOLS_AT_ONCE]]
        }
        if len(targets) > first + _TOOLS_AT_ONCE:
            page["nextCursor"] = str(first + _TOOLS_AT_ONCE)
        return page

    async def _call(self, params: Mapping[str, Any], request: Request) -> dict[str, Any]:
        """Call a function. Its errors are results, so that the model can react; other errors are of the protocol."""
        wanted = params.get("name")
        target = next(
            (each for each in self.platform.functions(request) if messages.tool_name(each.path) == wanted), None
        )
        if target is None:
            raise RpcError(messages.INVALID_PARAMS, f"There is no tool {str(wanted)[:200]!r}.")
        arguments = msgspec.json.encode(params.get("arguments") or {})
        try:
            outcome = await self.platform.invoke(target.path, arguments, request)
        except CallFailed as error:
            return messages.tool_error(error.problem.info.message)
        except InvalidInput as error:
            return messages.tool_error(error.message)
        except GpufnError as error:
            raise RpcError(messages.SERVER_ERROR, error.message) from error
        return messages.tool_result(msgspec.json.decode(json_of(outcome)))
