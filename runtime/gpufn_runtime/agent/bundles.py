"""The node's unpacked bundles: `<digest>/`, whole or absent, shared read-only between workers.

1. asked for a digest that is not there, fetch the archive once, however many ask
2. check every name in it, again: this process trusts no archive
3. unpack to a hidden folder, flush, rename
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import logging
import os
import shutil
import stat
import zipfile
from collections.abc import Awaitable, Callable
from pathlib import Path, PurePosixPath

from gpufn.errors import ArtifactUnavailable, InvalidBundle
from gpufn.ids import Digest, digest_of

log = logging.getLogger(__name__)

_MOST_BYTES = 2 << 30
_MOST_FILES = 50_000
_CHUNK = 1 << 20


class BundleCache:
    """`fetch(digest)` gets the archive's bytes."""

    def __init__(self, root: Path, fetch: Callable[[Digest], Awaitable[bytes]]) -> None:
        self._root = root
        self._fetch = fetch
        self._present: set[Digest] = set()
        self._under_way: dict[Digest, asyncio.Task[None]] = {}

    def sweep(self) -> None:
        """Remove what an earlier agent left half unpacked."""
        with contextlib.suppress(FileNotFoundError):
            for path in self._root.iterdir():
                if path.name.startswith("."):
                    shutil.rmtree(path, ignore_errors=True)

    def find(self, digest: Digest) -> Path | None:
        """The unpacked bundle, if it is here."""
        path = self._root / digest
        if digest not in self._present:
            if not path.is_dir():
                return None
            self._present.add(digest)
        return path

    async def get(self, digest: Digest) -> Path:
        """The unpacked bundle. Raises ArtifactUnavailable, InvalidBundle, BusUnavailable."""
        if (path := self.find(digest)) is not None:
            return path
        task = self._under_way.get(digest)
        if task is None:
            task = asyncio.create_task(self._bring(digest), name=f"bundle-{digest[:12]}")
            self._under_way[digest] = task
            task.add_done_callback(lambda _: self._under_way.pop(digest, None))
        await asyncio.shield(task)
        return self._root / digest

    async def _bring(self, digest: Digest) -> None:
        data = await self._fetch(digest)
        await asyncio.to_thread(unpack, data, digest, self._root)
        self._present.add(digest)


def unpack(data: bytes, digest: Digest, root: Path) -> None:
    """Unpack the archive `data` to `root/<digest>`. Raises ArtifactUnavailable, InvalidBundle."""
    if digest_of(data) != digest:
        raise ArtifactUnavailable(f"Bundle {digest[:12]} arrived damaged: its digest is {digest_of(data)[:12]}.")
    target = root / digest
    part = root / f".{digest}.{os.getpid()}"
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = checked_members(archive)
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            _extract(archive, members, part)
        with contextlib.suppress(FileExistsError):
            part.rename(target)
        _sync_folder(root)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:
        raise InvalidBundle(f"Bundle {digest[:12]} cannot be read: {error}.") from error
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY) and target.is_dir():
            return  # another agent of this home was faster
        why = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror
        raise ArtifactUnavailable(f"Cannot unpack bundle {digest[:12]} below {root}: {why}.") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def checked_members(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """Every file of the archive. Raises InvalidBundle for names that leave the folder, links, and duplicates."""
    members = archive.infolist()
    if len(members) > _MOST_FILES:
        raise InvalidBundle(f"The bundle has {len(members):,} files; {_MOST_FILES:,} are allowed.")
    total = sum(member.file_size for member in members)
    if total > _MOST_BYTES:
        raise InvalidBundle(f"The bundle holds {total:,} bytes unpacked; {_MOST_BYTES:,} are allowed.")
    seen: set[PurePosixPath] = set()
    for member in members:
        name = member.filename
        path = PurePosixPath(name)
        if not path.parts or path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name:
            raise InvalidBundle(f"The bundle has a file outside of itself: {name!r}.")
        kind = stat.S_IFMT(member.external_attr >> 16)
        if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
            raise InvalidBundle(f"The bundle has something that is neither file nor folder: {name!r}.")
        if path in seen:
            raise InvalidBundle(f"The bundle has {name!r} twice.")
        seen.add(path)
    return [member for member in members if not member.is_dir()]


def _extract(archive: zipfile.ZipFile, members: list[zipfile.ZipInfo], part: Path) -> None:
    folders = {part}
    for member in members:
        path = part / PurePosixPath(member.filename)
        path.parent.mkdir(parents=True, exist_ok=True)
        folders.add(path.parent)
        # Exclusive, so that nothing is ever written through what an earlier member made.
        with archive.open(member) as source, open(path, "xb") as file:
            left = member.file_size
            while chunk := source.read(_CHUNK):
                left -= len(chunk)
                if left < 0:
                    raise InvalidBundle(f"{member.filename!r} is larger than the archive says.")
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        path.chmod(0o444)
    for folder in folders:
        _sync_folder(folder)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
