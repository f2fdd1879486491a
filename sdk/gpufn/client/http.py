"""Requests to a gateway: its address, its connections, what is tried again, and what failures become.

A request that may be repeated (all but `invoke` and the creation of things) is repeated when its connection breaks, and
when a gateway that answered before refuses, or a proxy says so, which is what a restart looks like.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import msgspec

from gpufn.call.context import is_in_worker
from gpufn.client.interruptible_http import make_leavable
from gpufn.client.responses import decoded, error_of
from gpufn_core.encoding import media
from gpufn_core.encoding.urls import DEFAULT_GATEWAY, gateway_address, public
from gpufn_core.errors import Forbidden, GatewayUnavailable, GpufnError, InvalidInput, Unauthorized
from gpufn_core.home import Home

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")

MANAGE_TIMEOUT_S = 60.0
JSON_BODY = {"content-type": media.JSON}

_CONNECT_TIMEOUT_S = 5.0
_KEEPALIVE_S = 3.0  # less than servers keep an idle connection, so that none closes as we write to it
_PROXY_SAYS = {
    HTTPStatus.BAD_GATEWAY: "it does not reach the gateway",
    HTTPStatus.SERVICE_UNAVAILABLE: "it does not reach the gateway",
    HTTPStatus.GATEWAY_TIMEOUT: "the gateway did not answer in time",
}
_PAUSES_S = (0.1, 0.4, 1.0, 2.0)  # before a request is repeated


def find_url(environ: Mapping[str, str] = os.environ) -> str:
    """GPUFN_URL, else what `gpufn up` runs on this machine, else the default: not in a worker, which may be on another
    machine, and whose HOME is none where a platform runs. Raises GatewayUnavailable.
    """
    if url := environ.get("GPUFN_URL"):
        return url
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(Home.from_env(environ).up_file.read_bytes(), type=_Up).url
    if is_in_worker():
        raise GatewayUnavailable(
            "a worker is not told where its platform is: call functions by f.remote(...), which needs no address; for "
            "the rest give Client an address, or the function env={'GPUFN_URL': ...}"
        )
    return DEFAULT_GATEWAY


def _address(url: str | None) -> str:
    try:
        return gateway_address(url or find_url())
    except InvalidInput as error:
        whose = "" if url else "GPUFN_URL: "  # what `gpufn up` wrote down is one
        raise GatewayUnavailable(whose + error.message) from None


def _checked_key(name: str, key: str) -> str:
    """`key`, which can be sent in a header. Raises Unauthorized, which does not tell the key, for any other."""
    wrong = ""
    if not isinstance(key, str):
        wrong = "is no text"
    elif "\r" in key or "\n" in key:
        wrong = "has a line break in it"
    elif not key.isascii():
        wrong = "has a character that is not ASCII in it"
    elif not key.isprintable() or " " in key:
        wrong = "has a space or a control character in it"
    if wrong:
        raise Unauthorized(f"{name} is not a key: it {wrong}; write it as `gpufn keys create` printed it")
    return key


class _Up(msgspec.Struct):
    url: str


class Requests:
    """One gateway, by the kinds of requests that its endpoints need."""

    def __init__(self, url: str | None = None, api_key: str | None = None) -> None:
        import httpx  # noqa: PLC0415  100 ms that a program without remote calls does not pay

        address = _address(url)
        self.url = public(address)
        is_encrypted = self.url.startswith("https:")
        key = _checked_key("api_key" if api_key else "GPUFN_API_KEY", api_key or os.environ.get("GPUFN_API_KEY", ""))
        try:
            transport = httpx.HTTPTransport(
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=_KEEPALIVE_S),
                trust_env=False,
                verify=is_encrypted,  # the certificates take 70 ms to read, and http has no use for them
            )
            make_leavable(transport)
            self._http = httpx.Client(
                base_url=address,
                transport=transport,
                headers={"authorization": f"Bearer {key}"} if key else {},
                timeout=httpx.Timeout(MANAGE_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S, pool=None),
                follow_redirects=False,
                trust_env=False,
            )
        except (httpx.InvalidURL, ValueError) as error:
            raise GatewayUnavailable(f"{self.url!r} is not an address: {error}") from None
        self._endless = httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S)
        self._failures = httpx.TransportError
        self._answered = False

    def close(self) -> None:
        """Close its connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _status(self, path: str) -> int:
        try:
            return self._request("GET", path, check=False).status_code
        except GatewayUnavailable:
            return 0

    def _exists(self, path: str) -> bool:
        """Of what a deploy sends. Raises Unauthorized and Forbidden by the status, for a HEAD's answer has no body."""
        try:
            self._request("HEAD", path)
        except GpufnError as error:
            status = getattr(error, "status", None)
            if status == 404:
                return False
            if status == 401:
                raise Unauthorized from error
            if status == 403:
                raise Forbidden("this needs a key with the scope 'deploy'") from error
            raise
        return True

    def _json(self, kind: type[T], method: str, path: str, **options: Any) -> T:
        response = self._request(method, path, **options)
        if _is_text(response):
            raise self._no_gateway(response)
        return decoded(kind, response.content)

    def _request(self, method: str, path: str, *, check: bool = True, **options: Any) -> httpx.Response:
        for pause in (*_PAUSES_S, None):
            try:
                response = self._http.request(method, path, **options)
            except self._failures as error:
                if pause is None or not self._may_repeat(method, error):
                    raise self._unavailable(error) from None
            else:
                if pause is None or not (_is_away(response) and self._answered and method != "POST"):
                    self._answered |= not _is_away(response)
                    if check and response.status_code >= 300:
                        raise self._error(response, response.content)
                    return response
            time.sleep(pause)
        raise AssertionError("the last try returns or raises")

    @contextlib.contextmanager
    def _stream(
        self, method: str, path: str, *, silent_s: float | None = None, **options: Any
    ) -> Iterator[httpx.Response]:
        """`silent_s`: it broke when nothing has come for so long."""
        import httpx  # noqa: PLC0415

        timeout = httpx.Timeout(silent_s, connect=_CONNECT_TIMEOUT_S)
        request = self._http.build_request(method, path, timeout=timeout, **options)
        try:
            response = self._http.send(request, stream=True)
        except self._failures as error:
            raise self._unavailable(error) from None
        self._answered |= not _is_away(response)
        with contextlib.closing(response):
            if response.status_code >= 300:
                raise self._error(response, b"".join(self._chunks(response)))
            yield response

    def _chunks(self, response: httpx.Response) -> Iterator[bytes]:
        try:
            yield from response.iter_raw()
        except self._failures as error:
            raise self._unavailable(error) from None

    def _error(self, response: httpx.Response, body: bytes) -> GpufnError:
        if _is_text(response) and response.status_code in _PROXY_SAYS:
            said = _PROXY_SAYS[HTTPStatus(response.status_code)]
            phrase = HTTPStatus(response.status_code).phrase
            return GatewayUnavailable(f"a proxy at {self.url} answers {response.status_code} {phrase}: {said}")
        if _is_text(response):
            return self._no_gateway(response)
        return error_of(response.status_code, response.headers, body)

    def _no_gateway(self, response: httpx.Response) -> GatewayUnavailable:
        said = f"{response.status_code}, {response.headers['content-type']}"
        return GatewayUnavailable(f"what answers at {self.url} is not a gpufn gateway: {said}")

    def _may_repeat(self, method: str, error: Exception) -> bool:
        import httpx  # noqa: PLC0415

        if method == "POST" or isinstance(error, (httpx.TimeoutException, httpx.LocalProtocolError)):
            return False
        if isinstance(error, httpx.RemoteProtocolError) and "disconnected" not in str(error):
            return False  # what answers does not speak HTTP
        return self._answered or not isinstance(error, httpx.ConnectError)

    def _unavailable(self, error: Exception) -> GatewayUnavailable:
        import httpx  # noqa: PLC0415

        if isinstance(error, httpx.ConnectError) and ("SSL" in str(error) or "Name or service" in str(error)):
            return GatewayUnavailable(f"no gateway answers at {self.url}: {error}")
        if isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout)):
            return GatewayUnavailable(f"no gateway answers at {self.url}: is `gpufn up` running?")
        if isinstance(error, httpx.TimeoutException):
            return GatewayUnavailable(f"the gateway at {self.url} did not answer in time")
        return GatewayUnavailable(f"the connection to the gateway at {self.url} broke: {error}")


def _is_away(response: httpx.Response) -> bool:
    """A proxy in between says that the gateway is not there, as its absence would without the proxy."""
    return response.status_code in (HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE) and _is_text(response)


def _is_text(response: httpx.Response) -> bool:
    """A page, or words for a person; a gateway's documents and problems are JSON."""
    kind: str = response.headers.get("content-type", "")
    return kind.startswith("text/")
