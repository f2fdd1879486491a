"""Links that leave a folder."""

from __future__ import annotations

from pathlib import Path


def is_inside(folder: Path, path: Path) -> bool:
    """Return whether a path, with its links followed, is below a folder."""
    return path.resolve().is_relative_to(folder.resolve())
