"""Where one machine's gpufn keeps its state: every path below GPUFN_HOME, in one place.

nats/            the bus's data, configuration and credentials
run/             what runs now: up.json (address, pids), worker folders with their sockets
logs/            one log per process of the platform
cache/bundles/   unpacked bundles, by digest, shared read-only with workers
cache/engines/   engines, by EngineKey, shared read-only with workers
cache/tuning/    what compilers measured, for the next build
builds/          a folder for each build that runs
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpufn_core.errors import PlatformError
from gpufn_core.remove_folder import remove_tree

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (a folder of our own in it, which `ensure` claims)
_RUN = Path("/run")
# A unix socket's path fits 107 bytes; a worker's folder and the socket's name take 40 of them.
_LONGEST_RUN_PATH = 66


@dataclass(frozen=True)
class Home:
    root: Path

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Home:
        """GPUFN_HOME, else `~/.gpufn`."""
        return cls(Path(environ.get("GPUFN_HOME") or Path.home() / ".gpufn").absolute())

    @property
    def nats(self) -> Path:
        return self.root / "nats"

    @property
    def run(self) -> Path:
        """Runtime files. Elsewhere when GPUFN_HOME is too deep for a unix socket's path."""
        path = self.root / "run"
        if len(os.fsencode(path)) <= _LONGEST_RUN_PATH:
            return path
        return Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / f"gpufn-{self._name}"

    @property
    def _name(self) -> str:
        """Of folders elsewhere: the user's and this home's own."""
        return f"{os.getuid()}-{hashlib.sha256(os.fsencode(self.root)).hexdigest()[:12]}"

    @property
    def up_file(self) -> Path:
        return self.root / "up.json"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def bundles(self) -> Path:
        return self.root / "cache" / "bundles"

    @property
    def mps(self) -> Path:
        """A folder for each GPU that is shared by MPS, with its daemon's sockets and logs."""
        return self.run / "mps"

    @property
    def mps_elsewhere(self) -> Path:
        """The like for GPUs that containers share, whose daemons' users cannot enter our folders."""
        return _RUN / f"gpufn-mps-{self._name}"

    @property
    def mps_memory(self) -> Path:
        """What the daemons of such GPUs share with their clients."""
        return _SHARED_MEMORY / f"gpufn-mps-{self._name}"

    @property
    def lane_socket(self) -> Path:
        """Where this node's runner takes calls from gateways of the same host."""
        return self.run / "lane"

    @property
    def supervisor_fifo(self) -> Path:
        """`gpufn up` holds it open as long as it lives (`gpufn_platform.process.supervisor_fifo`)."""
        return self.run / "up"

    @property
    def agent_lock(self) -> Path:
        """Held by this home's agent for as long as it lives."""
        return self.run / "agent.lock"

    @property
    def parcels(self) -> Path:
        """Large bodies of calls on their way between processes of this host (`gpufn_platform.shared_bodies.bodies`): in memory, if it can."""
        if not os.access(_SHARED_MEMORY, os.W_OK):
            return self.run / "parcels"
        return _SHARED_MEMORY / f"gpufn-{self._name}"

    @property
    def engines(self) -> Path:
        return self.root / "cache" / "engines"

    @property
    def tuning(self) -> Path:
        return self.root / "cache" / "tuning"

    @property
    def builds(self) -> Path:
        return self.root / "builds"

    def ensure(self) -> None:
        """Make the folders that processes of a node share: for their owner only. Raises PlatformError."""
        try:
            for path in (self.root / "cache", self.logs):
                _make_private(path)
            if self.run.parent == self.root:
                _make_private(self.run)
            else:
                _claim(self.run)
        except OSError as error:
            raise PlatformError(f"Cannot make {error.filename}: {error.strerror}.") from error

    def claim_parcels(self) -> Path:
        """`parcels`, made for its owner only; by who writes there. Raises PlatformError."""
        try:
            self.parcels.parent.mkdir(parents=True, exist_ok=True)
            _claim(self.parcels)
        except OSError as error:
            raise PlatformError(f"Cannot make {error.filename}: {error.strerror}.") from error
        return self.parcels

    def forget_running(self) -> None:
        """Remove what is kept elsewhere than below `root`, for processes that run: none does any more."""
        remove_tree(self.parcels)
        shutil.rmtree(self.mps_elsewhere, ignore_errors=True)
        shutil.rmtree(self.mps_memory, ignore_errors=True)
        if self.run.parent != self.root:
            remove_tree(self.run)

    def worker(self, worker_id: str) -> Path:
        return self.run / "w" / worker_id

    def worker_socket(self, worker_id: str) -> Path:
        return self.worker(worker_id) / "s"


def _make_private(path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    with contextlib.suppress(PermissionError):  # another user's, who gave it to us
        path.chmod(0o700)


def _claim(path: Path) -> None:
    """A folder where everybody may make one: only one that nobody else can have prepared for us will do."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise PlatformError(f"{path} is a link or no folder: remove it, or set XDG_RUNTIME_DIR.")
    if found.st_uid != os.geteuid():
        raise PlatformError(f"{path} belongs to the user {found.st_uid}: remove it, or set XDG_RUNTIME_DIR.")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PlatformError(f"{path} is not safe to use, for others may write to it: remove it.")
    path.chmod(0o700)
