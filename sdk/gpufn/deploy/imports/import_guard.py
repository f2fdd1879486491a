"""Add a user's folder to sys.path without letting it shadow the standard library or gpufn's dependencies.

Without the guard, the next import of json anywhere in this process would load a `json.py` beside the user's file. The
user's other modules take precedence over installed ones, as with `python FILE`.
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

_DEPENDENCIES = frozenset(
    {
        "gpufn",
        "gpufn_core",
        "click",
        "cloudpickle",
        "cronsim",
        "httpx",
        "httpcore",
        "h11",
        "anyio",
        "idna",
        "certifi",
        "msgspec",
        "rich",
    }
)


def is_reserved(name: str) -> bool:
    """Return whether users cannot replace the top-level module of this name."""
    return name in sys.stdlib_module_names or name in _DEPENDENCIES


class _ReservedFinder(MetaPathFinder):
    """Finds reserved modules outside the users' folders. Runs before Python's PathFinder."""

    def __init__(self) -> None:
        self.folders = {""}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if path is not None or not is_reserved(fullname):
            return None
        return PathFinder.find_spec(fullname, [entry for entry in sys.path if entry not in self.folders])


_finder = _ReservedFinder()


def import_from(*folders: Path) -> None:
    """Add the folders to sys.path, guarded."""
    names = [str(folder) for folder in folders]
    _finder.folders.update(names)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(sys.meta_path.index(PathFinder) if PathFinder in sys.meta_path else 0, _finder)
    sys.path[:0] = [name for name in dict.fromkeys(names) if name not in sys.path]
    importlib.invalidate_caches()


def advice(error: BaseException, folder: Path) -> str:
    """Return a hint if a file in `folder` with a reserved name may have caused `error`, else ""."""
    if not isinstance(error, (ImportError, AttributeError)):
        return ""
    for entry in sorted(os.listdir(folder)):
        name = entry.removesuffix(".py")
        if is_reserved(name) and f"'{name}'" in str(error) and (name != entry or (folder / name).is_dir()):
            kind = "a standard library module" if name in sys.stdlib_module_names else "a module that gpufn needs"
            return f". {entry} has the same name as {kind}, which was imported instead: rename it"
    return ""
