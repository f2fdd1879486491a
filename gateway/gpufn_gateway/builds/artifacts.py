"""What was uploaded for builds: models' files and samples, by digest."""

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
        """A file that is asked for is about to be built of: it is kept as if it came now."""
        return await object_store.touch(self._bus, subjects.MODEL_FILES, digest)

    async def put(self, digest: str, size: int, parts: AsyncIterator[bytes]) -> None:
        """Reads `parts` also when the file is there. Raises InvalidInput when they are not the bytes of this digest."""
        if await self.has(digest):
            await object_store.check(digest, size, parts)
        else:
            await object_store.put_stream(self._bus, subjects.MODEL_FILES, digest, size, parts)

    async def check_uploaded(self, models: Iterable[ModelSpec]) -> None:
        """Raises InvalidSpec that names what is missing."""
        files: dict[str, ModelFile] = {}
        for model in models:
            samples = () if model.samples is None else (model.samples,)
            files |= {file.digest: file for file in (*model.files, *samples)}
        wanted = list(files.values())
        for at in range(0, len(wanted), _AT_ONCE):
            batch = wanted[at : at + _AT_ONCE]
            found = await asyncio.gather(*(self.has(file.digest) for file in batch))
            for file, is_there in zip(batch, found, strict=True):
                if not is_there:
                    raise InvalidSpec(
                        f"the model's file {file.name} ({file.digest[:12]}) is not here: "
                        f"PUT /v1/artifacts/{file.digest} first"
                    )
