"""The record of a build that runs here. Except for `cancel`, which anyone may set, only the builder that owns the build
writes the record. Each write is a compare-and-set that checks the owner.

claim     A delivery came, so the build is ours. A previous owner that did not release the build is counted as dead.
release   This builder lives but did not finish the build; the next owner counts no death.
taken     Another builder claimed the build, for example after NATS was unavailable. This builder is not dead.
ended     The record no longer changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any, Final, Self

import msgspec

from gpufn_builder.processes.process_messages import ProgressUpdate
from gpufn_core.domain.devices.engine import Build, BuildState
from gpufn_core.errors import BuildNotFound, Conflict, GpufnError
from gpufn_core.protocol.codec import encode
from gpufn_platform.bus.storage.key_value import Entry, KeyValue

log = logging.getLogger(__name__)

_TRIES: Final = 50
_WRITE_EVERY_S: Final = 0.25

_build = msgspec.msgpack.Decoder(Build)


class TakenOver(Conflict):
    """Another builder owns the build now."""


class AlreadyEnded(Conflict):
    """The build has ended and no longer changes."""


async def read(builds: KeyValue, build_id: str) -> Build:
    """Raises BuildNotFound."""
    return _build.decode((await _entry(builds, build_id)).value)


class BuildRecord:
    def __init__(self, builds: KeyValue, entry: Entry, builder: str) -> None:
        self._builds = builds
        self._revision = entry.revision
        self._builder = builder
        self._has_progress = asyncio.Event()
        self._progress: ProgressUpdate | None = None
        self.build: Build = _build.decode(entry.value)

    @classmethod
    async def claim(cls, builds: KeyValue, build_id: str, builder: str, now: float) -> Self:
        """Make `builder` the owner of the build. Raises BuildNotFound, AlreadyEnded."""
        record = cls(builds, await _entry(builds, build_id), builder)
        await record._store(lambda build: claimed(build, builder, now))
        return record

    async def change(self, **fields: Any) -> None:
        """Change fields, keep all others. Raises BuildNotFound if the record was removed, TakenOver or
        AlreadyEnded."""
        await self._store(lambda build: msgspec.structs.replace(owned(build, self._builder), **fields))

    async def release(self, reason: str) -> None:
        """Release the build for the next builder, or for this one. Raises the errors of `change`."""
        try:
            await self.change(state=BuildState.PENDING, builder="", detail=reason)
        except TakenOver:
            await self.decrement_deaths()
            raise

    async def decrement_deaths(self) -> None:
        """Undo the death that another builder counted, after TakenOver. Raises BuildNotFound, AlreadyEnded."""
        await self._store(lambda build: msgspec.structs.replace(_open(build), deaths=max(0, build.deaths - 1)))

    def set_progress(self, progress: ProgressUpdate) -> None:
        """Set the progress, which is written soon while `sync` runs."""
        if progress != self._progress:
            self._progress = progress
            self._has_progress.set()

    @contextlib.asynccontextmanager
    async def sync(self, on_stop: Callable[[], object]) -> AsyncIterator[None]:
        """Write progress in the background. Call `on_stop` when someone cancels or removes the build, or when another
        builder claims it."""

        def on_change(key: str, entry: Entry | None) -> None:
            if key != self.build.id or (entry is not None and entry.revision < self._revision):
                return  # a change from before our claim
            if entry is None or must_stop(_build.decode(entry.value), self._builder):
                on_stop()

        watch = await self._builds.watch(on_change, prefix=self.build.id)
        writing = asyncio.create_task(self._write(), name=f"progress of {self.build.id}")
        try:
            yield
        finally:
            watch.stop()
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    async def _write(self) -> None:
        """Write progress, a few times a second at most."""
        while True:
            await self._has_progress.wait()
            self._has_progress.clear()
            if (progress := self._progress) is not None:
                try:
                    await self.change(
                        stage=progress.stage, progress=round(progress.progress, 3), detail=progress.detail
                    )
                except (TakenOver, AlreadyEnded, BuildNotFound):
                    return  # the watch reports this
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
    """Return `build` with `builder` as its owner. Raises AlreadyEnded."""
    was_abandoned = build.state is BuildState.BUILDING and build.builder not in ("", builder)
    return msgspec.structs.replace(
        _open(build),
        state=BuildState.BUILDING,
        builder=builder,
        deaths=build.deaths + was_abandoned,
        detail="",
        started_at=build.started_at or now,
    )


def owned(build: Build, builder: str) -> Build:
    """Return `build` if `builder` owns it. Raises AlreadyEnded, TakenOver."""
    if _open(build).builder != builder:
        raise TakenOver(f"{builder} no longer owns the build {build.id}: its owner is {build.builder or 'no builder'}.")
    return build


def must_stop(build: Build, builder: str) -> bool:
    """Return whether `builder` must stop working on `build`."""
    return build.cancel or build.state.ended or build.builder != builder


def _open(build: Build) -> Build:
    if build.state.ended:
        raise AlreadyEnded(f"The build {build.id} has already ended: {build.state}.")
    return build


async def _entry(builds: KeyValue, build_id: str) -> Entry:
    entry = await builds.get(build_id)
    if entry is None:
        raise BuildNotFound(f"The build {build_id} no longer exists.")
    return entry
