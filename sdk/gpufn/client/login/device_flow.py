"""The OAuth 2.0 device authorization grant (RFC 8628) with an OpenID provider: a user approves in any browser."""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar
from urllib.parse import quote_plus

import msgspec

from gpufn.client.views.access import ProviderView
from gpufn_core.encoding.urls import keeps_secrets
from gpufn_core.errors import Forbidden, GatewayUnavailable, Unauthorized

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")

_DEVICE_GRANT: Final = "urn:ietf:params:oauth:grant-type:device_code"
_WANTED_SCOPES: Final = ("openid", "email", "groups", "offline_access")
_TIMEOUT_S: Final = 30.0
_INTERVAL_S: Final = 5.0
_SLOW_DOWN_S: Final = 5.0
_MAX_INTERVAL_S: Final = 60.0


class Grant(msgspec.Struct, frozen=True):
    """A grant of a provider: a token that names the user, and a token for the next grant."""

    id_token: str = ""
    refresh_token: str = ""


class DeviceCode(msgspec.Struct, frozen=True):
    """A request that a user approves at `verification_uri` with `user_code`, within `expires_in` seconds."""

    device_code: str
    user_code: str
    verification_uri: str
    verification_uri_complete: str = ""
    expires_in: float = 600.0
    interval: float = _INTERVAL_S


class _Discovery(msgspec.Struct):
    issuer: str
    token_endpoint: str
    device_authorization_endpoint: str = ""
    scopes_supported: tuple[str, ...] = ()
    token_endpoint_auth_methods_supported: tuple[str, ...] = ()


class _Error(msgspec.Struct):
    error: str = ""


class DeviceFlow:
    """Requests of a client to a provider. `wait(seconds)` pauses between polls; `now` is monotonic."""

    def __init__(
        self,
        provider: ProviderView,
        *,
        wait: Callable[[float], None] = time.sleep,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        import httpx  # noqa: PLC0415

        self._provider = provider
        self._wait = wait
        self._now = now
        self._failures = httpx.HTTPError
        self._http = httpx.Client(verify=_trust(), timeout=_TIMEOUT_S, trust_env=False)
        try:
            self._discovery = self._discover()
        except BaseException:
            self._http.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._http.close()

    def start(self) -> DeviceCode:
        """Request a code. Raises GatewayUnavailable."""
        url = self._discovery.device_authorization_endpoint
        if not url:
            raise GatewayUnavailable(f"the identity provider {self._provider.issuer} has no device flow")
        response = self._post(url, {"scope": self._scope()})
        if response.status_code != 200:
            raise self._refused(response)
        return _decoded(response, DeviceCode)

    def finish(self, code: DeviceCode) -> Grant:
        """Wait until the user has approved. Raises Forbidden if the user denied, TimeoutError if the code expired."""
        interval_s, deadline = max(code.interval, 0.0), self._now() + code.expires_in
        form = {"grant_type": _DEVICE_GRANT, "device_code": code.device_code}
        while self._now() < deadline:
            self._wait(interval_s)
            try:
                response = self._post(self._discovery.token_endpoint, form)
            except GatewayUnavailable:  # RFC 8628, 3.5: slower after a timeout
                interval_s = min(max(interval_s, 1.0) * 2, _MAX_INTERVAL_S)
                continue
            if response.status_code == 200:
                return self._first(_decoded(response, Grant))
            error = _error_in(response)
            if error == "slow_down":
                interval_s += _SLOW_DOWN_S
            elif error == "access_denied":
                raise Forbidden("The login was denied.")
            elif error == "expired_token":
                break
            elif error != "authorization_pending":
                raise self._refused(response)
        raise TimeoutError("the code has expired before the login was approved: run `gpufn login` again")

    def refresh(self, refresh_token: str) -> Grant:
        """Return the next grant. Raises Unauthorized if the provider ended the login, GatewayUnavailable."""
        response = self._post(
            self._discovery.token_endpoint, {"grant_type": "refresh_token", "refresh_token": refresh_token}
        )
        if response.status_code == 200:
            grant = _decoded(response, Grant)
            if not grant.id_token:  # OpenID Connect Core, 12.2: optional
                raise Unauthorized("Your login has ended, and its provider renews none: run `gpufn login`.")
            return msgspec.structs.replace(grant, refresh_token=grant.refresh_token or refresh_token)
        if 400 <= response.status_code < 500 and response.status_code != 429:
            raise Unauthorized("Your login has ended: run `gpufn login`.")
        raise self._refused(response)

    def _discover(self) -> _Discovery:
        issuer = self._provider.issuer
        try:
            response = self._http.get(_checked(f"{issuer.rstrip('/')}/.well-known/openid-configuration"))
        except self._failures as error:
            raise self._unreachable(error) from None
        if response.status_code != 200:
            raise self._refused(response)
        discovery = _decoded(response, _Discovery)
        if discovery.issuer != issuer:
            raise GatewayUnavailable(f"{issuer} says that it is the identity provider {discovery.issuer[:200]}")
        return discovery

    def _scope(self) -> str:
        supported = self._discovery.scopes_supported
        wanted = [scope for scope in _WANTED_SCOPES if scope in supported or scope == "openid"]
        return self._provider.scopes or " ".join(wanted)

    def _post(self, url: str, form: dict[str, str]) -> httpx.Response:
        provider = self._provider
        options: dict[str, Any] = {"data": {**form, "client_id": provider.client_id}}
        if provider.client_secret:
            if "client_secret_post" in self._discovery.token_endpoint_auth_methods_supported:
                options["data"]["client_secret"] = provider.client_secret
            else:  # RFC 6749, 2.3.1
                options["auth"] = (quote_plus(provider.client_id), quote_plus(provider.client_secret))
        try:
            return self._http.post(_checked(url), headers={"accept": "application/json"}, **options)
        except self._failures as error:
            raise self._unreachable(error) from None

    def _first(self, grant: Grant) -> Grant:
        if not grant.id_token:
            raise GatewayUnavailable(
                f"the identity provider {self._provider.issuer} returned no ID token: GPUFN_OIDC_SCOPES needs openid"
            )
        return grant

    def _unreachable(self, error: Exception) -> GatewayUnavailable:
        return GatewayUnavailable(f"the identity provider {self._provider.issuer} does not answer: {error}")

    def _refused(self, response: httpx.Response) -> GatewayUnavailable:
        why = _error_in(response) or "an unexpected response"
        return GatewayUnavailable(
            f"the identity provider {self._provider.issuer} returned {response.status_code}: {why[:200]}"
        )


def _decoded(response: httpx.Response, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(response.content, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise GatewayUnavailable(f"{response.url.host} returned a document that cannot be used: {error}") from None


def _error_in(response: httpx.Response) -> str:
    try:
        return msgspec.json.decode(response.content, type=_Error).error
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""


def _checked(url: str) -> str:
    """Return an address to which credentials may go. Raises GatewayUnavailable."""
    if not keeps_secrets(url):
        raise GatewayUnavailable(f"{url[:200]!r} is not a safe address of an identity provider: it needs https")
    return url


def _trust() -> ssl.SSLContext:
    """Return the public authorities and the authorities in GPUFN_CA_FILE. Raises GatewayUnavailable."""
    context = ssl.create_default_context()
    if path := os.environ.get("GPUFN_CA_FILE"):
        try:
            context.load_verify_locations(cafile=path)
        except OSError as error:
            raise GatewayUnavailable(f"GPUFN_CA_FILE={path}: {error.strerror or error}") from None
    return context
