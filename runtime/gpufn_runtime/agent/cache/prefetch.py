"""What is made ready on this node before the first call asks for it, and what is known of revisions.

1. FUNCTIONS and REVISIONS are watched; runners report which modules their workers imported
2. after each change, and each launch: the launcher hears which module sets matter; bundles are unpacked, engines
   fetched
3. after a deletion, and each COLLECT_EVERY_S: what nothing deployed uses is removed from the node's cache
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec

from gpufn_core.domain.engine import CPU_KIND
from gpufn_core.domain.revision import Function, Revision, RevisionKey
from gpufn_core.errors import ArtifactUnavailable, GpufnError, RevisionNotFound
from gpufn_core.protocol import subjects
from gpufn_core.spec.function_spec import MOST_MODULES, FunctionSpec, Packaging, is_module_name
from gpufn_core.spec.image_spec import ImageSpec
from gpufn_platform.bus.storage.key_value import Entry, KeyValue, Watch
from gpufn_runtime.agent.cache.bundles import BundleCache
from gpufn_runtime.agent.cache.engines import EngineCache
from gpufn_runtime.agent.decide.template_choice import ContainerUse, Use
from gpufn_runtime.agent.launchers.containers.sandbox import Limits

log = logging.getLogger(__name__)

COLLECT_EVERY_S = 600.0
_RUN_MODELS = ("numpy", "onnxruntime")  # known before a worker tells; a first cold start takes 25 ms instead of 150

_function = msgspec.msgpack.Decoder(Function)
_revision = msgspec.msgpack.Decoder(Revision)


class Preparer(Protocol):
    """Makes templates, images and standby containers for what is in use."""

    def want(self, uses: Iterable[Use], in_containers: Iterable[ContainerUse]) -> None: ...
    def keep_images(self, images: Iterable[ImageSpec]) -> None: ...


class Preparation:
    """`gpu_kinds` are the DeviceKinds of this node's GPUs. `running` tells the revisions that have a worker here, and
    `image_of` which of them live in containers: with `limits_of`."""

    def __init__(
        self,
        *,
        functions: KeyValue,
        revisions: KeyValue,
        bundles: BundleCache,
        engines: EngineCache,
        gpu_kinds: Iterable[str],
        launcher: Preparer,
        running: Callable[[], Iterable[RevisionKey]],
        image_of: Callable[[FunctionSpec], ImageSpec | None],
        limits_of: Callable[[FunctionSpec], Limits],
    ) -> None:
        self._functions = functions
        self._revisions = revisions
        self._bundles = bundles
        self._engines = engines
        self._gpu_kinds = frozenset(gpu_kinds)
        self._launcher = launcher
        self._running = running
        self._image_of = image_of
        self._limits_of = limits_of
        self._known: dict[RevisionKey, Revision] = {}
        self._deployed: dict[str, Function] = {}
        self._reported_modules: dict[RevisionKey, frozenset[str]] = {}
        self._last_used: dict[RevisionKey, float] = {}
        self._changes = asyncio.Event()
        self._collect_at = 0.0

    async def watch(self) -> list[Watch]:
        """Returns once everything that is deployed is known."""
        return [await self._revisions.watch(self._on_revision), await self._functions.watch(self._on_function)]

    async def run(self) -> None:
        """Prepare after each change, and collect, until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(COLLECT_EVERY_S):
                    await self._changes.wait()
            self._changes.clear()
            try:
                await self._prepare()
                await self._collect(asyncio.get_running_loop().time())
            except Exception:
                log.exception("could not prepare for what is deployed; the next deploy tries again")

    async def revision(self, function: str, number: int) -> Revision:
        """Raises RevisionNotFound, BusUnavailable."""
        if (known := self._known.get((function, number))) is not None:
            return known
        entry = await self._revisions.get(subjects.revision_key(function, number))
        if entry is None:
            raise RevisionNotFound(f"{function}@{number} was assigned to this node, but there is no such revision.")
        return _revision.decode(entry.value)

    async def bundle(self, revision: Revision) -> str:
        """Its unpacked bundle; empty for a function without code. Raises ArtifactUnavailable, InvalidBundle,
        BusUnavailable."""
        if revision.spec.entry.packaging is Packaging.MODEL:
            return ""
        return os.fspath(await self._bundles.get(revision.bundle))

    async def engines(self, revision: Revision, kind: str) -> dict[str, tuple[str, ...]]:
        """The folders of its engines for a DeviceKind, by the model's parameter, the best first. One that cannot be had
        is left out, for another may do; when none is left, raises ArtifactUnavailable, BusUnavailable."""
        return {model.parameter: await self._folders(revision, model.parameter, kind) for model in revision.spec.models}

    async def _folders(self, revision: Revision, parameter: str, kind: str) -> tuple[str, ...]:
        folders: list[str] = []
        error: GpufnError = ArtifactUnavailable(f"{revision} has no engine of {parameter} for {kind}.")
        for key in revision.engines.get(parameter, {}).get(kind, ()):
            try:
                folders.append(os.fspath(await self._engines.get(key)))
            except GpufnError as caught:
                error = caught
                log.warning("%s: an engine of %s is not here: %s", revision, parameter, error.message)
        if not folders:
            raise error
        return tuple(folders)

    def doubt(self, revision: RevisionKey) -> None:
        """A worker of it did not get ready: its bundle or one of its engines may be damaged, though it looks as it
        did."""
        if (known := self._known.get(revision)) is not None:
            if known.bundle:
                self._bundles.doubt(known.bundle)
            for by_kind in known.engines.values():
                for keys in by_kind.values():
                    self._engines.doubt(keys)

    def timeout_s(self, revision: RevisionKey) -> float:
        """Of its calls; 0 when it is not known."""
        known = self._known.get(revision)
        return known.spec.timeout_s if known else 0.0

    def modules(self, revision: Revision) -> frozenset[str]:
        reported = self._reported_modules.get(revision.key, frozenset())
        return reported.union(revision.spec.modules, _RUN_MODELS if revision.spec.models else ())

    def learn_modules(self, revision: RevisionKey, modules: Iterable[str]) -> None:
        """Each worker tells what its template lacked. It is the user's process that tells: anything may be a name."""
        known = self._reported_modules.get(revision, frozenset())
        more = known.union(filter(is_module_name, modules))
        if known < more and len(more) <= MOST_MODULES:
            self._reported_modules[revision] = more
            self._changes.set()

    def note_launch(self, revision: RevisionKey, launched_at: float) -> None:
        self._last_used[revision] = launched_at
        self._changes.set()

    def note_end(self) -> None:
        """A worker is gone: what it alone used may go as well."""
        if not self._collect_at:
            self._changes.set()

    async def _prepare(self) -> None:
        current = self._current()
        self._launcher.want(
            [
                Use(self.modules(revision), self._used_at(revision), revision.spec.env)
                for revision in current
                if self._image_of(revision.spec) is None
            ],
            [use for revision in current if (use := self._container_use(revision)) is not None],
        )
        for revision in current:
            try:
                was_here = self._has_bundle(revision)
                await self.bundle(revision)
                if not was_here and self._image_of(revision.spec) is not None:
                    self._changes.set()  # its image may be made of files in there
                for kind in self._kinds(revision):
                    await self.engines(revision, kind)
            except Exception as error:  # its launch will try again, and tell who waits for it
                log.warning("%s is not prepared: %s", revision, error)

    def _container_use(self, revision: Revision) -> ContainerUse | None:
        """None for a process, and before its bundle is here, which may hold files of its image."""
        image = self._image_of(revision.spec)
        if image is None or not self._has_bundle(revision):
            return None
        return ContainerUse(
            revision.function,
            revision.number,
            image,
            os.fspath(self._bundles.find(revision.bundle) or ""),
            None if revision.spec.resources.gpu else self._limits_of(revision.spec),
            self.modules(revision),
            self._used_at(revision),
        )

    def _has_bundle(self, revision: Revision) -> bool:
        is_model = revision.spec.entry.packaging is Packaging.MODEL
        return is_model or self._bundles.find(revision.bundle) is not None

    def _used_at(self, revision: Revision) -> float:
        return self._last_used.get(revision.key, 0.0)

    def _kinds(self, revision: Revision) -> set[str]:
        """Of the devices here that its workers may run on."""
        kinds = self._gpu_kinds if revision.spec.resources.gpu else {CPU_KIND}
        return {kind for by_kind in revision.engines.values() for kind in by_kind if kind in kinds}

    async def _collect(self, now: float) -> None:
        """Remove what nothing uses. What that is, is asked each time: to remove takes a while, and a worker may be
        launched meanwhile of what was deployed just now."""
        if now < self._collect_at:
            return
        running = set(self._running())
        if not running <= self._known.keys():
            return  # of one that was deleted, whose worker still runs
        are_deployed = all(function in self._deployed for function, _ in running)
        self._collect_at = now + COLLECT_EVERY_S if are_deployed else 0.0  # else again when the last of them ends
        await self._bundles.keep({revision.bundle for revision in self._used()})
        self._launcher.keep_images({image for each in self._used() if (image := self._image_of(each.spec)) is not None})
        by_kind = [keys for revision in self._used() for keys in revision.engines.values()]
        await self._engines.keep({key for keys in by_kind for of_kind in keys.values() for key in of_kind})

    def _used(self) -> list[Revision]:
        """Any of a deployed function, for a rollback is quick, and those that run here."""
        running = set(self._running())
        return [revision for key, revision in self._known.items() if key[0] in self._deployed or key in running]

    def _current(self) -> list[Revision]:
        """What each function wants to run and what serves it, and those that run here."""
        keys = set(self._running())
        for function in self._deployed.values():
            keys |= {(function.name, function.active), (function.name, function.serving)}
        return [self._known[key] for key in sorted(keys) if key in self._known]

    def _on_revision(self, key: str, entry: Entry | None) -> None:
        function, _, number = key.rpartition(".")
        which = (function, int(number))
        if entry is None:
            for known in (self._known, self._last_used, self._reported_modules):
                known.pop(which, None)
            self._collect_at = 0.0
        else:
            self._known[which] = _revision.decode(entry.value)
            self._last_used.setdefault(which, self._known[which].created_at)
        self._changes.set()

    def _on_function(self, key: str, entry: Entry | None) -> None:
        if entry is None:
            self._deployed.pop(key, None)
            self._collect_at = 0.0
        else:
            function = self._deployed[key] = _function.decode(entry.value)
            active = (key, function.active)  # a rollback makes an old one worth a template
            self._last_used[active] = max(function.updated_at, self._last_used.get(active, 0.0))
        self._changes.set()
