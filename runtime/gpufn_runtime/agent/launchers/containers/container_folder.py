"""The folders that a container sees as its worker's, made before anybody knows whose they will be.

A container's mounts are fixed when it is made, and a standby is made before its worker. So its folder begins as a
stranger and, once there is a worker, takes the place of that worker's: renamed, it stays mounted, while agent and
runner find it where they always look. The worker owns it, which is how the runner knows whom to expect, and cannot
write to it, for the mount is read-only.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from gpufn_core.errors import PlatformError

_TRIES = 100  # the runner makes one socket in it


def make(path: Path, uid: int) -> None:
    path.mkdir(parents=True, mode=0o700)
    _give(path, uid)


def furnish(path: Path, uid: int, bundle: str, engines: dict[str, tuple[str, ...]]) -> None:
    """What its worker reads. Raises PlatformError."""
    try:
        if bundle:
            _link_all(Path(bundle), path / "bundle")
        if engines:
            (path / "engines").mkdir()
            (path / "engines").chmod(0o755)
        for folder in sorted({folder for folders in engines.values() for folder in folders}):
            _link_all(Path(folder), path / "engines" / os.path.basename(folder))
    except OSError as error:
        raise PlatformError(f"Cannot give {path.name} its files: {error.strerror}.") from error


def take_place(path: Path, worker: Path, uid: int) -> None:
    """Put `path` where `worker` is, with all that is there: our files, and the socket that the runner may make there at
    any moment. Raises PlatformError."""
    for _ in range(_TRIES):
        try:
            for name in os.listdir(worker) if worker.exists() else ():
                if (path / name).is_dir():  # of a container that died as it was given this worker
                    shutil.rmtree(worker / name)
                    continue
                os.rename(worker / name, path / name)
                _give(path / name, uid)
            os.rename(path, worker)  # which succeeds when nothing is in the way
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                continue
            raise PlatformError(f"Cannot give {worker.name} its folder: {error.strerror}.") from error
        return
    raise PlatformError(f"Cannot give {worker.name} its folder: something keeps writing to it.")


def _link_all(source: Path, target: Path) -> None:
    """The same files under another name, so they are in memory once; across file systems, copies. Ours, and for
    everybody to read, for the folder above is closed."""
    for folder, _, names in os.walk(source, onerror=_raise):
        into = target / os.path.relpath(folder, source)
        into.mkdir(parents=True, exist_ok=True)
        into.chmod(0o755)
        for name in names:
            _link(Path(folder) / name, into / name)


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


def _give(path: Path, uid: int) -> None:
    if os.geteuid() == 0:
        os.chown(path, uid, uid, follow_symlinks=False)
