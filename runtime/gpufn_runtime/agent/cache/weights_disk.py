"""Weights on a node's disk. Equal files exist once, also if several weights contain them.

files/<key>               a complete file, read-only; the key is its sha256, or stands for a place and an etag
files/.<key>.<size>.part  a file that is being fetched, or whose fetch was interrupted
folders/<digest>/         complete weights: hard links to the files

A complete file has a modification time that no writer sets. A file that a worker changed is detected by that.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Container, Iterable
from pathlib import Path

from gpufn_core.errors import ArtifactUnavailable
from gpufn_core.remove_folder import remove_tree
from gpufn_core.spec.file_tree import FileTree
from gpufn_core.spec.volume_spec import EXECUTABLE_KEY
from gpufn_core.weights import safetensors
from gpufn_runtime.agent.cache import folder_cache
from gpufn_runtime.agent.decide.eviction import StoredFiles

_COMPLETE_NS = 1_000_000_000  # the modification time of complete files
_HASH_CHUNK = 1 << 20


class WeightsDisk:
    """The files below `root`. All methods block."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._files = root / "files"
        self._folders = root / "folders"

    def sweep(self) -> None:
        """Remove folders that an earlier agent created or removed only in part."""
        for path in _list(self._folders):
            if path.name.startswith("."):
                remove_tree(path)

    def ensure(self) -> None:
        """Create the folders. Raises OSError."""
        for path in (self._files, self._folders):
            path.mkdir(parents=True, exist_ok=True)

    def find(self, spec: FileTree) -> Path | None:
        """Return the path of complete and unchanged weights, and set the time of their last use."""
        folder = self._folders / spec.digest
        if not folder.is_dir() or not all(_is_complete(folder / file.path, file.size) for file in spec.files):
            return None
        self.touch([spec.digest])
        return folder / spec.files[0].path if spec.is_file else folder

    def has_file(self, key: str, size: int) -> bool:
        return _is_complete(self._files / key, size)

    def part(self, key: str, size: int) -> PartFile:
        return PartFile(self._files / key, size)

    def publish(self, spec: FileTree) -> None:
        """Make the folder of weights whose files are all here. Raises ArtifactUnavailable for damaged content."""
        for file in spec.files:
            path = self._files / spec.key(file)
            if not file.path.endswith(safetensors.SUFFIX):
                continue
            with open(path, "rb") as content:
                damage = safetensors.damage_of(content, file.size)
            if damage is not None:
                path.unlink()
                raise ArtifactUnavailable(
                    f"{spec.source}: {file.path} is not a complete safetensors file: {damage}. Upload it again there, "
                    "then deploy again."
                )
        staging = folder_cache.staging_path(self._folders, spec.digest)
        remove_tree(staging)
        try:
            folders = {staging}
            staging.mkdir()
            for file in spec.files:
                path = staging / file.path
                path.parent.mkdir(parents=True, exist_ok=True)
                folders.update(parent for parent in path.parents if staging in parent.parents)
                os.link(self._files / spec.key(file), path)
            for folder in folders:
                folder.chmod(0o555)
                folder_cache.sync_folder(folder)
            remove_tree(self._folders / spec.digest)
            staging.rename(self._folders / spec.digest)
            folder_cache.sync_folder(self._folders)
        finally:
            remove_tree(staging)

    def stored(self) -> list[StoredFiles]:
        """List the complete weights."""
        keys = {path.stat().st_ino: (path.name, path.stat().st_size) for path in self._complete_files()}
        result = []
        for folder in _list(self._folders):
            if not folder.name.startswith("."):
                inodes = {
                    os.stat(os.path.join(base, name)).st_ino for base, _, names in os.walk(folder) for name in names
                }
                files = dict(keys[inode] for inode in inodes & keys.keys())
                result.append(StoredFiles(folder.name, folder.stat().st_mtime, files))
        return result

    def touch(self, digests: Iterable[str]) -> None:
        """Set the time of the last use."""
        for digest in digests:
            with contextlib.suppress(OSError):  # the order of removal is not worth a failure
                os.utime(self._folders / digest)

    def hide(self, digest: str) -> Path:
        """Rename weights, so that `find` does not find them. Return the folder to remove. The files stay until
        `remove_unused`."""
        path = self._folders / digest
        hidden = path.with_name(f".old.{digest}")
        remove_tree(hidden)
        with contextlib.suppress(FileNotFoundError):
            path.rename(hidden)
        return hidden

    def remove_unused(self, kept: Container[str]) -> int:
        """Remove the files that no weights contain, except those with a key in `kept`. Return their bytes."""
        freed = 0
        for path in _list(self._files):
            key = _key(path)
            if key in kept:  # it may be renamed now
                continue
            status = path.stat()
            if path.name != key or status.st_nlink == 1:
                path.unlink()
                freed += status.st_size
        return freed

    def sizes(self) -> dict[str, int]:
        """Return the size of each file on the disk, by key; of an incomplete file, the bytes that are there."""
        sizes: dict[str, int] = {}
        for path in _list(self._files):
            with contextlib.suppress(FileNotFoundError):  # it was renamed meanwhile
                sizes[_key(path)] = sizes.get(_key(path), 0) + path.stat().st_size
        return sizes

    def disk(self) -> tuple[int, int]:
        """Return the size and the free space of the disk, in bytes."""
        usage = shutil.disk_usage(next(path for path in (self._root, *self._root.parents) if path.exists()))
        return usage.total, usage.free

    def _complete_files(self) -> list[Path]:
        return [path for path in _list(self._files) if not path.name.startswith(".")]


