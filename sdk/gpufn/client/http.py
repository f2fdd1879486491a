"""HTTP requests to a gateway: address, connections, retries, and the exceptions that failures become.

Requests other than POST (`invoke` and the creation of objects) are retried when their connection breaks. They are also
retried when a gateway that responded before refuses the connection, or a proxy reports it as unreachable: a restarting
gateway looks like that.
"""

from __future__ import annotations

import contextlib
import functools
import os
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import msgspec

from gpufn.call.context import is_in_worker
from gpufn.client.interruptible_http import make_interruptible
from gpufn.client.responses import decode, error_of
from gpufn.client.views.access import TokenView
from gpufn_core.encoding import media
from gpufn_core.encoding.urls import DEFAULT_GATEWAY, function_path, gateway_address, public
from gpufn_core.errors import (
    Forbidden,
    GatewayUnavailable,
    GpufnError,
    HistoryUnavailable,
    InvalidInput,
    InvalidSpec,
    Unauthorized,
)
from gpufn_core.home import Home
from gpufn_core.spec.naming import names

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")

MANAGE_TIMEOUT_S = 60.0
JSON_BODY = {"content-type": media.JSON}

_CONNECT_TIMEOUT_S = 5.0
_KEEPALIVE_S = 3.0  # shorter than the idle timeout of servers, so that no connection closes while we write to it
_PROXY_ERRORS = {
    HTTPStatus.BAD_GATEWAY: "it cannot reach the gateway",
    HTTPStatus.SERVICE_UNAVAILABLE: "it cannot reach the gateway",
    HTTPStatus.GATEWAY_TIMEOUT: "the gateway did not respond in time",
}
_RETRY_DELAYS_S = (0.1, 0.4, 1.0, 2.0)
_LOADING_S = 15.0  # after its start a gateway loads the history
_LOADING_RETRY_S = 1.0


def find_url(environ: Mapping[str, str] = os.environ) -> str:
    """Return GPUFN_URL, else the address of this machine's `gpufn up`, else the default address without GPUFN_HOME.

    A worker may run on another machine, and its HOME has no platform, so it has no default. Raises GatewayUnavailable.
    """
    if url := environ.get("GPUFN_URL"):
        return url
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(Home.from_env(environ).up_file.read_bytes(), type=_Up).url
    if is_in_worker():
        raise GatewayUnavailable(
            "a worker does not know the gateway's address: call functions with f.remote(...), which needs none; for "
            "other requests pass an address to Client, or declare env={'GPUFN_URL': ...} on the function"
        )
    if home := environ.get("GPUFN_HOME"):  # the platform at the default address is another one
        raise GatewayUnavailable(f"no platform runs in GPUFN_HOME={home}: start it with `gpufn up`, or set GPUFN_URL")
    return DEFAULT_GATEWAY


def _address(url: str | None) -> str:
    try:
        return gateway_address(url or find_url())
    except InvalidInput as error:
        prefix = "" if url else "GPUFN_URL: "  # `gpufn up` writes valid addresses only
        raise GatewayUnavailable(prefix + error.message) from None


def _checked_key(name: str, key: str) -> str:
    """Return `key` if it is valid in a header. Raises Unauthorized otherwise, with a message that hides the key."""
    problem = ""
    if not isinstance(key, str):
        problem = "is not a string"
    elif "\r" in key or "\n" in key:
        problem = "contains a line break"
    elif not key.isascii():
        problem = "contains a character that is not ASCII"
    elif not key.isprintable() or " " in key:
        problem = "contains a space or a control character"
    if problem:
        raise Unauthorized(f"{name} is not a key: it {problem}; copy it exactly as `gpufn keys create` printed it")
    return key


def _checked_environment(environment: str | None) -> str:
    """Return `environment`, else GPUFN_ENV, else "". Raises InvalidInput."""
    chosen = environment or os.environ.get("GPUFN_ENV", "")
    if chosen:
        try:
            names.check_group("environment", chosen)
        except InvalidSpec as error:
            raise InvalidInput(error.message if environment else f"GPUFN_ENV: {error.message}") from None
    return chosen


