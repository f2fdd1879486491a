"""Writes of the embedded nats-server that are on the disk, so that a power failure takes none of them along.

nats-server answers when a message is with the kernel. The gateway beside it syncs the files before it answers a client:

recorded   a deploy, a key, a schedule, an upload ...: always; the whole file system (`syncfs`), for a stream may be new
accepted   a call: with GPUFN_SYNC=always; the blocks of the streams that hold calls (`fdatasync`), the queue first: a
           call leaves the queue after its outcome was stored

Those who wait share a sync: one that begins after a write covers it, and whoever comes while one runs waits for the
next. A bus that others run has no store here: its servers sync as they are configured.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from gpufn_core.errors import BusUnavailable, StoreFull
from gpufn_core.protocol import subjects

_CALLS: Final = (subjects.ASYNC, subjects.RESULTS)
_LEAST_BYTES: Final = 64 << 10
_STEP_NS: Final = 50_000_000
_libc: Final = ctypes.CDLL(None, use_errno=True)


class StoreSync:
    """`store`: the folder of the server's data; None: it is not on this host. `waits`: accepted calls are synced."""

    def __init__(self, store: Path | None, *, waits: bool) -> None:
        self._store = store
        self._recorded = None if store is None else _Shared(_FileSystem(store).sync)
        self._accepted = None if store is None or not waits else _Shared(_Blocks(store).sync)

    def is_full(self) -> bool:
        """Looked up in the file system each time, which takes microseconds."""
        if self._store is None:
            return False
        try:
            found = os.statvfs(self._store)
        except OSError:
            return False
        return found.f_bavail * found.f_frsize < _LEAST_BYTES

    def check_room(self) -> None:
        """Raises StoreFull: nats-server sends no answer for what it cannot store, and the client would wait for it."""
        if self.is_full():
            raise StoreFull("The disk of the message bus is full: nothing is stored until there is room.")

    async def recorded(self) -> None:
        """Raises BusUnavailable when the disk fails."""
        if self._recorded is not None:
            await self._recorded.done()

    async def accepted(self) -> None:
        """Raises BusUnavailable when the disk fails."""
        if self._accepted is not None:
            await self._accepted.done()


class _Shared:
    """`sync` in a thread, one at a time, for all who wait when it begins."""

    def __init__(self, sync: Callable[[], None]) -> None:
        self._sync = sync
        self._waiting: list[asyncio.Future[None]] = []
        self._task: asyncio.Task[None] | None = None

    async def done(self) -> None:
        loop = asyncio.get_running_loop()
        synced: asyncio.Future[None] = loop.create_future()
        self._waiting.append(synced)
        if self._task is None:
            self._task = loop.create_task(self._run(), name="sync of the store")
        await synced

    async def _run(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting, []
                error: BusUnavailable | None = None
                try:
                    await asyncio.to_thread(self._sync)
                except OSError as failed:
                    error = BusUnavailable(f"The disk of the message bus failed: {failed.strerror}.")
                for synced in batch:
                    if synced.done():  # its client has left
                        continue
                    if error is None:
                        synced.set_result(None)
                    else:
                        synced.set_exception(error)
        finally:
            self._task = None


class _FileSystem:
    def __init__(self, store: Path) -> None:
        self._store = store

    def sync(self) -> None:
        folder = os.open(self._store, os.O_RDONLY)
        try:
            if _libc.syncfs(folder) != 0:
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code))
        finally:
            os.close(folder)


class _Blocks:
    """The files that the messages of the streams are in. Those that did not change since the last sync are on disk."""

    def __init__(self, store: Path) -> None:
        streams = store / "jetstream" / "$G" / "streams"
        self._folders = [streams / name / "msgs" for name in _CALLS]
        self._synced: dict[str, int] = {}  # block → when it was last written, in ns; those that no sync need look at
        self._known: set[str] = set()

    def sync(self) -> None:
        # The times of files advance in steps: a block that was written just now may be written again at the same time.
        settled_ns = time.time_ns() - _STEP_NS
        there: dict[str, int] = {}
        for folder in self._folders:
            blocks = _blocks(folder)
            for path, written_ns in blocks.items():
                if self._synced.get(path) != written_ns:
                    _sync(path, os.fdatasync)
            if not blocks.keys() <= self._known:
                _sync(os.fspath(folder), os.fsync)
            there |= blocks
        self._known = set(there)
        self._synced = {path: written_ns for path, written_ns in there.items() if written_ns < settled_ns}


def _blocks(folder: Path) -> dict[str, int]:
    """Each block, and when it was last written."""
    found = {}
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for each in entries:
            if each.name.endswith(".blk"):
                with contextlib.suppress(FileNotFoundError):  # the server removes a block that is empty
                    found[each.path] = each.stat().st_mtime_ns
    return found


def _sync(path: str, sync: Callable[[int], None]) -> None:
    with contextlib.suppress(FileNotFoundError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            sync(descriptor)
        finally:
            os.close(descriptor)
