"""The state folders of one machine: every path below GPUFN_HOME, in one place.

nats/            data, configuration and credentials of NATS
run/             runtime files: up.json (address, pids), worker folders with their sockets
logs/            one log per platform process
cache/bundles/   unpacked bundles, by digest, shared read-only with workers
cache/engines/   engines, by EngineKey, shared read-only with workers
cache/weights/   weights, shared read-only with workers; as many as fit
cache/python/    environments of functions with packages, and the cache of uv that makes them
cache/tuning/    measurements of the compilers, reused by later builds
builds/          one folder per running build
history/         copies of the history, one per gateway (`gpufn_gateway.history`)
master.key       master key of the secrets, unless a setting names another one (`gpufn_platform.secrets.master_key`)
store.key        key of an encrypted store, unless a setting names another one (`gpufn_local.store_encryption`)
logins.json      logins of `gpufn login`, by gateway (`gpufn.client.login.stored_logins`)
failed-gpus.json GPUs that failed since the last boot
power-limits.json GPUs whose power limit the agent has changed, with the limit to restore
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from gpufn_core.errors import PlatformError
from gpufn_core.remove_folder import remove_tree

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (`ensure` creates a private folder in it)
_RUN = Path("/run")
# The path of a unix socket is limited to 107 bytes; a worker's folder and the socket's name take 40 of them.
_LONGEST_RUN_PATH = 66


class Home:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.nats = root / "nats"
        self.up_file = root / "up.json"
        self.logs = root / "logs"
        self.cache = root / "cache"
        self.bundles = self.cache / "bundles"
        self.engines = self.cache / "engines"
        self.weights = self.cache / "weights"
        self.python = self.cache / "python"
        self.tuning = self.cache / "tuning"
        self.builds = root / "builds"
        self.history = root / "history"
        self.master_key = root / "master.key"
        self.store_key = root / "store.key"
        self.logins_file = root / "logins.json"
        self.failed_gpus = root / "failed-gpus.json"  # `gpufn_runtime.agent.devices.failed_gpus`
        self.power_limits = root / "power-limits.json"  # `gpufn_runtime.agent.devices.power_limits`
        # A suffix of folders outside of `root`, unique per user and home.
        self._name = f"{os.getuid()}-{hashlib.sha256(os.fsencode(root)).hexdigest()[:12]}"
        # Runtime files: outside of `root` if GPUFN_HOME is too long for the path of a unix socket.
        self.run = root / "run"
        if len(os.fsencode(self.run)) > _LONGEST_RUN_PATH:
            self.run = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / f"gpufn-{self._name}"
        self.workers = self.run / "w"  # a folder per worker; containers mount theirs
        self.worker_packages = self.run / "packages"  # links to the packages that a worker in an environment imports
        self.fast_path_socket = self.run / "fast-path"  # this node's runner receives calls of the host's gateways on it
        self.supervisor_fifo = self.run / "up"  # `gpufn_platform.process.supervisor_fifo`
        self.agent_lock = self.run / "agent.lock"  # this home's agent holds it while it runs
        self.grace_file = self.run / "grace"  # `gpufn_platform.process.grace_period`
        self.calls_running_file = self.run / "calls-running"
        self.mps = self.run / "mps"  # a folder per GPU that is shared by MPS, for its daemon's sockets and logs
        # The same for GPUs that containers share: the users of their daemons cannot enter our folders.
        self.shared_mps = _RUN / f"gpufn-mps-{self._name}"
        self.mps_memory = _SHARED_MEMORY / f"gpufn-mps-{self._name}"  # for daemons in `shared_mps` and their clients

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Home:
        """Return the home at GPUFN_HOME, or `~/.gpufn` if unset."""
        return cls(Path(environ.get("GPUFN_HOME") or Path.home() / ".gpufn").absolute())

    @property
    def shared_bodies(self) -> Path:
        """Folder of large bodies in transit between processes of this host (`gpufn_platform.shared_bodies.bodies`). In
        shared memory if possible."""
        if not os.access(_SHARED_MEMORY, os.W_OK):
            return self.run / "shared_bodies"
        return _SHARED_MEMORY / f"gpufn-{self._name}"

    def ensure(self) -> None:
        """Create the folders that the processes of a node share, private to their owner. Raises PlatformError."""
        try:
            _make_root(self.root)
            for path in (self.logs, self.cache, self.bundles):
                _make_private(path)
            if self.run.parent == self.root:
                _make_private(self.run)
            else:
                _claim(self.run)
            _make_private(self.workers)
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
        return self.workers / worker_id

    def worker_socket(self, worker_id: str) -> Path:
        return self.worker(worker_id) / "s"


def _make_root(path: Path) -> None:
    """Create `path`, private to its owner. Raises PlatformError for a folder in which other users can replace files."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    if path.stat().st_mode & stat.S_ISVTX:  # such as /tmp, which its other users need
        raise PlatformError(f"{path} is a folder that users share: set GPUFN_HOME to a folder inside it.")
    _make_private(path)
    status = path.stat()
    if status.st_mode & stat.S_IWOTH:
        raise PlatformError(
            f"Every user can write to {path}, which belongs to the user {status.st_uid}: run chmod o-w on it as that "
            "user, or set GPUFN_HOME to a folder of yours."
        )


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
