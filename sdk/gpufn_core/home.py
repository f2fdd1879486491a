"""The state folders of one machine: every path below GPUFN_HOME, in one place.

nats/            data, configuration and credentials of NATS
run/             runtime files: up.json (address, pids), worker folders with their sockets
logs/            one log per platform process
cache/bundles/   unpacked bundles, by digest, shared read-only with workers
cache/engines/   engines, by EngineKey, shared read-only with workers
cache/tuning/    measurements of the compilers, reused by later builds
builds/          one folder per running build
failed-gpus.json GPUs that failed since the last boot
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

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (`ensure` creates a private folder in it)
_RUN = Path("/run")
# The path of a unix socket is limited to 107 bytes; a worker's folder and the socket's name take 40 of them.
_LONGEST_RUN_PATH = 66


@dataclass(frozen=True)
class Home:
    root: Path

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Home:
        """Return the home at GPUFN_HOME, or `~/.gpufn` if unset."""
        return cls(Path(environ.get("GPUFN_HOME") or Path.home() / ".gpufn").absolute())

    @property
    def nats(self) -> Path:
        return self.root / "nats"

    @property
    def run(self) -> Path:
        """Folder of runtime files. Outside of `root` if GPUFN_HOME is too long for the path of a unix socket."""
        path = self.root / "run"
        if len(os.fsencode(path)) <= _LONGEST_RUN_PATH:
            return path
        return Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / f"gpufn-{self._name}"

    @property
    def _name(self) -> str:
        """Suffix of folders outside of `root`, unique per user and home."""
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
        """Folder with one subfolder per GPU that is shared by MPS, for its daemon's sockets and logs."""
        return self.run / "mps"

    @property
    def shared_mps(self) -> Path:
        """Same as `mps` for GPUs that containers share: the users of their daemons cannot enter our folders."""
        return _RUN / f"gpufn-mps-{self._name}"

    @property
    def mps_memory(self) -> Path:
        """Folder for the memory that the daemons in `shared_mps` share with their clients."""
        return _SHARED_MEMORY / f"gpufn-mps-{self._name}"

    @property
    def fast_path_socket(self) -> Path:
        """Socket on which this node's runner receives calls from gateways of the same host."""
        return self.run / "fast-path"

    @property
    def supervisor_fifo(self) -> Path:
        """FIFO that `gpufn up` holds open while it runs (`gpufn_platform.process.supervisor_fifo`)."""
        return self.run / "up"

    @property
    def agent_lock(self) -> Path:
        """Lock that this home's agent holds while it runs."""
        return self.run / "agent.lock"

    @property
    def failed_gpus(self) -> Path:
        """File of the GPUs that failed (`gpufn_runtime.agent.devices.failed_gpus`)."""
        return self.root / "failed-gpus.json"

    @property
    def shared_bodies(self) -> Path:
        """Folder of large bodies in transit between processes of this host (`gpufn_platform.shared_bodies.bodies`). In
        shared memory if possible."""
        if not os.access(_SHARED_MEMORY, os.W_OK):
            return self.run / "shared_bodies"
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
        """Create the folders that the processes of a node share, private to their owner. Raises PlatformError."""
        try:
            for path in (self.root / "cache", self.logs):
                _make_private(path)
            if self.run.parent == self.root:
                _make_private(self.run)
            else:
                _claim(self.run)
        except OSError as error:
            raise PlatformError(f"Cannot create {error.filename}: {error.strerror}.") from error

    def claim_shared_bodies(self) -> Path:
        """Create `shared_bodies`, private to its owner. Processes that write there call this. Raises PlatformError."""
        try:
            self.shared_bodies.parent.mkdir(parents=True, exist_ok=True)
            _claim(self.shared_bodies)
        except OSError as error:
            raise PlatformError(f"Cannot create {error.filename}: {error.strerror}.") from error
        return self.shared_bodies

    def remove_runtime_folders(self) -> None:
        """Remove the runtime folders outside of `root`. Call this only when no process of this home runs."""
        remove_tree(self.shared_bodies)
        shutil.rmtree(self.shared_mps, ignore_errors=True)
        shutil.rmtree(self.mps_memory, ignore_errors=True)
        if self.run.parent != self.root:
            remove_tree(self.run)

    def worker(self, worker_id: str) -> Path:
        return self.run / "w" / worker_id

    def worker_socket(self, worker_id: str) -> Path:
        return self.worker(worker_id) / "s"


def _make_private(path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    with contextlib.suppress(PermissionError):  # another user owns it and gave us access
        path.chmod(0o700)


def _claim(path: Path) -> None:
    """Create a private folder where every user can create one. Raises PlatformError for a folder that another user may
    have prepared."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise PlatformError(f"{path} is a link or not a folder: remove it, or set XDG_RUNTIME_DIR.")
    if status.st_uid != os.geteuid():
        raise PlatformError(f"{path} belongs to the user {status.st_uid}: remove it, or set XDG_RUNTIME_DIR.")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PlatformError(f"{path} is not safe to use because other users can write to it: remove it.")
    path.chmod(0o700)
