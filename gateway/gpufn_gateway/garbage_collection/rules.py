"""Garbage collection rules: which revisions, bundles, builds, model files and engines are in use. Pure.

The collector (`gpufn_gateway.garbage_collection.collector`) removes automatically:

revisions   A READY revision that is not called, and too old for rollbacks, is retired. It is removed a minute later,
            because a rollback may be in progress; at once if its function was deleted. The highest number leaves a
            tombstone, because that number must not be reused. The tombstone of a temporary function is removed an hour
            later: each `gpufn run` has its own name, and its record would remain forever
builds      records that ended long ago, and all but the newest few hundred that ended
blobs       blobs that no record names. An upload precedes its record, so young blobs stay

Engines are expensive to build: they are removed only on request, by `unused`. Times are in unix seconds.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Final

import msgspec

from gpufn_core.domain.devices.engine import Build, EngineManifest, model_digest
from gpufn_core.domain.revision import Function, Revision, RevisionState
from gpufn_core.ids import Digest
from gpufn_core.protocol import subjects
from gpufn_core.spec.function_spec import EntryPoint, FunctionSpec, MethodSpec
from gpufn_gateway.builds.build_rules import RECORDED_WITHIN_S

YOUNG_S: Final = 3600.0  # age of an upload, or of a revision, whose record may still follow
_RETIRED_S: Final = 60.0
_DAY_S: Final = 86_400.0
_FAILURE_KEPT_S: Final = 7 * _DAY_S
_BUILD_KEPT_S: Final = 7 * _DAY_S
_KEPT_BUILDS: Final = 500


# --- revisions --------------------------------------------------------------------------------------------------------


def changes(
    revisions: Mapping[int, Revision], function: Function | None, in_use: Container[int], *, kept: int, now: float
) -> dict[int, Revision | None]:
    """Return the changes to one function's unused revisions: number -> new record, or None to delete the record.

    `in_use` has the revisions with workers or calls. `kept` READY revisions stay for rollbacks, and as many FAILED ones
    for their errors. `function` is None if it was deleted, or if its first revision is not READY yet.
    """
    newest = max(revisions, default=0)
    newer: dict[RevisionState, int] = {}  # newer revisions in the same state
    after: dict[int, Revision | None] = {}
    for number in sorted(revisions, reverse=True):
        revision = revisions[number]
        place = newer.get(revision.state, 0)
        newer[revision.state] = place + 1
        is_called = function is not None and number in function.called
        if is_called or number in in_use or not _is_expired(revision, place, function is None, kept, now):
            continue
        if revision.state is RevisionState.READY:
            after[number] = as_retired(revision, now)
        elif number < newest or (function is None and _is_old_and_temporary(revision, now)):
            after[number] = None
        elif revision != (replacement := tombstone(revision)):
            after[number] = replacement
    return after


def _is_expired(revision: Revision, place: int, is_deleted: bool, kept: int, now: float) -> bool:
    """Return whether a revision is no longer needed. `place` is the number of newer revisions in the same state."""
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


def _is_old_and_temporary(revision: Revision, now: float) -> bool:
    ended_at = max(revision.created_at, revision.retired_at or 0.0)
    return revision.lease is not None and now - ended_at > YOUNG_S


def as_retired(revision: Revision, now: float) -> Revision:
    return msgspec.structs.replace(revision, state=RevisionState.RETIRED, retired_at=now)


def tombstone(revision: Revision) -> Revision:
    """Return the record that keeps a revision's number from being reused; it names no bundle, model or engine."""
    return Revision(
        function=revision.function,
        number=revision.number,
        spec=FunctionSpec(name=revision.spec.name, entry=EntryPoint("", ""), methods=(MethodSpec(),)),
        bundle=Digest(""),
        created_at=revision.created_at,
        state=revision.state,
        retired_at=revision.retired_at,
        lease=revision.lease,
    )


# --- builds and blobs -------------------------------------------------------------------------------------------------


def expired_builds(builds: Iterable[Build], revisions: Iterable[Revision], now: float) -> list[Build]:
    """Return the builds whose records can be removed; never a build that a BUILDING revision waits for."""
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
    """Return the digests that records name, by object store."""
    all_revisions, all_builds = list(revisions), list(builds)
    models = [model for revision in all_revisions for model in revision.spec.models]
    models += [build.model for build in all_builds if not build.state.ended]
    uploads = {file.digest for model in models for file in model.files}
    weights = {file.digest for revision in all_revisions for each in revision.spec.weights for file in each.uploads}
    samples = {model.samples.digest for model in models if model.samples is not None}
    engines = {file.digest for manifest in manifests for file in manifest.files}
    reports = {digest for build in all_builds for digest in (build.report, build.page)}
    return {
        subjects.BUNDLES: {revision.bundle for revision in all_revisions},
        subjects.MODEL_FILES: uploads | samples | weights,
        subjects.ENGINE_FILES: engines | reports,
    }


# --- engines ----------------------------------------------------------------------------------------------------------


class Unused(msgspec.Struct, frozen=True):
    """Engines to remove, and their files that no other engine shares: digest -> size in bytes."""

    engines: tuple[EngineManifest, ...]
    files: dict[str, int]

    @property
    def freed_bytes(self) -> int:
        return sum(self.files.values())


def users(revisions: Iterable[Revision], functions: Mapping[str, Function]) -> dict[str, list[str]]:
    """Return a map from EngineKey to the revisions that keep it, such as ``resnet@7``."""
    used_by: dict[str, list[str]] = {}
    for revision in revisions:
        if _keeps_engines(revision, functions):
            for key in revision.engine_keys:
                used_by.setdefault(key, []).append(str(revision))
    return used_by


def _keeps_engines(revision: Revision, functions: Mapping[str, Function]) -> bool:
    """Return whether the revision can be rolled back to, or is called."""
    function = functions.get(revision.function)
    is_called = function is not None and revision.number in function.called
    return revision.state is RevisionState.READY or is_called


def unused(
    manifests: Mapping[str, EngineManifest],
    revisions: Iterable[Revision],
    functions: Mapping[str, Function],
    builds: Iterable[Build],
    now: float,
) -> Unused:
    """Return the engines that nothing keeps. A revision keeps its engines while it can be rolled back to or is called.
    A running build keeps the blobs of its model. An ended build keeps the blobs that it made until the revision that
    waits for it is READY. Without a revision it keeps them for a minute, because a build is recorded before its
    revision."""
    kept: set[str] = set()
    waited_for: set[str] = set()
    has_revision: set[str] = set()
    for revision in revisions:
        has_revision |= set(revision.builds)
        if _keeps_engines(revision, functions):
            kept |= revision.engine_keys
        elif revision.state is RevisionState.BUILDING:
            waited_for |= set(revision.builds)
    models: set[str] = set()
    for build in builds:
        if not build.state.ended:
            models.add(model_digest(build.model.files))
        elif build.id in waited_for or (build.id not in has_revision and now - _ended_at(build) < RECORDED_WITHIN_S):
            kept |= set(build.engines)
    removable = [
        manifest for key, manifest in manifests.items() if key not in kept and manifest.identity.model not in models
    ]
    staying = manifests.keys() - {manifest.key for manifest in removable}
    shared = {file.digest for key in staying for file in manifests[key].files}
    files = {file.digest: file.size for manifest in removable for file in manifest.files if file.digest not in shared}
    return Unused(tuple(removable), files)
