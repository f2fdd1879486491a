"""Which revisions use which engines, and which engines nothing uses. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from gpufn.engine import Build, EngineManifest, model_digest
from gpufn.revision import Function, Revision, RevisionState


class Unused(msgspec.Struct, frozen=True):
    """Engines to remove, and those of their files that no other engine shares: digest → size in bytes."""

    engines: tuple[EngineManifest, ...]
    files: dict[str, int]

    @property
    def freed_bytes(self) -> int:
        return sum(self.files.values())


def users(revisions: Iterable[Revision]) -> dict[str, list[str]]:
    """EngineKey → the revisions that name it, such as ``resnet@7``."""
    found: dict[str, list[str]] = {}
    for revision in revisions:
        for key in keys_of(revision):
            found.setdefault(key, []).append(str(revision))
    return found


def keys_of(revision: Revision) -> set[str]:
    return {key for devices in revision.engines.values() for keys in devices.values() for key in keys}


def unused(
    manifests: Mapping[str, EngineManifest],
    revisions: Iterable[Revision],
    functions: Mapping[str, Function],
    builds: Iterable[Build],
) -> Unused:
    """A revision keeps its engines while it can be rolled back to or is called; a build, those of its model until it
    has ended, and those that it made until the revision that waits for it is READY."""
    kept: set[str] = set()
    waited_for: set[str] = set()
    for revision in revisions:
        function = functions.get(revision.function)
        is_called = function is not None and revision.number in (function.active, function.serving)
        if revision.state is RevisionState.READY or is_called:
            kept |= keys_of(revision)
        elif revision.state is RevisionState.BUILDING:
            waited_for |= set(revision.builds)
    models: set[str] = set()
    for build in builds:
        if not build.state.ended:
            models.add(model_digest(build.model.files))
        elif build.id in waited_for:
            kept |= set(build.engines)
    going = [
        manifest for key, manifest in manifests.items() if key not in kept and manifest.identity.model not in models
    ]
    staying = manifests.keys() - {manifest.key for manifest in going}
    shared = {file.digest for key in staying for file in manifests[key].files}
    files = {file.digest: file.size for manifest in going for file in manifest.files if file.digest not in shared}
    return Unused(tuple(going), files)
