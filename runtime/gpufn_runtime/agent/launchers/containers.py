"""Workers in containers: each in one of its own, which waits for it if possible.

1. a container is made with an empty folder, a uid of its own, and a process that imports what its worker will need
2. as a standby it is paused then; `run` keeps one for each use that is worth it
3. `launch` takes a standby with the same image and limits, or makes a container now; the worker's files go into its
   folder, the folder takes the place of the worker's, and the process is told to become the worker
4. containers that are nobody's are removed, whatever made them: those of an earlier agent, and what a failure left

The daemon's word is taken for what exists, never an event: `run` compares, at each poke and each _SWEEP_S.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec

from gpufn.errors import GpufnError, PlatformError
from gpufn.home import Home
from gpufn.image import ImageSpec
from gpufn.protocol.launch import CONTROL_NAME, ForkRequest, TemplateReady
from gpufn_runtime.agent import processes, standbys
from gpufn_runtime.agent.images import Images
from gpufn_runtime.agent.launchers import container_folder
from gpufn_runtime.agent.launchers.base import ContainerEnd, DaemonAway, Launched, LaunchOrder
from gpufn_runtime.agent.launchers.sandbox import WORKER, Limits, Sandbox, inside, sandbox
from gpufn_runtime.agent.standbys import ContainerUse, ModuleSet

log = logging.getLogger(__name__)

_READY_TIMEOUT_S = 120.0  # torch on a cold disk takes 20 s and more
_SWEEP_S = 10.0
_AFTER_LAUNCH_S = 1.0  # the worker that has just been launched has a start to get through
_END_TIMEOUT_S = 5.0
_MOST_FAILURES = 3
_LONGEST_LINE = 1 << 20
_UIDS = range(1_900_000_000, 2_000_000_000)  # that no system gives out; so many that two are never the same

# (function, revision, line): a line of what making an image says, for the function's log.
Say = Callable[[str, int, str], None]


class Daemon(Protocol):
    """What is asked of `docker.Docker`."""

    async def create(self, name: str, image: str, sandbox: Sandbox, labels: Mapping[str, str]) -> str: ...
    async def start(self, container: str) -> int: ...
    async def pause(self, container: str) -> None: ...
    async def unpause(self, container: str) -> None: ...
    async def end_of(self, container: str) -> ContainerEnd: ...
    async def output_of(self, container: str) -> str: ...
    async def remove(self, container: str) -> None: ...
    async def containers(self, labels: Mapping[str, str]) -> set[str]: ...


@dataclass(frozen=True)
class Kind:
    """What a container is made with and cannot change."""

    image: str
    limits: Limits


@dataclass(eq=False)
class _Container:
    """One that has no worker yet."""

    kind: Kind
    modules: ModuleSet
    name: str
    uid: int
    folder: Path
    parcels: Path
    control: _Control
    id: str = ""
    pid: int = 0
    is_paused: bool = False
    covers: ModuleSet = field(default_factory=frozenset)


class ContainerLauncher:
    """`limit` standbys at most. `owner` labels our containers; `packages` are the folders of our packages here."""

    def __init__(
        self,
        daemon: Daemon,
        images: Images,
        *,
        home: Home,
        owner: Mapping[str, str],
        limit: int,
        packages: Sequence[str],
        say: Say,
    ) -> None:
        self._daemon = daemon
        self._images = images
        self._home = home
        self._owner = owner
        self._limit = limit
        self._packages = packages
        self._say = say
        self._standbys: list[_Container] = []
        self._making: set[str] = set()  # folders' names
        self._in_use: set[str] = set()  # ids
        self._ended: set[str] = set()  # and not removed yet
        self._uses: tuple[ContainerUse, ...] = ()
        self._failures: dict[tuple[Kind, ModuleSet], int] = {}
        self._prepared: dict[ImageSpec, asyncio.Task[None]] = {}  # being built, or could not be
        self._may_sweep = False
        self._launches = 0
        self._poke = asyncio.Event()
        self._settled = asyncio.Event()
        self.trouble = ""  # why the daemon makes no containers now, as far as is known

    @property
    def standbys(self) -> tuple[str, ...]:
        return tuple(f"{each.kind.image} {','.join(sorted(each.modules))}".strip() for each in self._standbys)

    def want(self, uses: Iterable[ContainerUse]) -> None:
        wanted = tuple(uses)
        if wanted != self._uses:
            self._uses = wanted
            self._failures.clear()
            for image in [image for image, task in self._prepared.items() if task.done()]:
                del self._prepared[image]
            self._review()

    def keep_images(self, images: Iterable[ImageSpec]) -> None:
        self._images.keep(images)
        self._review()

    def take_over(self, containers: Iterable[str]) -> None:
        """Those that have workers of ours. From now on all others are removed."""
        self._in_use.update(containers)
        self._may_sweep = True
        self._review()

    def let_go(self, container: str) -> None:
        """Its worker is gone."""
        self._in_use.discard(container)
        self._ended.add(container)
        self._review()

    async def end_of(self, container: str) -> ContainerEnd:
        """Raises PlatformError when the daemon cannot tell."""
        return await self._daemon.end_of(container)

    async def settled(self) -> None:
        """Return once every standby that is worth having is there, or given up, and nothing is left to remove."""
        await self._settled.wait()

    async def run(self) -> None:
        """Make standbys and remove what is nobody's, until cancelled; then remove all that has no worker."""
        has_warned_of = ""
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_SWEEP_S):
                        await self._poke.wait()
                self._poke.clear()
                try:
                    await self._step()
                except PlatformError as error:
                    self._note(error)
                    # A node may have no Docker, and need none.
                    if error.message != has_warned_of and (self._uses or self._in_use):
                        log.warning("containers are not looked after: %s", error.message)
                        has_warned_of = error.message
                except Exception:
                    log.exception("containers are not looked after, again in %g s", _SWEEP_S)
                else:
                    has_warned_of = ""
                    if not self._poke.is_set():
                        self._settled.set()
        finally:
            for task in self._prepared.values():
                task.cancel()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_END_TIMEOUT_S):
                    await self._clear()

    async def _clear(self) -> None:
        """Leave nothing but what workers live in. What cannot be removed now, the next agent removes."""
        removing = [self._discard(standby) for standby in list(self._standbys)]
        removing += [self._daemon.remove(container) for container in self._ended]
        await asyncio.gather(*removing, return_exceptions=True)

    async def launch(self, order: LaunchOrder) -> Launched:
        """Raises BuildFailed, PlatformError."""
        assert order.image is not None
        told = order.told
        limits = limits_of(order)
        self._launches += 1
        try:
            if (standby := self._take(Kind(self._images.tag(order.image), limits), order.modules)) is not None:
                try:
                    return await self._hand_over(standby, order, is_standby=True)
                except PlatformError as error:
                    log.warning("%s starts from nothing: its standby is gone: %s", order.worker, error.message)
            its_log = _LogOf(self._say, told.function, told.revision)
            image = await self._images.get(order.image, told.bundle_dir, its_log)
            return await self._hand_over(await self._make(Kind(image, limits), order.modules), order, is_standby=False)
        except PlatformError as error:
            self._note(error)
            raise
        finally:
            asyncio.get_running_loop().call_later(_AFTER_LAUNCH_S, self._launched)

    # --- launching ----------------------------------------------------------------------------------------------------

    def _take(self, kind: Kind, modules: ModuleSet) -> _Container | None:
        """One that has nothing in memory that the worker does not need, for that counts as the worker's."""
        fitting = [each for each in self._standbys if each.kind == kind]
        covers = standbys.closest((each.modules for each in fitting), modules)
        found = next((each for each in fitting if each.modules == covers), None)
        if found is not None:
            self._standbys.remove(found)
            self._making.add(found.name)
        return found

    async def _hand_over(self, container: _Container, order: LaunchOrder, *, is_standby: bool) -> Launched:
        try:
            if container.is_paused:
                await asyncio.gather(self._daemon.unpause(container.id), self._furnish(container, order))
            else:
                await self._furnish(container, order)
            request = ForkRequest(f"{WORKER}/{order.config.name}", f"{WORKER}/{order.output.name}", order.environment)
            container.control.send(request)
        except BaseException:
            await self._abandon(container)
            raise
        container.control.close()
        self._in_use.add(container.id)
        self._making.discard(container.name)
        return Launched(container.pid, is_standby, container.id)

    async def _furnish(self, container: _Container, order: LaunchOrder) -> None:
        def furnish() -> None:
            folder, uid, told = container.folder, container.uid, order.told
            order.config.write_bytes(msgspec.json.encode(inside(told)))
            container_folder.furnish(folder, uid, told.bundle_dir, told.engines)
            container_folder.take_place(folder, order.folder, uid)
            container_folder.take_place(container.parcels, Path(told.parcels), uid)

        await asyncio.to_thread(furnish)

    async def _make(self, kind: Kind, modules: ModuleSet) -> _Container:
        """A container whose process waits for a request. Raises PlatformError."""
        name = f"c-{secrets.token_hex(6)}"
        uid = _uid_for(kind.limits)
        folder, parcels = self._folders / name, self._home.parcels / name
        self._making.add(name)
        container = _Container(kind, modules, name, uid, folder, parcels, _Control(folder / CONTROL_NAME))
        try:
            container_folder.make(folder, uid)
            container_folder.make(parcels, uid)
            await container.control.listen()
            confined = sandbox(
                kind.limits, uid=uid, folder=folder, parcels=parcels, packages=self._packages, modules=modules
            )
            container.id = await self._daemon.create(f"gpufn-{name}", kind.image, confined, self._owner)
            container.pid = await self._daemon.start(container.id)
            ready = await self._ready(container)
            container.covers = modules | frozenset(ready.modules)
        except BaseException as error:
            await self._abandon(container)
            if isinstance(error, OSError):
                raise PlatformError(f"Cannot make the folder of a container: {error}.") from error
            raise
        return container

    async def _ready(self, container: _Container) -> TemplateReady:
        ready = asyncio.create_task(container.control.ready(), name=f"ready-{container.name}")
        ended = asyncio.create_task(_end_of(container.pid), name=f"ended-{container.name}")
        try:
            async with asyncio.timeout(_READY_TIMEOUT_S):
                await asyncio.wait([ready, ended], return_when=asyncio.FIRST_COMPLETED)
            if ready.done() and ready.exception() is None:
                return ready.result()
            output = await self._daemon.output_of(container.id)
            raise PlatformError(f"A container of {container.kind.image} ended at once: {output or 'it said nothing'}")
        except TimeoutError:
            raise PlatformError(
                f"A container of {container.kind.image} was not ready in {_READY_TIMEOUT_S:g} s."
            ) from None
        finally:
            for task in (ready, ended):
                task.cancel()

    async def _abandon(self, container: _Container) -> None:
        """Remove all of it; what cannot be removed now is nobody's, and removed later."""
        container.control.close()
        try:
            if container.id:
                with contextlib.suppress(GpufnError):
                    await asyncio.shield(self._daemon.remove(container.id))
        finally:
            self._making.discard(container.name)
            self._in_use.discard(container.id)
            for path in (container.folder, container.parcels):
                shutil.rmtree(path, ignore_errors=True)
            self._review()

    # --- looking after ------------------------------------------------------------------------------------------------

    @property
    def _folders(self) -> Path:
        return self._home.run / "c"

    async def _step(self) -> None:
        for standby in list(self._standbys):
            if not standby.control.is_open:
                log.warning("a standby of %s is gone", standby.kind.image)
                await self._discard(standby)
        if self._may_sweep:
            await self._sweep()
        await self._images.collect()
        if self._launches:
            return
        wanted = await self._wanted()
        for standby in list(self._standbys):
            if (standby.kind, standby.modules) not in wanted:
                await self._discard(standby)
        have = {(standby.kind, standby.modules) for standby in self._standbys}
        for kind, modules in wanted:
            if (kind, modules) not in have and not self._launches:
                await self._add(kind, modules)

    async def _wanted(self) -> list[tuple[Kind, ModuleSet]]:
        """At most `limit`, those used last first. An image that is not there yet is built meanwhile."""
        wanted: dict[tuple[Kind, ModuleSet], None] = {}
        for use in sorted(self._uses, key=lambda use: -use.last_used_at):
            tag = await self._images.find(use.image)
            if tag is None:
                self._prepare(use)
            elif use.limits is not None:
                wanted[Kind(tag, use.limits), use.modules] = None
        given_up = {which for which, count in self._failures.items() if count >= _MOST_FAILURES}
        return [which for which in wanted if which not in given_up][: self._limit]

    def _prepare(self, use: ContainerUse) -> None:
        """Build the image of what is deployed, once: after a failure its launch tries again, and tells who waits."""
        if use.image not in self._prepared:
            self._prepared[use.image] = asyncio.create_task(self._build(use), name=f"image-of-{use.function}")

    async def _build(self, use: ContainerUse) -> None:
        try:
            await self._images.get(use.image, use.bundle, _LogOf(self._say, use.function, use.revision))
        except GpufnError as error:
            self._say(use.function, use.revision, f"image: {error.message}")
        else:
            self._prepared.pop(use.image, None)
            self._review()

    async def _add(self, kind: Kind, modules: ModuleSet) -> None:
        try:
            standby = await self._make(kind, modules)
        except PlatformError as error:
            count = self._failures[kind, modules] = self._failures.get((kind, modules), 0) + 1
            log.warning("no standby of %s (%d of %d): %s", kind.image, count, _MOST_FAILURES, error.message)
            return
        try:
            await self._daemon.pause(standby.id)
        except PlatformError:
            await self._abandon(standby)
            raise
        standby.is_paused = True
        standby.control.on_gone = self._review
        self._standbys.append(standby)
        self._making.discard(standby.name)
        log.info("a standby of %s [%s] is ready", kind.image, ",".join(sorted(modules)))

    async def _discard(self, standby: _Container) -> None:
        if standby in self._standbys:
            self._standbys.remove(standby)
            await self._abandon(standby)

    async def _sweep(self) -> None:
        """Remove containers and folders that are nobody's: what a crash, or a daemon that went away, has left."""
        found = await self._daemon.containers(self._owner)
        self.trouble = ""
        if self._making:
            return  # one of them may be among those found, and is not known by its id yet
        for container in found - self._in_use - {standby.id for standby in self._standbys}:
            if container not in self._ended:
                log.info("container %s is nobody's and is removed", container[:12])
            await self._daemon.remove(container)
        self._ended &= found
        names = {standby.name for standby in self._standbys} | self._making
        for folder in (self._folders, self._home.parcels):
            for path in folder.glob("c-*"):
                if path.name not in names:
                    shutil.rmtree(path, ignore_errors=True)

    def _note(self, error: PlatformError) -> None:
        if isinstance(error, DaemonAway):
            self.trouble = error.message.rstrip(".")

    def _launched(self) -> None:
        self._launches -= 1
        self._review()

    def _review(self) -> None:
        self._settled.clear()
        self._poke.set()


