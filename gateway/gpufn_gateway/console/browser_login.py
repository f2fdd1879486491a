"""Sign-in at the OpenID provider in the browser: the authorization code flow with PKCE (RFC 7636).

1. `begin`: a page of the console requests the address of the provider's login. Everything that the end of the flow
   needs is in a sealed cookie, which only the callback receives. So any gateway can end the flow.
2. The provider sends the browser back to the callback with a code.
3. `end`: the state must equal the state in the cookie. The gateway redeems the code with the verifier of the cookie,
   and verifies the ID token and its nonce. Users get the same roles as with `gpufn login`.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final
from urllib.parse import parse_qs, urlencode, urlsplit

import msgspec

from gpufn_core.encoding.urls import is_loopback
from gpufn_core.errors import InvalidInput, IssuerUnavailable, Unauthorized
from gpufn_gateway.auth.access import Access
from gpufn_gateway.auth.issuer import Discovery
from gpufn_gateway.auth.login import Issued, Login, Provider
from gpufn_gateway.auth.token_store import TokenStore
from gpufn_gateway.console.sealed import seal, unseal
from gpufn_platform.process.clock import Clock

LOGIN: Final = "/console/login"
CALLBACK: Final = f"{LOGIN}/callback"
FLOW_S: Final = 600.0  # a user may have to find a second factor
_MAX_NEXT: Final = 2000
_MAX_CODE: Final = 4096
_REDEEMED_AT_ONCE: Final = 8
_CONTEXT: Final = b"gpufn console login\0"
_SCOPES: Final = ("openid", "email", "groups")  # no offline_access: a session cannot be renewed
# Only a page of the console, on this origin: no other host, no backslash, no line break.
_NEXT: Final = re.compile(r"/console(?:[/?][!-\[\]-~]*)?")

Post = Callable[[str, Mapping[str, str]], Awaitable[bytes]]


class LoginDenied(Unauthorized):
    """The user or the provider has refused the login."""


class LoginExpired(Unauthorized):
    """The flow is unknown: its cookie is gone, too old, or of another flow."""


class Flow(msgspec.Struct, frozen=True, array_like=True):
    """State of a flow until its end. `next` is the page of the console to show."""

    state: str
    nonce: str
    verifier: str
    redirect_uri: str
    next: str
    valid_until: float


class _Tokens(msgspec.Struct):
    id_token: str


_decode_flow: Final = msgspec.json.Decoder(Flow).decode


class BrowserLogin:
    """`post(url, form)` returns the response of the provider's token endpoint."""

    def __init__(self, login: Login, access: Access, store: TokenStore, clock: Clock, post: Post) -> None:
        self._login = login
        self._access = access
        self._store = store
        self._clock = clock
        self._post = post
        self._redeeming = asyncio.Semaphore(_REDEEMED_AT_ONCE)

    async def begin(self, origin: str, next_page: str) -> tuple[str, str]:
        """Return the address of the provider's login, and the sealed flow for the cookie. Raises InvalidInput,
        IssuerUnavailable."""
        provider = self._provider()
        if len(next_page) > _MAX_NEXT or _NEXT.fullmatch(next_page) is None:
            raise InvalidInput("next must be a page of the console, such as /console/functions", field="next")
        found = await self._login.issuer_of_provider.discover()
        if not _is_secure(found.authorization_endpoint):
            raise IssuerUnavailable("The identity provider names no usable address for logins in a browser.")
        flow = Flow(
            state=secrets.token_urlsafe(24),
            nonce=secrets.token_urlsafe(24),
            verifier=secrets.token_urlsafe(48),
            redirect_uri=origin + CALLBACK,
            next=next_page,
            valid_until=self._clock.time() + FLOW_S,
        )
        digest = hashlib.sha256(flow.verifier.encode()).digest()
        query = {
            "response_type": "code",
            "client_id": provider.client_id,
            "redirect_uri": flow.redirect_uri,
            "scope": _scopes(provider, found),
            "state": flow.state,
            "nonce": flow.nonce,
            "code_challenge": base64.urlsafe_b64encode(digest).rstrip(b"=").decode(),
            "code_challenge_method": "S256",
        }
        separator = "&" if urlsplit(found.authorization_endpoint).query else "?"
        url = f"{found.authorization_endpoint}{separator}{urlencode(query)}"
        return url, seal(await self._store.signing_key(), _CONTEXT, msgspec.json.encode(flow))

    def flow_of(self, sealed: str, query: bytes) -> tuple[Flow, dict[str, str]]:
        """Return the flow that a callback ends, and its parameters. Raises LoginExpired."""
        try:
            flow = _decode_flow(unseal(self._access.tokens.signing_keys, _CONTEXT, sealed))
            given = parse_qs(query.decode("ascii"), max_num_fields=20)
        except (ValueError, msgspec.MsgspecError):
            raise LoginExpired("This login is not known, or older than 10 minutes: sign in again.") from None
        parameters = {name: values[0] for name, values in given.items() if len(values) == 1}
        has_state = hmac.compare_digest(parameters.get("state", "").encode(), flow.state.encode())
        if not has_state or self._clock.time() > flow.valid_until:
            raise LoginExpired("This login is not known, or older than 10 minutes: sign in again.")
        return flow, parameters

    async def end(self, flow: Flow, parameters: Mapping[str, str]) -> Issued:
        """Return the token of a session. Raises Unauthorized, LoginDenied, Forbidden, IssuerUnavailable."""
        provider = self._provider()
        if parameters.get("iss", provider.issuer) != provider.issuer:  # RFC 9207
            raise Unauthorized("The response is of another identity provider.")
        code = parameters.get("code", "")
        if "error" in parameters or not 0 < len(code) <= _MAX_CODE:
            raise LoginDenied("The identity provider has not confirmed the login.")
        if self._redeeming.locked():
            raise IssuerUnavailable("Too many logins at the same time: sign in again in a few seconds.")
        async with self._redeeming:
            id_token = await self._redeem(provider, flow, code)
            return await self._login.exchange_jwt(id_token, None, None, nonce=flow.nonce)

    async def _redeem(self, provider: Provider, flow: Flow, code: str) -> str:
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": flow.redirect_uri,
            "client_id": provider.client_id,
            "code_verifier": flow.verifier,
        }
        if provider.client_secret:
            form["client_secret"] = provider.client_secret
        found = await self._login.issuer_of_provider.discover()
        if not found.has_own_token_endpoint:
            raise IssuerUnavailable("The identity provider's token endpoint is on another host than the issuer.")
        try:
            return msgspec.json.decode(await self._post(found.token_endpoint, form), type=_Tokens).id_token
        except (OSError, TimeoutError):
            raise IssuerUnavailable from None
        except (ValueError, msgspec.MsgspecError) as error:
            reason = str(error)[:200]
            raise Unauthorized(f"The identity provider has not accepted the code of the login: {reason}") from None

    def _provider(self) -> Provider:
        """Return the provider. Raises InvalidInput."""
        provider = self._login.provider
        if provider is None:
            raise InvalidInput("this gateway has no identity provider: sign in with an API key")
        return provider


def _scopes(provider: Provider, found: Discovery) -> str:
    if provider.scopes:
        return provider.scopes
    return " ".join(each for each in _SCOPES if each == "openid" or each in found.scopes_supported)


def _is_secure(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme == "https" or (parts.scheme == "http" and is_loopback(parts.hostname or ""))
    except ValueError:
        return False


def outcome_of(error: Exception) -> str:
    """Return the word for the sign-in page.

    >>> outcome_of(LoginExpired("x")), outcome_of(IssuerUnavailable("x"))
    ('expired', 'unavailable')
    """
    words: dict[Any, str] = {LoginExpired: "expired", LoginDenied: "denied", IssuerUnavailable: "unavailable"}
    known = next((word for kind, word in words.items() if isinstance(error, kind)), "")
    return known or ("no-role" if getattr(error, "code", "") == "forbidden" else "failed")
