"""Engines: list the published ones and their users, remove unused ones; and the models that they were built from."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from gpufn_core.domain.devices.engine import EngineManifest
from gpufn_core.domain.revision import Revision
from gpufn_core.errors import Conflict, FunctionNotFound
from gpufn_core.protocol import subjects
from gpufn_core.spec.function_spec import Packaging
from gpufn_core.spec.model_spec import ModelSpec
from gpufn_gateway.auth.access import Principal
from gpufn_gateway.auth.scopes import READ
from gpufn_gateway.buckets import Buckets, decode_build, decode_function, decode_manifest, decode_revision, records
from gpufn_gateway.functions.registry import Registry
from gpufn_gateway.garbage_collection.rules import Unused, unused, users
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import object_store
from gpufn_platform.process.clock import Clock

log = logging.getLogger(__name__)


class Engines:
    def __init__(self, bus: Bus, buckets: Buckets, registry: Registry, clock: Clock) -> None:
        self._bus = bus
        self._buckets = buckets
        self._registry = registry
        self._clock = clock

    def views(self, principal: Principal) -> list[dict[str, Any]]:
        """Return the engines of the functions that the principal may read, newest first; without a pattern also unused
        engines."""
        readable = (each for each in self._registry.all_revisions() if principal.may_read(each.function))
        used_by = users(readable, self._registry.functions)
        reads_all = principal.has_scope(READ)
        listed = (each for each in self._registry.manifests.values() if reads_all or each.key in used_by)
        manifests = sorted(listed, key=lambda manifest: manifest.built_at, reverse=True)
        return [{**engine_view(each), "used_by": used_by.get(each.key, [])} for each in manifests]

    async def collect(self, *, dry_run: bool = False) -> Unused:
        """Remove unused engines, unless `dry_run`, and return them.

        Reads the records, because this gateway's watches may lag. The order of reads matters: a build ends after its
        revision is recorded, or is still remembered. A build that finds one of these engines in the meantime writes it
        again (`gpufn_builder.store`), so the engine stays.
        """
        entries = {entry.key: entry for entry in await self._buckets.engines.entries()}
        revisions = await records(self._buckets.revisions, decode_revision)
        functions = {each.name: each for each in await records(self._buckets.functions, decode_function)}
        builds = await records(self._buckets.builds, decode_build)
        manifests = {key: decode_manifest(entry.value) for key, entry in entries.items()}
        candidates = unused(manifests, revisions, functions, builds, self._clock.time())
        if dry_run:
            return candidates
        removed = []
        for manifest in candidates.engines:
            try:
                await self._buckets.engines.delete(manifest.key, entries[manifest.key].revision)
            except Conflict:
                log.info("kept engine %s: it is in use again", manifest.key)
            else:
                removed.append(manifest)
        return Unused(tuple(removed), await self._remove_files(removed))

    async def _remove_files(self, removed: Iterable[EngineManifest]) -> dict[str, int]:
        """Remove the files that no other engine names, and return their sizes. The blobs are read first: a builder
        touches a file after naming it, and then the blob has changed and is not removed."""
        blobs = {blob.digest: blob for blob in await object_store.blobs(self._bus, subjects.ENGINE_FILES)}
        named = {file.digest for each in await records(self._buckets.engines, decode_manifest) for file in each.files}
        files = {file.digest: file.size for each in removed for file in each.files if file.digest not in named}
        for digest in files.keys() & blobs.keys():
            await object_store.remove(self._bus, subjects.ENGINE_FILES, blobs[digest])
        return files

    def models(self, principal: Principal) -> list[dict[str, Any]]:
        """Return the models of the serving revision of every function that the principal may read."""
        views = []
        for name in filter(principal.may_read, sorted(self._registry.functions)):
            revision = self._registry.revisions.get(name, {}).get(self._registry.functions[name].serving)
            if revision is not None and revision.variant is None:
                views += [self._model_view(revision, model) for model in revision.spec.models]
        return views

    def model(self, name: str, principal: Principal) -> dict[str, Any]:
        """Return a model by its name: the name of its function, in full or short, and its parameter. Raises
        FunctionNotFound, AmbiguousFunction, Forbidden."""
        base, dot, parameter = name.partition(".")
        function = self._registry.find(base, principal)
        principal.require_on(READ, function)
        wanted = f"{function}{dot}{parameter}"
        for view in self.models(principal):
            if view["name"] == wanted:
                return view
        raise FunctionNotFound(f"There is no model {name[:80]!r}.")

    def _model_view(self, revision: Revision, model: ModelSpec) -> dict[str, Any]:
        engines = {
            device: [engine_view(self._registry.manifests[key]) for key in keys if key in self._registry.manifests]
            for device, keys in revision.engines.get(model.parameter, {}).items()
        }
        manifest = self._registry.manifest(revision, model)
        is_function = revision.spec.entry.packaging is Packaging.MODEL
        return {
            "name": revision.function if is_function else f"{revision.function}.{model.parameter}",
            "function": revision.function,
            "revision": revision.number,
            "parameter": model.parameter,
            "file": model.files[0].name,
            "precision": model.precision,
            "max_batch": model.max_batch,
            "batched": manifest.batched if manifest else None,
            "why_alone": manifest.why_alone if manifest else "",
            "inputs": manifest.inputs if manifest else (),
            "outputs": manifest.outputs if manifest else (),
            "profiles": manifest.profiles if manifest else (),
            "engines": engines,
        }


def engine_view(manifest: EngineManifest) -> dict[str, Any]:
    return {
        "key": manifest.key,
        "model": manifest.model,
        "backend": manifest.backend,
        "device": manifest.identity.device,
        "precision": manifest.identity.recipe,
        "size": manifest.size,
        "accuracy": manifest.accuracy,
        "latency": manifest.latency,
        "remarks": manifest.remarks,
        "built_at": manifest.built_at,
    }
