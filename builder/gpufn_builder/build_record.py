"""The record of a Build that runs here. But for `cancel`, which anybody may set, only the builder that has the build
writes it: each write is a compare-and-set, and looks whose it is.

claim      a delivery came: the build is ours from now on. Who had it and never gave it back is counted as dead
give back  we live, and did not end it: whoever comes next counts nobody
taken      another builder claimed it, as after a while without the bus: it is that one's, and we are not dead
ended      it stays as it is, whoever comes late
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any, Final, Self

import msgspec

from gpufn_builder.processes.process_messages import Told
from gpufn_core.domain.engine import Build, BuildState
from gpufn_core.errors import BuildNotFound, Conflict, GpufnError
from gpufn_core.protocol.codec import encode
from gpufn_platform.bus.storage.key_value import Entry, KeyValue

log = logging.getLogger(__name__)

_TRIES: Final = 50
_WRITE_EVERY_S: Final = 0.25

_build = msgspec.msgpack.Decoder(Build)


class TakenAway(Conflict):
    """Another builder has the build now."""


class HasEnded(Conflict):
    """The build has ended: nothing changes it any more."""


class BuildRecord:
    def __init__(self, builds: KeyValue, entry: Entry, builder: str) -> None:
        self._builds = builds
        self._revision = entry.revision
        self._builder = builder
        self._told = asyncio.Event()
        self._news: Told | None = None
        self.build: Build = _build.decode(entry.value)

    @classmethod
    async def claim(cls, builds: KeyValue, build_id: str, builder: str, now: float) -> Self:
        """The build is `builder`'s from now on. Raises BuildNotFound, HasEnded."""
        record = cls(builds, await _entry(builds, build_id), builder)
        await record._store(lambda build: claimed(build, builder, now))
        return record

    async def change(self, **fields: Any) -> None:
        """Whatever else was changed stays. Raises BuildNotFound when somebody removed it, TakenAway, HasEnded."""
        await self._store(lambda build: msgspec.structs.replace(owned(build, self._builder), **fields))

    async def give_back(self, why: str) -> None:
        """For the next builder, or ourselves. Raises as `change`."""
        try:
            await self.change(state=BuildState.PENDING, builder="", detail=why)
        except TakenAway:
            await self.tell_that_we_live()
            raise

    async def tell_that_we_live(self) -> None:
        """After TakenAway: who took it away counted us as dead. Raises BuildNotFound, HasEnded."""
        await self._store(lambda build: msgspec.structs.replace(_open(build), deaths=max(0, build.deaths - 1)))

    def tell(self, told: Told) -> None:
        """How far it is; written soon, while it is `kept_up`."""
        self._news = told
        self._told.set()

    @contextlib.asynccontextmanager
    async def kept_up(self, on_over: Callable[[], object]) -> AsyncIterator[None]:
        """What is told is written, and `on_over` is called when somebody asks for the build's end, removes it, or has
        it in our place."""

        def look(key: str, entry: Entry | None) -> None:
            if key != self.build.id or (entry is not None and entry.revision < self._revision):
                return  # what was before we claimed it
            if entry is None or is_over(_build.decode(entry.value), self._builder):
                on_over()

        watch = await self._builds.watch(look, prefix=self.build.id)
        writing = asyncio.create_task(self._write(), name=f"progress of {self.build.id}")
        try:
            yield
        finally:
            watch.stop()
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    async def _write(self) -> None:
        """What is told, a few times a second at most."""
        while True:
            await self._told.wait()
            self._told.clear()
            if (news := self._news) is not None:
                try:
                    await self.change(stage=news.stage, progress=round(news.progress, 3), detail=news.detail)
                except (TakenAway, HasEnded, BuildNotFound):
                    return  # the watch tells it
                except GpufnError as error:
                    log.warning("the progress of build %s was not written: %s", self.build.id, error)
            await asyncio.sleep(_WRITE_EVERY_S)

    async def _store(self, change: Callable[[Build], Build]) -> None:
        for _ in range(_TRIES):
            changed = change(self.build)
            try:
                self._revision = await self._builds.update(self.build.id, encode(changed), self._revision)
            except Conflict:
                entry = await _entry(self._builds, self.build.id)
                self.build, self._revision = _build.decode(entry.value), entry.revision
                continue
            self.build = changed
            return
        raise Conflict(f"The build {self.build.id} changes too quickly.")


def claimed(build: Build, builder: str, now: float) -> Build:
    """`build` in the hands of `builder`. Raises HasEnded."""
    was_left = build.state is BuildState.BUILDING and build.builder not in ("", builder)
    return msgspec.structs.replace(
        _open(build),
        state=BuildState.BUILDING,
        builder=builder,
        deaths=build.deaths + was_left,
        detail="",
        started_at=build.started_at or now,
    )


def owned(build: Build, builder: str) -> Build:
    """`build`, which is `builder`'s to change. Raises HasEnded, TakenAway."""
    if _open(build).builder != builder:
        raise TakenAway(f"The build {build.id} was taken away from {builder}: {build.builder or 'nobody'} has it now.")
    return build


def is_over(build: Build, builder: str) -> bool:
    """Whether `builder` has nothing more to do for it."""
    return build.cancel or build.state.ended or build.builder != builder


def _open(build: Build) -> Build:
    if build.state.ended:
        raise HasEnded(f"The build {build.id} has ended before: {build.state}.")
    return build


async def _entry(builds: KeyValue, build_id: str) -> Entry:
    entry = await builds.get(build_id)
    if entry is None:
        raise BuildNotFound(f"The build {build_id} is gone.")
    return entry
