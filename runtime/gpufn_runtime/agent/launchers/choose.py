"""Choice of launcher: a container if the worker has an image, else a process."""

from __future__ import annotations

from collections.abc import Iterable

from gpufn_core.errors import PlatformError
from gpufn_core.spec.image_spec import ImageSpec
from gpufn_runtime.agent.decide.template_choice import ContainerUse, Use
from gpufn_runtime.agent.launchers.base import ContainerEnd, Launched, LaunchOrder
from gpufn_runtime.agent.launchers.containers.launcher import ContainerLauncher
from gpufn_runtime.agent.launchers.template import TemplateLauncher

_NO_DOCKER = "install gpufn-platform[docker] there"


class LauncherByImage:
    """Container or process launcher, by image. `containers` is None if the docker package is not installed."""

    def __init__(self, processes: TemplateLauncher, containers: ContainerLauncher | None) -> None:
        self._processes = processes
        self._containers = containers

    @property
    def templates(self) -> tuple[str, ...]:
        return self._processes.templates + (self._containers.standbys if self._containers else ())

    @property
    def container_trouble(self) -> str:
        """Return why containers cannot start, or "" if no reason is known."""
        return _NO_DOCKER if self._containers is None else self._containers.trouble

    @property
    def gpu_container_trouble(self) -> str:
        """Return why containers cannot have GPUs, or "" if no reason is known."""
        return "" if self._containers is None else self._containers.gpu_trouble

    @property
    def gvisor_trouble(self) -> str:
        """Return why containers cannot have gVisor, or ""."""
        return _NO_DOCKER if self._containers is None else self._containers.gvisor_trouble

    @property
    def has_child_processes(self) -> bool:
        """Return whether a command runs whose process only its caller may reap."""
        return self._containers is not None and self._containers.has_child_processes

    @property
    def pids(self) -> frozenset[int]:
        return self._processes.pids

    def set_uses(self, uses: Iterable[Use], in_containers: Iterable[ContainerUse]) -> None:
        self._processes.set_uses(uses)
        if self._containers is not None:
            self._containers.set_uses(in_containers)

    async def launch(self, order: LaunchOrder) -> Launched:
        """Launch the worker. Raises PlatformError, BuildFailed."""
        if order.image is None:
            return await self._processes.launch(order)
        return await self._container_launcher().launch(order)

    async def end_of(self, container: str) -> ContainerEnd:
        """Return how a container ended. Raises PlatformError."""
        return await self._container_launcher().end_of(container)

    def take_over(self, containers: Iterable[str]) -> None:
        if self._containers is not None:
            self._containers.take_over(containers)

    def release(self, container: str) -> None:
        if self._containers is not None:
            self._containers.release(container)

    def set_standby_memory(self, limit_bytes: int) -> None:
        """Limit the memory of standby containers. Templates share their memory with the workers forked from them."""
        if self._containers is not None:
            self._containers.set_standby_memory(limit_bytes)

    def keep_images(self, images: Iterable[ImageSpec]) -> None:
        if self._containers is not None:
            self._containers.keep_images(images)

    def _container_launcher(self) -> ContainerLauncher:
        if self._containers is None:
            raise PlatformError(f"This node cannot start containers: {_NO_DOCKER}.")
        return self._containers
