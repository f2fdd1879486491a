"""Engines: what was published, who uses it, and the removal of what nobody uses; and the models that they are of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gpufn.bus import objects
from gpufn.bus.connection import Bus
from gpufn.bus.kv import KeyValue
from gpufn.engine import EngineManifest
from gpufn.errors import FunctionNotFound
from gpufn.model import ModelSpec
from gpufn.protocol import subjects
from gpufn.revision import Revision
from gpufn.spec import Packaging, function_name
from gpufn_gateway.builds import Builds
from gpufn_gateway.registry import Registry
from gpufn_gateway.usage import Unused, unused, users


class Engines:
    def __init__(self, bus: Bus, engines: KeyValue, registry: Registry, builds: Builds) -> None:
        self._bus = bus
        self._engines = engines
        self._registry = registry
        self._builds = builds

    def listed(self) -> list[dict[str, Any]]:
        """Every engine, the newest first."""
        used_by = users(self._revisions())
        manifests = sorted(self._registry.manifests.values(), key=lambda manifest: manifest.built_at, reverse=True)
        return [{**engine_view(each), "used_by": used_by.get(each.key, [])} for each in manifests]

    def unused(self) -> Unused:
        known = self._registry
        return unused(known.manifests, self._revisions(), known.functions, self._builds.known.values())

    async def remove(self, going: Unused) -> None:
        """Manifests first: what there is a manifest of is whole."""
        for manifest in going.engines:
            await self._engines.delete(manifest.key)
        for digest in going.files:
            await objects.delete(self._bus, subjects.ENGINE_FILES, digest)

    def models(self) -> list[dict[str, Any]]:
        """The models of every function's serving revision."""
        found = []
        for name in sorted(self._registry.functions):
            revision = self._registry.revisions.get(name, {}).get(self._registry.functions[name].serving)
            if revision is not None:
                found += [self._model_view(revision, model) for model in revision.spec.models]
        return found

    def model(self, name: str) -> dict[str, Any]:
        """One of them by its name, in either spelling of its function's. Raises FunctionNotFound."""
        base, dot, parameter = name.partition(".")
        wanted = f"{function_name(base)}{dot}{parameter}"
        for view in self.models():
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
            "inputs": manifest.inputs if manifest else (),
            "outputs": manifest.outputs if manifest else (),
            "profiles": manifest.profiles if manifest else (),
            "engines": engines,
        }

    def _revisions(self) -> Iterator[Revision]:
        for numbered in self._registry.revisions.values():
            yield from numbered.values()


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
        "built_at": manifest.built_at,
    }
