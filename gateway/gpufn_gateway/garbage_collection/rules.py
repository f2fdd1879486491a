"""Who uses what, and what nobody needs any more: revisions, bundles, builds, models' files and engines. Pure.

What is *over* goes by itself (`gpufn_gateway.garbage_collection.collector`):

revisions   a READY one that is not called, and too old for rollbacks, is retired. It goes a minute later, for a
            rollback may be under way; at once when its function was deleted. The newest of all leaves a tombstone, for
            its number must never mean something else
builds      those that ended long ago, and all but the newest few hundred that ended
blobs       what no record names. An upload comes before its record, so the young stay

Engines are dear to make: they go when somebody asks for it, by `unused`. Times are in unix seconds.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Final

import msgspec

from gpufn_core.domain.engine import Build, EngineManifest, model_digest
from gpufn_core.domain.revision import Function, Revision, RevisionState
from gpufn_core.ids import Digest
from gpufn_core.protocol import subjects
from gpufn_core.spec.function_spec import EntryPoint, FunctionSpec, MethodSpec
from gpufn_gateway.builds.build_rules import RECORDED_WITHIN_S

YOUNG_S: Final = 3600.0  # an upload, or a revision whose Function's record is still to come
_RETIRED_S: Final = 60.0
_DAY_S: Final = 86_400.0
_FAILURE_KEPT_S: Final = 7 * _DAY_S
_BUILD_KEPT_S: Final = 7 * _DAY_S
_KEPT_BUILDS: Final = 500


# --- revisions --------------------------------------------------------------------------------------------------------


def changes(
    revisions: Mapping[int, Revision], function: Function | None, in_use: Container[int], *, kept: int, now: float
) -> dict[int, Revision | None]:
    """What becomes of one name's revisions that nobody needs: number → its record from now on, or None: it goes.

    `in_use` are those with workers or calls. `kept` READY ones stay for rollbacks, as many FAILED ones for their
    errors. `function` is None when it was deleted, or when its first revision is not READY yet.
    """
    newest = max(revisions, default=0)
    newer: dict[RevisionState, int] = {}  # than the one that is looked at, in the same state
    after: dict[int, Revision | None] = {}
    for number in sorted(revisions, reverse=True):
        revision = revisions[number]
        place = newer.get(revision.state, 0)
        newer[revision.state] = place + 1
        is_called = function is not None and number in (function.active, function.serving)
        if is_called or number in in_use or not _is_over(revision, place, function is None, kept, now):
            continue
        if revision.state is RevisionState.READY:
            after[number] = retired(revision, now)
        elif number < newest:
            after[number] = None
        elif revision != (left := tombstone(revision)):
            after[number] = left
    return after


def _is_over(revision: Revision, place: int, is_deleted: bool, kept: int, now: float) -> bool:
    """`place`: how many newer revisions are in the same state."""
    match revision.state:
        case RevisionState.BUILDING:
            return False
        case RevisionState.READY if is_deleted:
            return now - revision.created_at > YOUNG_S
        case RevisionState.READY:
            return place >= kept
        case RevisionState.FAILED:
            return place >= kept or now - revision.created_at > _FAILURE_KEPT_S
        case RevisionState.RETIRED:
            return is_deleted or now - (revision.retired_at or 0.0) > _RETIRED_S


def retired(revision: Revision, now: float) -> Revision:
    return msgspec.structs.replace(revision, state=RevisionState.RETIRED, retired_at=now)


def tombstone(revision: Revision) -> Revision:
    """What is left of a revision so that its number is not given again; it names no bundle, model or engine."""
    return Revision(
        function=revision.function,
        number=revision.number,
        spec=FunctionSpec(name=revision.function, entry=EntryPoint("", ""), methods=(MethodSpec(),)),
        bundle=Digest(""),
        created_at=revision.created_at,
        state=revision.state,
        retired_at=revision.retired_at,
    )


# --- builds and blobs -------------------------------------------------------------------------------------------------


def builds_over(builds: Iterable[Build], revisions: Iterable[Revision], now: float) -> list[Build]:
    """Builds whose records go; not those that a BUILDING revision waits for."""
    waited_for = {build for each in revisions if each.state is RevisionState.BUILDING for build in each.builds}
    ended = [build for build in builds if build.state.ended and build.id not in waited_for]
    newest_first = sorted(ended, key=_ended_at, reverse=True)
    return [
        build
        for place, build in enumerate(newest_first)
        if place >= _KEPT_BUILDS or now - _ended_at(build) > _BUILD_KEPT_S
    ]


def _ended_at(build: Build) -> float:
    return build.created_at if build.ended_at is None else build.ended_at


def named_blobs(
    revisions: Iterable[Revision], builds: Iterable[Build], manifests: Iterable[EngineManifest]
) -> dict[str, set[str]]:
    """The digests that records name, by object store."""
    there, made = list(revisions), list(builds)
    models = [model for revision in there for model in revision.spec.models]
    models += [build.model for build in made if not build.state.ended]
    uploads = {file.digest for model in models for file in model.files}
    samples = {model.samples.digest for model in models if model.samples is not None}
    engines = {file.digest for manifest in manifests for file in manifest.files}
    reports = {digest for build in made for digest in (build.report, build.page)}
    return {
        subjects.BUNDLES: {revision.bundle for revision in there},
        subjects.MODEL_FILES: uploads | samples,
        subjects.ENGINE_FILES: engines | reports,
    }


# --- engines ----------------------------------------------------------------------------------------------------------


class Unused(msgspec.Struct, frozen=True):
    """Engines to remove, and those of their files that no other engine shares: digest → size in bytes."""

    engines: tuple[EngineManifest, ...]
    files: dict[str, int]

    @property
    def freed_bytes(self) -> int:
        return sum(self.files.values())


def users(revisions: Iterable[Revision], functions: Mapping[str, Function]) -> dict[str, list[str]]:
    """EngineKey → the revisions that keep it, such as ``resnet@7``."""
    found: dict[str, list[str]] = {}
    for revision in revisions:
        if _keeps_engines(revision, functions):
            for key in keys_of(revision):
                found.setdefault(key, []).append(str(revision))
    return found


def _keeps_engines(revision: Revision, functions: Mapping[str, Function]) -> bool:
    """It can be rolled back to, or is called."""
    function = functions.get(revision.function)
    is_called = function is not None and revision.number in (function.active, function.serving)
    return revision.state is RevisionState.READY or is_called


def keys_of(revision: Revision) -> set[str]:
    return {key for devices in revision.engines.values() for keys in devices.values() for key in keys}


def unused(
    manifests: Mapping[str, EngineManifest],
    revisions: Iterable[Revision],
    functions: Mapping[str, Function],
    builds: Iterable[Build],
    now: float,
) -> Unused:
    """A revision keeps its engines while it can be rolled back to or is called; a build, those of its model until it
    has ended, and those that it made until the revision that waits for it is READY, or for a minute when there is none:
    a build's record is made before its revision's."""
    kept: set[str] = set()
    waited_for: set[str] = set()
    has_revision: set[str] = set()
    for revision in revisions:
        has_revision |= set(revision.builds)
        if _keeps_engines(revision, functions):
            kept |= keys_of(revision)
        elif revision.state is RevisionState.BUILDING:
            waited_for |= set(revision.builds)
    models: set[str] = set()
    for build in builds:
        if not build.state.ended:
            models.add(model_digest(build.model.files))
        elif build.id in waited_for or (build.id not in has_revision and now - _ended_at(build) < RECORDED_WITHIN_S):
            kept |= set(build.engines)
    going = [
        manifest for key, manifest in manifests.items() if key not in kept and manifest.identity.model not in models
    ]
    staying = manifests.keys() - {manifest.key for manifest in going}
    shared = {file.digest for key in staying for file in manifests[key].files}
    files = {file.digest: file.size for manifest in going for file in manifest.files if file.digest not in shared}
    return Unused(tuple(going), files)
