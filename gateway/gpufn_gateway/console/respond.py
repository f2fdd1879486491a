"""Responses of the console, with a body as a whole."""

from __future__ import annotations

from gpufn_gateway.http.body_reader import Send
from gpufn_gateway.problems import Headers


async def respond(send: Send, status: int, headers: Headers, body: bytes, *, length: int | None = None) -> None:
    size = (b"content-length", b"%d" % (len(body) if length is None else length))
    await send({"type": "http.response.start", "status": status, "headers": [*headers, size]})
    await send({"type": "http.response.body", "body": body})
