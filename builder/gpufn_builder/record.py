"""The record of a Build that runs here. The builder alone writes it, but for `cancel`, which anybody may set."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

import msgspec

from gpufn.bus.kv import Entry, KeyValue
from gpufn.engine import Build
from gpufn.errors import BuildNotFound, Conflict, GpufnError
from gpufn.protocol.codec import encode
from gpufn_builder.exchange import Told

log = logging.getLogger(__name__)

_TRIES: Final = 50
_WRITE_EVERY_S: Final = 0.25

_build = msgspec.msgpack.Decoder(Build)


class BuildRecord:
    def __init__(self, builds: KeyValue, entry: Entry) -> None:
        self._builds = builds
        self._revision = entry.revision
        self._told = asyncio.Event()
        self._news: Told | None = None
        self.build: Build = _build.decode(entry.value)

    @classmethod
    async def open(cls, builds: KeyValue, build_id: str) -> BuildRecord | None:
        """None when it is gone."""
        entry = await builds.get(build_id)
        return cls(builds, entry) if entry is not None else None

    async def change(self, **fields: Any) -> None:
        """Whatever else was changed stays. Raises BuildNotFound when somebody removed it."""
        for _ in range(_TRIES):
            changed = msgspec.structs.replace(self.build, **fields)
            try:
                self._revision = await self._builds.update(self.build.id, encode(changed), self._revision)
            except Conflict:
                await self._read()
                continue
            self.build = changed
            return
        raise Conflict(f"The build {self.build.id} changes too quickly.")

    def tell(self, told: Told) -> None:
        """How far it is; written soon, by `keep_up`."""
        self._news = told
        self._told.set()

    async def keep_up(self) -> None:
        """Write what is told, a few times a second at most, until cancelled."""
        while True:
            await self._told.wait()
            self._told.clear()
            if (news := self._news) is not None:
                try:
                    await self.change(stage=news.stage, progress=round(news.progress, 3), detail=news.detail)
                except GpufnError as error:
                    log.warning("the progress of build %s was not written: %s", self.build.id, error)
            await asyncio.sleep(_WRITE_EVERY_S)

    async def watch(self, on_cancel: Callable[[], object]) -> Callable[[], None]:
        """Calls `on_cancel` when somebody asks for the build's end, or removes it; returns what stops to look."""

        def look(key: str, entry: Entry | None) -> None:
            if key == self.build.id and (entry is None or _build.decode(entry.value).cancel):
                on_cancel()

        return (await self._builds.watch(look, prefix=self.build.id)).stop

    async def _read(self) -> None:
        entry = await self._builds.get(self.build.id)
        if entry is None:
            raise BuildNotFound(f"The build {self.build.id} is gone.")
        self.build, self._revision = _build.decode(entry.value), entry.revision
