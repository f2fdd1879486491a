"""The sandboxes of this node's workers and templates: which files each may use. Pure.

A template sees the files of all workers, because they are forked from it, but nothing else of GPUFN_HOME. A worker
sees its own.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from gpufn_core.home import Home
from gpufn_core.protocol.launch import Sandbox, WorkerConfig
from gpufn_core.spec.isolation import Isolation, Network
from gpufn_platform.sandbox.layout import SYSTEM, is_inside

_LEAST_MEMORY_BYTES = 64 << 20


class Folder(NamedTuple):
    """A folder of the host that all workers may read, or also write."""

    path: str
    is_writable: bool = False


@dataclass(frozen=True)
class Sandboxes:
    """Makes the sandboxes. `python` has the folders of the interpreter and its packages, `private` files of the system
    that are only for the platform's user. `cgroups` is the folder of
    the workers' memory cgroups. Without `namespaces` the kernel allows no namespaces here."""

    home: Home
    python: tuple[str, ...]
    folders: Sequence[Folder] = ()
    private: tuple[str, ...] = ()
    cgroups: Path | None = None
    namespaces: bool = True

    def worker(self, config: WorkerConfig) -> Sandbox | None:
        """Return None for a function that chose a process without a sandbox."""
        if config.spec.isolation is Isolation.PROCESS:
            return None
        folder = os.path.dirname(config.socket)
        engines = {path for paths in config.engines.values() for path in paths}
        bundle = (config.bundle_dir,) if config.bundle_dir else ()
        mps = (os.fspath(self.home.mps),) if config.mps is not None else ()
        return Sandbox(
            shared=self._shared,
            readable=(folder, *bundle, *sorted(engines), *config.weights),
            writable=(*self._writable, os.path.join(folder, "tmp"), config.shared_bodies, *mps),
            hidden=self._hidden,
            memory_bytes=max((config.memory_bytes or 0) // 2, _LEAST_MEMORY_BYTES),
            network=config.spec.network is not Network.NONE,
            gpus=bool(config.spec.resources.gpu),
            shares_memory=config.mps is not None,
            namespaces=self.namespaces,
        )

    def template(self, scratch: Path, *, offline: bool) -> Sandbox:
        home = self.home
        cgroups = () if self.cgroups is None else (os.fspath(self.cgroups),)
        fifo = os.fspath(home.supervisor_fifo)
        return Sandbox(
            shared=self._shared,
            readable=(*map(os.fspath, (home.bundles, home.engines, home.weights)), fifo),
            writable=(
                *self._writable,
                *map(os.fspath, (scratch, home.workers, home.shared_bodies, home.mps)),
                *cgroups,
            ),
            hidden=self._hidden,
            network=not offline,
            gpus=True,
            shares_memory=True,
            namespaces=self.namespaces,
            is_template=True,
        )

    @property
    def _shared(self) -> tuple[str, ...]:
        return (*self.python, *(folder.path for folder in self.folders if not folder.is_writable))

    @property
    def _writable(self) -> tuple[str, ...]:
        return tuple(folder.path for folder in self.folders if folder.is_writable)

    @property
    def _hidden(self) -> tuple[str, ...]:
        home = self.home
        return (*map(os.fspath, (home.root, home.run, home.shared_bodies)), *self.private)


def private_paths(folder: str) -> tuple[str, ...]:
    """Return the paths in `folder` that other users cannot read. Root without capabilities still reads what it owns."""
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


def python_folders(path: Sequence[str], prefixes: Sequence[str]) -> tuple[str, ...]:
    """Return the folders that an interpreter reads: `path` is its sys.path, `prefixes` where it is installed. A link
    and its target are both listed."""
    known = [entry for entry in (*prefixes, *path) if os.path.isabs(entry)]
    all_folders = dict.fromkeys(each for entry in known for each in (entry, os.path.realpath(entry)))
    outer = [each for each in all_folders if not any(is_inside(each, other) for other in all_folders if other != each)]
    return tuple(each for each in outer if not any(is_inside(each, other) for other in SYSTEM))
