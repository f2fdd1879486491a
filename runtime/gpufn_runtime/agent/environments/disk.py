"""The folders of environments and of uv's cache, which share files by hard links.

The agent's facts about an environment lie beside it: commands of its build can write all that is in it.
"""

from __future__ import annotations

import os
from pathlib import Path

from gpufn_platform.process.disk_use import files
from gpufn_runtime.agent.decide.eviction import StoredFiles

_FACTS = "facts"


def facts(environment: Path) -> Path:
    """Return the file with the facts about an environment. Its time is the time of the last start."""
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
        StoredFiles(path.name, _used_at(path), dict(files(path)))
        for path in (root.iterdir() if root.is_dir() else ())
        if not path.name.startswith(".")
    ]


def _used_at(environment: Path) -> float:
    try:
        return facts(environment).stat().st_mtime
    except OSError:
        return 0.0
