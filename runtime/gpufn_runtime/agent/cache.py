"""Folders of the node's cache: whole or absent, by name, read by workers. A hidden one is being made or removed."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Container
from pathlib import Path


def being_made(root: Path, name: str) -> Path:
    """Where `root/name` is made, before it is renamed into its place."""
    return root / f".{name}.{os.getpid()}"


def sweep(root: Path) -> None:
    """Remove what an earlier agent left half made or half removed."""
    with contextlib.suppress(FileNotFoundError):
        for path in root.iterdir():
            if path.name.startswith("."):
                shutil.rmtree(path, ignore_errors=True)


def set_aside(root: Path, keep: Container[str]) -> dict[str, Path]:
    """Hide every folder whose name is not in `keep`, at once: name → where it is now. The caller removes them, which
    takes longer."""
    hidden: dict[str, Path] = {}
    with contextlib.suppress(FileNotFoundError):
        for path in list(root.iterdir()):
            if not path.name.startswith(".") and path.name not in keep:
                hidden[path.name] = path.rename(root / f".old.{path.name}.{os.getpid()}")
    return hidden


def why_not_written(error: OSError) -> str:
    return "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror or str(error)