class PartFile:
    """A file while it is fetched. It becomes `path` once it is complete and has the right digest."""

    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        self._part = path.with_name(f".{path.name}.{size}.part")  # a manifest with a wrong size has its own
        self._size = size
        self._sha256 = hashlib.sha256()
        self._file = open(self._part, "ab+")  # noqa: SIM115
        self.done = 0
        self.received = 0  # from the origin, by this object

    def resume(self) -> int:
        """Hash the bytes of an interrupted fetch. Return their number."""
        self._file.seek(0)
        while chunk := self._file.read(_HASH_CHUNK):
            self._sha256.update(chunk)
            self.done += len(chunk)
        if self.done > self._size:
            self.restart()
        return self.done

    def restart(self) -> None:
        self._file.truncate(0)
        self._sha256, self.done = hashlib.sha256(), 0

    def add(self, chunk: bytes) -> None:
        self.done += len(chunk)
        self.received += len(chunk)
        if self.done > self._size:
            raise WrongContent(f"it is longer than {self._size:,} bytes")
        self._file.write(chunk)
        self._sha256.update(chunk)

    def finish(self, digest: str) -> None:
        """Verify the content and make it durable under its name. Raises WrongContent. An empty `digest` is unknown."""
        if self.done != self._size:
            raise WrongContent(f"it has {self.done:,} bytes instead of {self._size:,}")
        if digest and self._sha256.hexdigest() != digest:
            raise WrongContent(f"its sha256 is {self._sha256.hexdigest()[:12]} instead of {digest[:12]}")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._part.chmod(0o555 if self._path.name.endswith(EXECUTABLE_KEY) else 0o444)
        os.utime(self._part, ns=(_COMPLETE_NS, _COMPLETE_NS))
        self._part.rename(self._path)
        folder_cache.sync_folder(self._path.parent)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # its buffer does not fit on a full disk
            self._file.close()

    def discard(self) -> None:
        self.close()
        self._part.unlink(missing_ok=True)


class WrongContent(Exception):
    """The origin has other bytes than the manifest says. The message completes "the file is refused: "."""


def _list(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        return []


def _key(path: Path) -> str:
    """Return the key of a complete or incomplete file."""
    return path.name.removeprefix(".").partition(".")[0]


def _is_complete(path: Path, size: int) -> bool:
    try:
        status = path.stat()
    except OSError:
        return False
    return status.st_size == size and status.st_mtime_ns == _COMPLETE_NS
