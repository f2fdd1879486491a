"""Reading a request's body, and what its client does after it: bytes are counted as they come, whatever its length
claims.

A client that sends nothing at all is `protocol.GuardedProtocol`'s to hang up on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, MutableMapping
from typing import Any, TypeVar

from gpufn_core.errors import CapacityError, GpufnError, PayloadTooLarge, RequestError
from gpufn_gateway.calls.admission import too_large
from gpufn_gateway.problems import RouteError

T = TypeVar("T")
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Write = Callable[[bytes | memoryview], object]


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


def announced_length(headers: Mapping[bytes, bytes], limit_bytes: int, what: str) -> int:
    """Of a body that is not kept in memory, so its sender must say it. Raises RouteError 411, PayloadTooLarge."""
    claimed = headers.get(b"content-length")
    if claimed is None:
        raise RouteError(411, f"The length of {what} is needed: send Content-Length.")
    return _length(claimed, limit_bytes, what)


async def parts_of_body(receive: Receive) -> AsyncGenerator[bytes, None]:
    """A body as it comes, each part once; the sender waits while a part is used. Raises ClientGone."""
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise ClientGone
        yield message.get("body", b"")
        if not message.get("more_body"):
            return


async def left(receive: Receive) -> None:
    """Returns when the client has, of a request whose body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def write_body(receive: Receive, write: Write) -> None:
    """A body as it comes, into `write`, by the shortest way that `receive` knows. Raises ClientGone, and what `write`
    does."""
    shortcut: Callable[[Write], Awaitable[None]] | None = getattr(receive, "write_into", None)
    if shortcut is not None:
        await shortcut(write)
        return
    async for part in parts_of_body(receive):
        write(part)


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
            _length(claimed, self.limit_bytes, self._what)
        message = await receive()
        if message["type"] != "http.request" or message.get("more_body"):
            return await self._rest(message, receive)
        body: bytes = message.get("body", b"")
        if len(body) > self.limit_bytes:
            raise self._too_large()
        return body

    async def in_time(self, receiving: Awaitable[T]) -> T:
        """What receives a body in its own way has as long for it as `read`. Raises RouteError 408."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await receiving
        except TimeoutError:
            raise self._too_slow() from None

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
            raise self._too_slow() from None
        finally:
            self._budget.give_back(taken)
        raise ClientGone

    def _too_slow(self) -> RouteError:
        return RouteError(408, f"The request's body did not arrive within {self._timeout_s:g} s.")

    def _too_large(self) -> PayloadTooLarge:
        return too_large(self._what, self.limit_bytes)


def _length(claimed: bytes, limit_bytes: int, what: str) -> int:
    if not claimed.isdigit():
        raise RequestError("Content-Length is not a number.")
    if len(claimed) > 18 or int(claimed) > limit_bytes:
        raise too_large(what, limit_bytes, int(claimed) if len(claimed) <= 18 else None)
    return int(claimed)
