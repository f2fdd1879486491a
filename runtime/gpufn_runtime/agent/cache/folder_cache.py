"""Folders of the node's cache: complete or absent. A folder with a hidden name is being created or removed."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import shutil
from collections.abc import Callable, Container, Coroutine
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


class SharedTasks:
    """Downloads in progress, by name. Concurrent callers share one download. `noun` names the kind of artifact."""

    def __init__(self, noun: str) -> None:
        self._noun = noun
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tasks)

    async def run(self, name: str, work: Callable[[str], Coroutine[Any, Any, None]]) -> None:
        """Run `work(name)`, or wait until the running one is done. Cancelling a caller does not cancel the work."""
        task = self._tasks.get(name)
        if task is None:
            task = asyncio.create_task(work(name), name=f"{self._noun}-{name[:12]}")
            self._tasks[name] = task
            task.add_done_callback(self._on_done)
        await asyncio.shield(task)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks = {name: each for name, each in self._tasks.items() if each is not task}
        if not task.cancelled() and (error := task.exception()) is not None:  # all callers may have left
            log.debug("%s failed: %s", task.get_name(), error)


def staging_path(root: Path, name: str) -> Path:
    """Return the hidden path where `root/name` is created before it is renamed into place."""
    return root / f".{name}.{os.getpid()}"


def sweep(root: Path) -> None:
    """Remove folders that an earlier agent created or removed only in part."""
    with contextlib.suppress(FileNotFoundError):
        for path in root.iterdir():
            if path.name.startswith("."):
                shutil.rmtree(path, ignore_errors=True)


def discard(path: Path) -> None:
    """Remove the folder. It is renamed first, so readers stop finding it at once."""
    trash = _trash_path(path)
    shutil.rmtree(trash, ignore_errors=True)
    path.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)


async def remove_others(root: Path, keep: Container[str], noun: str) -> None:
    """Remove every folder whose name is not in `keep`. All are renamed first, so readers stop finding them at once."""
    for name, path in _hide_unused(root, keep).items():
        log.info("removing %s %s: no deployed function uses it", noun, name[:12])
        await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)


def _hide_unused(root: Path, keep: Container[str]) -> dict[str, Path]:
    hidden: dict[str, Path] = {}
    with contextlib.suppress(FileNotFoundError):
        for path in list(root.iterdir()):
            if not path.name.startswith(".") and path.name not in keep:
                hidden[path.name] = path.rename(_trash_path(path))
    return hidden


def _trash_path(path: Path) -> Path:
    return path.with_name(f".old.{path.name}.{os.getpid()}")


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def why_not_written(error: OSError) -> str:
    return "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror or str(error)
