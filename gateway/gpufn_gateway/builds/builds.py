"""Builds: created here, run by builders, and kept in memory by a watch.

begin    1. create the record   2. queue its id for the builders of the DeviceKind
cancel   set `cancel` by compare-and-set, and the builder ends the build; a pending build ends at once
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import msgspec

from gpufn_core.domain.devices.engine import Build, BuildState
from gpufn_core.errors import BuildNotFound, Conflict
from gpufn_core.ids import is_invocation_id, new_ulid
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import encode
from gpufn_core.signing.statement import DeploySignature
from gpufn_core.spec.model_spec import ModelSpec
from gpufn_gateway.buckets import decode_build
from gpufn_gateway.builds.build_rules import build_ahead
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage.key_value import Entry, KeyValue, Watch
from gpufn_platform.process.clock import Clock


class Builds:
    def __init__(self, bus: Bus, builds: KeyValue, clock: Clock) -> None:
        self._bus = bus
        self._builds = builds
        self._clock = clock
        self._changed_at: dict[str, int] = {}  # id -> revision of the record
        self._waiting: set[asyncio.Event] = set()
        self._watch: Watch | None = None
        self.known: dict[str, Build] = {}
        self.on_change: Callable[[Build], None] = lambda build: None

    async def start(self) -> None:
        """Start the watch. Returns when every existing build has been read."""
        self._watch = await self._builds.watch(self.on_build)

    def stop(self) -> None:
        if self._watch is not None:
            self._watch.stop()

    def on_build(self, key: str, entry: Entry | None) -> None:
        if entry is None:
            self.known.pop(key, None)
            self._changed_at.pop(key, None)
        else:
            self._changed_at[key] = entry.revision
            self.known[key] = build = decode_build(entry.value)
            self.on_change(build)
        for event in self._waiting:
            event.set()

    # --- queries -----------------------------------------------------------------------------------------------------

    def get(self, build_id: str) -> Build:
        """Raises BuildNotFound."""
        build = self.known.get(build_id)
        if build is None:
            raise no_such_build(build_id)
        return build

    def newest_first(self) -> list[Build]:
        return sorted(self.known.values(), key=lambda build: build.id, reverse=True)

    def ahead(self, build: Build, is_shown: Callable[[Build], bool]) -> dict[str, Any] | None:
        """Describe the build that a waiting build waits for, and for how long that has been building; only the time
        unless `is_shown`."""
        ahead = build_ahead(build, self.known.values())
        if ahead is None:
            return None
        building_s = max(0.0, self._clock.time() - (ahead.started_at or ahead.created_at))
        model = ahead.model.files[0].name
        named = {"id": ahead.id, "model": model, "function": ahead.function}
        return {**(named if is_shown(ahead) else dict.fromkeys(named, "")), "building_s": round(building_s, 3)}

    def change(self, build_id: str) -> int:
        """Return a number that grows with each change of this build."""
        return self._changed_at.get(build_id, 0)

    async def changed(self, build_id: str, since: int, wait_s: float) -> Build:
        """Return the build once it has changed after `since` or has ended, or after `wait_s`. Raises BuildNotFound."""
        await self.sync(build_id)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        while True:
            build = self.get(build_id)
            remaining_s = deadline - loop.time()
            if build.state.ended or self.change(build_id) > since or remaining_s <= 0:
                return build
            await self.wait_any_change(remaining_s)

    async def sync(self, build_id: str) -> None:
        """Wait for the watch if it does not know this build: another gateway may have just created it."""
        if build_id not in self.known and is_invocation_id(build_id):
            await self._builds.get(build_id)

    async def wait_any_change(self, wait_s: float) -> None:
        """Wait for the next change of any build, or for `wait_s`."""
        event = asyncio.Event()
        self._waiting.add(event)
        try:
            async with asyncio.timeout(wait_s):
                await event.wait()
        except TimeoutError:
            pass
        finally:
            self._waiting.discard(event)

    # --- changes -----------------------------------------------------------------------------------------------------

    async def begin(
        self, model: ModelSpec, device: str, function: str = "", signature: DeploySignature | None = None
    ) -> Build:
        """Queue a build of `model`, whose files are stored, for a DeviceKind. Raises QueueFull."""
        now = self._clock.time()
        build = Build(id=new_ulid(), model=model, device=device, created_at=now, function=function, signature=signature)
        value = encode(build)
        await self._builds.create(build.id, value)
        try:
            await self.queue(build)
        except BaseException:
            await self._builds.delete(build.id)
            raise
        return build

    async def queue(self, build: Build) -> None:
        """Queue a build for the builders of its DeviceKind. A builder that gets it twice finds it started or ended.
        Raises QueueFull."""
        await self._bus.publish_stored(subjects.build_queue(build.device), build.id.encode(), msg_id=build.id)

    async def set_detail(self, build_id: str, detail: str) -> None:
        """Set the detail of a build: why it waits. Does nothing if the build changes at the same time."""
        build, revision = self.get(build_id), self.change(build_id)
        value = encode(msgspec.structs.replace(build, detail=detail))
        with contextlib.suppress(Conflict):
            await self._builds.update(build_id, value, revision)

    async def cancel(self, build_id: str) -> Build:
        """Cancel a build and return it. A build that has ended does not change. Raises BuildNotFound."""
        if not is_invocation_id(build_id):
            raise no_such_build(build_id)

        def change(entry: Entry | None) -> bytes:
            if entry is None:
                raise no_such_build(build_id)
            build = decode_build(entry.value)
            if build.state.ended or build.cancel:
                return entry.value
            cancelled = msgspec.structs.replace(build, cancel=True)
            if build.state is BuildState.PENDING:
                cancelled = msgspec.structs.replace(
                    cancelled, state=BuildState.CANCELLED, ended_at=self._clock.time(), detail="cancelled"
                )
            return encode(cancelled)

        stored = await self._builds.change(build_id, change)
        return decode_build(stored.value)


def no_such_build(build_id: str) -> BuildNotFound:
    return BuildNotFound(f"There is no build {build_id[:100]!r}: see `gpufn builds`.")
