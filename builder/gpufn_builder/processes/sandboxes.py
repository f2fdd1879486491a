"""The sandboxes of this node's builds: which files a build process, and the processes of its candidates, may use. Pure.

A build sees its own folder and the compilers' measurements. It needs no network and no other file of GPUFN_HOME.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from gpufn_core.home import Home
from gpufn_core.protocol.launch import Sandbox


@dataclass(frozen=True)
class BuildSandboxes:
    """Makes the sandboxes. `python` has the folders of the interpreter and its packages, `private` other files
    that are only for the platform's user. Without `namespaces` the kernel allows no namespaces here, and builds have
    the node's network."""

    home: Home
    python: tuple[str, ...]
    private: tuple[str, ...] = ()
    namespaces: bool = True

    def build(self, folder: Path, caches: Path, *, has_gpu: bool) -> Sandbox:
        return Sandbox(
            shared=self.python,
            writable=(os.fspath(folder), os.fspath(caches)),
            hidden=(*map(os.fspath, (self.home.root, self.home.run, self.home.shared_bodies)), *self.private),
            network=not self.namespaces,
            gpus=has_gpu,
            namespaces=self.namespaces,
            is_command=True,
        )
