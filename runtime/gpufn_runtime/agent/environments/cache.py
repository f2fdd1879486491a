"""The node's environments: folders named by the digest of their image, complete or absent.

1. `get` makes an absent environment, once for all concurrent callers. It is made in a hidden folder, flushed, verified
   and renamed.
2. Environments of wheels only share their files with uv's cache, by hard links.
3. When all together are larger than the limit, first uv's cache is removed, then the environments that were used the
   longest time ago. Environments of starting and running workers stay.
4. A doubted environment (one of its workers failed to start) is verified before its next use.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec

from gpufn_core.errors import ArtifactUnavailable, GpufnError
from gpufn_core.spec.image_spec import FILES_FOLDER, ImageSpec
from gpufn_core.spec.units import format_bytes
from gpufn_platform.process.disk_use import total_bytes
from gpufn_platform.sandbox.host_paths import python_folders
from gpufn_runtime.agent.cache import folder_cache
from gpufn_runtime.agent.decide.eviction import evicted
from gpufn_runtime.agent.environments import disk
from gpufn_runtime.agent.environments.build import Build, Confinement, Limits, OnLine
from gpufn_runtime.agent.environments.environment import Environment
from gpufn_runtime.agent.environments.integrity import damage
from gpufn_runtime.agent.environments.interpreters import InstalledVersions, find_interpreter

log = logging.getLogger(__name__)

_PARTS = 4  # default: a quarter of the disk
_PYTHONS_S = 30.0  # until the node's Pythons are looked up again
_RETRY_S = 60.0  # until a prefetch that failed is tried again
_SPARE_BYTES = 256 << 20  # free space that an environment needs at least

InUse = Callable[[], set[str] | None]


class _About(msgspec.Struct, frozen=True):
    """Facts about an environment, for agents that did not make it."""

    interpreter: tuple[str, ...]


class EnvironmentCache:
    """Environments below `root`. `packages` is the folder with gpufn's packages. `find_uv` returns the path of uv.
    `in_use` returns the digests of environments that must stay, or None if they are unknown. `on_ready` is called after
    an environment was made."""

    def __init__(
        self,
        root: Path,
        *,
        packages: Path,
        find_uv: Callable[[], str | None],
        environ: Mapping[str, str],
        confinement: Confinement | None,
        limit_bytes: int | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        build_limits: Limits,
    ) -> None:
        self._root = root
        self._monotonic = monotonic
        self._installed = InstalledVersions(environ.get("PATH", os.defpath))
        self._search: asyncio.Task[None] | None = None
        self._pythons: tuple[str, ...] = ()
        self._pythons_until = 0.0
        self._environments = root / "environments"
        self._uv_cache = root / "uv"
        self._packages = os.fspath(packages)
        self._find_uv = find_uv
        self._environ = environ
        self._confinement = confinement
        self._limit_bytes = limit_bytes
        self._build_limits = build_limits
        self.in_use: InUse = lambda: None
        self.on_ready: Callable[[], None] = lambda: None
        self._tasks = folder_cache.SharedTasks("environment")
        self._listeners: dict[str, list[OnLine]] = {}
        self._known: dict[str, Environment] = {}
        self._unverified: set[str] = set()
        self._prefetching: dict[str, asyncio.Task[None]] = {}
        self._space = asyncio.Lock()
        self._active: set[str] = set()

    @property
    def has_child_processes(self) -> bool:
        return bool(self._active)

    @property
    def making(self) -> tuple[str, ...]:
        """The digests of the environments that are being made."""
        return self._tasks.names

    def pythons(self) -> tuple[str, ...]:
        """Return the versions of Python that an environment can have; none while the first search runs. A search starts
        at most twice a minute."""
        if (self._search is None or self._search.done()) and self._monotonic() >= self._pythons_until:
            self._pythons_until = self._monotonic() + _PYTHONS_S
            self._search = asyncio.create_task(self._find_pythons(), name="search for Pythons")
        return self._pythons

    async def _find_pythons(self) -> None:
        self._pythons = await asyncio.to_thread(self._installed.find)

    def sweep(self) -> None:
        """Remove the unfinished environments of an earlier agent."""
        folder_cache.sweep(self._environments)

    def find(self, image: ImageSpec) -> Environment | None:
        """Return the environment, or None if it is absent."""
        digest = image.digest
        path = self._environments / digest
        if not os.path.lexists(path / "bin" / "python"):
            self._known.pop(digest, None)
            return None
        if digest not in self._known:
            try:
                about = msgspec.json.decode(disk.facts(path).read_bytes(), type=_About)
            except (OSError, msgspec.MsgspecError):
                return None
            self._known[digest] = Environment(os.fspath(path), about.interpreter, self._packages)
        return self._known[digest]

    async def get(self, image: ImageSpec, bundle: str, on_line: OnLine) -> Environment:
        """Return the environment, and make it first if needed. `bundle` is the folder with the lock. Raises
        BuildFailed, ArtifactUnavailable."""
        digest = image.digest
        found = self.find(image)
        if found is None or digest in self._unverified:
            if on_line not in (listeners := self._listeners.setdefault(digest, [])):
                listeners.append(on_line)
            await self._tasks.run(digest, lambda _: self._ensure(image, bundle))
            if (found := self.find(image)) is None:
                raise ArtifactUnavailable("The environment was removed while a worker started. Try again.")
        with contextlib.suppress(OSError):
            disk.touch(self._environments / digest)
        return found

    def prefetch(self, image: ImageSpec, bundle: str, on_line: OnLine) -> None:
        """Make the environment in the background, if it is absent."""
        digest = image.digest
        if self.find(image) is None and digest not in self._prefetching:
            task = asyncio.create_task(self._prefetch(image, bundle, on_line), name=f"prefetch-{digest[:12]}")
            self._prefetching[digest] = task

    async def _prefetch(self, image: ImageSpec, bundle: str, on_line: OnLine) -> None:
        try:
            await self.get(image, bundle, on_line)
        except GpufnError as error:  # a start tries again, and reports the error to its callers
            log.warning("cannot make environment %s: %s", image.digest[:12], error.message)
            await asyncio.sleep(_RETRY_S)
        finally:
            self._prefetching.pop(image.digest, None)

    def recheck(self, digest: str) -> None:
        """Verify the environment before its next use."""
        self._unverified.add(digest)

    async def _ensure(self, image: ImageSpec, bundle: str) -> None:
        digest = image.digest
        path = self._environments / digest
        try:
            if self.find(image) is not None:
                if not (reason := await asyncio.to_thread(damage, path)):
                    self._unverified.discard(digest)
                    return
                log.warning("environment %s is made again: %s", digest[:12], reason)
                self._known.pop(digest, None)
                await asyncio.to_thread(folder_cache.discard, path)
            await self._make(image, bundle, path)
            self._unverified.discard(digest)
        finally:
            self._listeners.pop(digest, None)
        self.on_ready()

    async def _make(self, image: ImageSpec, bundle: str, path: Path) -> None:
        digest = image.digest
        if image.machine != (machine := platform.machine()):
            raise ArtifactUnavailable(
                f"The packages are locked for {image.machine}, and this node is {machine}: deploy with "
                f"Image.python({image.python!r}, machine={machine!r})."
            )
        await asyncio.to_thread(_check_lock, Path(bundle) / FILES_FOLDER / image.locked)
        uv = self._find_uv()
        if uv is None:
            raise ArtifactUnavailable("This node has no uv, which makes environments: run `pip install uv` there.")
        search = self._environ.get("PATH", os.defpath)
        interpreter = await asyncio.to_thread(find_interpreter, image.python, search)
        staging = folder_cache.staging_path(self._environments, digest)
        build = Build(
            spec=image,
            lock=Path(bundle) / FILES_FOLDER / image.locked,
            target=staging,
            shared=self._root,
            cache=self._uv_cache,
            uv=uv,
            interpreter=interpreter,
            confinement=self._confinement,
            environ=self._environ,
            limits=self._build_limits,
        )
        self._active.add(digest)
        log.info("making environment %s", digest[:12])
        try:
            for folder in (self._environments, self._uv_cache):
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            await self._make_room(digest)
            await asyncio.to_thread(shutil.rmtree, staging, ignore_errors=True)
            staging.mkdir(mode=0o755)
            await build.run(lambda line: self._on_line(digest, line))
            about = _About(python_folders([], (interpreter.prefix, os.path.dirname(interpreter.executable))))
            await asyncio.to_thread(_publish, staging, path, about)
        except OSError as error:
            reason = folder_cache.why_not_written(error)
            raise ArtifactUnavailable(f"Cannot store an environment in {self._root}: {reason}.") from error
        finally:
            self._active.discard(digest)
            await asyncio.to_thread(shutil.rmtree, staging, ignore_errors=True)
        log.info("environment %s is ready", digest[:12])

    def _on_line(self, digest: str, line: str) -> None:
        for listener in self._listeners.get(digest, ()):
            listener(f"packages: {line}")

    async def _make_room(self, digest: str) -> None:
        """Remove the least recently used environments until the limit is kept. Raises ArtifactUnavailable."""
        async with self._space:
            short = await asyncio.to_thread(self._short_bytes)
            if short <= 0:
                return
            if len(self._active) == 1:
                await asyncio.to_thread(shutil.rmtree, self._uv_cache, ignore_errors=True)
                self._uv_cache.mkdir(mode=0o700, exist_ok=True)
            if (short := await asyncio.to_thread(self._short_bytes)) <= 0:
                return
            in_use = self.in_use()
            all_stored = await asyncio.to_thread(disk.stored, self._environments)
            kept = {each.digest for each in all_stored} if in_use is None else in_use | self._active
            for name in evicted(all_stored, short, kept) or [e.digest for e in all_stored if e.digest not in kept]:
                log.info("removing environment %s: others need the space", name[:12])
                self._known.pop(name, None)
                await asyncio.to_thread(folder_cache.discard, self._environments / name)
                disk.facts(self._environments / name).unlink(missing_ok=True)
            if await asyncio.to_thread(self._short_bytes) > 0:
                raise ArtifactUnavailable(
                    f"There is no room for environment {digest[:12]}: the limit is {format_bytes(self._limit())} "
                    f"(GPUFN_ENVIRONMENTS_DISK), the disk has {format_bytes(self._free())} free, and environments of "
                    "running workers stay."
                )

    def _short_bytes(self) -> int:
        """Return how many bytes are missing. Walks over all files."""
        return max(total_bytes(self._root) - self._limit(), _SPARE_BYTES - self._free())

    def _limit(self) -> int:
        return shutil.disk_usage(self._root).total // _PARTS if self._limit_bytes is None else self._limit_bytes

    def _free(self) -> int:
        return shutil.disk_usage(self._root).free


def _check_lock(lock: Path) -> None:
    """Raises ArtifactUnavailable unless the file has the digest that it is named by: teams share environments."""
    try:
        digest = hashlib.sha256(lock.read_bytes()).hexdigest()
    except OSError as error:
        raise ArtifactUnavailable(f"The bundle lacks a file of its image: {error.filename}.") from error
    if digest != lock.name:
        raise ArtifactUnavailable(f"The lock in the bundle differs from its digest {lock.name[:12]}: deploy again.")


def _publish(staging: Path, path: Path, about: _About) -> None:
    shutil.rmtree(staging / ".tmp", ignore_errors=True)
    if reason := damage(staging):
        raise ArtifactUnavailable(f"The environment that uv has made is damaged: {reason}.")
    disk.write_facts(path, msgspec.json.encode(about))
    disk.touch(path)
    os.sync()  # thousands of files, many in the cache: faster than one by one
    with contextlib.suppress(FileExistsError):
        staging.rename(path)
    folder_cache.sync_folder(path.parent)


def link_packages(folder: Path, packages: Iterable[str]) -> Path:
    """Make a folder with links to gpufn's packages, and nothing else of this Python."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for package in packages:
        link = folder / os.path.basename(package)
        new = link.with_name(f".{link.name}.{os.getpid()}")
        new.unlink(missing_ok=True)
        new.symlink_to(os.path.realpath(package))
        new.replace(link)
    return folder
