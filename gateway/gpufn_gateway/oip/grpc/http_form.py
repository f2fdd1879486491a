"""Requests of the HTTP form, sent to the application inside the process: all its checks apply to gRPC too."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping, Sequence
from typing import Any, NamedTuple

import msgspec
from starlette.types import ASGIApp, Scope

from gpufn_gateway.problems import Headers

Address = tuple[str, int]


class HttpResponse(NamedTuple):
    status: int
    headers: dict[bytes, bytes]
    body: bytes

    @property
    def error(self) -> str:
        """The message of an error in the protocol's HTTP form."""
        return msgspec.json.decode(self.body, type=dict[str, str])["error"]


class HttpForm:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def send(
        self, method: str, path: str, headers: Headers, *, client: Address, body: Sequence[bytes] = ()
    ) -> HttpResponse:
        """Send a request and return the response. If this task is cancelled, so is the call."""
        parts = list(body) or [b""]
        status, fields, received = 0, dict[bytes, bytes](), bytearray()

        async def receive() -> dict[str, Any]:
            if parts:
                return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}
            await asyncio.get_running_loop().create_future()  # cancelled with the task: the client stays connected
            raise AssertionError

        async def send(event: MutableMapping[str, Any]) -> None:
            nonlocal status
            if event["type"] == "http.response.start":
                status = event["status"]
                fields.update(event["headers"])
            else:
                received.extend(event.get("body", b""))

        length = (b"content-length", b"%d" % sum(map(len, parts)))
        await self._app(_scope(method, path, [*headers, length], client), receive, send)
        return HttpResponse(status, fields, bytes(received))


def _scope(method: str, path: str, headers: Headers, client: Address) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "2",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": headers,
        "client": client,
        "server": None,
    }
