"""Build rules: the builds that a revision with models needs, the build that another waits for, and the revision's state
once its builds have ended. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from gpufn_core.domain.devices.device import ANY_KIND, DeviceType, has_kind
from gpufn_core.domain.devices.engine import CPU_KIND, Build, BuildState, EngineManifest
from gpufn_core.domain.revision import Revision, RevisionState
from gpufn_core.errors import BuildFailed, ErrorInfo, NoCapacity
from gpufn_core.protocol.reports import NodeReport
from gpufn_core.spec.resources import Resources
from gpufn_gateway.builds.gpu_memory import memory_problem

# Builds are recorded before their revision, and manifests before the build's end, but the watches may report them in
# reverse order.
RECORDED_WITHIN_S = 60.0


def device_kinds(resources: Resources, nodes: Iterable[NodeReport]) -> tuple[str, ...]:
    """Return the DeviceKinds of the live `nodes` that the function may use. Raises NoCapacity if there is none."""
    if not resources.gpu:
        return (CPU_KIND,)
    gpus = [device for report in nodes for device in report.devices if device.type is DeviceType.GPU]
    kinds = {device.kind for device in gpus if any(has_kind(device, wanted) for wanted in resources.gpu)}
    if not kinds:
        wanted = "any GPU" if ANY_KIND in resources.gpu else " or ".join(resources.gpu)
        available = ", ".join(sorted({device.kind for device in gpus})) or "no GPU"
        raise NoCapacity(
            f"An engine is built on the device that it is for. It needs {wanted}, and the live nodes have {available}."
        )
    return tuple(sorted(kinds))


def after_builds(
    revision: Revision, builds: Mapping[str, Build], manifests: Mapping[str, EngineManifest], now: float
) -> Revision | None:
    """Return a BUILDING revision as READY or FAILED; None while one of its builds runs.

    `builds` are the known builds, by id. `manifests` are the known manifests, by EngineKey; `now` is in unix seconds.
    """
    own = [builds.get(build) for build in revision.builds]
    for build in own:
        if build is not None and build.state in (BuildState.FAILED, BuildState.CANCELLED):
            return as_failed(revision, _error_of(build))
    known = [build for build in own if build is not None]
    if len(known) < len(own):
        if now - revision.created_at < RECORDED_WITHIN_S:
            return None
        return as_failed(revision, BuildFailed("a build of this revision is missing: deploy again").info())
    has_limit = revision.spec.resources.vram_bytes is not None
    if not all(build.state.ended and not (has_limit and _awaits_manifest(build, manifests, now)) for build in known):
        return None
    if problem := memory_problem(revision, known, manifests):
        return as_failed(revision, BuildFailed(problem).info())
    engines: dict[str, dict[str, tuple[str, ...]]] = {}
    for build in known:
        engines.setdefault(build.model.parameter, {})[build.device] = build.engines
    return msgspec.structs.replace(revision, state=RevisionState.READY, engines=engines)


def _awaits_manifest(build: Build, manifests: Mapping[str, EngineManifest], now: float) -> bool:
    """Return whether the manifest of the engine that workers load first is not known here yet."""
    return now - (build.ended_at or 0.0) < RECORDED_WITHIN_S and not manifests.keys() >= {*build.engines[:1]}


def build_ahead(build: Build, builds: Iterable[Build]) -> Build | None:
    """Return the build that a PENDING build waits for: the build of its DeviceKind that has run the longest.

    None if none runs. A builder always runs one build of each DeviceKind, so builds of other kinds are not ahead.
    """
    running = [
        each
        for each in builds
        if each.state is BuildState.BUILDING and each.device == build.device and each.id != build.id
    ]
    if build.state is not BuildState.PENDING or not running:
        return None
    return min(running, key=lambda each: (each.started_at or 0.0, each.id))


def as_failed(revision: Revision, error: ErrorInfo) -> Revision:
    return msgspec.structs.replace(revision, state=RevisionState.FAILED, error=error)


def _error_of(build: Build) -> ErrorInfo:
    subject = f"{build.model.files[0].name} for {build.device}"
    if build.state is BuildState.CANCELLED:
        return BuildFailed(f"{subject}: the build was cancelled", stage=build.stage or "").info()
    error = build.error or BuildFailed().info()
    return msgspec.structs.replace(error, message=f"{subject}: {error.message}")
