"""The node's unpacked bundles: `<digest>/`, whole or absent, shared read-only between workers.

1. asked for a digest that is not there, fetch the archive once, however many ask
2. check every name in it, again (`gpufn_core.domain.bundle_rules`): this process trusts no archive
3. unpack to a hidden folder, flush, rename
4. one in doubt, for a worker of it did not get ready, is compared with its archive: workers that are processes work in
   it, and may have changed or removed what is there
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

from gpufn_core.domain.bundle_rules import checked_entries, open_bundle
from gpufn_core.errors import ArtifactUnavailable, InvalidBundle
from gpufn_core.ids import Digest, digest_of
from gpufn_runtime.agent.cache import folder_cache

log = logging.getLogger(__name__)

_CHUNK = 1 << 20
_Contents = dict[str, int]  # name → checksum


class BundleCache:
    """`fetch(digest)` gets the archive's bytes."""

    def __init__(self, root: Path, fetch: Callable[[Digest], Awaitable[bytes]]) -> None:
        self._root = root
        self._fetch = fetch
        self._contents: dict[Digest, _Contents] = {}  # of those that were fetched
        self._doubted: set[Digest] = set()
        self._under_way = folder_cache.UnderWay("bundle")

    def sweep(self) -> None:
        folder_cache.sweep(self._root)

    def find(self, digest: Digest) -> Path | None:
        """The unpacked bundle, if it is here."""
        path = self._root / digest
        return path if path.is_dir() else None

    async def get(self, digest: Digest) -> Path:
        """The unpacked bundle. Raises ArtifactUnavailable, InvalidBundle, BusUnavailable."""
        path = self.find(digest)
        if path is None or digest in self._doubted:
            await self._under_way.bring(digest, self._bring)
        return self._root / digest

    def doubt(self, digest: Digest) -> None:
        """Compare it with its archive when it is asked for."""
        self._doubted.add(digest)

    async def keep(self, digests: Container[str]) -> None:
        """Remove all others."""
        self._contents = {digest: contents for digest, contents in self._contents.items() if digest in digests}
        self._doubted = {digest for digest in self._doubted if digest in digests}
        await folder_cache.remove_others(self._root, digests, "bundle")

    async def _bring(self, name: str) -> None:
        digest = Digest(name)
        path = self._root / digest
        known = self._contents.get(digest)
        if known is None or not await asyncio.to_thread(_is_whole, path, known):
            try:
                data = await self._fetch(digest)
            except ArtifactUnavailable as error:
                why = f"its bundle is lost or damaged ({error.message.rstrip('.')}): deploy the function again"
                raise ArtifactUnavailable(why) from error
            self._contents[digest] = await asyncio.to_thread(_restore, data, digest, self._root)
        self._doubted.discard(digest)


def _restore(data: bytes, digest: Digest, root: Path) -> _Contents:
    """Have the archive `data` unpacked at `root/<digest>`, whatever is there. Raises as `unpack`."""
    path = root / digest
    if path.is_dir() and digest_of(data) == digest:
        with open_bundle(data) as archive:
            contents = _contents(archive)
        if _is_whole(path, contents):
            return contents
        log.warning("bundle %s was changed by what ran in it, and is unpacked again", digest[:12])
        folder_cache.discard(path)
    unpack(data, digest, root)
    with open_bundle(data) as archive:
        return _contents(archive)


def _contents(archive: zipfile.ZipFile) -> _Contents:
    return {entry.filename: entry.CRC for entry in archive.infolist() if not entry.is_dir()}


def _is_whole(path: Path, contents: _Contents) -> bool:
    try:
        return all(zlib.crc32((path / name).read_bytes()) == checksum for name, checksum in contents.items())
    except OSError:
        return False


def unpack(data: bytes, digest: Digest, root: Path) -> None:
    """Unpack the archive `data` to `root/<digest>`. Raises ArtifactUnavailable, InvalidBundle."""
    if digest_of(data) != digest:
        raise ArtifactUnavailable(f"Bundle {digest[:12]} arrived damaged: its digest is {digest_of(data)[:12]}.")
    target = root / digest
    part = folder_cache.being_made(root, digest)
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
        why = folder_cache.why_not_written(error)
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
