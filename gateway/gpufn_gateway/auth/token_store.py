"""The signing keys of tokens and the users, on the bus. Every gateway watches both.

A new signing key is made when the newest one is a week old. It signs after `_SPREAD_S`, when each gateway has it; the
one before it still verifies its tokens until all of them have ended.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from typing import Final

import msgspec

from gpufn_core.errors import Conflict, Unauthorized
from gpufn_core.protocol.codec import encode
from gpufn_gateway.auth.access import Principal
from gpufn_gateway.auth.tokens import MAX_TTL_S, SigningKey, Tokens, User
from gpufn_gateway.buckets import Buckets
from gpufn_gateway.problems import RouteError
from gpufn_platform.bus.storage.key_value import Entry, Watch
from gpufn_platform.process.clock import Clock

ROTATION_S: Final = 7 * 86_400.0
_SPREAD_S: Final = 10.0
_SECRET_BYTES: Final = 32

_signing_key = msgspec.msgpack.Decoder(SigningKey)
_user = msgspec.msgpack.Decoder(User)


class TokenStore:
    def __init__(self, buckets: Buckets, tokens: Tokens[Principal], clock: Clock) -> None:
        self._keys = buckets.token_keys
        self._users = buckets.users
        self._tokens = tokens
        self._clock = clock
        self._watches: list[Watch] = []

    async def start(self) -> None:
        """Start the watches. Returns when all records have been read and there is a signing key."""
        self._watches.append(await self._users.watch(self._on_user))
        self._watches.append(await self._keys.watch(self._on_key))
        if not self._tokens.signing_keys:
            await self._add_key(1)

    def stop(self) -> None:
        for watch in self._watches:
            watch.stop()

    async def signing_key(self) -> SigningKey:
        """Return the key that signs new tokens, after a rotation if it is due."""
        now = self._clock.time()
        keys = self._sorted_keys()
        if not keys or now - keys[-1].created_at > ROTATION_S:
            await self._add_key(keys[-1].number + 1 if keys else 1)
            keys = self._sorted_keys()
        for key, successor in itertools.pairwise(keys):
            if now - successor.created_at > MAX_TTL_S + _SPREAD_S:
                await self._keys.delete(str(key.number))
        spread = [key for key in keys if now - key.created_at > _SPREAD_S]
        return spread[-1] if spread else keys[0]

    async def record(self, user: User, issued_at: float) -> int:
        """Store that a user has exchanged a token now, which the provider has issued at `issued_at`. Return the
        generation of the gateway's token. Raises Unauthorized if the user's tokens were ended since."""

        def change(entry: Entry | None) -> bytes:
            before = user if entry is None else _user.decode(entry.value)
            if issued_at < math.floor(before.ended_at):  # the provider counts whole seconds
                raise Unauthorized("Your tokens were ended after this one was issued: run `gpufn login`.")
            return encode(msgspec.structs.replace(user, generation=before.generation, ended_at=before.ended_at))

        return _user.decode((await self._users.change(user.id, change)).value).generation

    async def revoke(self, id_: str) -> None:
        """Reject all tokens of a user that were issued until now. Raises RouteError."""

        def change(entry: Entry | None) -> bytes:
            if entry is None:
                raise _no_such_user(id_)
            user = _user.decode(entry.value)
            return encode(msgspec.structs.replace(user, generation=user.generation + 1, ended_at=self._clock.time()))

        if id_ not in self._tokens.users:
            raise _no_such_user(id_)
        await self._users.change(id_, change)

    async def revoke_all(self) -> None:
        """Reject all tokens that were issued until now. New signing keys end the gateway's tokens, and the time in each
        user's record ends the provider's. Raises RouteError."""
        replaced = self._sorted_keys()
        await self._add_key(replaced[-1].number + 1 if replaced else 1)
        for key in replaced:
            await self._keys.delete(str(key.number))
        for id_ in tuple(self._tokens.users):
            await self.revoke(id_)

    async def _add_key(self, number: int) -> None:
        key = SigningKey(number, os.urandom(_SECRET_BYTES), self._clock.time())
        with contextlib.suppress(Conflict):  # another gateway has just made it
            await self._keys.create(str(number), encode(key))
        if number not in self._tokens.signing_keys:
            await self._keys.get(str(number))  # reported to the watch

    def _sorted_keys(self) -> list[SigningKey]:
        return [key for _, key in sorted(self._tokens.signing_keys.items())]

    def _on_key(self, number: str, entry: Entry | None) -> None:
        self._tokens.put_signing_key(int(number), None if entry is None else _signing_key.decode(entry.value))

    def _on_user(self, id_: str, entry: Entry | None) -> None:
        self._tokens.put_user(id_, None if entry is None else _user.decode(entry.value))


def _no_such_user(id_: str) -> RouteError:
    return RouteError(404, f"There is no user {id_[:80]!r}: see `gpufn users`.")
