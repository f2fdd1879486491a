"""Folder of a worker in a container.

A container's mounts are fixed at creation, and a standby is created before its worker is known. So the container's
folder starts under a temporary name and is later renamed to the worker's folder. A renamed folder stays mounted, and
agent and runner find it at the usual path. The worker's uid owns the folder, so the runner knows which user to accept;
the worker cannot write to the folder, because its mount is read-only.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from gpufn_core.errors import PlatformError

_MAX_TRIES = 100  # the runner creates one socket in the folder


def make(path: Path, uid: int) -> None:
    path.mkdir(parents=True, mode=0o700)
    _chown(path, uid)


def add_files(path: Path, uid: int, bundle: str, engines: dict[str, tuple[str, ...]]) -> None:
    """Add the files that the worker reads. Raises PlatformError."""
    try:
        if bundle:
            _link_all(Path(bundle), path / "bundle")
        if engines:
            (path / "engines").mkdir()
            (path / "engines").chmod(0o755)
        for folder in sorted({folder for folders in engines.values() for folder in folders}):
            _link_all(Path(folder), path / "engines" / os.path.basename(folder))
    except OSError as error:
        raise PlatformError(f"Cannot add the files of {path.name}: {error.strerror}.") from error


def add_weights(source: Path, target: Path) -> None:
    """Link weights into `target`. They are too large to copy to another disk. Raises PlatformError."""
    try:
        target.parent.mkdir(exist_ok=True)
        target.parent.chmod(0o755)
        _link_all(source, target, may_copy=False)
    except OSError as error:
        advice = ": set GPUFN_HOME to a shorter path, so that its `run` and `cache` are on one disk"
        raise PlatformError(
            f"Cannot link the weights {source} into {target}: {error.strerror}"
            f"{advice if error.errno == errno.EXDEV else ''}."
        ) from error


def replace_worker_folder(path: Path, worker: Path, uid: int) -> None:
    """Rename `path` to `worker`, after moving the content of `worker` into `path`: the agent's files, and the socket
    that the runner may create there at any moment. Raises PlatformError."""
    for _ in range(_MAX_TRIES):
        try:
            for name in os.listdir(worker) if worker.exists() else ():
                if (path / name).is_dir():  # left by a container that died while this worker was assigned to it
                    shutil.rmtree(worker / name)
                    continue
                os.rename(worker / name, path / name)
                _chown(path / name, uid)
            os.rename(path, worker)  # succeeds only if `worker` is empty
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                continue
            raise PlatformError(f"Cannot create the folder of {worker.name}: {error.strerror}.") from error
        return
    raise PlatformError(f"Cannot create the folder of {worker.name}: another process keeps writing to it.")


def _link_all(source: Path, target: Path, *, may_copy: bool = True) -> None:
    """Link a tree, so its files are in memory once; copy across file systems. The new folders are ours and readable by
    all users, because the folder above is closed."""
    for folder, _, names in os.walk(source, onerror=_raise):
        target_folder = target / os.path.relpath(folder, source)
        target_folder.mkdir(parents=True, exist_ok=True)
        target_folder.chmod(0o755)
        for name in names:
            if may_copy:
                _link(Path(folder) / name, target_folder / name)
            else:
                os.link(Path(folder) / name, target_folder / name)


def _raise(error: OSError) -> None:
    raise error


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EMLINK, errno.EPERM):
            raise
        shutil.copyfile(source, target)
        target.chmod(0o444)


def _chown(path: Path, uid: int) -> None:
    if os.geteuid() == 0:
        os.chown(path, uid, uid, follow_symlinks=False)
