"""Read request bodies within limits, and detect that a client has disconnected.

Limits apply to the received bytes, independent of Content-Length. `uvicorn_protocol.GuardedProtocol` disconnects
clients that send nothing.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Final, TypeVar

from gpufn_core.errors import CapacityError, GpufnError, PayloadTooLarge, RequestError
from gpufn_gateway.calls.admission import too_large
from gpufn_gateway.http import sender
from gpufn_gateway.problems import RouteError

T = TypeVar("T")
_SHARE: Final = 4
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Write = Callable[[bytes | memoryview], object]


class ClientDisconnected(GpufnError):
    """The client disconnected before its request was complete."""

    code = "client_gone"


class BodyBudget:
    """The total bytes of all bodies that are being received. A complete body no longer counts.

    A sender may use `_SHARE` times the bytes that it leaves free. So one sender alone has four fifths of the budget,
    and another one always finds room.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._used_by: Counter[str] = Counter()

    def reserve(self, size: int) -> str:
        """Return the sender, for `release`. Raises CapacityError if the budget, or the sender's share, is used up."""
        own, free = sender.current.get(), self.limit_bytes - self.used_bytes - size
        used = self._used_by[own]
        if free < 0 or (used and used + size > _SHARE * free):
            raise CapacityError(
                "The request bodies in flight have reached the gateway's limit; retry later.", retry_after_s=1.0
            )
        self.used_bytes += size
        self._used_by[own] += size
        return own

    def release(self, size: int, of: str) -> None:
        self.used_bytes -= size
        self._used_by[of] -= size
        if not self._used_by[of]:
            del self._used_by[of]


def require_content_length(headers: Mapping[bytes, bytes], limit_bytes: int, what: str) -> int:
    """Return the Content-Length of a body that is not read into memory. Raises RouteError 411, PayloadTooLarge."""
    announced = headers.get(b"content-length")
    if announced is None:
        raise RouteError(411, f"The length of {what} is required: send Content-Length.")
    return _length(announced, limit_bytes, what)


async def iter_body(receive: Receive) -> AsyncGenerator[bytes, None]:
    """Yield a body part by part as it arrives. Reading pauses while a part is processed. Raises ClientDisconnected."""
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise ClientDisconnected
        yield message.get("body", b"")
        if not message.get("more_body"):
            return


async def wait_for_disconnect(receive: Receive) -> None:
    """Wait until the client disconnects. Call it only after the body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def write_body(receive: Receive, write: Write) -> None:
    """Pass a body to `write` as it arrives, past the HTTP parser where `receive` supports that.

    Raises ClientDisconnected, and the exceptions of `write`.
    """
    write_into: Callable[[Write], Awaitable[None]] | None = getattr(receive, "write_into", None)
    if write_into is not None:
        await write_into(write)
        return
    async for part in iter_body(receive):
        write(part)


class BodyReader:
    """Read bodies of at most `limit_bytes` within `timeout_s`. `what` names the body in error messages."""

    def __init__(self, limit_bytes: int, timeout_s: float, *, what: str, budget: BodyBudget) -> None:
        self.limit_bytes = limit_bytes
        self._timeout_s = timeout_s
        self._what = what
        self._budget = budget

    async def read(self, headers: Mapping[bytes, bytes], receive: Receive) -> bytes:
        """Read a whole body. Raises PayloadTooLarge, CapacityError, RouteError 408, ClientDisconnected."""
        announced = headers.get(b"content-length")
        if announced is not None:
            _length(announced, self.limit_bytes, self._what)
        message = await receive()
        if message["type"] != "http.request" or message.get("more_body"):
            return await self._rest(message, receive)
        body: bytes = message.get("body", b"")
        if len(body) > self.limit_bytes:
            raise self._too_large()
        return body

    async def within_timeout(self, body: Awaitable[T]) -> T:
        """Await a coroutine that receives a body itself, with the timeout of `read`. Raises RouteError 408."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await body
        except TimeoutError:
            raise self._too_slow() from None

    async def _rest(self, message: MutableMapping[str, Any], receive: Receive) -> bytes:
        body = bytearray()
        reserved, own = 0, sender.current.get()
        try:
            async with asyncio.timeout(self._timeout_s):
                while message["type"] == "http.request":
                    chunk: bytes = message.get("body", b"")
                    if len(body) + len(chunk) > self.limit_bytes:
                        raise self._too_large()
                    self._budget.reserve(len(chunk))
                    reserved += len(chunk)
                    body += chunk
                    if not message.get("more_body"):
                        return bytes(body)
                    message = await receive()
        except TimeoutError:
            raise self._too_slow() from None
        finally:
            self._budget.release(reserved, own)
        raise ClientDisconnected

    def _too_slow(self) -> RouteError:
        return RouteError(408, f"The request body did not arrive within {self._timeout_s:g} s.")

    def _too_large(self) -> PayloadTooLarge:
        return too_large(self._what, self.limit_bytes)


def _length(announced: bytes, limit_bytes: int, what: str) -> int:
    if not announced.isdigit():
        raise RequestError("Content-Length is not a number.")
    if len(announced) > 18 or int(announced) > limit_bytes:
        raise too_large(what, limit_bytes, int(announced) if len(announced) <= 18 else None)
    return int(announced)
