"""The secrets that webhooks are signed with: one per API key, and the platform's own."""

from __future__ import annotations

import msgspec

from gpufn.webhooks import new_secret
from gpufn_platform.bus.storage.key_value import Entry, KeyValue


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
        stored = await self._bucket.change(
            owner, lambda entry: entry.value if entry is not None else _encode(_Stored((new_secret(),)))
        )
        return _secrets(stored)

    async def change(self, owner: str) -> tuple[str, ...]:
        """A new one; until the next change, the one before it signs as well."""
        stored = await self._bucket.change(owner, lambda entry: _encode(_Stored((new_secret(), *_secrets(entry)[:1]))))
        return _secrets(stored)


def _secrets(entry: Entry | None) -> tuple[str, ...]:
    return () if entry is None else _stored.decode(entry.value).secrets
