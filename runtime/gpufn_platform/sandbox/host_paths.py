"""Files of this machine that sandboxes show or hide: the interpreter's folders, and private files of the system."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from gpufn_platform.sandbox.layout import SYSTEM, is_inside


def own_python_folders(packages: Iterable[str], environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the folders that this process's interpreter reads, with `packages` and LD_LIBRARY_PATH."""
    libraries = filter(os.path.isdir, environ.get("LD_LIBRARY_PATH", "").split(os.pathsep))
    return python_folders([*sys.path, *packages, *libraries], (sys.prefix, sys.base_prefix))


def python_folders(path: Sequence[str], prefixes: Sequence[str]) -> tuple[str, ...]:
    """Return the folders that an interpreter reads: `path` is its sys.path, `prefixes` where it is installed. A link
    and its target are both listed."""
    known = [entry for entry in (*prefixes, *path) if os.path.isabs(entry)]
    all_folders = dict.fromkeys(each for entry in known for each in (entry, os.path.realpath(entry)))
    outer = [each for each in all_folders if not any(is_inside(each, other) for other in all_folders if other != each)]
    return tuple(each for each in outer if not any(is_inside(each, other) for other in SYSTEM))


def system_secrets() -> tuple[str, ...]:
    """Return the files of the system that only root can read, if the platform runs as root."""
    return private_paths("/etc") if os.geteuid() == 0 else ()


def behind_links(*paths: Path) -> tuple[str, ...]:
    """Return the real path of each path that leads over a link. A sandbox that hides a path hides its real path too,
    because a visible folder may contain the target of the link."""
    return tuple(real for path in paths if (real := os.path.realpath(path)) != os.fspath(path))


def private_paths(folder: str) -> tuple[str, ...]:
    """Return the paths in `folder` that other users cannot read. Root without capabilities can still read its own
    files."""
    found: list[str] = []
    for parent, folders, files in os.walk(folder):
        closed = [name for name in folders if not _is_public(os.path.join(parent, name), stat.S_IXOTH)]
        found += (os.path.join(parent, name) for name in closed)
        folders[:] = [name for name in folders if name not in closed]
        found += (path for name in files if not _is_public(path := os.path.join(parent, name), stat.S_IROTH))
    return tuple(sorted(found))


def _is_public(path: str, right: int) -> bool:
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return True  # gone
    return stat.S_ISLNK(mode) or bool(mode & right)
