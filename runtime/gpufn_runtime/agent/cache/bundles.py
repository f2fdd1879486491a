"""Cache of the node's unpacked bundles: folders `<digest>/`, complete or absent, shared read-only between workers.

1. `get` fetches an absent bundle's archive, once for all concurrent callers.
2. It checks every name in the archive again (`gpufn_core.domain.bundle_rules`), because it trusts no archive.
3. It unpacks into a hidden folder, flushes, and renames.
4. A doubted bundle (one of its workers failed to start) is compared with its archive. Workers without a sandbox can
   change or remove files in the bundle. Byte code that the agent has not written is removed.
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
from gpufn_runtime.agent.bytecode.added import AddedBytecode
from gpufn_runtime.agent.cache import folder_cache

log = logging.getLogger(__name__)

_CHUNK = 1 << 20
_Contents = dict[str, int]  # name → checksum


class BundleCache:
    """Unpacked bundles on disk. `fetch(digest)` returns an archive's bytes."""

    def __init__(self, root: Path, fetch: Callable[[Digest], Awaitable[bytes]]) -> None:
        self._root = root
        self._fetch = fetch
        self._contents: dict[Digest, _Contents] = {}  # of the bundles fetched by this process
        self._bytecode: dict[Digest, AddedBytecode] = {}
        self._unverified: set[Digest] = set()
        self._tasks = folder_cache.SharedTasks("bundle")

    def sweep(self) -> None:
        folder_cache.sweep(self._root)

    def find(self, digest: Digest) -> Path | None:
        """Return the unpacked bundle's folder, or None if it is absent."""
        path = self._root / digest
        return path if path.is_dir() else None

    async def get(self, digest: Digest) -> Path:
        """Return the unpacked bundle's folder. Raises ArtifactUnavailable, InvalidBundle, BusUnavailable."""
        path = self.find(digest)
        if path is None or digest in self._unverified:
            await self._tasks.run(digest, self._ensure)
        return self._root / digest

    def bytecode(self, digest: Digest) -> AddedBytecode | None:
        """Return the byte code of an unpacked bundle that is not in doubt."""
        if (path := self.find(digest)) is None or digest in self._unverified:
            return None
        return self._bytecode.setdefault(digest, AddedBytecode(path))

    def recheck(self, digest: Digest) -> None:
        """Compare the bundle with its archive on the next `get`."""
        self._unverified.add(digest)

    async def keep(self, digests: Container[str]) -> None:
        """Remove all other bundles."""
        self._contents = {digest: contents for digest, contents in self._contents.items() if digest in digests}
        self._bytecode = {digest: bytecode for digest, bytecode in self._bytecode.items() if digest in digests}
        self._unverified = {digest for digest in self._unverified if digest in digests}
        await folder_cache.remove_others(self._root, digests, "bundle")

    async def _ensure(self, name: str) -> None:
        digest = Digest(name)
        path = self._root / digest
        known = self._contents.get(digest)
        if known is None or not await asyncio.to_thread(_is_intact, path, known):
            try:
                data = await self._fetch(digest)
            except ArtifactUnavailable as error:
                reason = f"Its bundle is lost or damaged ({error.message.rstrip('.')}). Deploy the function again."
                raise ArtifactUnavailable(reason) from error
            self._contents[digest] = await asyncio.to_thread(_restore, data, digest, self._root)
            self._bytecode.pop(digest, None)
        await self._check_bytecode(digest, path)
        self._unverified.discard(digest)

    async def _check_bytecode(self, digest: Digest, path: Path) -> None:
        bytecode, archived = self._bytecode.get(digest) or AddedBytecode(path), self._contents[digest]
        if not await asyncio.to_thread(bytecode.is_intact, archived):
            log.info("bundle %s has byte code of unknown origin, and is compiled again", digest[:12])
            self._bytecode.pop(digest, None)
            await asyncio.to_thread(bytecode.remove, archived)


def _restore(data: bytes, digest: Digest, root: Path) -> _Contents:
    """Make `root/<digest>` match the archive `data`. Raises like `unpack`."""
    path = root / digest
    if path.is_dir() and digest_of(data) == digest:
        contents = _contents(data)
        if _is_intact(path, contents):
            return contents
        log.warning("bundle %s was modified by a worker and is unpacked again", digest[:12])
        folder_cache.discard(path)
    unpack(data, digest, root)
    return _contents(data)


def _contents(data: bytes) -> _Contents:
    with open_bundle(data) as archive:
        return {entry.filename: entry.CRC for entry in archive.infolist() if not entry.is_dir()}


def _is_intact(path: Path, contents: _Contents) -> bool:
    try:
        return all(zlib.crc32((path / name).read_bytes()) == checksum for name, checksum in contents.items())
    except OSError:
        return False


def unpack(data: bytes, digest: Digest, root: Path) -> None:
    """Unpack the archive `data` to `root/<digest>`. Raises ArtifactUnavailable, InvalidBundle."""
    if digest_of(data) != digest:
        raise ArtifactUnavailable(f"Bundle {digest[:12]} arrived damaged: its digest is {digest_of(data)[:12]}.")
    target = root / digest
    staging = folder_cache.staging_path(root, digest)
    try:
        with open_bundle(data) as archive:
            members = [entry for entry in checked_entries(archive) if not entry.is_dir()]
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(parents=True)
            _extract(archive, members, staging)
        with contextlib.suppress(FileExistsError):
            staging.rename(target)
        folder_cache.sync_folder(root)
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError) as error:
        raise InvalidBundle(f"Bundle {digest[:12]} cannot be read: {error}.") from error
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY) and target.is_dir():
            return  # another agent with the same home was faster
        reason = folder_cache.why_not_written(error)
        raise ArtifactUnavailable(f"Cannot unpack bundle {digest[:12]} in {root}: {reason}.") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _extract(archive: zipfile.ZipFile, members: list[zipfile.ZipInfo], staging: Path) -> None:
    folders = {staging}
    for member in members:
        path = staging / PurePosixPath(member.filename)
        path.parent.mkdir(parents=True, exist_ok=True)
        folders.add(path.parent)
        # Exclusive mode, so that no member writes through a link or file that an earlier member created.
        with archive.open(member) as source, open(path, "xb") as file:
            remaining = member.file_size
            while chunk := source.read(_CHUNK):
                remaining -= len(chunk)
                if remaining < 0:
                    raise InvalidBundle(f"{member.filename!r} is larger than its archive header says.")
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        path.chmod(0o444)
    for folder in folders:
        folder_cache.sync_folder(folder)
