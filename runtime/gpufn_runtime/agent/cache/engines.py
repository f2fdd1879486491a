"""The node's engines: `<EngineKey>/`, whole or absent, shared read-only between workers.

1. asked for a key, look whether its folder is here and what it was when last checked
2. else check the digests of all that its manifest names, once, however many ask
3. what is absent or damaged is fetched: files first, into a hidden folder, then the manifest; rename
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import shutil
from collections.abc import Awaitable, Callable, Container, Iterable
from pathlib import Path

import msgspec

from gpufn_core.domain.engine import MANIFEST_FILE, EngineManifest
from gpufn_core.errors import ArtifactUnavailable
from gpufn_runtime.agent.cache import folder_cache

log = logging.getLogger(__name__)

_manifest = msgspec.json.Decoder(EngineManifest)
_Marks = tuple[tuple[str, int, int], ...]  # of each file: name, size, time of its last change


class EngineCache:
    """`find(key)` gets a published manifest, `fetch(digest, path)` writes one file and checks its digest."""

    def __init__(
        self,
        root: Path,
        find: Callable[[str], Awaitable[EngineManifest | None]],
        fetch: Callable[[str, Path], Awaitable[None]],
    ) -> None:
        self._root = root
        self._find = find
        self._fetch = fetch
        self._checked: dict[str, _Marks] = {}
        self._under_way = folder_cache.UnderWay("engine")

    def sweep(self) -> None:
        folder_cache.sweep(self._root)

    async def get(self, key: str) -> Path:
        """The engine's folder. Raises ArtifactUnavailable, BusUnavailable."""
        path = self._root / key
        if key not in self._checked or self._checked[key] != _marks(path):
            await self._under_way.bring(key, self._bring)
        return path

    def doubt(self, keys: Iterable[str]) -> None:
        """Check their digests again when they are asked for: a disk may lose bytes without a change of size or time."""
        for key in keys:
            self._checked.pop(key, None)

    async def keep(self, keys: Container[str]) -> None:
        """Remove all others."""
        self._checked = {key: marks for key, marks in self._checked.items() if key in keys}
        await folder_cache.remove_others(self._root, keys, "engine")

    async def _bring(self, key: str) -> None:
        target = self._root / key
        flaw = await asyncio.to_thread(_flaw, target)
        if flaw is not None:
            if flaw:
                log.warning("engine %s is fetched again: %s", key[:12], flaw)
            await self._download(key, target)
        self._checked[key] = _marks(target) or ()

    async def _download(self, key: str, target: Path) -> None:
        manifest = await self._find(key)
        if manifest is None:
            raise ArtifactUnavailable(f"There is no engine {key[:12]} any more: deploy the function again.")
        part = folder_cache.being_made(self._root, key)
        try:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            for file in manifest.files:
                await self._fetch(file.digest, part / file.name)
                (part / file.name).chmod(0o444)
            (part / MANIFEST_FILE).write_bytes(msgspec.json.encode(manifest))
            await asyncio.to_thread(shutil.rmtree, target, ignore_errors=True)
            part.rename(target)
        except OSError as error:
            why = folder_cache.why_not_written(error)
            raise ArtifactUnavailable(f"Cannot store engine {key[:12]} below {self._root}: {why}.") from error
        finally:
            shutil.rmtree(part, ignore_errors=True)


def _flaw(path: Path) -> str | None:
    """What is wrong with the engine at `path`: None is nothing, empty that there is none."""
    if not path.is_dir():
        return ""
    try:
        for file in _manifest.decode((path / MANIFEST_FILE).read_bytes()).files:
            with open(path / file.name, "rb") as content:
                if hashlib.file_digest(content, "sha256").hexdigest() != file.digest:
                    return f"{file.name} is damaged"
    except (OSError, msgspec.DecodeError) as error:
        return str(error)
    return None


def _marks(path: Path) -> _Marks | None:
    """None when it is not here."""
    try:
        return tuple(sorted((file.name, *_size_and_time(file)) for file in path.iterdir()))
    except OSError:
        return None


def _size_and_time(file: Path) -> tuple[int, int]:
    found = file.stat()
    return found.st_size, found.st_mtime_ns
