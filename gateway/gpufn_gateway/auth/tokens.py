"""Tokens: short-lived credentials that each gateway verifies on its own.

A token is `gpufnt_<payload>.<MAC>`, in base64url. The payload names the principal, its scopes and the end of the token.
The MAC is HMAC-SHA256 under a signing key that all gateways have. A verified token is cached, so that a further request
with it costs one lookup.

A token ends early if its signing key is removed, if its user is signed out, or if the API key behind it is deleted or
gets another secret.
"""

from __future__ import annotations

import base64
import hmac
from collections.abc import Callable
from typing import Final, Generic, TypeVar

import msgspec

from gpufn_core.errors import InvalidInput, Unauthorized
from gpufn_core.protocol.records import KeyLimits

P = TypeVar("P")

PREFIX: Final = b"gpufnt_"
MAX_TTL_S: Final = 43_200.0  # the longest life of a token, and how long a replaced signing key verifies tokens
MIN_TTL_S: Final = 1.0
MAX_BYTES: Final = 4096
_MAX_CACHED: Final = 2048


class SigningKey(msgspec.Struct, frozen=True):
    """A key that signs tokens; `number` counts up with each rotation."""

    number: int
    secret: bytes
    created_at: float  # unix seconds


class User(msgspec.Struct, frozen=True, kw_only=True):
    """A subject of an OpenID provider that has exchanged a token here, last at `seen_at` in unix seconds.

    Tokens of an earlier `generation` are rejected. It counts how often the user's tokens were ended. It is no time:
    the clocks of gateways differ. `ended_at` is when they were ended last: tokens that the provider issued before are
    exchanged for no new ones, because they have the groups of then.
    """

    id: str
    issuer: str
    subject: str
    name: str
    scopes: tuple[str, ...] = ()
    seen_at: float
    generation: int = 0
    ended_at: float = 0.0


class Token(msgspec.Struct, frozen=True, array_like=True):
    """The payload of a token. `secret` is the start of the digest of the API key that it was made with, empty for the
    token of a user. `generation` is the user's generation."""

    signing_key: int
    principal: str
    scopes: tuple[str, ...]
    issued_at: float
    expires_at: float
    secret: str = ""
    limits: KeyLimits | None = None
    generation: int = 0


_encode: Final = msgspec.json.Encoder().encode
_decoder: Final = msgspec.json.Decoder(Token)


class _Verified(msgspec.Struct, Generic[P], frozen=True):
    principal: P
    expires_at: float


class Tokens(Generic[P]):
    """The signing keys and the users, kept in memory by watches, and the verified tokens.

    `principal_of(token)` returns the principal of a token and the end of its validity, in unix seconds; it raises
    Unauthorized if the principal no longer exists. `now` returns unix seconds.
    """

    def __init__(self, now: Callable[[], float], principal_of: Callable[[Token], tuple[P, float]]) -> None:
        self._now = now
        self._principal_of = principal_of
        self.signing_keys: dict[int, SigningKey] = {}
        self.users: dict[str, User] = {}
        self._verified: dict[bytes, _Verified[P]] = {}

    def put_signing_key(self, number: int, key: SigningKey | None) -> None:
        if key is None:
            self.signing_keys.pop(number, None)
        else:
            self.signing_keys[number] = key
        self.forget()

    def put_user(self, id_: str, user: User | None) -> None:
        before = self.users.pop(id_, None)
        if user is not None:
            self.users[id_] = user
        if (before.generation if before else 0) != (user.generation if user else 0):
            self.forget()

    def forget(self) -> None:
        """Verify each token again with its next request."""
        self._verified.clear()

    def authenticate(self, credential: bytes) -> P:
        """Return the principal of a token. Raises Unauthorized."""
        verified = self._verified.get(credential)
        if verified is None:
            verified = self._verify(credential)
        if self._now() >= verified.expires_at:
            self._verified.pop(credential, None)
            raise Unauthorized("This token has expired: run `gpufn login`, or request another one.")
        return verified.principal

    def _verify(self, credential: bytes) -> _Verified[P]:
        token = self.decode(credential)
        principal, expires_at = self._principal_of(token)
        verified = _Verified(principal, min(expires_at, token.expires_at))
        if len(self._verified) >= _MAX_CACHED:
            self._verified.pop(next(iter(self._verified)))
        self._verified[credential] = verified
        return verified

    def decode(self, credential: bytes) -> Token:
        """Return the payload of a token that a gateway has signed and that was not revoked. It may have expired. Raises
        Unauthorized."""
        signed, _, mac = credential.rpartition(b".")
        try:
            if len(credential) > MAX_BYTES:
                raise ValueError("too long")
            token = _decoder.decode(_from_base64(signed[len(PREFIX) :]))
            key = self.signing_keys[token.signing_key]
            if not hmac.compare_digest(_mac(key.secret, signed), _from_base64(mac)):
                raise ValueError("wrong MAC")
        except (ValueError, KeyError, msgspec.MsgspecError):
            raise Unauthorized("This token is not valid: run `gpufn login`, or request another one.") from None
        user = self.users.get(token.principal)
        if user is not None and token.generation < user.generation:
            raise Unauthorized("This token was revoked: run `gpufn login`.")
        return token


def sign(key: SigningKey, token: Token) -> str:
    """Return the text of a token. Raises InvalidInput if its scopes are too long."""
    signed = PREFIX + _to_base64(_encode(msgspec.structs.replace(token, signing_key=key.number)))
    text = signed + b"." + _to_base64(_mac(key.secret, signed))
    if len(text) > MAX_BYTES:
        raise InvalidInput(
            f"these scopes do not fit a token of {MAX_BYTES:,} bytes: request fewer scopes", field="scopes"
        )
    return text.decode()


def _mac(secret: bytes, signed: bytes) -> bytes:
    return hmac.digest(secret, signed, "sha256")


def _to_base64(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")


def _from_base64(text: bytes) -> bytes:
    """Decode base64url without padding. Raises ValueError for text that `_to_base64` does not return."""
    data = base64.b64decode(text + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
    if _to_base64(data) != text:
        raise ValueError("not canonical")
    return data