def trusted_certificates() -> ssl.SSLContext | bool:
    """Return the certificates that https trusts: the certificates in GPUFN_CA_FILE, or else the public authorities.

    Reading them takes 70 ms. Raises GatewayUnavailable.
    """
    if not (path := os.environ.get("GPUFN_CA_FILE")):
        return True
    try:
        return ssl.create_default_context(cafile=path)
    except ssl.SSLError:
        raise GatewayUnavailable(f"GPUFN_CA_FILE={path} has no certificate in PEM format") from None
    except OSError as error:
        raise GatewayUnavailable(f"GPUFN_CA_FILE={path}: {error.strerror}") from None


class _Up(msgspec.Struct):
    url: str


class Requests:
    """The kinds of requests that the endpoints of one gateway need.

    `environment`: where functions are that are named without an environment. Default: GPUFN_ENV, else any.
    """

    def __init__(self, url: str | None = None, api_key: str | None = None, environment: str | None = None) -> None:
        import httpx  # noqa: PLC0415  takes 100 ms; programs without remote calls do not import it

        address = _address(url)
        self.url = public(address)
        self.environment = _checked_environment(environment)
        key = _checked_key("api_key" if api_key else "GPUFN_API_KEY", api_key or os.environ.get("GPUFN_API_KEY", ""))
        try:
            transport = httpx.HTTPTransport(
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=_KEEPALIVE_S),
                trust_env=False,
                verify=trusted_certificates() if self.url.startswith("https:") else False,
            )
            make_interruptible(transport)
            self._http = httpx.Client(
                base_url=address,
                transport=transport,
                headers={"authorization": f"Bearer {key}"} if key else {},
                auth=None if key else self._stored_login(),
                timeout=httpx.Timeout(MANAGE_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S, pool=None),
                follow_redirects=False,
                trust_env=False,
            )
        except (httpx.InvalidURL, ValueError) as error:
            raise GatewayUnavailable(f"{self.url!r} is not an address: {error}") from None
        self._no_timeout = httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S)
        self._failures = httpx.TransportError
        self._has_responded = False

    def _stored_login(self) -> Callable[[httpx.Request], httpx.Request] | None:
        """Return a function that adds the token of `gpufn login` to a request, or None without a login at this
        gateway."""
        from gpufn.client.login.stored_logins import Logins, StoredToken  # noqa: PLC0415

        logins = Logins()
        if (login := logins.get(self.url)) is None:
            return None
        from gpufn.client.login.renewal import renewed  # noqa: PLC0415

        token = StoredToken(self.url, login, logins, functools.partial(renewed, self._exchange))

        def add_token(request: httpx.Request) -> httpx.Request:
            request.headers["authorization"] = f"Bearer {token.get()}"
            return request

        return add_token

    def _exchange(self, jwt: str) -> TokenView:
        """Return the gateway's token in exchange for a token of its OpenID provider. The request itself has none."""
        body = msgspec.json.encode({"jwt": jwt})
        return self._json(TokenView, "POST", "/v1/auth/token", content=body, headers=JSON_BODY, auth=None)

    @property
    def has_credential(self) -> bool:
        """True if requests have an API key or a token."""
        return "authorization" in self._http.headers or self._http.auth is not None

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _function_path(self, name: str) -> str:
        """Return the name of a function, in this client's environment, as segments of a path. Raises InvalidInput."""
        return function_path(name, self.environment)

    def _function_url(self, name: str) -> str:
        return f"/v1/functions/{self._function_path(name)}"

    def _status(self, path: str) -> int:
        try:
            return self._request("GET", path, check=False).status_code
        except GatewayUnavailable:
            return 0

    def _exists(self, path: str) -> bool:
        """Return whether the gateway has an uploaded file. Raises Unauthorized and Forbidden.

        The status alone determines the exception: a response to HEAD has no body.
        """
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
            raise self._not_a_gateway(response)
        return decode(kind, response.content)

    def _member(self, kind: type[T], name: str, method: str, path: str, **options: Any) -> T:
        """Return the member `name` of the JSON object in the response."""
        return decode(kind, self._json(dict[str, msgspec.Raw], method, path, **options).get(name, b""))

    def _request(self, method: str, path: str, *, check: bool = True, **options: Any) -> httpx.Response:
        """Send a request. A gateway that has just started is given time to load its history."""
        deadline = time.monotonic() + _LOADING_S
        while True:
            try:
                return self._request_once(method, path, check=check, **options)
            except HistoryUnavailable:
                if method != "GET" or time.monotonic() >= deadline:
                    raise
            time.sleep(_LOADING_RETRY_S)

    def _request_once(self, method: str, path: str, *, check: bool, **options: Any) -> httpx.Response:
        for delay_s in (*_RETRY_DELAYS_S, None):
            try:
                response = self._http.request(method, path, **options)
            except self._failures as error:
                if delay_s is None or not self._may_retry(method, error):
                    raise self._unavailable(error) from None
            else:
                if delay_s is None or not (_is_unreachable(response) and self._has_responded and method != "POST"):
                    self._has_responded |= not _is_unreachable(response)
                    if check and response.status_code >= 300:
                        raise self._error(response, response.content)
                    return response
            time.sleep(delay_s)
        raise AssertionError("the last attempt returns or raises")

    def _authorized_request(self, method: str, path: str) -> httpx.Request:
        """Build a request with the API key or token of this client, for another protocol than HTTP."""
        request = self._http.build_request(method, path)
        return request if self._http.auth is None else next(self._http.auth.sync_auth_flow(request))

    @contextlib.contextmanager
    def _stream(
        self, method: str, path: str, *, read_timeout_s: float | None = None, **options: Any
    ) -> Iterator[httpx.Response]:
        """Stream a response. Raises GatewayUnavailable if nothing arrives for `read_timeout_s`."""
        import httpx  # noqa: PLC0415

        timeout = httpx.Timeout(read_timeout_s, connect=_CONNECT_TIMEOUT_S)
        request = self._http.build_request(method, path, timeout=timeout, **options)
        try:
            response = self._http.send(request, stream=True)
        except self._failures as error:
            raise self._unavailable(error) from None
        self._has_responded |= not _is_unreachable(response)
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
        if _is_text(response) and response.status_code in _PROXY_ERRORS:
            problem = _PROXY_ERRORS[HTTPStatus(response.status_code)]
            phrase = HTTPStatus(response.status_code).phrase
            return GatewayUnavailable(f"a proxy at {self.url} returned {response.status_code} {phrase}: {problem}")
        if _is_text(response):
            return self._not_a_gateway(response)
        return error_of(response.status_code, response.headers, body)

    def _not_a_gateway(self, response: httpx.Response) -> GatewayUnavailable:
        received = f"{response.status_code}, {response.headers['content-type']}"
        return GatewayUnavailable(f"the server at {self.url} is not a gpufn gateway: it returned {received}")

    def _may_retry(self, method: str, error: Exception) -> bool:
        import httpx  # noqa: PLC0415

        if method == "POST" or isinstance(error, (httpx.TimeoutException, httpx.LocalProtocolError)):
            return False
        if isinstance(error, httpx.RemoteProtocolError) and "disconnected" not in str(error):
            return False  # the server does not speak HTTP
        return self._has_responded or not isinstance(error, httpx.ConnectError)

    def _unavailable(self, error: Exception) -> GatewayUnavailable:
        import httpx  # noqa: PLC0415

        if isinstance(error, httpx.ConnectError) and ("SSL" in str(error) or "Name or service" in str(error)):
            return GatewayUnavailable(f"no gateway answers at {self.url}: {error}{_certificate_advice(str(error))}")
        if isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout)):
            return GatewayUnavailable(f"no gateway answers at {self.url}: is `gpufn up` running?")
        if isinstance(error, httpx.TimeoutException):
            return GatewayUnavailable(f"the gateway at {self.url} did not respond in time")
        return GatewayUnavailable(f"the connection to the gateway at {self.url} broke: {error}")


def _certificate_advice(reason: str) -> str:
    if "CERTIFICATE_VERIFY_FAILED" not in reason:
        return ""
    if "mismatch" in reason:
        return "; set GPUFN_URL to a name in the gateway's certificate"
    return "; set GPUFN_CA_FILE to the file of the authority that issued the gateway's certificate"


def _is_unreachable(response: httpx.Response) -> bool:
    """Return whether a proxy reports that it cannot reach the gateway."""
    return response.status_code in (HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE) and _is_text(response)


def _is_text(response: httpx.Response) -> bool:
    """Return whether the response is HTML or plain text; a gateway returns JSON."""
    kind: str = response.headers.get("content-type", "")
    return kind.startswith("text/")
