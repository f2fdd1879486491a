"""Folders of the node's cache: whole or absent, by name, read by workers. A hidden one is being made or removed."""

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


class UnderWay:
    """What is being brought here, by name: once, whoever asks for it meanwhile. `what` it is, in words."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def bring(self, name: str, work: Callable[[str], Coroutine[Any, Any, None]]) -> None:
        """Returns when it is here. Who stops waiting leaves it to the others."""
        task = self._tasks.get(name)
        if task is None:
            task = asyncio.create_task(work(name), name=f"{self._what}-{name[:12]}")
            self._tasks[name] = task
            task.add_done_callback(lambda _: self._tasks.pop(name, None))
        await asyncio.shield(task)


def being_made(root: Path, name: str) -> Path:
    """Where `root/name` is made, before it is renamed into its place."""
    return root / f".{name}.{os.getpid()}"


def sweep(root: Path) -> None:
    """Remove what an earlier agent left half made or half removed."""
    with contextlib.suppress(FileNotFoundError):
        for path in root.iterdir():
            if path.name.startswith("."):
                shutil.rmtree(path, ignore_errors=True)


def discard(path: Path) -> None:
    """Remove it: at once it is no more to be found."""
    old = _old(path)
    shutil.rmtree(old, ignore_errors=True)
    path.rename(old)
    shutil.rmtree(old, ignore_errors=True)


async def remove_others(root: Path, keep: Container[str], what: str) -> None:
    """Every folder whose name is not in `keep`: at once they are no more to be found."""
    for name, path in _hide_others(root, keep).items():
        log.info("nothing that is deployed uses the %s %s any more", what, name[:12])
        await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)


def _hide_others(root: Path, keep: Container[str]) -> dict[str, Path]:
    hidden: dict[str, Path] = {}
    with contextlib.suppress(FileNotFoundError):
        for path in list(root.iterdir()):
            if not path.name.startswith(".") and path.name not in keep:
                hidden[path.name] = path.rename(_old(path))
    return hidden


def _old(path: Path) -> Path:
    return path.with_name(f".old.{path.name}.{os.getpid()}")


def why_not_written(error: OSError) -> str:
    return "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror or str(error)
