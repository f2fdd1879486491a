"""The folders of environments and of uv's cache, which share files by hard links.

The agent's facts about an environment lie beside it: commands of its build can write all that is in it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from gpufn_runtime.agent.decide.eviction import StoredFiles

_FACTS = "facts"


def facts(environment: Path) -> Path:
    """Return the file with the facts about an environment. Its time is that of the last start."""
    return environment.parent.parent / _FACTS / f"{environment.name}.json"


def write_facts(environment: Path, data: bytes) -> None:
    path = facts(environment)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_bytes(data)
    new.replace(path)


def touch(environment: Path) -> None:
    os.utime(facts(environment))


def stored(root: Path) -> list[StoredFiles]:
    """Return the environments with their files. A file that several have is counted once."""
    return [
        StoredFiles(path.name, _used_at(path), dict(_files(path)))
        for path in (root.iterdir() if root.is_dir() else ())
        if not path.name.startswith(".")
    ]


def total_bytes(*roots: Path) -> int:
    return sum({key: size for root in roots for key, size in _files(root)}.values())


def _files(root: Path) -> Iterator[tuple[str, int]]:
    for folder, _, names in os.walk(root):
        for name in names:
            try:
                status = os.lstat(os.path.join(folder, name))
            except OSError:
                continue
            yield f"{status.st_dev}:{status.st_ino}", status.st_blocks * 512


def _used_at(environment: Path) -> float:
    try:
        return facts(environment).stat().st_mtime
    except OSError:
        return 0.0
