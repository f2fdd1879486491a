"""Prefetch for deployed revisions, before their first call; also the agent's index of revisions.

1. FUNCTIONS and REVISIONS are watched. Runners report which modules their workers imported.
2. After each change and each launch, the launcher receives the module sets in use; bundles are unpacked, and weights
   and engines are fetched.
3. A revision that no trusted key signed, where a signature is required, is neither prepared nor returned.
4. After a deletion, and every COLLECT_EVERY_S, the node's cache drops artifacts that no deployed function uses.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec

from gpufn_core.domain.devices.device import Device, has_kind
from gpufn_core.domain.devices.engine import CPU_KIND
from gpufn_core.domain.revision import Function, Revision, RevisionKey
from gpufn_core.domain.team import Team, Teams, domain_of
from gpufn_core.errors import ArtifactUnavailable, GpufnError, RevisionNotFound, UntrustedDeploy
from gpufn_core.protocol import subjects
from gpufn_core.protocol.launch import MountedVolume
from gpufn_core.spec.function_spec import MAX_MODULES, FunctionSpec, Packaging, is_module_name
from gpufn_core.spec.image_spec import ImageSpec
from gpufn_platform.bus.storage.key_value import Entry, KeyValue, Watch
from gpufn_platform.signing.signatures import Signatures
from gpufn_runtime.agent.bytecode.added import AddedBytecode
from gpufn_runtime.agent.bytecode.background import OWN_VERSION
from gpufn_runtime.agent.cache.build_log import BuildLog, LogLine
from gpufn_runtime.agent.cache.bundles import BundleCache
from gpufn_runtime.agent.cache.engines import EngineCache
from gpufn_runtime.agent.cache.volumes import Volumes
from gpufn_runtime.agent.cache.weights import WeightsCache
from gpufn_runtime.agent.decide.template_choice import ContainerUse, Use, network_of
from gpufn_runtime.agent.environments.cache import EnvironmentCache
from gpufn_runtime.agent.environments.environment import Environment
from gpufn_runtime.agent.launchers.containers.sandbox import Limits

log = logging.getLogger(__name__)

COLLECT_EVERY_S = 600.0
_MODEL_MODULES = ("numpy", "onnxruntime")  # known before a worker reports; the first cold start takes 25 ms, not 150

_team = msgspec.msgpack.Decoder(Team)
_function = msgspec.msgpack.Decoder(Function)
_revision = msgspec.msgpack.Decoder(Revision)


class Preparer(Protocol):
    """Prepares templates, images and standby containers for the revisions in use."""

    def set_uses(self, uses: Iterable[Use], in_containers: Iterable[ContainerUse]) -> None: ...
    def keep_images(self, images: Iterable[ImageSpec]) -> None: ...


class Prefetch:
    """Prefetch and cache cleanup. `gpus` are the GPUs of this node. `running` returns the revisions that have a worker
    here, and `workers` each of their workers. `image_of` returns the image of a function that runs in containers, and
    `limits_of` its container's limits."""

    def __init__(
        self,
        *,
        functions: KeyValue,
        revisions: KeyValue,
        bundles: BundleCache,
        engines: EngineCache,
        weights: WeightsCache,
        environments: EnvironmentCache | None = None,
        signatures: Signatures,
        gpus: Iterable[Device],
        launcher: Preparer,
        running: Callable[[], Iterable[RevisionKey]],
        workers: Callable[[], Iterable[tuple[str, RevisionKey]]] = tuple,
        image_of: Callable[[FunctionSpec], ImageSpec | None],
        limits_of: Callable[[FunctionSpec], Limits],
        environment_of: Callable[[FunctionSpec], ImageSpec | None] = lambda spec: None,
        log_line: LogLine = lambda function, revision, text: None,
        compile_later: Callable[[AddedBytecode, str], None] | None = None,
        teams: KeyValue | None = None,
        volumes: Volumes | None = None,
    ) -> None:
        self._teams = teams
        self._known_teams = Teams()
        self._volumes = volumes
        self._functions = functions
        self._revisions = revisions
        self._bundles = bundles
        self._engines = engines
        self._weights = weights
        self._signatures = signatures
        self._gpus = tuple(gpus)
        self._gpu_kinds = frozenset(gpu.kind for gpu in self._gpus)
        self._launcher = launcher
        self._running_revisions = running
        self._running_workers = workers
        self._image_of = image_of
        self._limits_of = limits_of
        self._environments = environments
        self._environment_of = environment_of
        self._log_line = log_line
        self._compile_later = compile_later
        if environments is not None:
            environments.in_use = self._environments_in_use
            environments.on_ready = self._changes_later
        self._known: dict[RevisionKey, Revision] = {}
        self._deployed: dict[str, Function] = {}
        self._reported_modules: dict[RevisionKey, frozenset[str]] = {}
        self._last_used: dict[RevisionKey, float] = {}
        self._changes = asyncio.Event()
        signatures.on_change = self._changes.set
        self._collect_at = 0.0

    async def watch(self) -> list[Watch]:
        """Start the watches. Returns once all teams, deployed functions and revisions are known."""
        of_teams = [] if self._teams is None else [await self._teams.watch(self._on_team)]
        return [
            *of_teams,
            await self._revisions.watch(self._on_revision),
            await self._functions.watch(self._on_function),
        ]

    async def run(self) -> None:
        """Prepare and collect after each change, until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(COLLECT_EVERY_S):
                    await self._changes.wait()
            self._changes.clear()
            try:
                await self._prepare()
                await self._collect(asyncio.get_running_loop().time())
            except Exception:
                log.exception("prefetch failed; the next deploy tries again")

    async def revision(self, function: str, number: int) -> Revision:
        """Return a revision that may start here. Raises RevisionNotFound, UntrustedDeploy, BusUnavailable."""
        revision = self._known.get((function, number)) or await self._read(function, number)
        await self._signatures.verify_revision((function, number), revision)
        return revision

    async def _read(self, function: str, number: int) -> Revision:
        entry = await self._revisions.get(subjects.revision_key(function, number))
        if entry is None:
            raise RevisionNotFound(f"{function}@{number} was assigned to this node but does not exist.")
        return _revision.decode(entry.value)

    async def bundle(self, revision: Revision) -> str:
        """Return the folder of the unpacked bundle, or "" for a model without code. Raises ArtifactUnavailable,
        InvalidBundle, BusUnavailable."""
        if revision.spec.entry.packaging is Packaging.MODEL:
            return ""
        return os.fspath(await self._bundles.get(revision.bundle))

    async def engines(self, revision: Revision, kind: str) -> dict[str, tuple[str, ...]]:
        """Return the engine folders for a DeviceKind by model parameter, best first. Unavailable engines are skipped.
        If none is left for a model, raises ArtifactUnavailable or BusUnavailable."""
        return {model.parameter: await self._folders(revision, model.parameter, kind) for model in revision.spec.models}

    async def _folders(self, revision: Revision, parameter: str, kind: str) -> tuple[str, ...]:
        folders: list[str] = []
        error: GpufnError = ArtifactUnavailable(f"{revision} has no engine of {parameter} for {kind}.")
        for key in revision.engines.get(parameter, {}).get(kind, ()):
            try:
                folders.append(os.fspath(await self._engines.get(key)))
            except GpufnError as caught:
                error = caught
                log.warning("%s: an engine of %s is not available: %s", revision, parameter, error.message)
        if not folders:
            raise error
        return tuple(folders)

    async def weights(self, revision: Revision) -> tuple[str, ...]:
        """Return the path of each of the revision's weights. Raises ArtifactUnavailable, BusUnavailable."""
        paths = [await self._weights.get(spec, self._weights_in_use) for spec in revision.spec.weights]
        return tuple(map(os.fspath, paths))

    async def volumes(self, revision: Revision, worker: str) -> tuple[MountedVolume, ...]:
        """Return the newest version of each of the revision's volumes, for a worker. Raises ArtifactUnavailable,
        BusUnavailable."""
        if self._volumes is None:
            return ()
        mounted = []
        for mount in revision.spec.mounts:
            tree = await self._volumes.newest(mount, revision, worker)
            path = await self._weights.get(tree, self._weights_in_use)
            mounted.append(MountedVolume(mount.name, os.fspath(path), tree.version, tree.digest))
        return tuple(mounted)

    async def environment(self, revision: Revision, bundle: str) -> Environment | None:
        """Return the environment of the revision's processes. Raises BuildFailed, ArtifactUnavailable."""
        image = self._environment_of(revision.spec)
        if image is None or self._environments is None:
            return None
        return await self._environments.get(image, bundle, self._on_line(revision))

    def _found_environment(self, revision: Revision) -> Environment | None:
        image = self._environment_of(revision.spec)
        return None if image is None or self._environments is None else self._environments.find(image)

    def _on_line(self, revision: Revision) -> Callable[[str], None]:
        return BuildLog(self._log_line, revision.function, revision.number)

    def _environments_in_use(self) -> set[str] | None:
        """Return the digests of the environments of starting and running workers; None while one of them is unknown."""
        running = set(self._running_revisions())
        if not running <= self._known.keys():
            return None
        images = (self._environment_of(self._known[key].spec) for key in running)
        return {image.digest for image in images if image is not None}

    def _changes_later(self) -> None:
        self._changes.set()

    def _weights_in_use(self) -> set[str] | None:
        """Return the digests of the weights and volumes of starting and running workers; None while one of them is
        unknown."""
        running = set(self._running_revisions())
        if not running <= self._known.keys():
            return None
        digests = {spec.digest for key in running for spec in self._known[key].spec.weights}
        if self._volumes is None:
            return digests
        in_use = self._volumes.in_use(worker for worker, key in self._running_workers() if self._known[key].spec.mounts)
        return None if in_use is None else digests | in_use

    def _weights_deployed(self) -> set[str] | None:
        """Return the digests of the weights that a prefetch must not remove."""
        in_use = self._weights_in_use()
        return (
            None
            if in_use is None
            else in_use | {spec.digest for revision in self._current().values() for spec in revision.spec.weights}
        )

    def recheck(self, revision: RevisionKey) -> None:
        """Check the revision's bundle and engines again: a worker failed to start, so a file may be damaged even though
        size and time are unchanged."""
        if (known := self._known.get(revision)) is not None:
            if known.bundle:
                self._bundles.recheck(known.bundle)
            self._engines.recheck(known.engine_keys)
            if self._environments is not None and (image := self._environment_of(known.spec)) is not None:
                self._environments.recheck(image.digest)

    def timeout_s(self, revision: RevisionKey) -> float:
        """Return the timeout of the revision's calls, or 0 if the revision is unknown."""
        known = self._known.get(revision)
        return known.spec.timeout_s if known else 0.0

    def modules(self, revision: Revision) -> frozenset[str]:
        reported = self._reported_modules.get(revision.key, frozenset())
        return reported.union(revision.spec.modules, _MODEL_MODULES if revision.spec.models else ())

    def learn_modules(self, revision: RevisionKey, modules: Iterable[str]) -> None:
        """Record modules that workers imported and their template lacked. User code reports them: check each name."""
        known = self._reported_modules.get(revision, frozenset())
        union = known.union(filter(is_module_name, modules))
        if known < union and len(union) <= MAX_MODULES:
            self._reported_modules[revision] = union
            self._changes.set()

    def note_launch(self, revision: RevisionKey, launched_at: float) -> None:
        self._last_used[revision] = launched_at
        self._changes.set()

    def note_end(self) -> None:
        """Schedule a collection after a worker ended: it may have been the last user of an artifact."""
        if not self._collect_at:
            self._changes.set()

    async def _prepare(self) -> None:
        current = self._trusted()
        self._launcher.set_uses(
            [self._use(each) for each in current if self._may_use_template(each)],
            [use for each in current if (use := self._container_use(each)) is not None],
        )
        self._weights.prefetch(
            (spec for revision in current if self._has_gpu_for(revision.spec) for spec in revision.spec.weights),
            self._weights_deployed,
        )
        for revision in current:
            try:
                await self._fetch_files(revision)
            except Exception as error:  # the launch tries again, and reports the error to its callers
                log.warning("cannot prefetch %s: %s", revision, error)

    def _may_use_template(self, revision: Revision) -> bool:
        """Return whether workers are processes that can start here now: their Python environment is built."""
        spec = revision.spec
        return (
            self._image_of(spec) is None
            and bool(self._gpu_kinds or not spec.resources.gpu)
            and (self._environment_of(spec) is None or self._found_environment(revision) is not None)
        )

    def _use(self, revision: Revision) -> Use:
        spec = revision.spec
        return Use(
            self.modules(revision),
            self._used_at(revision),
            spec.env,
            has_gpu=bool(spec.resources.gpu),
            network=network_of(spec),
            python=self._found_environment(revision),
            domain=domain_of(spec.resources.trust_domain, self._known_teams.of(revision.function)),
        )

    async def _fetch_files(self, revision: Revision) -> None:
        was_cached = self._has_bundle(revision)
        bundle = await self.bundle(revision)
        self._compile_bundle(revision)
        if (image := self._environment_of(revision.spec)) is not None and self._environments is not None:
            self._environments.prefetch(image, bundle, self._on_line(revision))
        if not was_cached and self._image_of(revision.spec) is not None:
            self._changes.set()  # the image may use files from the bundle
        for kind in self._kinds(revision):
            await self.engines(revision, kind)

    def _compile_bundle(self, revision: Revision) -> None:
        """Have the bundle compiled for the Python of the revision's workers, if that is known."""
        if self._compile_later is None or not self._has_gpu_for(revision.spec):
            return
        image = self._environment_of(revision.spec) or self._image_of(revision.spec)
        version = OWN_VERSION if image is None else image.python
        if version and (bytecode := self._bundles.bytecode(revision.bundle)) is not None:
            self._compile_later(bytecode, version)

    def _container_use(self, revision: Revision) -> ContainerUse | None:
        """Return None for a function without image, and until the bundle (which may hold image files) is unpacked."""
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

    def _has_gpu_for(self, spec: FunctionSpec) -> bool:
        """Return whether the node could run the function, if it were empty."""
        wanted = spec.resources.gpu
        return not wanted or any(has_kind(gpu, name) for gpu in self._gpus for name in wanted)

    def _kinds(self, revision: Revision) -> set[str]:
        """Return the kinds of the devices on this node that the revision's workers may use."""
        kinds = self._gpu_kinds if revision.spec.resources.gpu else {CPU_KIND}
        return {kind for by_kind in revision.engines.values() for kind in by_kind if kind in kinds}

    async def _collect(self, now: float) -> None:
        """Remove unused artifacts. The set in use is read again for each kind: removal takes time, and a new revision
        may be deployed and launched meanwhile."""
        if now < self._collect_at:
            return
        running = set(self._running_revisions())
        if not running <= self._known.keys():
            return  # a worker of a deleted revision still runs
        all_deployed = all(function in self._deployed for function, _ in running)
        self._collect_at = now + COLLECT_EVERY_S if all_deployed else 0.0  # 0: collect when the next worker ends
        await self._bundles.keep({revision.bundle for revision in self._used()})
        self._launcher.keep_images(
            {image for revision in self._used() if (image := self._image_of(revision.spec)) is not None}
        )
        await self._engines.keep({key for revision in self._used() for key in revision.engine_keys})

    def _used(self) -> list[Revision]:
        """Return all revisions of deployed functions (so that a rollback is fast), and those that run here."""
        running = set(self._running_revisions())
        return [revision for key, revision in self._known.items() if key[0] in self._deployed or key in running]

    def _current(self) -> dict[RevisionKey, Revision]:
        """Return the revisions of each function that are called, and those that run here."""
        keys = set(self._running_revisions())
        for function in self._deployed.values():
            keys |= {(function.name, number) for number in function.called}
        return {key: self._known[key] for key in sorted(keys) if key in self._known}

    def _trusted(self) -> list[Revision]:
        """Return the current revisions without those whose signature is refused: nothing of them is unpacked."""
        trusted = []
        for key, revision in self._current().items():
            try:
                self._signatures.check_revision(key, revision)
            except UntrustedDeploy as error:
                log.warning("%s is not prepared: %s", revision, error.message)
            else:
                trusted.append(revision)
        return trusted

    def _on_revision(self, key: str, entry: Entry | None) -> None:
        function, _, number = key.rpartition(".")
        revision_key = (function, int(number))
        if entry is None:
            self._signatures.forget(revision_key)
            for known in (self._known, self._last_used, self._reported_modules):
                known.pop(revision_key, None)
            self._collect_at = 0.0
        else:
            self._known[revision_key] = _revision.decode(entry.value)
            self._last_used.setdefault(revision_key, self._known[revision_key].created_at)
        self._changes.set()

    def _on_team(self, key: str, entry: Entry | None) -> None:
        if entry is None:
            self._known_teams.remove(key)
        else:
            self._known_teams.put(_team.decode(entry.value))
        self._changes.set()

    def _on_function(self, key: str, entry: Entry | None) -> None:
        if entry is None:
            self._deployed.pop(key, None)
            self._collect_at = 0.0
        else:
            function = self._deployed[key] = _function.decode(entry.value)
            active = (key, function.active)  # after a rollback the old revision needs a template again
            self._last_used[active] = max(function.updated_at, self._last_used.get(active, 0.0))
        self._changes.set()
