"""A user's folder on sys.path whose files do not take the place of Python's own modules, or of those that gpufn needs.

A `json.py` beside the user's file would be imported by whoever imports json next, in this process too. The user's other
modules come before what is installed, as they do for `python FILE`.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

_NEEDED = frozenset(
    {
        "gpufn",
        "gpufn_core",
        "cloudpickle",
        "httpx",
        "httpcore",
        "h11",
        "anyio",
        "idna",
        "certifi",
        "msgspec",
        "rich",
        "typer",
    }
)


def is_kept(name: str) -> bool:
    """Whether a top-level module of this name is never the user's."""
    return name in sys.stdlib_module_names or name in _NEEDED


class _Kept(MetaPathFinder):
    """Stands before Python's own finder of files: finds what is kept, past the users' folders."""

    def __init__(self) -> None:
        self.folders = {""}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if path is not None or not is_kept(fullname):
            return None
        return PathFinder.find_spec(fullname, [entry for entry in sys.path if entry not in self.folders])


_finder = _Kept()


def import_from(*folders: Path) -> None:
    """From now on modules are found in these folders too."""
    names = [str(folder) for folder in folders]
    _finder.folders.update(names)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(sys.meta_path.index(PathFinder) if PathFinder in sys.meta_path else 0, _finder)
    sys.path[:0] = [name for name in dict.fromkeys(names) if name not in sys.path]
    importlib.invalidate_caches()


def advice(error: BaseException, folder: Path) -> str:
    """What to do when `error` may come from a file in `folder` that was not imported for its name; empty else."""
    if not isinstance(error, (ImportError, AttributeError)):
        return ""
    for entry in sorted(os.listdir(folder)):
        name = entry.removesuffix(".py")
        if is_kept(name) and f"'{name}'" in str(error) and (name != entry or (folder / name).is_dir()):
            whose = "Python's own modules" if name in sys.stdlib_module_names else "the modules that gpufn needs"
            return f". {entry} has the name of one of {whose}, which was imported instead: rename it"
    return ""
