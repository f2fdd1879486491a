"""Where a worker starts: in a container when it is to have an image, else as a process."""

from __future__ import annotations

from collections.abc import Iterable

from gpufn_core.errors import PlatformError
from gpufn_core.spec.image_spec import ImageSpec
from gpufn_runtime.agent.decide.template_choice import ContainerUse, Use
from gpufn_runtime.agent.launchers.base import ContainerEnd, Launched, LaunchOrder
from gpufn_runtime.agent.launchers.containers.launcher import ContainerLauncher
from gpufn_runtime.agent.launchers.template import StandbyLauncher

_NO_DOCKER = "install gpufn-platform[docker] there"


class LauncherByImage:
    """`containers` is None where Docker's package is not installed."""

    def __init__(self, processes: StandbyLauncher, containers: ContainerLauncher | None) -> None:
        self._processes = processes
        self._containers = containers

    @property
    def templates(self) -> tuple[str, ...]:
        return self._processes.templates + (self._containers.standbys if self._containers else ())

    @property
    def container_trouble(self) -> str:
        """Why no container can be started, as far as is known."""
        return _NO_DOCKER if self._containers is None else self._containers.trouble

    @property
    def pids(self) -> frozenset[int]:
        return self._processes.pids

    def want(self, uses: Iterable[Use], in_containers: Iterable[ContainerUse]) -> None:
        self._processes.want(uses)
        if self._containers is not None:
            self._containers.want(in_containers)

    async def launch(self, order: LaunchOrder) -> Launched:
        """Raises PlatformError, BuildFailed."""
        if order.image is None:
            return await self._processes.launch(order)
        return await self._there().launch(order)

    async def end_of(self, container: str) -> ContainerEnd:
        """Raises PlatformError."""
        return await self._there().end_of(container)

    def take_over(self, containers: Iterable[str]) -> None:
        if self._containers is not None:
            self._containers.take_over(containers)

    def let_go(self, container: str) -> None:
        if self._containers is not None:
            self._containers.let_go(container)

    def leave_room(self, room_bytes: int) -> None:
        """For standbys in containers. Templates share their memory with the workers that are forked from them."""
        if self._containers is not None:
            self._containers.leave_room(room_bytes)

    def keep_images(self, images: Iterable[ImageSpec]) -> None:
        if self._containers is not None:
            self._containers.keep_images(images)

    def _there(self) -> ContainerLauncher:
        if self._containers is None:
            raise PlatformError(f"This node starts no containers: {_NO_DOCKER}.")
        return self._containers
