"""One POST to an address that a user chose: where it may connect to, how long it may take, how much it may answer."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterable
from typing import Any, Final
from urllib.parse import urljoin, urlsplit

import httpcore

from gpufn_core.encoding.urls import check_webhook
from gpufn_core.errors import Forbidden, GpufnError, InvalidInput
from gpufn_gateway.webhooks.address_policy import Addresses

_TIMEOUT_S: Final = 15.0
_MOST_ANSWER_BYTES: Final = 64 << 10
_MOST_REDIRECTS: Final = 3
_REDIRECTS: Final = frozenset({307, 308})  # those that keep the method; the others would drop what is told
_IDLE_S: Final = 5.0
_TRY_S: Final = 3.0  # to connect, while there is another address to try
_CONNECTIONS: Final = 128


class NotReached(GpufnError):
    """The receiver of a webhook could not be reached, or did not answer in time."""

    code = "webhook_not_reached"
    retryable = True


class AddressRefused(Forbidden):
    """A webhook may not go to this address."""

    code = "webhook_address_refused"


class Post:
    def __init__(self, addresses: Addresses) -> None:
        self._pool = httpcore.AsyncConnectionPool(
            network_backend=_Checked(addresses), max_connections=_CONNECTIONS, keepalive_expiry=_IDLE_S
        )

    async def send(self, url: str, headers: dict[str, str], body: bytes) -> int:
        """The status of the answer. Raises NotReached, AddressRefused."""
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                return await self._send(url, headers, body)
        except GpufnError:
            raise
        except TimeoutError:
            raise NotReached(f"no answer within {_TIMEOUT_S:g} s") from None
        except (OSError, ssl.SSLError, *_FAILURES) as error:
            raise NotReached(str(error) or type(error).__name__) from error

    async def close(self) -> None:
        await self._pool.aclose()

    async def _send(self, url: str, headers: dict[str, str], body: bytes) -> int:
        for _ in range(_MOST_REDIRECTS):
            status, location = await self._send_once(url, headers, body)
            if status not in _REDIRECTS or not location:
                return status
            there = _redirected(url, location)
            if there is None:
                return status
            url = there
        return status

    async def _send_once(self, url: str, headers: dict[str, str], body: bytes) -> tuple[int, str]:
        """Status and `Location`. Of the answer's body a little is read, so that the receiver can end in peace."""
        async with self._pool.stream("POST", url, headers=list(headers.items()), content=body) as response:
            read = 0
            async for part in response.aiter_stream():
                read += len(part)
                if read > _MOST_ANSWER_BYTES:
                    break
            location = next((value for name, value in response.headers if name.lower() == b"location"), b"")
            return response.status, location.decode("latin-1")


class _Checked(httpcore.AsyncNetworkBackend):
    """Resolves a name, and connects to the first of its addresses that is allowed and answers: to that address, not to
    the name again."""

    def __init__(self, addresses: Addresses) -> None:
        self._addresses = addresses
        self._connect = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        refusals = {address: self._addresses.refusal(address) for address in await _resolve(host, port)}
        allowed = [address for address, refusal in refusals.items() if refusal is None]
        if not allowed:
            raise AddressRefused(f"no webhook is sent to {host}: {next(iter(refusals.values()))}")
        for address in allowed[:-1]:
            try:
                return await self._connect.connect_tcp(address, port, _TRY_S, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                continue
        return await self._connect.connect_tcp(allowed[-1], port, timeout, local_address, socket_options)

    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        raise AddressRefused("no webhook is sent to a unix socket")

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


async def _resolve(host: str, port: int) -> list[str]:
    """Raises NotReached for a name without an address, and OSError when nobody knows."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError:  # a part that is empty, or longer than 63 characters
        raise NotReached(f"{host[:100]} is no name") from None
    if not found:
        raise NotReached(f"{host} has no address")
    return [str(info[4][0]) for info in found]


_FAILURES: Final = (
    httpcore.NetworkError,
    httpcore.TimeoutException,
    httpcore.ProtocolError,
    httpcore.UnsupportedProtocol,
    httpcore.ConnectionNotAvailable,
)


def _redirected(url: str, location: str) -> str | None:
    """Where a redirect leads to; None for another host, and for what no webhook can be sent to."""
    try:
        there = urljoin(url, location)
        check_webhook(there)
    except (ValueError, InvalidInput):
        return None
    return there if _origin(there) == _origin(url) else None


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port
