"""One container that has no worker yet: made, kept still if it is to wait, and given to a worker or removed.

start     a folder and a user of its own, the container, its process, which imports what its worker will need
freeze    nothing of it runs, until it becomes a worker's
become    the worker's files go into its folder, the folder takes the place of the worker's, and the process is told
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from gpufn_core.errors import GpufnError, PlatformError
from gpufn_core.home import Home
from gpufn_core.protocol.launch import CONTROL_NAME, ForkRequest, TemplateReady
from gpufn_core.remove_folder import remove_tree
from gpufn_runtime.agent.decide.template_choice import READY_TIMEOUT_S, ModuleSet
from gpufn_runtime.agent.launchers.base import LaunchOrder
from gpufn_runtime.agent.launchers.containers import container_folder
from gpufn_runtime.agent.launchers.containers.freezer import Freezer
from gpufn_runtime.agent.launchers.containers.sandbox import WORKER, Limits, Sandbox, inside, sandbox
from gpufn_runtime.agent.launchers.fork_channel import Control
from gpufn_runtime.agent.workers import processes

_CREATED_WITHIN_S = 5.0
_UIDS = range(1_900_000_000, 2_000_000_000)  # that no system gives out; so many that two are never the same


class ContainerDaemon(Protocol):
    """What a container asks of `docker.Docker`."""

    async def create(self, name: str, image: str, sandbox: Sandbox, labels: Mapping[str, str]) -> str: ...
    async def start(self, container: str) -> int: ...
    async def pause(self, container: str) -> None: ...
    async def unpause(self, container: str) -> None: ...
    async def output_of(self, container: str) -> str: ...
    async def remove(self, container: str) -> None: ...


@dataclass(frozen=True)
class Kind:
    """What a container is made with and cannot change."""

    image: str
    limits: Limits


def folders(home: Home) -> Path:
    """Where those are that have no worker yet."""
    return home.run / "c"


class Container:
    def __init__(self, daemon: ContainerDaemon, home: Home, kind: Kind, modules: ModuleSet) -> None:
        self.kind = kind
        self.modules = modules
        self.name = f"c-{secrets.token_hex(6)}"
        self.id = ""
        self.pid = 0
        self._daemon = daemon
        self._uid = _uid_for(kind.limits)
        self._folder = folders(home) / self.name
        self._parcels = home.parcels / self.name
        self._control = Control(self._folder / CONTROL_NAME)
        self._freezer: Freezer | None = None
        self._is_paused = False

    @property
    def is_open(self) -> bool:
        """Whether its process is there, as far as it has said."""
        return self._control.is_open

    @property
    def resident_bytes(self) -> int:
        return sum(map(processes.resident_bytes, [self.pid, *processes.children(self.pid)])) if self.pid else 0

    def when_gone(self, call: Callable[[], None]) -> None:
        self._control.on_gone = call

    async def start(self, owner: Mapping[str, str], packages: Sequence[str]) -> None:
        """Until its process waits for a request. `owner` are its labels. Raises PlatformError, ContainerGone when there
        is no such image; what there is of it is to be removed then."""
        try:
            container_folder.make(self._folder, self._uid)
            container_folder.make(self._parcels, self._uid)
            await self._control.listen()
        except OSError as error:
            raise PlatformError(f"Cannot make the folder of a container: {error}.") from error
        confined = sandbox(
            self.kind.limits,
            uid=self._uid,
            folder=self._folder,
            parcels=self._parcels,
            packages=packages,
            modules=self.modules,
        )
        await self._create(confined, owner)
        self.pid = await self._daemon.start(self.id)
        await self._ready()

    async def _create(self, confined: Sandbox, owner: Mapping[str, str]) -> None:
        """The daemon makes it also for who waits no more: then it is waited for all the same, to be removed."""
        creating = asyncio.ensure_future(self._daemon.create(f"gpufn-{self.name}", self.kind.image, confined, owner))
        try:
            self.id = await asyncio.shield(creating)
        except asyncio.CancelledError:
            with contextlib.suppress(GpufnError, TimeoutError):
                async with asyncio.timeout(_CREATED_WITHIN_S):
                    self.id = await creating
            raise

    async def _ready(self) -> TemplateReady:
        ready = asyncio.create_task(self._control.ready(), name=f"ready-{self.name}")
        ended = asyncio.create_task(_end_of(self.pid), name=f"ended-{self.name}")
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                await asyncio.wait([ready, ended], return_when=asyncio.FIRST_COMPLETED)
            if ready.done() and ready.exception() is None:
                return ready.result()
            output = await self._daemon.output_of(self.id)
            raise PlatformError(f"A container of {self.kind.image} ended at once: {output or 'it said nothing'}")
        except TimeoutError:
            raise PlatformError(f"A container of {self.kind.image} was not ready in {READY_TIMEOUT_S:g} s.") from None
        finally:
            for task in (ready, ended):
                task.cancel()

    async def freeze(self) -> None:
        """Raises PlatformError."""
        self._freezer = Freezer.of(self.pid)
        if self._freezer is not None:
            with contextlib.suppress(OSError):  # that it is gone, its control tells
                self._freezer.freeze()
        else:
            await self._daemon.pause(self.id)
            self._is_paused = True

    async def become(self, order: LaunchOrder) -> None:
        """Raises PlatformError."""
        self._thaw()
        if self._is_paused:
            await asyncio.gather(self._daemon.unpause(self.id), self._furnish(order))
        else:
            await self._furnish(order)
        request = ForkRequest(f"{WORKER}/{order.config.name}", f"{WORKER}/{order.output.name}", order.environment)
        self._control.send(request)
        self._control.close()

    def _thaw(self) -> None:
        if self._freezer is not None:
            with contextlib.suppress(OSError):  # it is gone
                self._freezer.thaw()

    async def _furnish(self, order: LaunchOrder) -> None:
        def furnish() -> None:
            told = order.told
            order.config.write_bytes(msgspec.json.encode(inside(told)))
            container_folder.furnish(self._folder, self._uid, told.bundle_dir, told.engines)
            container_folder.take_place(self._folder, order.folder, self._uid)
            container_folder.take_place(self._parcels, Path(told.parcels), self._uid)

        await asyncio.to_thread(furnish)

    async def remove(self) -> None:
        """All of it; what cannot be removed now is nobody's, and removed later."""
        self._control.close()
        self._thaw()  # older runc cannot end what is frozen
        try:
            if self.id:
                with contextlib.suppress(GpufnError):
                    await asyncio.shield(self._daemon.remove(self.id))
        finally:
            for path in (self._folder, self._parcels):
                remove_tree(path)


def _uid_for(limits: Limits) -> int:
    """One of its own, unless it is a client of MPS: a daemon's clients are one user's."""
    if limits.mps is not None:
        return limits.mps.uid
    return random.choice(_UIDS) if os.geteuid() == 0 else os.getuid()  # noqa: S311


async def _end_of(pid: int) -> None:
    """Return when the process is gone."""
    process = processes.identify(pid)
    pidfd = processes.open_pidfd(process) if process else None
    if pidfd is None:
        return
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(pidfd, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
