"""What the builder reads from the bus and puts there: a model's files, engines, reports.

An engine is published files first, then the manifest, create-only: a manifest means that all that it names is there.
Who removes what no manifest names may have come by in between, so at last what is not there any more is put again. Two
builds of one engine at a time compile it once: the second waits for the first one's lease, and finds its engine.

While the bus is away, as in an election, a build waits for a while: hours of work may be in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from gpufn_builder.processes.process import disk_failed
from gpufn_core.domain.engine import BuildStage, EngineManifest
from gpufn_core.errors import ArtifactUnavailable, BuildFailed, BusUnavailable, Conflict, GpufnError, PlatformError
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import encode
from gpufn_core.spec.model_spec import ModelFile
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.leader_lease import Lease
from gpufn_platform.bus.storage import object_store
from gpufn_platform.bus.storage.key_value import KeyValue
from gpufn_platform.process.clock import Clock

T = TypeVar("T")

log = logging.getLogger(__name__)

_LEASE_TTL_S: Final = 10.0
_RENEW_EVERY_S: Final = 3.0
_LOOK_EVERY_S: Final = 0.5
_PATIENCE_S: Final = 20.0

_manifest = msgspec.msgpack.Decoder(EngineManifest)


class Store:
    def __init__(self, bus: Bus, engines: KeyValue, leases: KeyValue, clock: Clock) -> None:
        self._bus = bus
        self._engines = engines
        self._leases = leases
        self._clock = clock

    async def find(self, key: str) -> EngineManifest | None:
        """The engine of this EngineKey, if it was built and all of it is there. It is written anew, so that whoever was
        about to remove it does not; one that has lost a file is removed."""
        while (entry := await self._engines.get(key)) is not None:
            manifest = _manifest.decode(entry.value)
            is_whole = await self._touch(manifest)
            with contextlib.suppress(Conflict):
                if is_whole:
                    await self._engines.update(key, entry.value, entry.revision)
                    return manifest
                log.warning("the engine %s has lost a file: it is built again", key[:12])
                await self._engines.delete(key, entry.revision)
        return None

    async def _touch(self, manifest: EngineManifest) -> bool:
        """Whether its files are there."""
        for file in manifest.files:
            if not await object_store.touch(self._bus, subjects.ENGINE_FILES, file.digest):
                return False
        return True

    async def fetch(self, files: Sequence[ModelFile], folder: Path) -> None:
        """The files of a model, under their names, into `folder`, which is there. Raises BuildFailed(stage="ingest")
        for one that is gone or damaged: it is absent then, so that the next deploy puts it again. Nobody else reads
        them, and who deploys is not to wait until gigabytes are read."""
        for file in files:
            try:
                path = folder / file.name
                await self._patiently(
                    partial(object_store.get_file, self._bus, subjects.MODEL_FILES, file.digest, path)
                )
            except PlatformError as error:
                if isinstance(error, ArtifactUnavailable) and isinstance(error.__cause__, OSError):
                    raise disk_failed(error.__cause__, BuildStage.INGEST) from error
                with contextlib.suppress(GpufnError):  # the next build finds it as well
                    await object_store.verify(self._bus, subjects.MODEL_FILES, file.digest)
                raise BuildFailed(f"{file.name} cannot be read: {error.message}", stage=BuildStage.INGEST) from error

    async def publish(self, manifest: EngineManifest, folder: Path) -> EngineManifest:
        """Return the published engine: that of another builder if it was quicker.

        Raises BuildFailed(stage="publish") and removes the files that this call stored.
        """
        stored: list[str] = []
        try:
            for file in manifest.files:
                await self._put(file, folder, stored)
            while not await self._create(manifest):
                if (theirs := await self.find(manifest.key)) is not None:
                    return theirs
            for file in manifest.files:
                touch = partial(object_store.touch, self._bus, subjects.ENGINE_FILES, file.digest)
                if not await self._patiently(touch):
                    await self._put(file, folder, stored)
        except (GpufnError, OSError) as error:
            await self._remove(stored)
            raise BuildFailed(f"the engine cannot be stored: {error}", stage=BuildStage.PUBLISH) from error
        return manifest

    async def _create(self, manifest: EngineManifest) -> bool:
        """Whether there was none of its key."""
        try:
            await self._patiently(partial(self._engines.create, manifest.key, encode(manifest)))
        except Conflict:
            return False
        return True

    async def _put(self, file: ModelFile, folder: Path, stored: list[str]) -> None:
        put = partial(object_store.put_file, self._bus, subjects.ENGINE_FILES, folder / file.name, purges=False)
        digest, is_new = await self._patiently(put)
        if is_new:
            stored.append(digest)
        if digest != file.digest:
            raise ArtifactUnavailable(f"{file.name} is not what the manifest names")

    async def _remove(self, digests: Sequence[str]) -> None:
        """Remove files that no manifest names. The gateway's garbage collector removes the rest."""
        for digest in digests:
            with contextlib.suppress(GpufnError):
                await object_store.withdraw(self._bus, subjects.ENGINE_FILES, digest)

    async def put_report(self, data: bytes) -> str:
        """In either form; its digest. Raises BuildFailed(stage="publish")."""
        try:
            return await self._patiently(
                partial(object_store.put, self._bus, subjects.ENGINE_FILES, data, purges=False)
            )
        except GpufnError as error:
            raise BuildFailed(f"the report cannot be stored: {error}", stage=BuildStage.PUBLISH) from error

    @contextlib.asynccontextmanager
    async def alone(self, key: str, holder: str, waits: Callable[[], None]) -> AsyncIterator[None]:
        """While nobody else builds this engine; `waits()` is called once when somebody does.

        A lease that is lost on the way is taken again; two that build at once publish one engine all the same.
        """
        lease = Lease(self._leases, f"{subjects.BUILD_LEASES}.{key}", holder, ttl_s=_LEASE_TTL_S)
        try:
            if not await lease.try_acquire(self._clock.monotonic()):
                waits()
                while not await lease.try_acquire(self._clock.monotonic()):  # noqa: ASYNC110  its end is told to nobody
                    await asyncio.sleep(_LOOK_EVERY_S)
            renewing = asyncio.create_task(self._renew(lease), name=f"lease of {key[:12]}")
            try:
                yield
            finally:
                renewing.cancel()
        finally:
            with contextlib.suppress(GpufnError):  # it expires
                await lease.release()

    async def _patiently(self, work: Callable[[], Awaitable[T]]) -> T:
        give_up = self._clock.monotonic() + _PATIENCE_S
        while True:
            try:
                return await work()
            except BusUnavailable as error:
                if self._clock.monotonic() >= give_up:
                    raise
                log.warning("a build waits for the bus: %s", error)
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _renew(self, lease: Lease) -> None:
        while True:
            await asyncio.sleep(_RENEW_EVERY_S)
            try:
                await lease.try_acquire(self._clock.monotonic())
            except GpufnError as error:
                log.warning("the lease of a build was not renewed: %s", error)
