"""This gateway's shared bodies: large bodies that runners on this host map from shared memory.

`gpufn_platform.shared_bodies.bodies` describes the files. The gateway holds a lock in its folder, so that another
gateway can detect and remove the folders of dead gateways.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from gpufn_gateway.http.body_reader import BodyBudget, Receive, write_body
from gpufn_platform.process.file_lock import lock_file
from gpufn_platform.shared_bodies.bodies import MIN_SHARED_BYTES, SharedBodies, SharedBodyReader

_LOCK: Final = "lock"
_STARTUP_S: Final = 60.0  # a gateway locks its folder within this time after it creates the folder
_ORPHANED_S: Final = 3600.0  # a result this old arrived for a call that had already ended


class SharedBody(NamedTuple):
    name: str
    size: int
    sender: str


class GatewaySharedBodies:
    """The shared bodies in one gateway's folder. `root` is Home.shared_bodies, `name` the name of the gateway.

    `reaches_all()` returns True if every runner that may get a call is on this host.
    """

    def __init__(self, root: Path, name: str, *, budget: BodyBudget, reaches_all: Callable[[], bool]) -> None:
        self.folder = name
        self._path = root / name
        self._store = SharedBodies(self._path)
        self._budget = budget
        self._reaches_all = reaches_all
        self._in_use: set[str] = set()
        self._lock = -1

    def open(self) -> None:
        """Create and lock the folder, and remove the folders of dead gateways. Raises OSError."""
        for folder in self._path.parent.glob("gw-*"):
            _remove_if_dead(folder)
        self._path.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = lock_file(self._path / _LOCK)

    def close(self) -> None:
        self._store.remove_all()
        if self._lock >= 0:
            os.close(self._lock)

    def is_shareable(self, size: int) -> bool:
        """True if a body of this size travels as a shared body."""
        return size >= MIN_SHARED_BYTES and self._reaches_all()

    async def receive(self, body: Receive, size: int) -> SharedBody:
        """Write a body of `size` bytes to a file while it arrives. Raises CapacityError if full."""
        sender = self._budget.reserve(size)
        try:
            with self._store.writer() as writer:
                await write_body(body, writer.write)
                name = writer.keep()
        except BaseException:
            self._budget.release(size, sender)
            raise
        self._in_use.add(name)
        return SharedBody(name, size, sender)

    def share(self, body: bytes) -> SharedBody:
        """Write a body from memory to a file. Raises CapacityError if there is no room."""
        sender = self._budget.reserve(len(body))
        try:
            name = self._store.write([body])
        except BaseException:
            self._budget.release(len(body), sender)
            raise
        self._in_use.add(name)
        return SharedBody(name, len(body), sender)

    def discard(self, shared: SharedBody) -> None:
        """Remove a body whose call has ended."""
        self._store.remove(shared.name)
        self._in_use.discard(shared.name)
        self._budget.release(shared.size, shared.sender)

    def path_of(self, shared: SharedBody) -> Path:
        """Return the file of a body that was not discarded."""
        return self._path / shared.name

    def view(self, shared: SharedBody) -> memoryview:
        """Map a body that was not discarded. This is safe: only this gateway can truncate the file.

        Raises ArtifactUnavailable.
        """
        return self._store.look(shared.name)

    def open_result(self, name: str) -> SharedBodyReader:
        """Open a result; the caller closes it. Raises ArtifactUnavailable."""
        return self._store.reader(name)

    def remove(self, name: str) -> None:
        """Remove a result that no client waits for."""
        self._store.remove(name)

    def sweep(self) -> None:
        """Remove orphaned results. Call it from time to time."""
        with contextlib.suppress(OSError):
            for entry in os.scandir(self._path):
                is_old = time.time() - entry.stat(follow_symlinks=False).st_mtime > _ORPHANED_S
                if is_old and entry.name != _LOCK and entry.name not in self._in_use:
                    self._store.remove(entry.name)


def _remove_if_dead(folder: Path) -> None:
    with contextlib.suppress(OSError):
        try:
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            if time.time() - folder.stat().st_mtime > _STARTUP_S:
                SharedBodies(folder).remove_all()
            return
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            SharedBodies(folder).remove_all()
        finally:
            os.close(lock)
