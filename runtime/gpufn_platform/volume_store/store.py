"""The interface of a store of files, which are named by their sha256."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, NamedTuple, Protocol


class StoredFile(NamedTuple):
    """A file as `files` lists it. `put_at`: last put or touch, in unix seconds by the store's clock. `version` lets the
    store recognise a file that was touched since."""

    digest: str
    size: int
    put_at: float
    version: Any


class VolumeStore(Protocol):
    """All methods raise BusUnavailable or ArtifactUnavailable if the store does not respond."""

    async def touch(self, digest: str) -> int | None:
        """Renew the age of a file, and return its size; None if it is absent."""
        ...

    async def put(self, data: bytes) -> str:
        """Store a small file, and return its digest."""
        ...

    async def put_stream(self, digest: str, size: int, parts: AsyncIterator[bytes]) -> None:
        """Store the concatenation of `parts`. Raises InvalidInput unless that is `size` bytes with this digest."""
        ...

    async def get(self, digest: str) -> bytes:
        """Return a small file. Raises ArtifactUnavailable."""
        ...

    def read(self, digest: str) -> AsyncGenerator[bytes, None]:
        """Iterate over the bytes of a file. Raises ArtifactUnavailable, before the first part or instead of the end."""
        ...

    async def files(self) -> list[StoredFile]:
        """List all files."""
        ...

    async def remove(self, file: StoredFile) -> bool:
        """Remove a file unless it was touched since it was listed. Return whether it is removed."""
        ...

    async def aclose(self) -> None:
        """Close the connections of the store."""
        ...

    async def remove_unfinished(self, before: float) -> None:
        """Remove leftovers of uploads that ended before `before` (unix seconds) without storing a file."""
        ...
