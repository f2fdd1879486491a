"""The sandboxes of this node's workers and templates: which files each may use. Pure.

A template sees the files of all workers, because they are forked from it, but nothing else of GPUFN_HOME. A worker
sees its own.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from gpufn_core.home import Home
from gpufn_core.protocol.launch import NetworkNamespace, Sandbox, WorkerConfig
from gpufn_core.spec.isolation import Isolation, Network
from gpufn_platform.sandbox.host_paths import python_folders
from gpufn_runtime.agent.environments.environment import Environment

_LEAST_MEMORY_BYTES = 64 << 20


class Folder(NamedTuple):
    """A folder of the host that all workers may read, or also write."""

    path: str
    is_writable: bool = False


@dataclass(frozen=True)
class Sandboxes:
    """Makes the sandboxes. `python` has the folders of the agent's interpreter and its packages, `packages` the folders
    of gpufn. `private` are other files that are only for the platform's user. `cgroups` is the folder of the
    workers' memory cgroups. Without `namespaces` the kernel allows no namespaces here, without `own_pids` no PID
    namespaces."""

    home: Home
    python: tuple[str, ...]
    folders: Sequence[Folder] = ()
    private: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    cgroups: Path | None = None
    namespaces: bool = True
    own_pids: bool = True

    def worker(
        self, config: WorkerConfig, python: Environment | None = None, egress: NetworkNamespace | None = None
    ) -> Sandbox | None:
        """Return None for a function that chose a process without a sandbox. `egress` is the namespace of workers with
        `network="egress"`."""
        if config.spec.isolation is Isolation.PROCESS:
            return None
        folder = os.path.dirname(config.socket)
        engines = {path for paths in config.engines.values() for path in paths}
        bundle = (config.bundle_dir,) if config.bundle_dir else ()
        mps = (os.fspath(self.home.mps),) if config.mps is not None else ()
        return Sandbox(
            shared=self._shared(python),
            readable=(
                folder,
                *bundle,
                *_resolv_conf(egress),
                *sorted(engines),
                *config.weights,
                *(volume.path for volume in config.volumes),
            ),
            writable=(*self._writable, os.path.join(folder, "tmp"), config.shared_bodies, *mps),
            hidden=self.hidden,
            memory_bytes=max((config.memory_bytes or 0) // 2, _LEAST_MEMORY_BYTES),
            network=config.spec.network is not Network.NONE,
            namespace=egress,
            gpus=bool(config.spec.resources.gpu),
            shares_memory=config.mps is not None,
            namespaces=self.namespaces,
            own_pids=self.own_pids,
        )

    def template(
        self,
        scratch: Path,
        *,
        network: Network = Network.FULL,
        python: Environment | None = None,
        egress: NetworkNamespace | None = None,
    ) -> Sandbox:
        home = self.home
        cgroups = () if self.cgroups is None else (os.fspath(self.cgroups),)
        fifo = os.fspath(home.supervisor_fifo)
        return Sandbox(
            shared=self._shared(python),
            readable=(*map(os.fspath, (home.bundles, home.engines, home.weights)), fifo, *_resolv_conf(egress)),
            writable=(
                *self._writable,
                *map(os.fspath, (scratch, home.workers, home.shared_bodies, home.mps)),
                *cgroups,
            ),
            hidden=self.hidden,
            network=network is not Network.NONE,
            namespace=egress,
            gpus=True,
            shares_memory=True,
            namespaces=self.namespaces,
            own_pids=self.own_pids,
            is_template=True,
        )

    def compiler(self, bundle: str, interpreter: str) -> Sandbox:
        """Return the sandbox of a process that compiles a bundle: it reads that, and writes to no file. `interpreter`
        is the folder of its Python."""
        return Sandbox(
            shared=self.python,
            readable=(interpreter, bundle),
            hidden=self.hidden,
            network=not self.namespaces,
            namespaces=self.namespaces,
            is_command=True,
        )

    def _shared(self, python: Environment | None) -> tuple[str, ...]:
        """Return the files that all workers with this Python may read; None: with the agent's."""
        of_python = self.python
        if python is not None:
            of_python = (*python_folders([python.path, python.packages, *self.packages], python.interpreter),)
        return (*of_python, *(folder.path for folder in self.folders if not folder.is_writable))

    @property
    def _writable(self) -> tuple[str, ...]:
        return tuple(folder.path for folder in self.folders if folder.is_writable)

    @property
    def hidden(self) -> tuple[str, ...]:
        home = self.home
        return (*map(os.fspath, (home.root, home.run, home.shared_bodies)), *self.private)


def _resolv_conf(egress: NetworkNamespace | None) -> tuple[str, ...]:
    """Return the file for a template, whose workers show it once more."""
    return () if egress is None else (egress.own_resolv_conf,)
