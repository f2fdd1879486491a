from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gpufn_core.domain.devices.device import Device, DeviceType, Share
from gpufn_core.domain.devices.engine import Build, BuildState, EngineManifest
from gpufn_core.domain.revision import Revision, RevisionState
from gpufn_core.errors import BuildFailed, NoCapacity
from gpufn_core.ids import Digest
from gpufn_core.protocol.reports import NodeReport
from gpufn_core.spec.function_spec import EntryPoint, FunctionSpec, MethodSpec
from gpufn_core.spec.model_spec import ModelFile, ModelSpec
from gpufn_core.spec.resources import Resources
from gpufn_core.spec.units import parse_bytes
from gpufn_gateway.builds.build_rules import RECORDED_WITHIN_S, after_builds, build_ahead, device_kinds
from tests.gateway.garbage_collection.test_rules import manifest

MODELS = tuple(ModelSpec(parameter=name, files=(ModelFile(f"{name}.onnx", "0" * 64, 1),)) for name in ("a", "b"))
SPEC = FunctionSpec(name="f", entry=EntryPoint("app", "f"), methods=(MethodSpec(),), models=MODELS)
REVISION = Revision(
    function="f", number=3, spec=SPEC, bundle=Digest("0" * 64), created_at=100.0, state=RevisionState.BUILDING,
    builds=("1", "2"),
)  # fmt: skip


def gpus(node: str, *kinds: str) -> NodeReport:
    devices = [Device(f"{node}-{number}", DeviceType.GPU, kind, 1 << 30) for number, kind in enumerate(kinds)]
    return NodeReport(node, 0.0, (Device(node, DeviceType.CPU, "cpu", 1 << 30, cores=4), *devices))


NODES = [gpus("n1", "NVIDIA L4", "NVIDIA L4"), gpus("n2", "NVIDIA A100", "NVIDIA H200")]


@pytest.mark.parametrize(
    ("gpu", "kinds"),
    [
        ((), ("cpu",)),
        (("L4",), ("NVIDIA L4",)),
        (("H200", "l4"), ("NVIDIA H200", "NVIDIA L4")),
        (("any",), ("NVIDIA A100", "NVIDIA H200", "NVIDIA L4")),
    ],
)
def test_an_engine_is_built_for_each_kind_where_the_function_can_run(
    gpu: tuple[str, ...], kinds: tuple[str, ...]
) -> None:
    assert device_kinds(Resources(gpu=gpu), NODES) == kinds


@pytest.mark.parametrize(
    ("gpu", "nodes", "why"),
    [
        (("B200", "T4"), NODES, "B200 or T4, and the live nodes have NVIDIA A100, NVIDIA H200, NVIDIA L4"),
        (("any",), [gpus("n3")], "any GPU, and the live nodes have no GPU"),
    ],
)
def test_without_a_device_to_build_for_there_is_no_build(
    gpu: tuple[str, ...], nodes: list[NodeReport], why: str
) -> None:
    with pytest.raises(NoCapacity, match=why):
        device_kinds(Resources(gpu=gpu), nodes)
    assert device_kinds(Resources(), []) == ("cpu",)  # a builder may come later


def build(number: str, state: BuildState, **fields: Any) -> Build:
    return Build(id=number, model=MODELS[int(number) - 1], device="cpu", created_at=0.0, state=state, **fields)


OK = BuildState.SUCCEEDED


@pytest.mark.parametrize("state", [BuildState.PENDING, BuildState.BUILDING])
def test_a_revision_is_being_built_until_all_its_builds_have_ended(state: BuildState) -> None:
    builds = {"1": build("1", OK, engines=("k1",)), "2": build("2", state)}
    assert after_builds(REVISION, builds, {}, 100.0) is None


def test_a_revision_whose_builds_succeeded_is_ready_and_has_their_engines() -> None:
    builds = {"1": build("1", OK, engines=("k1", "k2")), "2": build("2", OK, engines=("k3",))}
    after = after_builds(REVISION, builds, {}, 1e9)
    assert after is not None
    assert (after.state, after.engines) == (RevisionState.READY, {"a": {"cpu": ("k1", "k2")}, "b": {"cpu": ("k3",)}})


@pytest.mark.parametrize(
    ("ended", "message"),
    [
        (build("2", BuildState.FAILED, error=BuildFailed("it is 2x off", stage="verify", node="y").info()),
         "b.onnx for cpu: it is 2x off"),
        (build("2", BuildState.CANCELLED), "b.onnx for cpu: the build was cancelled"),
    ],
)  # fmt: skip
def test_one_build_that_failed_fails_its_revision_at_once(ended: Build, message: str) -> None:
    after = after_builds(REVISION, {"1": build("1", BuildState.BUILDING), "2": ended}, {}, 100.0)
    assert after is not None
    assert after.error is not None
    assert (after.state, after.error.code, after.error.message) == (RevisionState.FAILED, "build_failed", message)
    assert (after.error.stage, after.error.node) == (("verify", "y") if ended.error else (None, None))


