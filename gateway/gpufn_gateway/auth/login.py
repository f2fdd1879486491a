"""Exchange of credentials for tokens: the JSON Web Token of an OpenID provider, an API key, or another token."""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from gpufn_core.errors import Forbidden, InvalidInput, Unauthorized
from gpufn_gateway.auth import scopes
from gpufn_gateway.auth.access import Access
from gpufn_gateway.auth.issuer import Fetch, Issuer, issuer_of
from gpufn_gateway.auth.role_file import RoleFile
from gpufn_gateway.auth.roles import Roles, groups_in
from gpufn_gateway.auth.token_store import TokenStore
from gpufn_gateway.auth.tokens import MAX_TTL_S, MIN_TTL_S, Token, User, sign
from gpufn_gateway.settings import GatewaySettings
from gpufn_platform.process.clock import Clock

USER_PREFIX: Final = "user-"
_ID_DIGITS: Final = 20  # 100 bits: some subjects, such as branches in a CI system, are chosen by their users
_MAX_NAME: Final = 100


class Provider(msgspec.Struct, frozen=True):
    """The OpenID provider of `gpufn login`."""

    issuer: str
    client_id: str
    client_secret: str = ""
    scopes: str = ""


class Issued(msgspec.Struct, frozen=True):
    """A new token. `expires_in_s` serves clients whose clock differs."""

    token: str
    id: str
    name: str
    scopes: tuple[str, ...]
    expires_at: float
    expires_in_s: float


