"""Uploaded artifacts: the files of models, their samples, and weights, by digest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

from gpufn_core.errors import InvalidSpec
from gpufn_core.protocol import subjects
from gpufn_core.spec.model_spec import ModelSpec
from gpufn_core.spec.weights_spec import WeightsSpec
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

    async def check_uploaded(self, models: Iterable[ModelSpec], weights: Iterable[WeightsSpec] = ()) -> None:
        """Raises InvalidSpec naming the first missing file."""
        names: dict[str, str] = {}
        for model in models:
            samples = () if model.samples is None else (model.samples,)
            names |= {file.digest: f"the model's file {file.name}" for file in (*model.files, *samples)}
        for each in weights:
            names |= {file.digest: f"the file {file.path} of {each.source}" for file in each.uploads}
        wanted = list(names)
        for at in range(0, len(wanted), _AT_ONCE):
            batch = wanted[at : at + _AT_ONCE]
            stored = await asyncio.gather(*map(self.has, batch))
            for digest, is_stored in zip(batch, stored, strict=True):
                if not is_stored:
                    raise InvalidSpec(
                        f"{names[digest]} ({digest[:12]}) is not uploaded: PUT /v1/artifacts/{digest} first"
                    )