@dataclass(frozen=True)
class _LogOf:
    """A revision's log: one listener, however often it listens."""

    say: Say
    function: str
    revision: int

    def __call__(self, line: str) -> None:
        self.say(self.function, self.revision, line)


def limits_of(order: LaunchOrder) -> Limits:
    memory = order.told.memory_limit_bytes
    assert memory is not None, "a container holds its worker to its memory"
    return Limits(memory, order.told.spec.resources.cpu, order.told.spec.egress, order.gpus, order.mps)


def _uid_for(limits: Limits) -> int:
    """One of its own, unless it is a client of MPS: a daemon's clients are one user's."""
    if limits.mps is not None:
        return limits.mps.uid
    return random.choice(_UIDS) if os.geteuid() == 0 else os.getuid()  # noqa: S311


async def _end_of(pid: int) -> None:
    """Return when the process is gone."""
    process = processes.identify(pid)
    pidfd = processes.open_pidfd(process) if process else None
    if pidfd is None:
        return
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(pidfd, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


class _Control(asyncio.Protocol):
    """The one connection of a container's process: TemplateReady in, ForkRequest out."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._server: asyncio.Server | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._buffer = bytearray()
        self._ready: asyncio.Future[TemplateReady] = asyncio.get_running_loop().create_future()
        self.is_open = True
        self.on_gone: Callable[[], None] = lambda: None

    async def listen(self) -> None:
        self._server = await asyncio.get_running_loop().create_unix_server(lambda: self, str(self._path))
        self._path.chmod(0o666)  # the folder is closed to all but its owner

    async def ready(self) -> TemplateReady:
        """Raises PlatformError."""
        return await asyncio.shield(self._ready)

    def send(self, request: ForkRequest) -> None:
        """Raises PlatformError."""
        if not self.is_open or self._transport is None:
            raise PlatformError("Its process has gone away.")
        self._transport.write(msgspec.json.encode(request) + b"\n")

    def close(self) -> None:
        self.on_gone = lambda: None
        self.is_open = False
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._transport is not None:
            self._transport.close()  # after what was written
        if not self._ready.done():
            self._ready.cancel()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport
        if self._server is not None:  # one connection, for its worker's code will run there as well
            self._server.close()
            self._server = None

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        line, end, _ = self._buffer.partition(b"\n")
        if self._ready.done() or not (end or len(self._buffer) > _LONGEST_LINE):
            return
        try:
            self._ready.set_result(msgspec.json.decode(line, type=TemplateReady))
        except msgspec.DecodeError as error:
            self._ready.set_exception(PlatformError(f"Its process does not speak as agreed: {error}."))

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if not self._ready.done():
            self._ready.set_exception(PlatformError("Its process has ended."))
        self.on_gone()
