"""Which daemon a GPU gets, and which ones an earlier agent has left."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from gpufn_core.errors import DeviceFailed
from gpufn_runtime.agent.mps.daemon import Daemon, Elsewhere, left_in

# That no system gives out, nor the launcher of containers to a worker that shares no GPU.
_UIDS = range(1_800_000_000, 1_900_000_000)


class Make(Protocol):
    def __call__(self, gpu: str, folder: Path, *, uid: int, elsewhere: Elsewhere | None) -> Daemon: ...


class DaemonMaker:
    """`root` has a folder for each GPU; those in `elsewhere` have one for each whose clients live in containers."""

    def __init__(
        self, root: Path, elsewhere: Elsewhere, make: Make = Daemon, own_uid: Callable[[], int] = os.getuid
    ) -> None:
        self._root = root
        self._elsewhere = elsewhere
        self._make = make
        self._own_uid = own_uid

    def make(self, gpu: str, *, contained: bool = False) -> Daemon:
        """Raises DeviceFailed."""
        if contained and self._own_uid() != 0:
            raise DeviceFailed(f"{gpu}: to share it among containers takes an agent that runs as root")
        uid = random.choice(_UIDS) if contained else None  # noqa: S311
        # Short: a unix socket's path fits 107 bytes.
        return self._of(gpu, hashlib.sha256(gpu.encode()).hexdigest()[:8], uid)

    def left(self) -> Iterator[Daemon]:
        """By an earlier agent, whether they run or not."""
        for folder in sorted(self._root.glob("*")):
            if (file := left_in(folder)) is not None:
                daemon = self._of(file.gpu, folder.name, file.container_uid)
                daemon.take_over(file)
                yield daemon

    def _of(self, gpu: str, name: str, container_uid: int | None) -> Daemon:
        folder = self._root / name
        if container_uid is None:
            return self._make(gpu, folder, uid=self._own_uid(), elsewhere=None)
        elsewhere = Elsewhere(*(path / name for path in self._elsewhere))
        return self._make(gpu, folder, uid=container_uid, elsewhere=elsewhere)
