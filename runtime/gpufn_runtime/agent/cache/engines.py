"""Cache of the node's engines: folders `<EngineKey>/`, complete or absent, shared read-only between workers.

1. `get` compares the folder's file sizes and times with those of the last check.
2. If they differ, it checks the digests of all files in the manifest, once for all concurrent callers.
3. If the engine is absent or damaged, it fetches the files into a hidden folder, adds the manifest, and renames.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import shutil
from collections.abc import Awaitable, Callable, Container, Iterable
from pathlib import Path

import msgspec

from gpufn_core.domain.devices.engine import MANIFEST_FILE, EngineManifest
from gpufn_core.errors import ArtifactUnavailable
from gpufn_runtime.agent.cache import folder_cache

log = logging.getLogger(__name__)

_manifest = msgspec.json.Decoder(EngineManifest)
_FileStats = tuple[tuple[str, int, int], ...]  # for each file: name, size, modification time


class EngineCache:
    """Engines on disk. `find(key)` returns a published manifest. `fetch(digest, path)` writes one file and checks its
    digest."""

    def __init__(
        self,
        root: Path,
        find: Callable[[str], Awaitable[EngineManifest | None]],
        fetch: Callable[[str, Path], Awaitable[None]],
    ) -> None:
        self._root = root
        self._find = find
        self._fetch = fetch
        self._checked: dict[str, _FileStats] = {}
        self._tasks = folder_cache.SharedTasks("engine")

    def sweep(self) -> None:
        folder_cache.sweep(self._root)

    async def get(self, key: str) -> Path:
        """Return the engine's folder. Raises ArtifactUnavailable, BusUnavailable."""
        path = self._root / key
        if key not in self._checked or self._checked[key] != _file_stats(path):
            await self._tasks.run(key, self._ensure)
        return path

    def recheck(self, keys: Iterable[str]) -> None:
        """Check the digests on the next `get`. A disk can lose bytes without a change of size or time."""
        for key in keys:
            self._checked.pop(key, None)

    async def keep(self, keys: Container[str]) -> None:
        """Remove all other engines."""
        self._checked = {key: stats for key, stats in self._checked.items() if key in keys}
        await folder_cache.remove_others(self._root, keys, "engine")

    async def _ensure(self, key: str) -> None:
        target = self._root / key
        damage = await asyncio.to_thread(_find_damage, target)
        if damage is not None:
            if damage:
                log.warning("engine %s is damaged and is fetched again: %s", key[:12], damage)
            await self._download(key, target)
        self._checked[key] = _file_stats(target) or ()

    async def _download(self, key: str, target: Path) -> None:
        manifest = await self._find(key)
        if manifest is None:
            raise ArtifactUnavailable(f"Engine {key[:12]} no longer exists. Deploy the function again.")
        staging = folder_cache.staging_path(self._root, key)
        try:
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(parents=True)
            for file in manifest.files:
                await self._fetch(file.digest, staging / file.name)
                (staging / file.name).chmod(0o444)
            (staging / MANIFEST_FILE).write_bytes(msgspec.json.encode(manifest))
            await asyncio.to_thread(shutil.rmtree, target, ignore_errors=True)
            staging.rename(target)
        except OSError as error:
            reason = folder_cache.why_not_written(error)
            raise ArtifactUnavailable(f"Cannot store engine {key[:12]} in {self._root}: {reason}.") from error
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def _find_damage(path: Path) -> str | None:
    """Return what is wrong with the engine at `path`: None if it is intact, "" if it is absent."""
    if not path.is_dir():
        return ""
    try:
        for file in _manifest.decode((path / MANIFEST_FILE).read_bytes()).files:
            with open(path / file.name, "rb") as content:
                if hashlib.file_digest(content, "sha256").hexdigest() != file.digest:
                    return f"{file.name} has the wrong digest"
    except (OSError, msgspec.DecodeError) as error:
        return str(error)
    return None


def _file_stats(path: Path) -> _FileStats | None:
    """Return name, size and modification time of the folder's files, or None if the folder is absent."""
    try:
        with os.scandir(path) as files:
            return tuple(sorted((file.name, (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files))
    except OSError:
        return None
