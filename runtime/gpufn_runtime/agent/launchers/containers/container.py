"""A container that has no worker yet: created, frozen if it is a standby, and then assigned to a worker or removed.

start     create the folder, the uid and the container; its process imports the modules that the worker will need
freeze    stop the container's processes until a worker needs it
assign    put the worker's files into the folder, move the folder to the worker's path, and send the ForkRequest
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
from gpufn_runtime.agent.launchers.containers.gpu_access import GpuDriver
from gpufn_runtime.agent.launchers.containers.sandbox import (
    WORKER,
    Limits,
    Sandbox,
    config_in_container,
    sandbox,
    volume_name,
    weights_name,
)
from gpufn_runtime.agent.launchers.fork_channel import Control
from gpufn_runtime.agent.workers import processes

_CREATE_TIMEOUT_S = 5.0
_UIDS = range(1_900_000_000, 2_000_000_000)  # unused by any system; so many that a collision is unlikely


class ContainerDaemon(Protocol):
    """The part of the Docker client that a container needs."""

    async def create(self, name: str, image: str, sandbox: Sandbox, labels: Mapping[str, str]) -> str: ...
    async def start(self, container: str) -> int: ...
    async def pause(self, container: str) -> None: ...
    async def unpause(self, container: str) -> None: ...
    async def output_of(self, container: str) -> str: ...
    async def remove(self, container: str) -> None: ...


@dataclass(frozen=True)
class Kind:
    """The properties of a container that are fixed at creation."""

    image: str
    limits: Limits


def folders(home: Home) -> Path:
    """Return the folder that holds the folders of containers without a worker."""
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
        self._shared_bodies = home.shared_bodies / self.name
        self._control = Control(self._folder / CONTROL_NAME)
        self._freezer: Freezer | None = None
        self._is_paused = False

    @property
    def is_open(self) -> bool:
        """Whether the container's process is still connected."""
        return self._control.is_open

    @property
    def resident_bytes(self) -> int:
        return sum(map(processes.resident_bytes, [self.pid, *processes.children(self.pid)])) if self.pid else 0

    def set_on_gone(self, call: Callable[[], None]) -> None:
        self._control.on_gone = call

    async def start(
        self, owner: Mapping[str, str], packages: Sequence[str], gpu_driver: GpuDriver, egress_network: str
    ) -> None:
        """Start the container and wait until its process is ready for a request. `owner` are the container's labels.
        Raises PlatformError, or ContainerGone if the image does not exist. The caller must then `remove` it."""
        try:
            container_folder.make(self._folder, self._uid)
            container_folder.make(self._shared_bodies, self._uid)
            await self._control.listen()
        except OSError as error:
            raise PlatformError(f"Cannot create the folder of a container: {error}.") from error
        box = sandbox(
            self.kind.limits,
            uid=self._uid,
            folder=self._folder,
            shared_bodies=self._shared_bodies,
            packages=packages,
            modules=self.modules,
            gpu_driver=gpu_driver,
            egress_network=egress_network,
        )
        await self._create(box, owner)
        self.pid = await self._daemon.start(self.id)
        await self._ready()

    async def _create(self, box: Sandbox, owner: Mapping[str, str]) -> None:
        """Create the container. If cancelled, wait for Docker to finish anyway: the container must be removed later."""
        creating = asyncio.ensure_future(self._daemon.create(f"gpufn-{self.name}", self.kind.image, box, owner))
        try:
            self.id = await asyncio.shield(creating)
        except asyncio.CancelledError:
            with contextlib.suppress(GpufnError, TimeoutError):
                async with asyncio.timeout(_CREATE_TIMEOUT_S):
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
            raise PlatformError(f"A container of {self.kind.image} ended at once: {output or 'no output'}")
        except TimeoutError:
            raise PlatformError(f"A container of {self.kind.image} was not ready in {READY_TIMEOUT_S:g} s.") from None
        finally:
            for task in (ready, ended):
                task.cancel()

    async def freeze(self) -> None:
        """Freeze the container's processes. Raises PlatformError."""
        self._freezer = Freezer.of(self.pid)
        if self._freezer is not None:
            with contextlib.suppress(OSError):  # the container has ended; its connection reports that
                self._freezer.freeze()
        else:
            await self._daemon.pause(self.id)
            self._is_paused = True

    async def assign(self, order: LaunchOrder) -> None:
        """Assign the container to a worker, which then starts. Raises PlatformError."""
        self._thaw()
        if self._is_paused:
            await asyncio.gather(self._daemon.unpause(self.id), self._add_files(order))
        else:
            await self._add_files(order)
        request = ForkRequest(f"{WORKER}/{order.config.name}", f"{WORKER}/{order.output.name}", order.environment)
        self._control.send(request)
        self._control.close()

    def _thaw(self) -> None:
        if self._freezer is not None:
            with contextlib.suppress(OSError):  # the container has ended
                self._freezer.thaw()

    async def _add_files(self, order: LaunchOrder) -> None:
        def add_files() -> None:
            config = order.worker_config
            order.config.write_bytes(msgspec.json.encode(config_in_container(config)))
            container_folder.add_files(self._folder, self._uid, config.bundle_dir, config.engines)
            for spec, path in zip(config.spec.weights, config.weights, strict=True):
                container_folder.add_weights(
                    Path(path).parent if spec.is_file else Path(path), self._folder / weights_name(spec)
                )
            for volume in config.volumes:
                container_folder.add_weights(Path(volume.path), self._folder / volume_name(volume))
            container_folder.replace_worker_folder(self._folder, order.folder, self._uid)
            container_folder.replace_worker_folder(self._shared_bodies, Path(config.shared_bodies), self._uid)

        await asyncio.to_thread(add_files)

    async def remove(self) -> None:
        """Remove the container and its folders. `OrphanedContainers` removes the rest later."""
        self._control.close()
        self._thaw()  # older runc versions cannot kill a frozen container
        try:
            if self.id:
                with contextlib.suppress(GpufnError):
                    await asyncio.shield(self._daemon.remove(self.id))
        finally:
            for path in (self._folder, self._shared_bodies):
                remove_tree(path)


def _uid_for(limits: Limits) -> int:
    """Return a uid for one container. A client of MPS gets its daemon's: all clients of a daemon have the same user."""
    if limits.mps is not None:
        return limits.mps.uid
    return random.choice(_UIDS) if os.geteuid() == 0 else os.getuid()  # noqa: S311


async def _end_of(pid: int) -> None:
    """Wait until the process has ended."""
    if (handle := processes.open_handle(pid)) is None:
        return
    pidfd = handle.pidfd
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(pidfd, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
