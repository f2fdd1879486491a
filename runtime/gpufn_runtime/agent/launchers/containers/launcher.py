"""Workers in containers: one container per worker, created in advance if possible.

1. `run` keeps standby containers for the uses that were last in demand, within the memory that no lease needs.
2. `launch` assigns a standby with the same image and limits, or creates a container, and hands it to the worker.
3. Orphaned containers and their folders are removed (orphaned_containers.py).

Docker events are not used. `run` lists the containers at each wakeup and every _SWEEP_S.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from gpufn_core.errors import GpufnError, PlatformError
from gpufn_core.home import Home
from gpufn_core.remove_folder import remove_tree
from gpufn_core.spec.image_spec import ImageSpec
from gpufn_runtime.agent.cache.build_log import BuildLog, LogLine
from gpufn_runtime.agent.cache.images import Images
from gpufn_runtime.agent.decide import template_choice as standbys
from gpufn_runtime.agent.decide.template_choice import ContainerUse, ModuleSet
from gpufn_runtime.agent.launchers.base import ContainerEnd, ContainerGone, DaemonUnavailable, Launched, LaunchOrder
from gpufn_runtime.agent.launchers.containers.container import Container, ContainerDaemon, Kind, folders
from gpufn_runtime.agent.launchers.containers.gpu_access import NO_GPU_ACCESS, GpuDriver, gpu_driver, has_hook
from gpufn_runtime.agent.launchers.containers.orphaned_containers import OrphanedContainers
from gpufn_runtime.agent.launchers.containers.runtimes import gvisor_trouble
from gpufn_runtime.agent.launchers.containers.sandbox import Limits
from gpufn_runtime.agent.workers import processes
from gpufn_runtime.agent.workers.environment import container_limits

log = logging.getLogger(__name__)

_SWEEP_S = 10.0
_AFTER_LAUNCH_S = 1.0  # do not slow down the start of the worker that was just launched
_END_TIMEOUT_S = 10.0
_NOT_KNOWN = "Docker has not listed its runtimes"


class Daemon(ContainerDaemon, Protocol):
    """The part of the Docker client that the launcher needs."""

    async def end_of(self, container: str) -> ContainerEnd: ...
    async def containers(self, labels: Mapping[str, str]) -> set[str]: ...
    async def info(self) -> dict[str, Any]: ...


class EgressNetwork(Protocol):
    """The network of containers with `egress`."""

    @property
    def has_child_processes(self) -> bool: ...

    async def ready(self) -> str: ...
    def forget(self) -> None: ...
    async def remove(self) -> None: ...


StandbyKey = tuple[Kind, ModuleSet]  # standbys with the same key are interchangeable


class ContainerLauncher:
    """Launches workers in containers. `limit` is the maximum number of standbys. `owner` are the labels of our
    containers, `packages` the folders of our packages. `has_gpus`: the node has GPUs."""

    def __init__(
        self,
        daemon: Daemon,
        images: Images,
        *,
        home: Home,
        owner: Mapping[str, str],
        limit: int,
        packages: Sequence[str],
        log_line: LogLine,
        egress: EgressNetwork,
        has_gpus: bool = False,
    ) -> None:
        self._daemon = daemon
        self._images = images
        self._home = home
        self._owner = owner
        self._limit = limit
        self._packages = packages
        self._log_image_line = log_line
        self._has_gpus = has_gpus
        self._egress = egress
        self._gpu_driver: GpuDriver | None = None
        self._standbys: list[Container] = []
        self._in_progress: set[str] = set()  # folder names of containers being created, assigned or removed
        self._orphans = OrphanedContainers(daemon)
        self._uses: tuple[ContainerUse, ...] = ()
        self._failures: dict[StandbyKey, int] = {}
        self._sizes: dict[StandbyKey, int] = {}  # bytes, as last measured
        self._standby_memory_bytes = math.inf
        self._prepared: dict[ImageSpec, asyncio.Task[None]] = {}  # builds that run or have failed
        self._has_taken_over = False
        self._launches = 0
        self._wakeup = asyncio.Event()
        self._settled = asyncio.Event()
        self.trouble = ""  # why Docker cannot create containers, if known
        self.gpu_trouble = ""  # why containers cannot have GPUs, if known
        self.gvisor_trouble = _NOT_KNOWN  # why containers cannot have gVisor

    @property
    def has_child_processes(self) -> bool:
        return self._egress.has_child_processes

    @property
    def standbys(self) -> tuple[str, ...]:
        return tuple(f"{standby.kind.image} {','.join(sorted(standby.modules))}".strip() for standby in self._standbys)

    def set_uses(self, uses: Iterable[ContainerUse]) -> None:
        wanted = tuple(uses)
        if wanted != self._uses:
            self._uses = wanted
            self._failures.clear()
            for image in [image for image, task in self._prepared.items() if task.done()]:
                del self._prepared[image]
            self._review()

    def set_standby_memory(self, limit_bytes: int) -> None:
        """Let standbys use `limit_bytes` at most: the memory that no worker leases. Recently used standbys stay."""
        self._standby_memory_bytes = limit_bytes
        if sum(standby.resident_bytes for standby in self._standbys) > limit_bytes:
            self._review()

    def keep_images(self, images: Iterable[ImageSpec]) -> None:
        self._images.keep(images)
        self._review()

    def take_over(self, containers: Iterable[str]) -> None:
        """Keep the containers of adopted workers. From now on all other containers are removed."""
        self._orphans.in_use.update(containers)
        self._has_taken_over = True
        self._review()

    def release(self, container: str) -> None:
        """Release the container of a worker that has ended."""
        self._orphans.release(container)
        self._review()

    async def end_of(self, container: str) -> ContainerEnd:
        """Return how the container ended. Raises PlatformError if Docker cannot report it."""
        return await self._daemon.end_of(container)

    async def settled(self) -> None:
        """Wait until every wanted standby is ready or abandoned, and nothing is left to remove."""
        await self._settled.wait()

    async def run(self) -> None:
        """Create standbys and remove orphans until cancelled; then remove all containers without a worker."""
        last_warning = ""
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_SWEEP_S):
                        await self._wakeup.wait()
                self._wakeup.clear()
                try:
                    await self._step()
                except PlatformError as error:
                    self._note(error)
                    # A node may have no Docker and not need it.
                    if error.message != last_warning and (self._uses or self._orphans.in_use):
                        log.warning("cannot manage containers: %s", error.message)
                        last_warning = error.message
                except Exception:
                    log.exception("container review failed; next try in %g s", _SWEEP_S)
                else:
                    last_warning = ""
                    if not self._wakeup.is_set():
                        self._settled.set()
        finally:
            for task in self._prepared.values():
                task.cancel()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_END_TIMEOUT_S):  # the next agent removes the rest
                    removing = [self._discard(standby) for standby in list(self._standbys)]
                    await asyncio.gather(*removing, self._orphans.remove_ended(), return_exceptions=True)
                    with contextlib.suppress(PlatformError):
                        await self._egress.remove()

    async def launch(self, order: LaunchOrder) -> Launched:
        """Launch the worker in a standby or a new container. Raises BuildFailed, PlatformError."""
        assert order.image is not None
        config = order.worker_config
        limits = limits_of(order)
        self._launches += 1
        try:
            if (standby := self._take_standby(Kind(self._images.tag(order.image), limits), order.modules)) is not None:
                try:
                    return await self._assign(standby, order, is_standby=True)
                except PlatformError as error:
                    log.warning("worker %s gets a new container, its standby is gone: %s", order.worker, error.message)
            build_log = BuildLog(self._log_image_line, config.function, config.revision)
            image = await self._images.get(order.image, config.bundle_dir, build_log)
            try:
                container = await self._make(Kind(image, limits), order.modules)
            except ContainerGone:  # the image was removed
                self._images.forget(image)
                image = await self._images.get(order.image, config.bundle_dir, build_log)
                container = await self._make(Kind(image, limits), order.modules)
            return await self._assign(container, order, is_standby=False)
        except PlatformError as error:
            self._note(error)
            raise
        finally:
            asyncio.get_running_loop().call_later(_AFTER_LAUNCH_S, self._launched)

    def _take_standby(self, kind: Kind, modules: ModuleSet) -> Container | None:
        """Take the standby with the closest module set. The memory of other modules would count as the worker's."""
        candidates = [standby for standby in self._standbys if standby.kind == kind and standby.is_open]
        modules_of_standby = standbys.closest((standby.modules for standby in candidates), modules)
        match = next((standby for standby in candidates if standby.modules == modules_of_standby), None)
        if match is not None:
            self._standbys.remove(match)
            self._in_progress.add(match.name)
        return match

    async def _assign(self, container: Container, order: LaunchOrder, *, is_standby: bool) -> Launched:
        handle: processes.Handle | None = None
        try:
            handle = processes.open_handle(container.pid)  # before the request: a worker may end within milliseconds
            if handle is None:
                raise PlatformError(f"The process of container {container.name} has ended.")
            await container.assign(order)
        except BaseException:
            if handle is not None:
                os.close(handle.pidfd)
            await self._abandon(container)
            raise
        self._orphans.in_use.add(container.id)
        self._in_progress.discard(container.name)
        return Launched(container.pid, is_standby, container.id, handle)

    async def _make(self, kind: Kind, modules: ModuleSet) -> Container:
        """Create a container whose process waits for a request. Raises PlatformError."""
        container = Container(self._daemon, self._home, kind, modules)
        self._in_progress.add(container.name)
        try:
            network = await self._egress.ready() if kind.limits.egress else ""
            await container.start(self._owner, self._packages, self._gpu_driver or GpuDriver.HOOK, network)
        except BaseException:
            await self._abandon(container)
            raise
        return container

    async def _abandon(self, container: Container) -> None:
        try:
            await container.remove()
        finally:
            self._in_progress.discard(container.name)
            self._review()

    async def _step(self) -> None:
        for standby in list(self._standbys):
            if not standby.is_open:
                log.warning("a standby of %s is gone", standby.kind.image)
                await self._discard(standby)
        if self._has_taken_over:
            await self._sweep()
        await self._images.collect()
        if self._launches:
            return
        wanted = self._within_memory(await self._wanted())
        for standby in list(self._standbys):
            if (standby.kind, standby.modules) not in wanted:
                await self._discard(standby)
        have = {(standby.kind, standby.modules) for standby in self._standbys}
        for kind, modules in wanted:
            if (kind, modules) not in have and not self._launches:
                await self._add(kind, modules)

    def _within_memory(self, wanted: Sequence[StandbyKey]) -> list[StandbyKey]:
        """Return the standbys that fit in memory. A standby of unknown size is created to measure it."""
        self._sizes |= {(standby.kind, standby.modules): standby.resident_bytes for standby in self._standbys}
        selected: list[StandbyKey] = []
        used_bytes = 0
        for standby_key in wanted:
            size_bytes = self._sizes.get(standby_key, 0)
            if used_bytes + size_bytes <= self._standby_memory_bytes:
                used_bytes += size_bytes
                selected.append(standby_key)
        return selected

    async def _wanted(self) -> list[StandbyKey]:
        """Return at most `limit` standbys, last used first. Missing images are built in the background."""
        wanted: dict[StandbyKey, None] = {}
        for use in sorted(self._uses, key=lambda use: -use.last_used_at):
            tag = await self._images.find(use.image)
            if tag is None:
                self._prepare(use)
            elif use.limits is not None:
                wanted[Kind(tag, use.limits), use.modules] = None
        abandoned = {key for key, count in self._failures.items() if count >= standbys.MAX_FAILURES}
        return [key for key in wanted if key not in abandoned][: self._limit]

    def _prepare(self, use: ContainerUse) -> None:
        """Build a deployed function's image, once. After a failure, the launch tries again and reports the error."""
        if use.image not in self._prepared:
            self._prepared[use.image] = asyncio.create_task(self._build(use), name=f"image-of-{use.function}")

    async def _build(self, use: ContainerUse) -> None:
        try:
            await self._images.get(use.image, use.bundle, BuildLog(self._log_image_line, use.function, use.revision))
        except GpufnError as error:
            self._log_image_line(use.function, use.revision, f"image: {error.message}")
        else:
            self._prepared.pop(use.image, None)
            self._review()

    async def _add(self, kind: Kind, modules: ModuleSet) -> None:
        try:
            standby = await self._make(kind, modules)
            try:
                await standby.freeze()
            except PlatformError:
                await self._abandon(standby)
                raise
        except PlatformError as error:
            count = self._failures[kind, modules] = self._failures.get((kind, modules), 0) + 1
            log.warning("no standby of %s (%d of %d): %s", kind.image, count, standbys.MAX_FAILURES, error.message)
            return
        standby.set_on_gone(self._review)
        self._standbys.append(standby)
        self._in_progress.discard(standby.name)
        self._review()  # the new standby may not fit in memory
        log.info("a standby of %s [%s] is ready", kind.image, ",".join(sorted(modules)))

    async def _discard(self, standby: Container) -> None:
        if standby in self._standbys:
            self._standbys.remove(standby)
            await self._abandon(standby)

    async def _sweep(self) -> None:
        """Remove orphaned containers and folders, left by a crash or by an outage of Docker."""
        existing = await self._daemon.containers(self._owner)
        self.trouble = ""
        await self._learn_of_daemon()
        if self._in_progress:
            return  # a container that is being created may be listed, but its id is not known yet
        await self._orphans.remove(existing, kept={standby.id for standby in self._standbys})
        names = {standby.name for standby in self._standbys} | self._in_progress
        for folder in (folders(self._home), self._home.shared_bodies):
            for path in folder.glob("c-*"):
                if path.name not in names:
                    remove_tree(path)

    async def _learn_of_daemon(self) -> None:
        """Find the driver of GPUs, and gVisor. While it is absent, repeat: the operator may install it at any time."""
        needs_driver = self._has_gpus and self._gpu_driver is None
        if needs_driver or self.gvisor_trouble:
            info = await self._daemon.info()
            self.gvisor_trouble = gvisor_trouble(info)
            if needs_driver:
                self._gpu_driver = gpu_driver(info, has_hook=has_hook())
                self.gpu_trouble = "" if self._gpu_driver else NO_GPU_ACCESS

    def _note(self, error: PlatformError) -> None:
        if isinstance(error, DaemonUnavailable):
            self.trouble = error.message.rstrip(".")
            self._gpu_driver = None
            self.gvisor_trouble = self.trouble
        self._egress.forget()

    def _launched(self) -> None:
        self._launches -= 1
        self._review()

    def _review(self) -> None:
        self._settled.clear()
        self._wakeup.set()


def limits_of(order: LaunchOrder) -> Limits:
    memory_bytes = order.worker_config.memory_limit_bytes
    assert memory_bytes is not None, "a container limits its worker's memory"
    return container_limits(order.worker_config.spec, memory_bytes, order.gpus, order.mps)
