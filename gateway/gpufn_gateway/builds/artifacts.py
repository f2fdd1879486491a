"""Uploaded artifacts for builds: model files and samples, by digest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

from gpufn_core.errors import InvalidSpec
from gpufn_core.protocol import subjects
from gpufn_core.spec.model_spec import ModelFile, ModelSpec
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import object_store

_AT_ONCE = 64


class Artifacts:
    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def has(self, digest: str) -> bool:
        """Return whether a file is stored. This renews its age, because a build is about to use it."""
        return await object_store.touch(self._bus, subjects.MODEL_FILES, digest)

    async def put(self, digest: str, size: int, parts: AsyncIterator[bytes]) -> None:
        """Store a file. Consumes `parts` even if the file exists. Raises InvalidInput if the digest does not match."""
        if await self.has(digest):
            await object_store.check(digest, size, parts)
        else:
            await object_store.put_stream(self._bus, subjects.MODEL_FILES, digest, size, parts)

    async def check_uploaded(self, models: Iterable[ModelSpec]) -> None:
        """Raises InvalidSpec naming the first missing file."""
        files: dict[str, ModelFile] = {}
        for model in models:
            samples = () if model.samples is None else (model.samples,)
            files |= {file.digest: file for file in (*model.files, *samples)}
        wanted = list(files.values())
        for at in range(0, len(wanted), _AT_ONCE):
            batch = wanted[at : at + _AT_ONCE]
            stored = await asyncio.gather(*(self.has(file.digest) for file in batch))
            for file, is_stored in zip(batch, stored, strict=True):
                if not is_stored:
                    raise InvalidSpec(
                        f"the model's file {file.name} ({file.digest[:12]}) is not uploaded: "
                        f"PUT /v1/artifacts/{file.digest} first"
                    )