def test_a_deploy_waits_for_the_record_of_a_build_and_then_fails() -> None:
    builds = {"1": build("1", OK, engines=("k1",))}
    assert after_builds(REVISION, builds, {}, 100.0 + RECORDED_WITHIN_S - 1) is None
    after = after_builds(REVISION, builds, {}, 100.0 + RECORDED_WITHIN_S)
    assert after is not None
    assert after.error is not None
    assert (after.state, after.error.code) == (RevisionState.FAILED, "build_failed")
    assert "deploy again" in after.error.message


_ENGINE_BYTES, _CONTEXT_BYTES = 2 << 30, 512 << 20


def _revision(vram: str | None, concurrency: int = 3) -> Revision:
    resources = Resources(gpu=("any",), share=Share.MPS, vram_bytes=parse_bytes(vram)) if vram else Resources()
    spec = msgspec.structs.replace(SPEC, resources=resources, concurrency=concurrency)
    return msgspec.structs.replace(REVISION, spec=spec)


def _built(key: str, **settings: int) -> EngineManifest:
    return msgspec.structs.replace(manifest(key, ("0", _ENGINE_BYTES)), settings=settings)


_MANIFESTS = {key: _built(key, device_memory_bytes=_CONTEXT_BYTES) for key in ("k1", "k3")}
_BUILT = {"1": build("1", OK, engines=("k1", "k2")), "2": build("2", OK, engines=("k3",))}


@pytest.mark.parametrize(
    ("vram", "concurrency", "manifests", "state"),
    [
        ("7GiB", 3, _MANIFESTS, RevisionState.READY),  # 2 x (2 GiB + 3 x 512 MiB)
        ("6.9GiB", 3, _MANIFESTS, RevisionState.FAILED),
        ("5GiB", 1, _MANIFESTS, RevisionState.READY),
        (None, 3, _MANIFESTS, RevisionState.READY),
        ("1GiB", 3, {key: _built(key) for key in _MANIFESTS}, RevisionState.READY),  # ONNX Runtime reports no memory
    ],
)
def test_engines_and_their_contexts_fit_in_the_declared_vram(
    vram: str | None, concurrency: int, manifests: dict[str, EngineManifest], state: RevisionState
) -> None:
    after = after_builds(_revision(vram, concurrency), _BUILT, manifests, 1e9)
    assert after is not None
    assert after.state is state
    if state is RevisionState.FAILED:
        assert after.error is not None
        assert after.error.code == "build_failed"
        assert all(figure in after.error.message for figure in ("7 GiB", "6.9 GiB", "2 GiB", "512 MiB", "vram"))


def test_a_manifest_that_a_limit_is_compared_with_is_waited_for() -> None:
    builds = {id_: msgspec.structs.replace(build, ended_at=100.0) for id_, build in _BUILT.items()}
    revision = _revision("1GiB")
    assert after_builds(revision, builds, {}, 100.0 + RECORDED_WITHIN_S - 1) is None
    assert after_builds(_revision(None), builds, {}, 100.0) is not None
    after = after_builds(revision, builds, {}, 100.0 + RECORDED_WITHIN_S)
    assert after is not None
    assert after.state is RevisionState.READY


def waiting(id_: str, device: str = "cpu", state: BuildState = BuildState.PENDING, **fields: Any) -> Build:
    return Build(id=id_, model=MODELS[0], device=device, created_at=1.0, state=state, **fields)


RUNNING = waiting("1", state=BuildState.BUILDING, started_at=20.0)


@pytest.mark.parametrize(
    ("others", "ahead"),
    [
        ([], None),
        ([RUNNING], "1"),
        ([waiting("1", "NVIDIA L4", BuildState.BUILDING, started_at=1.0)], None),  # of another device
        ([waiting("1", state=BuildState.SUCCEEDED, started_at=1.0)], None),
        ([RUNNING, waiting("2", state=BuildState.BUILDING, started_at=10.0)], "2"),  # runs for longer
        ([waiting("2")], None),  # waits too
        ([waiting("8"), RUNNING], "1"),
    ],
)
def test_a_build_waits_behind_the_build_of_its_device_that_runs_for_the_longest_time(
    others: list[Build], ahead: str | None
) -> None:
    found = build_ahead(waiting("9"), [*others, waiting("9")])
    assert (found and found.id) == ahead


def test_a_build_is_not_ahead_of_itself() -> None:
    """Regression: its record is read before it starts, and the list of all builds after."""
    assert build_ahead(waiting("1"), [RUNNING]) is None


@pytest.mark.parametrize("state", [state for state in BuildState if state is not BuildState.PENDING])
def test_a_build_that_does_not_wait_has_no_build_ahead(state: BuildState) -> None:
    assert build_ahead(waiting("9", state=state), [RUNNING]) is None
