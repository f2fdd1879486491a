"""Creation of MPS daemons for GPUs, and discovery of the daemons of an earlier agent."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from gpufn_core.errors import DeviceFailed
from gpufn_runtime.agent.mps.daemon import ContainerFolders, Daemon, read_daemon_file

# Used neither by any system nor by the container launcher for workers that share no GPU.
_UIDS = range(1_800_000_000, 1_900_000_000)


class CreateDaemon(Protocol):
    def __call__(self, gpu: str, folder: Path, *, uid: int, container_folders: ContainerFolders | None) -> Daemon: ...


class DaemonFactory:
    """Creates MPS daemons. `root` has a folder per GPU. `container_folders` has folders for the GPUs whose clients run
    in containers."""

    def __init__(
        self,
        root: Path,
        container_folders: ContainerFolders,
        make: CreateDaemon = Daemon,
        own_uid: Callable[[], int] = os.getuid,
    ) -> None:
        self._root = root
        self._container_folders = container_folders
        self._make = make
        self._own_uid = own_uid

    def make(self, gpu: str, *, contained: bool = False) -> Daemon:
        """Create the daemon of a GPU. Raises DeviceFailed."""
        if contained and self._own_uid() != 0:
            raise DeviceFailed(f"{gpu}: sharing it among containers requires an agent that runs as root")
        uid = random.choice(_UIDS) if contained else None  # noqa: S311
        # A short name: the path of a unix socket has at most 107 bytes.
        return self._create(gpu, hashlib.sha256(gpu.encode()).hexdigest()[:8], uid)

    def existing(self) -> Iterator[Daemon]:
        """Return the daemons of an earlier agent, running or not."""
        for folder in sorted(self._root.glob("*")):
            if (file := read_daemon_file(folder)) is not None:
                daemon = self._create(file.gpu, folder.name, file.container_uid)
                daemon.file = file
                yield daemon

    def _create(self, gpu: str, name: str, container_uid: int | None) -> Daemon:
        folder = self._root / name
        if container_uid is None:
            return self._make(gpu, folder, uid=self._own_uid(), container_folders=None)
        container_folders = ContainerFolders(*(path / name for path in self._container_folders))
        return self._make(gpu, folder, uid=container_uid, container_folders=container_folders)
