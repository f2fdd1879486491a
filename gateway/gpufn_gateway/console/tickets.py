"""Tickets: `gpufn console` gets one from the API and opens the browser with it in the address.

An address stays in the history of the browser. So a ticket is no token: only the sign-in of the console accepts it, and
only for 30 seconds. It becomes the token of a session there.
"""

from __future__ import annotations

from typing import Final

import msgspec

from gpufn_core.errors import InvalidInput, Unauthorized
from gpufn_gateway.auth.access import Access, Principal
from gpufn_gateway.auth.login import Issued
from gpufn_gateway.auth.token_store import TokenStore
from gpufn_gateway.auth.tokens import MAX_TTL_S, Token, sign
from gpufn_gateway.console.sealed import seal, unseal
from gpufn_platform.process.clock import Clock

TICKET_S: Final = 30.0
_CONTEXT: Final = b"gpufn console ticket\0"


class _Payload(msgspec.Struct, frozen=True, array_like=True):
    valid_until: float
    token: Token


_decoder: Final = msgspec.json.Decoder(_Payload)


class Tickets:
    def __init__(self, access: Access, store: TokenStore, clock: Clock) -> None:
        self._access = access
        self._store = store
        self._clock = clock

    async def issue(self, principal: Principal, authorization: bytes) -> str:
        """Return a ticket with the rights of a request that was authenticated; "" if clients need no key."""
        if not principal.id:
            return ""
        key = await self._store.signing_key()
        token = self._access.token_for(authorization.partition(b" ")[2].strip(), MAX_TTL_S)
        payload = _Payload(self._clock.time() + TICKET_S, token)
        return seal(key, _CONTEXT, msgspec.json.encode(payload))

    async def redeem(self, ticket: str) -> Issued:
        """Return the token of a session. Raises Unauthorized."""
        token = self._token_in(ticket)
        try:
            text = sign(await self._store.signing_key(), token)
        except InvalidInput as error:
            raise Unauthorized(error.message) from None
        principal = self._access.tokens.authenticate(text.encode())  # it may have been revoked meanwhile
        name = self._access.label_of(principal.id)
        left_s = token.expires_at - self._clock.time()
        return Issued(text, principal.id, name, token.scopes, token.expires_at, left_s)

    def _token_in(self, ticket: str) -> Token:
        try:
            found = _decoder.decode(unseal(self._access.tokens.signing_keys, _CONTEXT, ticket))
        except (ValueError, msgspec.MsgspecError):
            raise _not_valid() from None
        if self._clock.time() > found.valid_until:
            raise _not_valid()
        return found.token


def _not_valid() -> Unauthorized:
    return Unauthorized("This ticket is not valid, or older than 30 s: run `gpufn console` again.")
