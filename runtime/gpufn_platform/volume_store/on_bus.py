"""Files of volumes in the bus's object store."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator

from gpufn_core.protocol import subjects
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import object_store
from gpufn_platform.volume_store.store import StoredFile

_BUCKET = subjects.VOLUME_FILES


class BusStore:
    """A `VolumeStore`."""

    def __init__(self, bus: Bus, *, purges: bool) -> None:
        self._bus = bus
        self._purges = purges

    async def touch(self, digest: str) -> int | None:
        if not await object_store.touch(self._bus, _BUCKET, digest):
            return None
        return await object_store.size_of(self._bus, _BUCKET, digest)

    async def put(self, data: bytes) -> str:
        return await object_store.put(self._bus, _BUCKET, data, purges=self._purges)

    async def put_stream(self, digest: str, size: int, parts: AsyncIterator[bytes]) -> None:
        await object_store.put_stream(self._bus, _BUCKET, digest, size, parts, purges=self._purges)

    async def get(self, digest: str) -> bytes:
        return await object_store.get(self._bus, _BUCKET, digest)

    def read(self, digest: str) -> AsyncGenerator[bytes, None]:
        return object_store.read(self._bus, _BUCKET, digest)

    async def files(self) -> list[StoredFile]:
        found = await object_store.blobs(self._bus, _BUCKET)
        return [StoredFile(blob.digest, blob.size, blob.put_at, blob) for blob in found]

    async def remove(self, file: StoredFile) -> bool:
        return await object_store.remove(self._bus, _BUCKET, file.version)

    async def aclose(self) -> None:
        """Do nothing: the bus belongs to the process."""

    async def remove_unfinished(self, before: float) -> None:
        await object_store.remove_unfinished(self._bus, _BUCKET, before)
