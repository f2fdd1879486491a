"""A disk of a few megabytes that tests fill."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(folder: Path, *, mebibytes: int) -> Iterator[Path]:
    """Mount a small disk below `folder`. The test is skipped, in CI as well, where containers may not mount."""
    disk = folder / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", os.fspath(disk)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"a small disk needs the right to mount: {mounted.stderr.strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


def fill(disk: Path, *, but_bytes: int = 0) -> Path:
    """Fill the disk except for `but_bytes`. Return the file that fills it."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    os.truncate(filler, max(0, filler.stat().st_size - but_bytes))
    return filler
