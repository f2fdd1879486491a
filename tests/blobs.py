"""Blobs of the object store that tests look for, or remove."""

from __future__ import annotations

from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import object_store
from gpufn_platform.bus.storage.object_store import Blob


async def exists(bus: Bus, bucket: str, digest: str) -> bool:
    return await _find(bus, bucket, digest) is not None


async def delete(bus: Bus, bucket: str, digest: str) -> None:
    if (blob := await _find(bus, bucket, digest)) is not None:
        await object_store.remove(bus, bucket, blob)


async def _find(bus: Bus, bucket: str, digest: str) -> Blob | None:
    return next((blob for blob in await object_store.blobs(bus, bucket) if blob.digest == digest), None)
