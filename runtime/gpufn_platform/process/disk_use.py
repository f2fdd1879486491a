"""Disk space of folders. A file that several names lead to counts once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_BLOCK = 512


def total_bytes(*roots: Path) -> int:
    return sum({key: size for root in roots for key, size in files(root)}.values())


def files(root: Path) -> Iterator[tuple[str, int]]:
    """Yield the identity and the size on disk of each name below `root`."""
    for folder, _, names in os.walk(root):
        for name in names:
            try:
                status = os.lstat(os.path.join(folder, name))
            except OSError:
                continue
            yield f"{status.st_dev}:{status.st_ino}", status.st_blocks * _BLOCK
