"""Who may do what. One function, `Access.authenticate`, stands before every route, the hot path included.

With keys, `Authorization: Bearer gpufn_<id>_<secret>` is needed, and its scopes decide. Without any key the gateway
listens on loopback only and everybody there may do everything; but a web page must not: the Host header must name
loopback (DNS rebinding) and an Origin, when there is one, must be the gateway itself (forged requests).
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from gpufn_core.errors import Conflict, Forbidden, GpufnError, InvalidInput, Unauthorized
from gpufn_core.ids import new_ulid
from gpufn_core.protocol import subjects
from gpufn_core.protocol.records import ApiKey, KeyLimits
from gpufn_core.protocol.subjects import is_function_name
from gpufn_gateway.auth.quotas import check as check_limits
from gpufn_gateway.http import host_field
from gpufn_gateway.openapi.request_bodies import LONGEST_LABEL

METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE"})

ADMIN, DEPLOY, READ, INVOKE_ALL, HI, PICKLE = "admin", "deploy", "read", "invoke:*", "hi", "pickle"
SCOPES: Final = (ADMIN, DEPLOY, READ, INVOKE_ALL, HI, PICKLE)  # and invoke:<function>
OPEN_PATHS: Final = frozenset({"/", "/healthz", "/readyz", "/v2/health/live", "/v2/health/ready"})  # for probes
_PREFIX = "gpufn_"
_NO_LIMITS: Final = KeyLimits()


class NotProtected(GpufnError):
    """The gateway would be open to the network without a key."""

    code = "not_protected"


class Principal(msgspec.Struct, frozen=True):
    """Who sends a request: a key, or somebody on this machine."""

    id: str
    scopes: frozenset[str]
    limits: KeyLimits | None = None

    @property
    def owner(self) -> str:
        """Whom calls belong to: a key's id, or the platform."""
        return self.id or subjects.PLATFORM

    def may(self, scope: str) -> bool:
        """`scope` as in a key; who may deploy may also read."""
        scopes = self.scopes
        return ADMIN in scopes or scope in scopes or (scope == READ and DEPLOY in scopes)

    def may_invoke(self, function: str) -> bool:
        scopes = self.scopes
        return ADMIN in scopes or INVOKE_ALL in scopes or f"invoke:{function}" in scopes

    def need(self, scope: str) -> None:
        if not self.may(scope):
            raise Forbidden(f"This needs a key with the scope {scope!r}.")

    def need_invoke(self, function: str) -> None:
        if not self.may_invoke(function):
            raise Forbidden(f"This needs a key with the scope 'invoke:{function}'.")


LOCAL: Final = Principal("", frozenset({ADMIN}))


class Access:
    """The keys there are, in memory (a watch keeps them), and whether we listen on loopback only."""

    def __init__(self, *, loopback: bool) -> None:
        self._loopback = loopback
        self._keys: dict[str, ApiKey] = {}
        self._principals: dict[str, Principal] = {}
        self._local_hosts: set[bytes] = set()

    @property
    def keys(self) -> list[ApiKey]:
        return sorted(self._keys.values(), key=lambda key: key.created_at)

    def put(self, key: ApiKey) -> None:
        self._keys[key.id] = key
        limits = None if key.limits == _NO_LIMITS else key.limits
        self._principals[key.id] = Principal(key.id, frozenset(key.scopes), limits)

    def remove(self, key_id: str) -> None:
        self._keys.pop(key_id, None)
        self._principals.pop(key_id, None)

    def check_protected(self, host: str) -> None:
        """Raises NotProtected rather than serve a network without a key."""
        if not self._loopback and not self._keys:
            raise NotProtected(
                f"refusing to listen on {host} without an API key: start on 127.0.0.1, create one there "
                "(`gpufn keys create --scope admin`), then listen on another address"
            )

    def check_removal(self, key_id: str) -> None:
        """Raises Conflict when nobody could make a key after it."""
        self.check_left([key for key in self._keys.values() if key.id != key_id])

    def check_left(self, keys: Sequence[ApiKey]) -> None:
        """Raises Conflict when nobody could make a key where there are these."""
        if any(ADMIN in key.scopes for key in keys) or (self._loopback and not keys):
            return
        if keys:
            raise Conflict("This is the last key with the scope admin: make another one first.")
        raise Conflict(
            "This is the last key, and this gateway listens on the network, where nothing is served without a key: "
            "make another one first (`gpufn keys create --scope admin`), or have it listen on 127.0.0.1."
        )

    def authenticate(self, headers: Mapping[bytes, bytes]) -> Principal:
        """Raises Unauthorized, or Forbidden for what a browser sends on somebody else's behalf."""
        if self._keys:
            return self._of_key(headers.get(b"authorization"))
        if not self._loopback:
            raise Unauthorized
        host = headers.get(b"host", b"")
        if host not in self._local_hosts:
            self._check_host(host)
        origin = headers.get(b"origin")
        if origin is not None and origin.lower() not in (b"http://" + host.lower(), b"https://" + host.lower()):
            raise Forbidden("A web page of another origin may not call this gateway.")
        return LOCAL

    def _of_key(self, authorization: bytes | None) -> Principal:
        scheme, _, presented = (authorization or b"").partition(b" ")
        if scheme.lower() != b"bearer":
            raise Unauthorized
        secret = presented.strip()
        key_id = secret[len(_PREFIX) :].partition(b"_")[0].decode("ascii", "replace")
        known = self._keys.get(key_id)
        digest = hashlib.sha256(secret).hexdigest()
        # An unknown id costs the same comparison, so that time does not tell which ids exist.
        if not hmac.compare_digest(digest, known.sha256 if known else "0" * 64) or known is None:
            raise Unauthorized("This API key is not known; it may have been deleted.")
        return self._principals[key_id]

    def _check_host(self, host: bytes) -> None:
        named = host_field.parse(host)
        if named is None or not host_field.is_loopback(named.host):
            raise Forbidden("Without API keys this gateway answers under localhost and 127.0.0.1 only.")
        if len(self._local_hosts) < 64:
            self._local_hosts.add(host)


def new_key(label: str, scopes: tuple[str, ...], now: float, limits: KeyLimits = _NO_LIMITS) -> tuple[ApiKey, str]:
    """A key to store and the secret to show once. Raises InvalidInput."""
    if not scopes:
        raise InvalidInput("a key needs at least one scope", field="scopes")
    for scope in scopes:
        _check_scope(scope)
    check_limits(limits)
    if len(label) > LONGEST_LABEL:
        raise InvalidInput(f"a label has at most {LONGEST_LABEL} characters", field="label")
    key_id = new_ulid()[-12:]
    secret = f"{_PREFIX}{key_id}_{secrets.token_urlsafe(32)}"
    digest = hashlib.sha256(secret.encode()).hexdigest()
    return ApiKey(key_id, digest, tuple(dict.fromkeys(scopes)), now, label, limits), secret


def _check_scope(scope: str) -> None:
    kind, colon, function = scope.partition(":")
    if scope in SCOPES or (kind == "invoke" and colon and is_function_name(function)):
        return
    raise InvalidInput(
        f"{scope!r} is not a scope: write invoke:<function>, invoke:*, hi, pickle, deploy, read or admin",
        field="scopes",
    )
