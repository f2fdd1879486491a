"""Authentication and scopes. `Access.authenticate` runs before every route, including the hot path.

If API keys exist, a request needs `Authorization: Bearer gpufn_<id>_<secret>` or a token (`tokens`), and the scopes of
the key or the token apply. Without keys the gateway listens only on loopback, and every local request is allowed. Web
pages are still rejected: the Host header must name loopback (against DNS rebinding), and a page's Origin or
Sec-Fetch-Site is refused (against forged requests). Only web functions have pages of the gateway's own origin, and
those may use web functions, not the API. A page of another origin cannot send a key, because the gateway does not
respond to its browser's CORS preflight.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final

import msgspec

from gpufn_core.domain.team import Teams
from gpufn_core.encoding.urls import is_loopback
from gpufn_core.errors import Conflict, Forbidden, GpufnError, InvalidInput, Unauthorized
from gpufn_core.ids import new_ulid
from gpufn_core.protocol import subjects
from gpufn_core.protocol.records import ApiKey, KeyLimits, ReplacedSecret
from gpufn_gateway.auth import scopes
from gpufn_gateway.auth.open_streams import OpenStreams
from gpufn_gateway.auth.quotas import check as check_limits
from gpufn_gateway.auth.scopes import ADMIN, INVOKE, INVOKE_ALL, READ
from gpufn_gateway.auth.team_account import quota_id
from gpufn_gateway.auth.tokens import PREFIX as TOKEN_PREFIX
from gpufn_gateway.auth.tokens import Token, Tokens
from gpufn_gateway.http import host_field
from gpufn_gateway.openapi.request_bodies import MAX_LABEL_LENGTH

METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE"})

AUTH_PATH: Final = "/v1/auth"
EXCHANGE_PATH: Final = f"{AUTH_PATH}/token"
OPEN_PATHS: Final = frozenset(
    {"/", "/healthz", "/readyz", "/v2/health/live", "/v2/health/ready"}  # for probes
    | {AUTH_PATH, EXCHANGE_PATH}  # for `gpufn login`; the latter verifies the tokens
)
_PREFIX = "gpufn_"
_NO_LIMITS: Final = KeyLimits()
_SECRET_DIGITS: Final = 16  # of an API key's digest, in tokens that were made with it
_FOREIGN: Final = (b"cross-site", b"same-site")  # another port of localhost is "same-site"


class NotProtected(GpufnError):
    """The gateway would listen on the network without API keys."""

    code = "not_protected"


class Principal(msgspec.Struct, frozen=True):
    """The sender of a request: an API key, or a local client if there are no keys."""

    id: str
    scopes: frozenset[str]
    limits: KeyLimits | None = None
    sees_all: bool = False  # whether `may_see` is true for every function

    @property
    def owner(self) -> str:
        """The owner of this principal's calls: the key's id, or the platform."""
        return self.id or subjects.PLATFORM

    def has_scope(self, scope: str) -> bool:
        """True if the principal has `scope` without a pattern. `deploy` includes `read`."""
        return scopes.has_everywhere(self.scopes, scope)

    def may(self, verb: str, function: str) -> bool:
        """Whether the principal has the verb for the function with this full name."""
        return scopes.has_on(self.scopes, verb, function)

    def may_on_all(self, verb: str, pattern: str) -> bool:
        """Whether the principal has the verb for every function that the pattern names."""
        return scopes.covers(self.scopes, f"{verb}:{pattern}")

    def is_within(self, verb: str, owned: Iterable[str]) -> bool:
        """Whether the principal has the verb for every function, or for one of its patterns within `owned`."""
        return self.has_scope(verb) or scopes.is_within(self.scopes, verb, owned)

    def may_invoke(self, function: str) -> bool:
        own = self.scopes
        return ADMIN in own or INVOKE_ALL in own or f"invoke:{function}" in own or scopes.has_on(own, INVOKE, function)

    def may_read(self, function: str) -> bool:
        return scopes.has_on(self.scopes, READ, function)

    def may_see(self, function: str) -> bool:
        """Whether the function exists for this principal."""
        return self.sees_all or scopes.is_visible(self.scopes, function)

    def require(self, scope: str) -> None:
        """Raise Forbidden unless the principal has `scope` without a pattern."""
        if not self.has_scope(scope):
            raise Forbidden(f"This request needs an API key with the scope {scope!r}.")

    def require_somewhere(self, verb: str) -> None:
        """Raise Forbidden unless the principal has the verb for some functions."""
        if not scopes.has_somewhere(self.scopes, verb):
            raise Forbidden(f"This request needs an API key with the scope {verb!r}.")

    def require_on(self, verb: str, function: str) -> None:
        """Raise Forbidden unless the principal has the verb for this function, whose existence it may know."""
        if not self.may(verb, function):
            raise Forbidden(f"This request needs an API key with the scope '{verb}:{function}'.")

    def require_invoke(self, function: str) -> None:
        if not self.may_invoke(function):
            raise Forbidden(f"This request needs an API key with the scope 'invoke:{function}'.")

    def require_invoke_or_read(self, function: str) -> None:
        if not self.may_read(function):
            self.require_invoke(function)

    def require_visible(self, function: str, missing: GpufnError) -> None:
        """Raise `missing` if the function does not exist for this principal, and so nothing of it."""
        if not self.may_see(function):
            raise missing


LOCAL: Final = Principal("", frozenset({ADMIN}), sees_all=True)


def principal_with(id_: str, given: Collection[str], limits: KeyLimits | None) -> Principal:
    """Return the principal that was given these scopes and limits."""
    own = scopes.effective(given)
    return Principal(id_, own, None if limits == _NO_LIMITS else limits, scopes.sees_all(own))


class Access:
    """The API keys, kept in memory by a watch.

    `loopback`: the gateway listens only on loopback. `hosts`: the allowed names of a Host header when keys are
    required, in addition to loopback; empty means any name. Without keys it may name only loopback: a proxy in front
    would let everybody in. `now` returns UNIX seconds.
    """

    def __init__(
        self, *, loopback: bool, now: Callable[[], float], hosts: Collection[str] = (), max_streams: int = 1000
    ) -> None:
        self._now = now
        self._loopback = loopback
        self._hosts = frozenset(hosts)
        self._keys: dict[str, ApiKey] = {}
        self._principals: dict[str, Principal] = {}
        self.teams = Teams()  # whose functions the keys of a team may use
        self.used: set[str] = set()  # keys, and users with tokens, that sent requests since `take_used`
        self._local_hosts: set[bytes] = set()
        self.streams = OpenStreams(max_streams)
        self.tokens = Tokens(now, self._principal_of_token)

    @property
    def keys(self) -> list[ApiKey]:
        return sorted(self._keys.values(), key=lambda key: key.created_at)

    def knows(self, id_: str) -> bool:
        """Return whether there is a key or a user with this id."""
        return id_ in self._keys or id_ in self.tokens.users

    def label_of(self, key_id: str) -> str:
        """Return the label of a key or the name of a user, or "" if there is neither."""
        if (user := self.tokens.users.get(key_id)) is not None:
            return user.name
        key = self._keys.get(key_id)
        return "" if key is None else key.label

    def sender_of(self, principal: Principal) -> str:
        """Return the unit of fair sharing at the gateway: the team of a key, otherwise the key or the user."""
        key = self._keys.get(principal.id)
        return quota_id(key.team) if key is not None and key.team else principal.owner

    def expiry_of(self, key_id: str) -> float | None:
        """Return when a key expires; None if it does not, or if there is no such key."""
        key = self._keys.get(key_id)
        return None if key is None else key.expires_at

    def take_used(self) -> set[str]:
        """Return the keys that were used since the last call."""
        used, self.used = self.used, set()
        return used & self._keys.keys()

    def on_team(self, name: str) -> None:
        """Apply a change of a team to its keys."""
        for key in self._keys.values():
            if key.team == name:
                self.put(key)

    def put(self, key: ApiKey) -> None:
        self._keys[key.id] = key
        given = scopes.of_team(key.scopes, self._owned_by(key.team)) if key.team else key.scopes
        self._principals[key.id] = principal_with(key.id, given, key.limits)
        self.tokens.forget()

    def _owned_by(self, name: str) -> tuple[str, ...]:
        team = self.teams.get(name)
        return () if team is None else team.owns

    def remove(self, key_id: str) -> None:
        self._keys.pop(key_id, None)
        self._principals.pop(key_id, None)
        self.tokens.forget()

    def check_protected(self, host: str) -> None:
        """Raises NotProtected if the gateway would listen on the network without API keys."""
        if not self._loopback and not self._keys:
            raise NotProtected(
                f"cannot listen on {host} without an API key: start on 127.0.0.1, create a key there "
                "(`gpufn keys create --scope admin`), then listen on another address"
            )

    def check_remaining_keys(self, keys: Sequence[ApiKey]) -> None:
        """Raises Conflict if no new key could be created with only these keys, now or when some have expired."""
        if any(ADMIN in key.scopes and key.expires_at is None for key in keys) or (self._loopback and not keys):
            return
        if keys:
            raise Conflict(
                "This is the last API key with the scope admin that does not expire: create another one first, "
                "or remove all other keys before it, to go on without keys."
            )
        raise Conflict(
            "This is the last API key, and this gateway listens on the network, where every request needs a key: "
            "create another one first (`gpufn keys create --scope admin`), or let the gateway listen on 127.0.0.1."
        )

    def authenticate(self, headers: Mapping[bytes, bytes], *, serves_own_pages: bool = False) -> Principal:
        """Return the principal of a request. Raises Unauthorized, or Forbidden for a browser request of a page.

        `serves_own_pages` allows pages of this origin. They come from web functions: they may use web functions, not
        the API.
        """
        if self._keys:
            if self._hosts:
                self._check_host(headers.get(b"host", b""))
            return self._authenticate_key(headers.get(b"authorization"))
        if not self._loopback:
            raise Unauthorized
        host = headers.get(b"host", b"")
        if host not in self._local_hosts:
            self._check_local_host(host)
        if b"origin" in headers or b"sec-fetch-site" in headers:
            _check_origin(headers, host.lower() if serves_own_pages else None)
        return LOCAL

    def check_address(self, headers: Mapping[bytes, bytes]) -> None:
        """Check the Host of a request that needs no key. Raises Forbidden."""
        host = headers.get(b"host", b"")
        if self._keys or not self._loopback:
            if self._hosts:
                self._check_host(host)
        elif host not in self._local_hosts:
            self._check_local_host(host)

    def check_unchanged(self, headers: Mapping[bytes, bytes], principal: Principal) -> None:
        """Raise Unauthorized unless the sender of a request still has the rights that it had."""
        if self.authenticate(headers) != principal:
            raise Unauthorized("The rights of this API key or token have changed: send the request again.")

    def _authenticate_key(self, authorization: bytes | None) -> Principal:
        scheme, _, credential = (authorization or b"").partition(b" ")
        if scheme.lower() != b"bearer":
            raise Unauthorized
        secret = credential.strip()
        if secret.startswith(TOKEN_PREFIX):
            principal = self.tokens.authenticate(secret)
            self.used.add(principal.id)
            return principal
        key_id = _key_id_of(secret)
        key = self._keys.get(key_id)
        digest = hashlib.sha256(secret).hexdigest()
        # An unknown id costs the same comparison, so that timing does not reveal which ids exist.
        is_right = hmac.compare_digest(digest, key.sha256 if key else "0" * 64)
        if key is None or not (is_right or (key.replaced is not None and self._is_replaced(digest, key.replaced))):
            raise Unauthorized("This API key is unknown; it may have been deleted or replaced.")
        if key.expires_at is not None and self._now() >= key.expires_at:
            raise Unauthorized("This API key has expired: ask its administrator for another one.")
        self.used.add(key_id)
        return self._principals[key_id]

    def token_for(self, credential: bytes, ttl_s: float) -> Token:
        """Return a token with the scopes of an API key or a token that `authenticate` accepted. It ends with the
        credential at the latest."""
        now = self._now()
        if credential.startswith(TOKEN_PREFIX):
            given = self.tokens.decode(credential)
            return msgspec.structs.replace(given, issued_at=now, expires_at=min(given.expires_at, now + ttl_s))
        key = self._keys[_key_id_of(credential)]
        expires_at = now + ttl_s if key.expires_at is None else min(key.expires_at, now + ttl_s)
        secret = hashlib.sha256(credential).hexdigest()[:_SECRET_DIGITS]
        own = tuple(sorted(self._principals[key.id].scopes))
        return Token(0, key.id, own, now, expires_at, secret)

    def _principal_of_token(self, token: Token) -> tuple[Principal, float]:
        """Return the principal of a token, and until when its API key is valid. Raises Unauthorized."""
        if not token.secret:
            return principal_with(token.principal, token.scopes, token.limits), token.expires_at
        key = self._keys.get(token.principal)
        if key is None:
            raise Unauthorized("The API key of this token was deleted.")
        expires_at = math.inf if key.expires_at is None else key.expires_at
        if key.sha256[:_SECRET_DIGITS] != token.secret:
            if key.replaced is None or key.replaced.sha256[:_SECRET_DIGITS] != token.secret:
                raise Unauthorized("The API key of this token was replaced.")
            expires_at = min(expires_at, key.replaced.valid_until)
        own = self._principals[key.id].scopes  # a team's key may have lost some
        still = [scope for scope in token.scopes if scopes.covers(own, scope)]
        return principal_with(key.id, still, key.limits), expires_at

    def _is_replaced(self, digest: str, replaced: ReplacedSecret) -> bool:
        """Return whether a digest belongs to a replaced secret that is still valid."""
        return hmac.compare_digest(digest, replaced.sha256) and self._now() < replaced.valid_until

    def _check_host(self, host: bytes) -> None:
        authority = host_field.parse(host)
        if authority is None or not (authority.host in self._hosts or is_loopback(authority.host)):
            raise Forbidden("This gateway does not serve the host of this request; GPUFN_ALLOWED_HOSTS can add it.")

    def _check_local_host(self, host: bytes) -> None:
        authority = host_field.parse(host)
        if authority is None or not is_loopback(authority.host):
            raise Forbidden("Without API keys this gateway serves only the hosts localhost and 127.0.0.1.")
        if len(self._local_hosts) < 64:
            self._local_hosts.add(host)


def is_our_credential(authorization: bytes) -> bool:
    """Return whether an Authorization field holds an API key or a token of this platform."""
    scheme, _, credential = authorization.partition(b" ")
    return scheme.lower() == b"bearer" and credential.strip().startswith((_PREFIX.encode(), TOKEN_PREFIX))


def _key_id_of(secret: bytes) -> str:
    return secret[len(_PREFIX) :].partition(b"_")[0].decode("ascii", "replace")


def _check_origin(headers: Mapping[bytes, bytes], host: bytes | None) -> None:
    """Raises Forbidden for a request that a page has sent. With a `host`, pages of its origin are allowed.

    Not every such request has an Origin. A link from another origin is allowed: it only reads, for the user. A page of
    this origin could read the pages that its links open.
    """
    origin, site = headers.get(b"origin"), headers.get(b"sec-fetch-site")
    is_own = host is not None and origin is not None and origin.lower() in (b"http://" + host, b"https://" + host)
    is_foreign = site in _FOREIGN and headers.get(b"sec-fetch-mode") != b"navigate"
    if (origin is not None and not is_own) or is_foreign or (site == b"same-origin" and host is None):
        raise Forbidden("Requests from web pages are not allowed here.")


def new_key(
    label: str,
    wanted: tuple[str, ...],
    now: float,
    limits: KeyLimits = _NO_LIMITS,
    expires_in_s: float | None = None,
    *,
    team: str = "",
) -> tuple[ApiKey, str]:
    """Create a key. Return the record to store and the secret to show once. Raises InvalidInput."""
    if not wanted:
        raise InvalidInput("a key needs at least one scope", field="scopes")
    for scope in wanted:
        (scopes.check_of_team if team else scopes.check)(scope)
    check_limits(limits)
    if len(label) > MAX_LABEL_LENGTH:
        raise InvalidInput(f"a label may have at most {MAX_LABEL_LENGTH} characters", field="label")
    key_id = new_ulid()[-12:]
    secret, digest = _new_secret(key_id)
    expires_at = None if expires_in_s is None else now + expires_in_s
    return ApiKey(key_id, digest, tuple(dict.fromkeys(wanted)), now, label, limits, expires_at, team=team), secret


def rotated(key: ApiKey, now: float, overlap_s: float) -> tuple[ApiKey, str]:
    """Give a key a new secret. Return the record to store and the secret to show once. The old secret stays valid for
    `overlap_s` seconds; a secret that was replaced earlier does not."""
    secret, digest = _new_secret(key.id)
    replaced = ReplacedSecret(key.sha256, now + overlap_s) if overlap_s else None
    return msgspec.structs.replace(key, sha256=digest, replaced=replaced), secret


def _new_secret(key_id: str) -> tuple[str, str]:
    """Return a secret for a key, and its digest."""
    secret = f"{_PREFIX}{key_id}_{secrets.token_urlsafe(32)}"
    return secret, hashlib.sha256(secret.encode()).hexdigest()
