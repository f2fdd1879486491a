"""Sending one webhook POST to an address that a user chose, with limits on addresses, time and response size."""

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
from gpufn_gateway.webhooks.address_policy import AddressPolicy

_TIMEOUT_S: Final = 15.0
_MAX_RESPONSE_BYTES: Final = 64 << 10
_MAX_REDIRECTS: Final = 3
_REDIRECTS: Final = frozenset({307, 308})  # redirects that keep the method; others would drop the body
_IDLE_S: Final = 5.0
_TRY_S: Final = 3.0  # connect timeout while there is another address to try
_CONNECTIONS: Final = 128


class ReceiverUnreachable(GpufnError):
    """The receiver of a webhook could not be reached, or did not answer in time."""

    code = "webhook_not_reached"
    retryable = True


class AddressRefused(Forbidden):
    """A webhook may not go to this address."""

    code = "webhook_address_refused"


class WebhookSender:
    def __init__(self, addresses: AddressPolicy) -> None:
        self._pool = httpcore.AsyncConnectionPool(
            network_backend=_CheckedBackend(addresses), max_connections=_CONNECTIONS, keepalive_expiry=_IDLE_S
        )

    async def send(self, url: str, headers: dict[str, str], body: bytes) -> int:
        """Return the response status. Raises ReceiverUnreachable, AddressRefused."""
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                return await self._send(url, headers, body)
        except GpufnError:
            raise
        except TimeoutError:
            raise ReceiverUnreachable(f"no answer within {_TIMEOUT_S:g} s") from None
        except (OSError, ssl.SSLError, *_FAILURES) as error:
            raise ReceiverUnreachable(str(error) or type(error).__name__) from error

    async def close(self) -> None:
        await self._pool.aclose()

    async def _send(self, url: str, headers: dict[str, str], body: bytes) -> int:
        for _ in range(_MAX_REDIRECTS):
            status, location = await self._send_once(url, headers, body)
            if status not in _REDIRECTS or not location:
                return status
            target = _redirected(url, location)
            if target is None:
                return status
            url = target
        return status

    async def _send_once(self, url: str, headers: dict[str, str], body: bytes) -> tuple[int, str]:
        """Return the status and `Location`. A little of the body is read, so that the receiver can finish cleanly."""
        async with self._pool.stream("POST", url, headers=list(headers.items()), content=body) as response:
            read = 0
            async for part in response.aiter_stream():
                read += len(part)
                if read > _MAX_RESPONSE_BYTES:
                    break
            location = next((value for name, value in response.headers if name.lower() == b"location"), b"")
            return response.status, location.decode("latin-1")


class _CheckedBackend(httpcore.AsyncNetworkBackend):
    """Resolve a name and connect to the first of its addresses that is allowed and answers. The connection goes to that
    address, and the name is not resolved again."""

    def __init__(self, addresses: AddressPolicy) -> None:
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


async def _resolve(host: str, port: int) -> list[str]:
    """Return the addresses of a name. Raises ReceiverUnreachable if it has none, OSError if the lookup fails."""
    try:
        infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError:  # a label that is empty, or longer than 63 characters
        raise ReceiverUnreachable(f"{host[:100]} is not a valid host name") from None
    if not infos:
        raise ReceiverUnreachable(f"{host} has no address")
    return [str(info[4][0]) for info in infos]


_FAILURES: Final = (
    httpcore.NetworkError,
    httpcore.TimeoutException,
    httpcore.ProtocolError,
    httpcore.UnsupportedProtocol,
    httpcore.ConnectionNotAvailable,
)


def _redirected(url: str, location: str) -> str | None:
    """Return the target of a redirect; None for another host, and for a URL that webhooks may not go to."""
    try:
        target = urljoin(url, location)
        check_webhook(target)
    except (ValueError, InvalidInput):
        return None
    return target if _origin(target) == _origin(url) else None


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port
