"""Incremental sha256 that hashes each chunk in a thread while the chunk is being transferred.

Without SHA instructions a CPU hashes 200 MB/s, which is slower than all other processing of a chunk.
"""

from __future__ import annotations

import asyncio
import hashlib


class Sha256:
    """Add chunks one after the other, from one task; each `add` waits for the previous one."""

    def __init__(self) -> None:
        self._sha256 = hashlib.sha256()
        self._pending: asyncio.Future[None] | None = None

    async def add(self, chunk: bytes) -> None:
        """Start hashing `chunk`, which must not change; returns before it is hashed."""
        await self._wait_for_pending()
        self._pending = asyncio.get_running_loop().run_in_executor(None, self._sha256.update, chunk)

    async def hexdigest(self) -> str:
        await self._wait_for_pending()
        return self._sha256.hexdigest()

    async def _wait_for_pending(self) -> None:
        if self._pending is not None:
            await self._pending
