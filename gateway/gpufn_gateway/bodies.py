"""Reading a request's body: bytes are counted as they come, whatever its length claims.

A client that sends nothing at all is `protocol.GuardedProtocol`'s to hang up on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from gpufn.errors import GpufnError, PayloadTooLarge, RequestError
from gpufn_gateway.admission import too_large
from gpufn_gateway.problems import RouteError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class ClientGone(GpufnError):
    """The client left before its request was complete."""

    code = "client_gone"


class BodyReader:
    """Reads bodies of at most `limit_bytes` within `timeout_s`. `what` has that limit, for the message."""

    def __init__(self, limit_bytes: int, timeout_s: float, *, what: str) -> None:
        self.limit_bytes = limit_bytes
        self._timeout_s = timeout_s
        self._what = what

    async def read(self, headers: Mapping[bytes, bytes], receive: Receive) -> bytes:
        """Raises PayloadTooLarge, RouteError 408, or ClientGone."""
        claimed = headers.get(b"content-length")
        if claimed is not None:
            if not claimed.isdigit():
                raise RequestError("Content-Length is not a number.")
            if len(claimed) > 18 or int(claimed) > self.limit_bytes:
                raise self._too_large()
        message = await receive()
        if message["type"] != "http.request" or message.get("more_body"):
            return await self._rest(message, receive)
        body: bytes = message.get("body", b"")
        if len(body) > self.limit_bytes:
            raise self._too_large()
        return body

    async def _rest(self, message: MutableMapping[str, Any], receive: Receive) -> bytes:
        body = bytearray()
        try:
            async with asyncio.timeout(self._timeout_s):
                while message["type"] == "http.request":
                    body += message.get("body", b"")
                    if len(body) > self.limit_bytes:
                        raise self._too_large()
                    if not message.get("more_body"):
                        return bytes(body)
                    message = await receive()
        except TimeoutError:
            raise RouteError(408, f"The request's body did not arrive within {self._timeout_s:g} s.") from None
        raise ClientGone

    def _too_large(self) -> PayloadTooLarge:
        return too_large(self._what, self.limit_bytes)
