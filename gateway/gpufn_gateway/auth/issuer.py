"""An issuer of JSON Web Tokens (an OpenID provider): its signing keys, and the verification of its tokens.

Requests go to the issuer's own address only: the discovery document, and the keys that it names. The keys are cached. A
token with an unknown key makes the gateway fetch them again, but at most once per `_MIN_FETCH_INTERVAL_S`, so that
forged tokens cause no load. If a fetch fails, the earlier keys stay valid for a day.

httpx and PyJWT are imported on use: most gateways have no issuer, and they take a third of a gateway's start. A thread
imports them, because the first login would stop calls for 0.1 s.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import msgspec

from gpufn_core.errors import IssuerUnavailable, Unauthorized

if TYPE_CHECKING:
    import httpx
    import jwt

log = logging.getLogger(__name__)

MAX_JWT_BYTES: Final = 16 << 10
_ALGORITHMS: Final = {  # kty, crv
    **dict.fromkeys(("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"), ("RSA", "")),
    "ES256": ("EC", "P-256"),
    "ES384": ("EC", "P-384"),
    "ES512": ("EC", "P-521"),
    "EdDSA": ("OKP", "Ed25519"),
}
_REQUIRED: Final = ["iss", "aud", "sub", "exp", "iat"]
_LEEWAY_S: Final = 60.0
_TIMEOUT_S: Final = 10.0
_MAX_DOCUMENT_BYTES: Final = 512 << 10
_FRESH_S: Final = 3600.0
_STALE_S: Final = 86_400.0
_MIN_FETCH_INTERVAL_S: Final = 10.0
_MAX_KEYS: Final = 100
_HEADERS: Final = {"accept": "application/json", "accept-encoding": "identity"}
_NOT_VALID: Final = "The identity provider's token is not valid for this gateway: run `gpufn login`."


class _Unusable(Exception):
    """A document of the issuer cannot be used."""


_FAILURES: Final = (_Unusable, OSError, TimeoutError, msgspec.MsgspecError, ValueError, RecursionError)

Fetch = Callable[[str], Awaitable[bytes]]
Claims = dict[str, Any]


class Discovery(msgspec.Struct):
    """The discovery document of an issuer. Its addresses may be on other hosts."""

    issuer: str
    jwks_uri: str = ""
    authorization_endpoint: str = ""
    token_endpoint: str = ""
    scopes_supported: tuple[str, ...] = ()

    @property
    def has_own_token_endpoint(self) -> bool:
        """Return whether the token endpoint is on the issuer's host. The gateway sends requests to no other host."""
        try:
            return _origin(self.token_endpoint) == _origin(self.issuer)
        except ValueError:  # no address
            return False


class _KeySet(msgspec.Struct):
    keys: list[dict[str, Any]]