class Login:
    """`fetch` returns documents of issuers."""

    def __init__(
        self, settings: GatewaySettings, access: Access, store: TokenStore, clock: Clock, fetch: Fetch
    ) -> None:
        self._settings = settings
        self._access = access
        self._store = store
        self._clock = clock
        self._fetch = fetch
        self._role_file = RoleFile(Path(settings.oidc_roles)) if settings.oidc_roles else None
        self._issuers: dict[str, Issuer] = {}

    @property
    def provider(self) -> Provider | None:
        """Return the provider for `gpufn login`; None if none is set."""
        own = self._settings
        if not own.oidc_issuer:
            return None
        return Provider(own.oidc_issuer, own.oidc_client_id, own.oidc_client_secret, own.oidc_scopes)

    @property
    def issuer_of_provider(self) -> Issuer:
        return self._issuer(self._settings.oidc_issuer)

    async def exchange_jwt(
        self, text: str, wanted: Sequence[str] | None, expires_in_s: float | None, *, nonce: str | None = None
    ) -> Issued:
        """Return a token for a user or a workload. With a `nonce`, the JSON Web Token must be of the provider and have
        it. Raises Unauthorized, Forbidden, InvalidInput, IssuerUnavailable."""
        roles = Roles() if self._role_file is None else self._role_file.roles()
        url = await issuer_of(text)
        audiences = self._audiences(url, roles)
        if not audiences:
            raise Unauthorized("This gateway does not accept tokens of this issuer.")
        claims = await self._issuer(url).verify(text, sorted(audiences))
        if nonce is not None:
            self._check_nonce(claims, nonce)
        own = self._scopes(claims, roles)
        if not own:
            raise Forbidden("Your groups have no role at this gateway: ask its administrator for one.")
        now = self._clock.time()
        user = User(
            id=user_id(url, claims["sub"]),
            issuer=url,
            subject=claims["sub"],
            name=_name_in(claims),
            scopes=tuple(sorted(own)),
            seen_at=now,
        )
        life_s = min(self._life_s(expires_in_s), self._settings.token_ttl_s)  # then the groups are looked up again
        token = self._narrowed(Token(0, user.id, user.scopes, now, now + life_s, limits=roles.limits), wanted)
        generation = await self._store.record(user, float(claims["iat"]))
        return await self._issue(msgspec.structs.replace(token, generation=generation), user.name)

    async def exchange(
        self, headers: Mapping[bytes, bytes], wanted: Sequence[str] | None, expires_in_s: float | None
    ) -> Issued:
        """Return a token for the API key or the token of a request. Raises Unauthorized, Forbidden, InvalidInput."""
        principal = self._access.authenticate(headers)
        if not principal.id:
            raise InvalidInput("this gateway has no API keys, so clients of this machine need no token")
        credential = headers[b"authorization"].partition(b" ")[2].strip()
        token = self._narrowed(self._access.token_for(credential, self._life_s(expires_in_s)), wanted)
        return await self._issue(token, self._access.label_of(principal.id))

    async def _issue(self, token: Token, name: str) -> Issued:
        text = sign(await self._store.signing_key(), token)
        return Issued(
            text, token.principal, name, token.scopes, token.expires_at, token.expires_at - self._clock.time()
        )

    def _life_s(self, wanted_s: float | None) -> float:
        """Return the life of a token. Raises InvalidInput."""
        if wanted_s is None:
            return self._settings.token_ttl_s
        if not MIN_TTL_S <= wanted_s <= MAX_TTL_S:
            raise InvalidInput(
                f"expires_in_s is a number of seconds from {MIN_TTL_S:g} to {MAX_TTL_S:,.0f}", field="expires_in_s"
            )
        return wanted_s

    def _narrowed(self, token: Token, wanted: Sequence[str] | None) -> Token:
        """Return a token with only the wanted scopes. Raises InvalidInput, Forbidden."""
        if wanted is None:
            return token
        if not wanted:
            raise InvalidInput("a token needs at least one scope", field="scopes")
        own = scopes.effective(token.scopes)
        for scope in wanted:
            scopes.check(scope)
            if not scopes.covers(own, scope):
                raise Forbidden(f"You do not have the scope {scope!r}, so no token can have it.")
        return msgspec.structs.replace(token, scopes=tuple(dict.fromkeys(wanted)))

    def _audiences(self, issuer: str, roles: Roles) -> set[str]:
        """Return the audiences for which tokens of an issuer are accepted; empty for an unknown issuer."""
        audiences = {workload.audience for workload in roles.workloads if workload.issuer == issuer}
        return audiences | ({self._audience} if issuer == self._settings.oidc_issuer else set())

    @property
    def _audience(self) -> str:
        return self._settings.oidc_audience or self._settings.oidc_client_id

    def _issuer(self, url: str) -> Issuer:
        issuer = self._issuers.get(url)
        if issuer is None:
            is_provider = url == self._settings.oidc_issuer
            jwks_url = self._settings.oidc_jwks_url if is_provider else ""
            issuer = self._issuers[url] = Issuer(url, self._fetch, self._clock.monotonic, jwks_url)
        return issuer

    def _scopes(self, claims: Mapping[str, Any], roles: Roles) -> set[str]:
        """Return the scopes of verified claims."""
        issuer, audiences = claims["iss"], _texts(claims["aud"])
        own = roles.scopes_of_workload(issuer, audiences, claims["sub"])
        if issuer == self._settings.oidc_issuer and self._audience in audiences:
            self._check_party(claims, audiences)
            own |= roles.scopes_of_groups(groups_in(claims, self._settings.oidc_groups_claim))
        return own

    def _check_nonce(self, claims: Mapping[str, Any], nonce: str) -> None:
        """Raises Unauthorized for a token that is not of this login at the provider."""
        given = claims.get("nonce")
        is_same = isinstance(given, str) and hmac.compare_digest(given.encode(), nonce.encode())
        if claims["iss"] != self._settings.oidc_issuer or not is_same:
            raise Unauthorized("The identity provider's token was issued for another login.")

    def _check_party(self, claims: Mapping[str, Any], audiences: Collection[str]) -> None:
        """Raises Unauthorized for a token that the provider has given to another client."""
        party = claims.get("azp")
        if party != self._settings.oidc_client_id and (party is not None or len(audiences) > 1):
            raise Unauthorized("The identity provider's token was issued to another client.")


def user_id(issuer: str, subject: str) -> str:
    """Return the id of a subject, which is part of subjects on the bus and of usage records.

    >>> user_id("https://login.example.org", "alice")
    'user-5sxpurwbdqm3by2mxsz3'
    """
    digest = hashlib.sha256(msgspec.json.encode((issuer, subject))).digest()
    return USER_PREFIX + base64.b32encode(digest)[:_ID_DIGITS].decode().lower()


def _name_in(claims: Mapping[str, Any]) -> str:
    """Return the name of a user for lists and the audit log. It does not identify the user: users can choose it."""
    names = [claims.get(claim) for claim in ("email", "preferred_username", "name", "sub")]
    name = next(name for name in names if isinstance(name, str) and name)
    return "".join(each if each.isprintable() else "?" for each in name[:_MAX_NAME])


def _texts(value: object) -> list[str]:
    return [value] if isinstance(value, str) else [each for each in value if isinstance(each, str)]  # type: ignore[attr-defined]
