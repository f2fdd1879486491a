"""The builder's objects in NATS: a model's files, engines, reports.

Publishing an engine stores its files first, then creates the manifest, so that a manifest implies that all its files
exist. A concurrent garbage collection may remove files without a manifest, so files that are missing afterwards are
stored again. A lease per engine makes concurrent builds compile it once: the second build waits and finds the engine.

While NATS is unavailable, for example during an election, operations are retried for `retry_for_s`, because hours of
work may be at stake. A full disk looks the same: NATS does not respond.
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

from gpufn_builder.processes.process import disk_error
from gpufn_core.domain.devices.engine import BuildStage, EngineManifest
from gpufn_core.errors import ArtifactUnavailable, BuildFailed, BusUnavailable, Conflict, GpufnError, PlatformError
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import encode
from gpufn_core.spec.model_spec import ModelFile
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.leader_lease import LeaderLease
from gpufn_platform.bus.storage import object_store
from gpufn_platform.bus.storage.key_value import KeyValue
from gpufn_platform.process.clock import Clock

T = TypeVar("T")

log = logging.getLogger(__name__)

_LEASE_TTL_S: Final = 10.0
_RENEW_EVERY_S: Final = 3.0
_POLL_S: Final = 0.5
RETRY_FOR_S: Final = 20.0

_manifest = msgspec.msgpack.Decoder(EngineManifest)


class Store:
    def __init__(
        self, bus: Bus, engines: KeyValue, leases: KeyValue, clock: Clock, *, retry_for_s: float = RETRY_FOR_S
    ) -> None:
        self._bus = bus
        self._engines = engines
        self._leases = leases
        self._clock = clock
        self._retry_for_s = retry_for_s

    async def find(self, key: str) -> EngineManifest | None:
        """Return the engine of this EngineKey if it and all of its files exist. The manifest is rewritten, which keeps
        a concurrent garbage collection from removing it. An engine that lost a file is removed."""
        while (entry := await self._engines.get(key)) is not None:
            manifest = _manifest.decode(entry.value)
            is_complete = await self._touch(manifest)
            with contextlib.suppress(Conflict):
                if is_complete:
                    await self._engines.update(key, entry.value, entry.revision)
                    return manifest
                log.warning("the engine %s has lost a file and is rebuilt", key[:12])
                await self._engines.delete(key, entry.revision)
        return None

    async def _touch(self, manifest: EngineManifest) -> bool:
        """Refresh the age of the engine's files. Return whether all of them exist."""
        for file in manifest.files:
            if not await object_store.touch(self._bus, subjects.ENGINE_FILES, file.digest):
                return False
        return True

    async def fetch(self, files: Sequence[ModelFile], folder: Path) -> None:
        """Write the files of a model into `folder`, which must exist. Raises BuildFailed(stage="ingest") for a missing
        or damaged file. A damaged file is removed, so that the next deploy uploads it again: only builds read these
        files, and a deploy must not wait for gigabytes to be verified."""
        for file in files:
            try:
                path = folder / file.name
                await self._retry(partial(object_store.get_file, self._bus, subjects.MODEL_FILES, file.digest, path))
            except PlatformError as error:
                if isinstance(error, ArtifactUnavailable) and isinstance(error.__cause__, OSError):
                    raise disk_error(error.__cause__, BuildStage.INGEST) from error
                with contextlib.suppress(GpufnError):  # the next build detects it again
                    await object_store.verify(self._bus, subjects.MODEL_FILES, file.digest)
                raise BuildFailed(f"{file.name} cannot be read: {error.message}", stage=BuildStage.INGEST) from error

    async def publish(self, manifest: EngineManifest, folder: Path) -> EngineManifest:
        """Publish the engine in `folder`. Return its manifest, or another builder's if that builder published it first.

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
                if not await self._retry(touch):
                    await self._put(file, folder, stored)
        except (GpufnError, OSError) as error:
            for digest in stored:  # no manifest names them; the gateway's garbage collector removes the rest
                with contextlib.suppress(GpufnError):
                    await object_store.withdraw(self._bus, subjects.ENGINE_FILES, digest)
            raise BuildFailed(f"the engine cannot be stored: {error}", stage=BuildStage.PUBLISH) from error
        return manifest

    async def _create(self, manifest: EngineManifest) -> bool:
        """Create the manifest. Return False if one exists."""
        try:
            await self._retry(partial(self._engines.create, manifest.key, encode(manifest)))
        except Conflict:
            return False
        return True

    async def _put(self, file: ModelFile, folder: Path, stored: list[str]) -> None:
        put = partial(object_store.put_file, self._bus, subjects.ENGINE_FILES, folder / file.name, purges=False)
        digest, is_new = await self._retry(put)
        if is_new:
            stored.append(digest)
        if digest != file.digest:
            raise ArtifactUnavailable(f"{file.name} does not match its digest in the manifest")

    async def put_report(self, data: bytes) -> str:
        """Store a report and return its digest. Raises BuildFailed(stage="publish")."""
        try:
            return await self._retry(partial(object_store.put, self._bus, subjects.ENGINE_FILES, data, purges=False))
        except GpufnError as error:
            raise BuildFailed(f"the report cannot be stored: {error}", stage=BuildStage.PUBLISH) from error

    @contextlib.asynccontextmanager
    async def exclusive(self, key: str, holder: str, on_wait: Callable[[], None]) -> AsyncIterator[None]:
        """Hold the lease of an engine. `on_wait()` is called once if another build holds it.

        A lost lease is acquired again. Two builds that run at the same time anyway publish one engine.
        """
        lease = LeaderLease(self._leases, f"{subjects.BUILD_LEASES}.{key}", holder, ttl_s=_LEASE_TTL_S)
        try:
            if not await lease.try_acquire(self._clock.monotonic()):
                on_wait()
                while not await lease.try_acquire(self._clock.monotonic()):  # noqa: ASYNC110  no event signals its end
                    await asyncio.sleep(_POLL_S)
            renewing = asyncio.create_task(self._renew(lease), name=f"lease of {key[:12]}")
            try:
                yield
            finally:
                renewing.cancel()
        finally:
            with contextlib.suppress(GpufnError):  # the lease expires anyway
                await lease.release()

    async def _retry(self, work: Callable[[], Awaitable[T]]) -> T:
        give_up = self._clock.monotonic() + self._retry_for_s
        while True:
            try:
                return await work()
            except BusUnavailable as error:
                if self._clock.monotonic() >= give_up:
                    raise
                log.warning("a build waits for the message bus: %s", error)
            await asyncio.sleep(_POLL_S)

    async def _renew(self, lease: LeaderLease) -> None:
        while True:
            await asyncio.sleep(_RENEW_EVERY_S)
            try:
                await lease.try_acquire(self._clock.monotonic())
            except GpufnError as error:
                log.warning("the lease of a build was not renewed: %s", error)
