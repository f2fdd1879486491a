"""This gateway's parcels: large bodies that runners of the same host take by reference (`gpufn_platform.shared_bodies.bodies`).

Its folder is locked as long as the gateway lives, so that the next one can tell what a dead one left.
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
from gpufn_platform.shared_bodies.bodies import LEAST_BYTES, ParcelReader, Parcels
from gpufn_platform.shared_bodies.reuse import MOST_BYTES

_LOCK: Final = "lock"
_STARTED_S: Final = 60.0  # has a gateway locked its folder within, or never
_FORGOTTEN_S: Final = 3600.0  # so old is nothing that somebody still wants: it came for a call that had ended


class Parcel(NamedTuple):
    name: str
    size: int


class GatewayParcels:
    """`root` is Home.parcels, `name` the gateway's. `reaches_all()`: any runner that may get a call is on this host."""

    def __init__(self, root: Path, name: str, *, budget: BodyBudget, reaches_all: Callable[[], bool]) -> None:
        self.folder = name
        self._path = root / name
        self._parcels = Parcels(self._path, spare_bytes=MOST_BYTES)
        self._budget = budget
        self._reaches_all = reaches_all
        self._kept: set[str] = set()
        self._lock = -1

    def open(self) -> None:
        """Claim the folder, and remove those of gateways that are gone. Raises OSError."""
        for left in self._path.parent.glob("gw-*"):
            _remove_if_dead(left)
        self._path.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = os.open(self._path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def close(self) -> None:
        self._parcels.remove_all()
        if self._lock >= 0:
            os.close(self._lock)

    def is_for(self, size: int) -> bool:
        """Whether a body of so many bytes travels as a parcel."""
        return size >= LEAST_BYTES and self._reaches_all()

    async def receive(self, body: Receive, size: int, *, function: str) -> Parcel:
        """A body of `size` bytes as it arrives, for `function`. Raises CapacityError when there is no room for it."""
        self._budget.take(size)
        try:
            with self._parcels.writer(function) as writer:
                await write_body(body, writer.write)
                name = writer.keep()
        except BaseException:
            self._budget.give_back(size)
            raise
        self._kept.add(name)
        return Parcel(name, size)

    def keep(self, body: bytes, *, function: str) -> Parcel:
        """A body that is here. Raises CapacityError when there is no room for it."""
        self._budget.take(len(body))
        try:
            name = self._parcels.write([body], function)
        except BaseException:
            self._budget.give_back(len(body))
            raise
        self._kept.add(name)
        return Parcel(name, len(body))

    def discard(self, parcel: Parcel) -> None:
        """Its call has ended."""
        self._parcels.remove(parcel.name)
        self._kept.discard(parcel.name)
        self._budget.give_back(parcel.size)

    def path_of(self, parcel: Parcel) -> Path:
        """The file of a body that is kept."""
        return self._path / parcel.name

    def view(self, parcel: Parcel) -> memoryview:
        """The bytes of a body that is kept, not copied: this gateway wrote the file, so nobody cuts it short. Raises
        ArtifactUnavailable."""
        return self._parcels.look(parcel.name)

    def take(self, name: str) -> ParcelReader:
        """A result, to be closed. Raises ArtifactUnavailable."""
        return self._parcels.reader(name)

    def remove(self, name: str) -> None:
        """A result that nobody waits for any more."""
        self._parcels.remove(name)

    def rest(self) -> None:
        """Give spare memory back when no body has come since the last time; every second or so."""
        self._parcels.spares.drop_unused()

    def sweep(self) -> None:
        """Remove results that came for nobody; now and then."""
        with contextlib.suppress(OSError):
            for entry in os.scandir(self._path):
                is_old = time.time() - entry.stat(follow_symlinks=False).st_mtime > _FORGOTTEN_S
                if is_old and entry.name != _LOCK and entry.name not in self._kept:
                    self._parcels.remove(entry.name)


def _remove_if_dead(folder: Path) -> None:
    with contextlib.suppress(OSError):
        try:
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            if time.time() - folder.stat().st_mtime > _STARTED_S:
                Parcels(folder).remove_all()
            return
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            Parcels(folder).remove_all()
        finally:
            os.close(lock)
