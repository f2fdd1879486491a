"""Reading a request's body: bytes are counted as they come, whatever its length claims.

A client that sends nothing at all is `protocol.GuardedProtocol`'s to hang up on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from gpufn.errors import CapacityError, GpufnError, PayloadTooLarge, RequestError
from gpufn_gateway.admission import too_large
from gpufn_gateway.problems import RouteError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class ClientGone(GpufnError):
    """The client left before its request was complete."""

    code = "client_gone"


class BodyBudget:
    """The bytes of all bodies that are being received, together. One that is whole is its request's to bound."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0

    def take(self, size: int) -> None:
        """Raises CapacityError."""
        if self.used_bytes + size > self.limit_bytes:
            raise CapacityError(
                "The gateway receives as many bytes at once as it may; come back later.", retry_after_s=1.0
            )
        self.used_bytes += size

    def give_back(self, size: int) -> None:
        self.used_bytes -= size


class BodyReader:
    """Reads bodies of at most `limit_bytes` within `timeout_s`. `what` has that limit, for the message."""

    def __init__(self, limit_bytes: int, timeout_s: float, *, what: str, budget: BodyBudget) -> None:
        self.limit_bytes = limit_bytes
        self._timeout_s = timeout_s
        self._what = what
        self._budget = budget

    async def read(self, headers: Mapping[bytes, bytes], receive: Receive) -> bytes:
        """Raises PayloadTooLarge, CapacityError, RouteError 408, or ClientGone."""
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
        taken = 0
        try:
            async with asyncio.timeout(self._timeout_s):
                while message["type"] == "http.request":
                    chunk: bytes = message.get("body", b"")
                    if len(body) + len(chunk) > self.limit_bytes:
                        raise self._too_large()
                    self._budget.take(len(chunk))
                    taken += len(chunk)
                    body += chunk
                    if not message.get("more_body"):
                        return bytes(body)
                    message = await receive()
        except TimeoutError:
            raise RouteError(408, f"The request's body did not arrive within {self._timeout_s:g} s.") from None
        finally:
            self._budget.give_back(taken)
        raise ClientGone

    def _too_large(self) -> PayloadTooLarge:
        return too_large(self._what, self.limit_bytes)
