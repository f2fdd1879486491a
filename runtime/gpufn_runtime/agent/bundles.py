"""The node's unpacked bundles: `<digest>/`, whole or absent, shared read-only between workers.

1. asked for a digest that is not there, fetch the archive once, however many ask
2. check every name in it, again (`gpufn.bundle_rules`): this process trusts no archive
3. unpack to a hidden folder, flush, rename
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import shutil
import zipfile
import zlib
from collections.abc import Awaitable, Callable, Container
from pathlib import Path, PurePosixPath

from gpufn.bundle_rules import checked_entries, open_bundle
from gpufn.errors import ArtifactUnavailable, InvalidBundle
from gpufn.ids import Digest, digest_of
from gpufn_runtime.agent import cache

log = logging.getLogger(__name__)

_CHUNK = 1 << 20


class BundleCache:
    """`fetch(digest)` gets the archive's bytes."""

    def __init__(self, root: Path, fetch: Callable[[Digest], Awaitable[bytes]]) -> None:
        self._root = root
        self._fetch = fetch
        self._present: set[Digest] = set()
        self._under_way = cache.UnderWay("bundle")

    def sweep(self) -> None:
        cache.sweep(self._root)

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
        await self._under_way.bring(digest, self._bring)
        return self._root / digest

    async def keep(self, digests: Container[str]) -> None:
        """Remove all others."""
        self._present = {digest for digest in self._present if digest in digests}
        await cache.remove_others(self._root, digests, "bundle")

    async def _bring(self, name: str) -> None:
        digest = Digest(name)
        data = await self._fetch(digest)
        await asyncio.to_thread(unpack, data, digest, self._root)
        self._present.add(digest)


def unpack(data: bytes, digest: Digest, root: Path) -> None:
    """Unpack the archive `data` to `root/<digest>`. Raises ArtifactUnavailable, InvalidBundle."""
    if digest_of(data) != digest:
        raise ArtifactUnavailable(f"Bundle {digest[:12]} arrived damaged: its digest is {digest_of(data)[:12]}.")
    target = root / digest
    part = cache.being_made(root, digest)
    try:
        with open_bundle(data) as archive:
            members = [entry for entry in checked_entries(archive) if not entry.is_dir()]
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            _extract(archive, members, part)
        with contextlib.suppress(FileExistsError):
            part.rename(target)
        _sync_folder(root)
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError) as error:
        raise InvalidBundle(f"Bundle {digest[:12]} cannot be read: {error}.") from error
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY) and target.is_dir():
            return  # another agent of this home was faster
        why = cache.why_not_written(error)
        raise ArtifactUnavailable(f"Cannot unpack bundle {digest[:12]} below {root}: {why}.") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


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
