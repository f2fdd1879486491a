"""The secrets that webhooks are signed with: one per API key, and the platform's own."""

from __future__ import annotations

from typing import Final

import msgspec

from gpufn.bus.kv import KeyValue
from gpufn.errors import Conflict
from gpufn.webhooks import new_secret

_TRIES: Final = 20


class _Stored(msgspec.Struct, frozen=True):
    secrets: tuple[str, ...]  # the newest first; after a change the one before it still signs


_stored = msgspec.msgpack.Decoder(_Stored)
_encode = msgspec.msgpack.Encoder().encode


class WebhookSecrets:
    """`owner` is an API key's id, or `Webhook.PLATFORM`."""

    def __init__(self, bucket: KeyValue) -> None:
        self._bucket = bucket

    async def of(self, owner: str) -> tuple[str, ...]:
        """Made when they are first asked for."""
        for _ in range(_TRIES):
            entry = await self._bucket.get(owner)
            if entry is not None:
                return _stored.decode(entry.value).secrets
            made = _Stored((new_secret(),))
            try:
                await self._bucket.create(owner, _encode(made))
            except Conflict:
                continue  # somebody else asked at the same time
            return made.secrets
        raise Conflict(f"The webhook secret of {owner} is being changed by too many at once; try again.")

    async def change(self, owner: str) -> tuple[str, ...]:
        """A new one; until the next change, the one before it signs as well."""
        for _ in range(_TRIES):
            entry = await self._bucket.get(owner)
            before = () if entry is None else _stored.decode(entry.value).secrets[:1]
            made = _Stored((new_secret(), *before))
            try:
                await self._bucket.update(owner, _encode(made), 0 if entry is None else entry.revision)
            except Conflict:
                continue
            return made.secrets
        raise Conflict(f"The webhook secret of {owner} is being changed by too many at once; try again.")
