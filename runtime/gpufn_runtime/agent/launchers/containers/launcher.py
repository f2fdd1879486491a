"""Workers in containers: each in one of its own, which waits for it if possible.

1. `run` keeps standbys, each for a use that is worth it, as long as their memory is nobody's by a lease
2. `launch` takes one with the same image and limits, or makes a container now, and gives it to the worker
3. containers that are nobody's are removed (strays.py), and so are their folders

The daemon's word is taken for what exists, never an event: `run` compares, at each poke and each _SWEEP_S.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from gpufn_core.errors import GpufnError, PlatformError
from gpufn_core.home import Home
from gpufn_core.remove_folder import remove_tree
from gpufn_core.spec.image_spec import ImageSpec
from gpufn_runtime.agent.cache.images import Images
from gpufn_runtime.agent.decide import template_choice as standbys
from gpufn_runtime.agent.decide.template_choice import ContainerUse, ModuleSet
from gpufn_runtime.agent.launchers.base import ContainerEnd, ContainerGone, DaemonAway, Launched, LaunchOrder
from gpufn_runtime.agent.launchers.containers.container import Container, ContainerDaemon, Kind, folders
from gpufn_runtime.agent.launchers.containers.orphaned_containers import Strays
from gpufn_runtime.agent.launchers.containers.sandbox import Limits
from gpufn_runtime.agent.workers import processes
from gpufn_runtime.agent.workers.environment import import_environment

log = logging.getLogger(__name__)

_SWEEP_S = 10.0
_AFTER_LAUNCH_S = 1.0  # the worker that has just been launched has a start to get through
_END_TIMEOUT_S = 10.0

# (function, revision, line): a line of what making an image says, for the function's log.
Say = Callable[[str, int, str], None]


class Daemon(ContainerDaemon, Protocol):
    """What is asked of `docker.Docker`."""

    async def end_of(self, container: str) -> ContainerEnd: ...
    async def containers(self, labels: Mapping[str, str]) -> set[str]: ...


Which = tuple[Kind, ModuleSet]  # what standbys are told apart by


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
        self._standbys: list[Container] = []
        self._making: set[str] = set()  # folders' names
        self._strays = Strays(daemon)
        self._uses: tuple[ContainerUse, ...] = ()
        self._failures: dict[Which, int] = {}
        self._sizes: dict[Which, int] = {}  # bytes, as they were seen last
        self._room_bytes = math.inf
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

    def leave_room(self, room_bytes: int) -> None:
        """Standbys go that take more than these bytes, which no worker has a lease on; those used last stay."""
        self._room_bytes = room_bytes
        if sum(standby.resident_bytes for standby in self._standbys) > room_bytes:
            self._review()

    def keep_images(self, images: Iterable[ImageSpec]) -> None:
        self._images.keep(images)
        self._review()

    def take_over(self, containers: Iterable[str]) -> None:
        """Those that have workers of ours. From now on all others are removed."""
        self._strays.in_use.update(containers)
        self._may_sweep = True
        self._review()

    def let_go(self, container: str) -> None:
        """Its worker is gone."""
        self._strays.let_go(container)
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
                    if error.message != has_warned_of and (self._uses or self._strays.in_use):
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
        await asyncio.gather(*removing, self._strays.remove_ended(), return_exceptions=True)

    async def launch(self, order: LaunchOrder) -> Launched:
        """Raises BuildFailed, PlatformError."""
        assert order.image is not None
        told = order.told
        limits = limits_of(order)
        self._launches += 1
        try:
            if (standby := self._take(Kind(self._images.tag(order.image), limits), order.modules)) is not None:
                try:
                    return await self._give(standby, order, is_standby=True)
                except PlatformError as error:
                    log.warning("%s starts from nothing: its standby is gone: %s", order.worker, error.message)
            its_log = _LogOf(self._say, told.function, told.revision)
            image = await self._images.get(order.image, told.bundle_dir, its_log)
            try:
                made = await self._make(Kind(image, limits), order.modules)
            except ContainerGone:  # somebody has removed its image
                self._images.forget(image)
                image = await self._images.get(order.image, told.bundle_dir, its_log)
                made = await self._make(Kind(image, limits), order.modules)
            return await self._give(made, order, is_standby=False)
        except PlatformError as error:
            self._note(error)
            raise
        finally:
            asyncio.get_running_loop().call_later(_AFTER_LAUNCH_S, self._launched)

    # --- launching ----------------------------------------------------------------------------------------------------

    def _take(self, kind: Kind, modules: ModuleSet) -> Container | None:
        """One that has nothing in memory that the worker does not need, for that counts as the worker's."""
        fitting = [each for each in self._standbys if each.kind == kind and each.is_open]
        covers = standbys.closest((each.modules for each in fitting), modules)
        found = next((each for each in fitting if each.modules == covers), None)
        if found is not None:
            self._standbys.remove(found)
            self._making.add(found.name)
        return found

    async def _give(self, container: Container, order: LaunchOrder, *, is_standby: bool) -> Launched:
        handle: processes.Handle | None = None
        try:
            handle = processes.open_handle(container.pid)  # before the request: a worker may end within milliseconds
            if handle is None:
                raise PlatformError(f"The process of container {container.name} has ended.")
            await container.become(order)
        except BaseException:
            if handle is not None:
                os.close(handle.pidfd)
            await self._abandon(container)
            raise
        self._strays.in_use.add(container.id)
        self._making.discard(container.name)
        return Launched(container.pid, is_standby, container.id, handle)

    async def _make(self, kind: Kind, modules: ModuleSet) -> Container:
        """One whose process waits for a request. Raises PlatformError."""
        container = Container(self._daemon, self._home, kind, modules)
        self._making.add(container.name)
        try:
            await container.start(self._owner, self._packages)
        except BaseException:
            await self._abandon(container)
            raise
        return container

    async def _abandon(self, container: Container) -> None:
        try:
            await container.remove()
        finally:
            self._making.discard(container.name)
            self._review()

    # --- looking after ------------------------------------------------------------------------------------------------

    async def _step(self) -> None:
        for standby in list(self._standbys):
            if not standby.is_open:
                log.warning("a standby of %s is gone", standby.kind.image)
                await self._discard(standby)
        if self._may_sweep:
            await self._sweep()
        await self._images.collect()
        if self._launches:
            return
        wanted = self._that_fit(await self._wanted())
        for standby in list(self._standbys):
            if (standby.kind, standby.modules) not in wanted:
                await self._discard(standby)
        have = {(standby.kind, standby.modules) for standby in self._standbys}
        for kind, modules in wanted:
            if (kind, modules) not in have and not self._launches:
                await self._add(kind, modules)

    def _that_fit(self, wanted: Sequence[Which]) -> list[Which]:
        """As many as there is room for. One that was never there is made, to know how large it is."""
        self._sizes |= {(standby.kind, standby.modules): standby.resident_bytes for standby in self._standbys}
        fitting: list[Which] = []
        taken_bytes = 0
        for which in wanted:
            size_bytes = self._sizes.get(which, 0)
            if taken_bytes + size_bytes <= self._room_bytes:
                taken_bytes += size_bytes
                fitting.append(which)
        return fitting

    async def _wanted(self) -> list[Which]:
        """At most `limit`, those used last first. An image that is not there yet is built meanwhile."""
        wanted: dict[Which, None] = {}
        for use in sorted(self._uses, key=lambda use: -use.last_used_at):
            tag = await self._images.find(use.image)
            if tag is None:
                self._prepare(use)
            elif use.limits is not None:
                wanted[Kind(tag, use.limits), use.modules] = None
        given_up = {which for which, count in self._failures.items() if count >= standbys.MOST_FAILURES}
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
            try:
                await standby.freeze()
            except PlatformError:
                await self._abandon(standby)
                raise
        except PlatformError as error:
            count = self._failures[kind, modules] = self._failures.get((kind, modules), 0) + 1
            log.warning("no standby of %s (%d of %d): %s", kind.image, count, standbys.MOST_FAILURES, error.message)
            return
        standby.when_gone(self._review)
        self._standbys.append(standby)
        self._making.discard(standby.name)
        self._review()  # it may be larger than there is room for
        log.info("a standby of %s [%s] is ready", kind.image, ",".join(sorted(modules)))

    async def _discard(self, standby: Container) -> None:
        if standby in self._standbys:
            self._standbys.remove(standby)
            await self._abandon(standby)

    async def _sweep(self) -> None:
        """Remove containers and folders that are nobody's: what a crash, or a daemon that went away, has left."""
        found = await self._daemon.containers(self._owner)
        self.trouble = ""
        if self._making:
            return  # one of them may be among those found, and is not known by its id yet
        await self._strays.remove(found, spared={standby.id for standby in self._standbys})
        names = {standby.name for standby in self._standbys} | self._making
        for folder in (folders(self._home), self._home.parcels):
            for path in folder.glob("c-*"):
                if path.name not in names:
                    remove_tree(path)

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
    spec = order.told.spec
    env = frozenset(import_environment(spec.resources.cpu, spec.env).items())
    return Limits(memory, spec.resources.cpu, spec.egress, order.gpus, order.mps, env)