async def issuer_of(token: str) -> str:
    """Return the `iss` of a token without verification, to find its issuer. Raises Unauthorized."""
    await _load("jwt")
    import jwt  # noqa: PLC0415

    try:
        if len(token) > MAX_JWT_BYTES:
            raise ValueError("too long")
        claims = jwt.decode(token, options={"verify_signature": False})
        return str(claims["iss"])
    except (jwt.PyJWTError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise Unauthorized(_NOT_VALID) from None


class Issuer:
    """`fetch(url)` returns a document; `now` is monotonic, in seconds. `jwks_url` overrides the discovery document."""

    def __init__(self, url: str, fetch: Fetch, now: Callable[[], float], jwks_url: str = "") -> None:
        self.url = url
        self._jwks_url = jwks_url
        self._fetch = fetch
        self._now = now
        self._keys: list[tuple[dict[str, Any], jwt.PyJWK]] = []
        self._fetched_at: float | None = None
        self._tried_at: float | None = None
        self._lock = asyncio.Lock()
        self._discovered: Discovery | None = None
        self._discovered_at = 0.0
        self._failed_at: float | None = None  # the last time that the discovery document could not be read

    async def verify(self, token: str, audiences: Sequence[str]) -> Claims:
        """Return the claims of a token for one of the audiences. Raises Unauthorized, IssuerUnavailable."""
        await _load("jwt")
        import jwt  # noqa: PLC0415

        try:
            header = jwt.get_unverified_header(token)
            algorithm, key_id = header.get("alg"), header.get("kid")
            if algorithm not in _ALGORITHMS or not isinstance(key_id, str | None):
                raise Unauthorized(_NOT_VALID)
            key = await self._key(algorithm, key_id)
            claims: Claims = jwt.decode(
                token,
                key.key,
                algorithms=[algorithm],
                audience=list(audiences),
                issuer=self.url,
                leeway=_LEEWAY_S,
                options={"require": _REQUIRED, "verify_iat": True, "verify_nbf": True},
            )
        except jwt.ExpiredSignatureError:
            raise Unauthorized("The identity provider's token has expired: run `gpufn login`.") from None
        except (jwt.PyJWTError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            log.info("a token of %s was rejected: %s", self.url, type(error).__name__)
            raise Unauthorized(_NOT_VALID) from None
        if not isinstance(claims["sub"], str) or not 0 < len(claims["sub"]) <= 1000:
            raise Unauthorized(_NOT_VALID)
        return claims

    async def _key(self, algorithm: str, key_id: str | None) -> jwt.PyJWK:
        """Return the key of a token. Raises Unauthorized, IssuerUnavailable."""
        if self._age() < _FRESH_S and (key := self._find(algorithm, key_id)) is not None:
            return key
        async with self._lock:
            if self._age() >= _FRESH_S or self._find(algorithm, key_id) is None:
                await self._refresh()
        if self._age() >= _STALE_S:
            raise IssuerUnavailable
        if (key := self._find(algorithm, key_id)) is None:
            raise Unauthorized(_NOT_VALID)
        return key

    def _age(self) -> float:
        return float("inf") if self._fetched_at is None else self._now() - self._fetched_at

    def _find(self, algorithm: str, key_id: str | None) -> jwt.PyJWK | None:
        kind, curve = _ALGORITHMS[algorithm]
        found = [
            key
            for jwk, key in self._keys
            if jwk.get("kty") == kind
            and jwk.get("crv", "") == curve
            and jwk.get("use", "sig") == "sig"
            and jwk.get("alg", algorithm) == algorithm
            and (key_id is None or jwk.get("kid") == key_id)
        ]
        return found[0] if len(found) == 1 or (found and key_id is not None) else None

    async def _refresh(self) -> None:
        """Fetch the keys, unless that was tried just now."""
        now = self._now()
        if self._tried_at is not None and now - self._tried_at < _MIN_FETCH_INTERVAL_S:
            return
        self._tried_at = now
        try:
            document = msgspec.json.decode(await self._fetch(await self._keys_url()), type=_KeySet)
            keys = [(each, key) for each in document.keys[:_MAX_KEYS] if (key := _key_of(each)) is not None]
            if not keys:
                raise _Unusable("its key set has no usable key")
        except _FAILURES as error:
            log.warning("cannot read the keys of the issuer %s: %s", self.url, str(error)[:200] or type(error).__name__)
            return
        self._keys = keys
        self._fetched_at = self._now()

    async def _keys_url(self) -> str:
        if self._jwks_url:
            return self._jwks_url
        document = await self._fetch_discovery()
        if _origin(document.jwks_uri) != _origin(self.url):
            raise _Unusable(
                f"its keys are at another address, {document.jwks_uri[:100]!r}: set GPUFN_OIDC_JWKS_URL to allow it"
            )
        return document.jwks_uri

    async def _fetch_discovery(self) -> Discovery:
        url = f"{self.url.rstrip('/')}/.well-known/openid-configuration"
        document = msgspec.json.decode(await self._fetch(url), type=Discovery)
        if document.issuer != self.url:
            raise _Unusable(f"its discovery document names the issuer {document.issuer[:100]!r}")
        return document

    async def discover(self) -> Discovery:
        """Return the discovery document, at most an hour old. Raises IssuerUnavailable."""
        async with self._lock:
            now = self._now()
            if self._discovered is not None and now - self._discovered_at < _FRESH_S:
                return self._discovered
            if self._failed_at is not None and now - self._failed_at < _MIN_FETCH_INTERVAL_S:
                raise IssuerUnavailable
            try:
                self._discovered, self._discovered_at = await self._fetch_discovery(), now
            except _FAILURES as error:
                self._failed_at = self._now()
                text = str(error)[:200] or type(error).__name__
                log.warning("cannot read the discovery document of the issuer %s: %s", self.url, text)
                raise IssuerUnavailable from None
            return self._discovered


class Fetcher:
    """Requests to issuers, bounded in time and size, without redirects: GET of documents, and POST of forms. `ca_file`
    has further authorities to trust. Raises OSError for an unreadable file."""

    def __init__(self, ca_file: str = "") -> None:
        self._context = ssl.create_default_context()
        if ca_file:
            self._context.load_verify_locations(cafile=ca_file)

    async def __call__(self, url: str) -> bytes:
        """Return a document. Raises OSError, ValueError."""
        return await self._send("GET", url, None)

    async def post(self, url: str, form: Mapping[str, str]) -> bytes:
        """Return the response to a form. Raises OSError, ValueError."""
        return await self._send("POST", url, form)

    async def _send(self, method: str, url: str, form: Mapping[str, str] | None) -> bytes:
        await _load("httpx")
        import httpx  # noqa: PLC0415

        try:
            async with (
                asyncio.timeout(_TIMEOUT_S),
                httpx.AsyncClient(verify=self._context, timeout=_TIMEOUT_S, trust_env=False) as client,
                client.stream(method, url, headers=_HEADERS, data=form) as response,
            ):
                return await self._read(response, url)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise OSError(str(error) or type(error).__name__) from error

    async def _read(self, response: httpx.Response, url: str) -> bytes:
        if response.status_code != 200:
            raise ValueError(f"{url} returned {response.status_code}")
        body = bytearray()
        async for part in response.aiter_raw():
            body += part
            if len(body) > _MAX_DOCUMENT_BYTES:
                raise ValueError(f"{url} returned more than {_MAX_DOCUMENT_BYTES:,} bytes")
        return bytes(body)


_LOADS: Final = {  # each with what it imports on its first use
    "jwt": ("jwt", "cryptography.hazmat.backends.openssl.backend"),
    "httpx": ("httpx", "httpcore", "anyio._backends._asyncio"),
}


async def _load(library: str) -> None:
    """Import a library in a thread."""
    for module in _LOADS[library]:
        await asyncio.to_thread(importlib.import_module, module)


def _key_of(jwk: dict[str, Any]) -> jwt.PyJWK | None:
    """Return a public key of a set, or None for an unsupported key."""
    import jwt  # noqa: PLC0415

    if jwk.get("kty") not in {kind for kind, _ in _ALGORITHMS.values()}:
        return None
    try:
        return jwt.PyJWK(jwk)
    except (jwt.PyJWTError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port
