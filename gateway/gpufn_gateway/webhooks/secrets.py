"""Signing secrets of webhooks: one per API key, and the platform's own."""

from __future__ import annotations

import msgspec

from gpufn.webhooks import new_secret
from gpufn_platform.bus.storage.key_value import Entry, KeyValue


class _Stored(msgspec.Struct, frozen=True):
    secrets: tuple[str, ...]  # newest first; after a rotation the previous one still signs


_stored = msgspec.msgpack.Decoder(_Stored)
_encode = msgspec.msgpack.Encoder().encode


class WebhookSecrets:
    """`owner` is an API key's id, or `Webhook.PLATFORM`."""

    def __init__(self, bucket: KeyValue) -> None:
        self._bucket = bucket

    async def of(self, owner: str) -> tuple[str, ...]:
        """Return the secrets of an owner, creating one on first use."""
        stored = await self._bucket.change(
            owner, lambda entry: entry.value if entry is not None else _encode(_Stored((new_secret(),)))
        )
        return _secrets(stored)

    async def change(self, owner: str) -> tuple[str, ...]:
        """Rotate the secret. The previous one still signs until the next rotation."""
        stored = await self._bucket.change(owner, lambda entry: _encode(_Stored((new_secret(), *_secrets(entry)[:1]))))
        return _secrets(stored)


def _secrets(entry: Entry | None) -> tuple[str, ...]:
    return () if entry is None else _stored.decode(entry.value).secrets
