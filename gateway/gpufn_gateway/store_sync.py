"""Sync the files of the embedded nats-server to disk, so that a power failure loses no acknowledged write.

nats-server acknowledges a message once the kernel has it. The gateway syncs the files before it responds to a client:

recorded   A deploy, key, schedule or upload: always. Syncs the whole file system (`syncfs`); the stream may be new.
accepted   A call: with GPUFN_SYNC=always. Syncs the blocks of the streams that hold calls (`fdatasync`), the queue
           first: a call leaves the queue only after its outcome was stored.

Concurrent requests share a sync. A sync covers the writes made before it starts; a request that arrives during a sync
waits for the next one. External NATS servers have no store here: they sync as configured.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from gpufn_core.errors import BusUnavailable, StoreFull
from gpufn_core.protocol import subjects

_CALL_STREAMS: Final = (subjects.ASYNC, subjects.RESULTS)
_MIN_FREE_BYTES: Final = 64 << 10
_MTIME_STEP_NS: Final = 50_000_000
_libc: Final = ctypes.CDLL(None, use_errno=True)


class StoreSync:
    """Disk sync of one nats-server. `store` is its data folder, None if it is on another host.

    `waits`: sync accepted calls before their response.
    """

    def __init__(self, store: Path | None, *, waits: bool) -> None:
        self._store = store
        self._recorded = None if store is None else _SharedSync(functools.partial(_sync_file_system, store))
        self._accepted = None if store is None or not waits else _SharedSync(_Blocks(store).sync)

    def is_full(self) -> bool:
        """True if the disk is full. Calls statvfs each time, which takes microseconds."""
        if self._store is None:
            return False
        try:
            stats = os.statvfs(self._store)
        except OSError:
            return False
        return stats.f_bavail * stats.f_frsize < _MIN_FREE_BYTES

    def check_room(self) -> None:
        """Raises StoreFull if the disk is full: nats-server does not reply to a write it cannot store."""
        if self.is_full():
            raise StoreFull("The disk of the message bus is full. Free some space; until then nothing is stored.")

    async def sync_records(self) -> None:
        """Wait until records are on disk. Raises BusUnavailable if the disk fails."""
        if self._recorded is not None:
            await self._recorded.wait()

    async def sync_calls(self) -> None:
        """Wait until accepted calls are on disk. Raises BusUnavailable if the disk fails."""
        if self._accepted is not None:
            await self._accepted.wait()


class _SharedSync:
    """Run `sync` in a thread, one at a time; one run serves all waiters that came before it started."""

    def __init__(self, sync: Callable[[], None]) -> None:
        self._sync = sync
        self._waiting: list[asyncio.Future[None]] = []
        self._task: asyncio.Task[None] | None = None

    async def wait(self) -> None:
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
                    if synced.done():  # its client has disconnected
                        continue
                    if error is None:
                        synced.set_result(None)
                    else:
                        synced.set_exception(error)
        finally:
            self._task = None


def _sync_file_system(store: Path) -> None:
    folder = os.open(store, os.O_RDONLY)
    try:
        if _libc.syncfs(folder) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
    finally:
        os.close(folder)


class _Blocks:
    """The message blocks of the streams that hold calls. Skips blocks that did not change since the last sync."""

    def __init__(self, store: Path) -> None:
        streams = store / "jetstream" / "$G" / "streams"
        self._folders = [streams / name / "msgs" for name in _CALL_STREAMS]
        self._synced: dict[str, int] = {}  # block → mtime in ns at its last sync
        self._known: set[str] = set()

    def sync(self) -> None:
        # File times advance in steps: a block written just now may be written again with the same mtime.
        settled_ns = time.time_ns() - _MTIME_STEP_NS
        current: dict[str, int] = {}
        for folder in self._folders:
            blocks = _blocks(folder)
            for path, written_ns in blocks.items():
                if self._synced.get(path) != written_ns:
                    _sync(path, os.fdatasync)
            if not blocks.keys() <= self._known:
                _sync(os.fspath(folder), os.fsync)
            current |= blocks
        self._known = set(current)
        self._synced = {path: written_ns for path, written_ns in current.items() if written_ns < settled_ns}


def _blocks(folder: Path) -> dict[str, int]:
    """Return the mtime in ns of each block."""
    stats = {}
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(".blk"):
                with contextlib.suppress(FileNotFoundError):  # the server removes empty blocks
                    stats[entry.path] = entry.stat().st_mtime_ns
    return stats


def _sync(path: str, sync: Callable[[int], None]) -> None:
    with contextlib.suppress(FileNotFoundError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            sync(descriptor)
        finally:
            os.close(descriptor)
