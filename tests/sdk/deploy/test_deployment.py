"""Deploy of one function: unchanged code, unmet requirements, and the wait until the revision serves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpufn.client.endpoints.traffic import TrafficView
from gpufn.client.views.functions import BuildingRevision, FunctionView, RevisionProgress, RevisionView, SplitView
from gpufn.client.views.models import BuildView
from gpufn.deploy.capacity_warnings import unmet_requirement
from gpufn.deploy.deployables import Deployable
from gpufn.deploy.deployment import deploy, wait_until_built, wait_until_serving
from gpufn_core.domain.devices.device import Share
from gpufn_core.domain.devices.engine import BuildStage, BuildState
from gpufn_core.domain.package_needs import PackageNeeds
from gpufn_core.domain.revision import Lease, RevisionState
from gpufn_core.errors import BuildFailed, Conflict, ErrorInfo, Forbidden, FunctionNotFound, FunctionStartFailed
from gpufn_core.ids import Digest
from gpufn_core.protocol.messages import LogLine
from gpufn_core.protocol.reports import NextRevision
from gpufn_core.signing.ed25519 import Signer, is_signed_by, parse_public_key
from gpufn_core.signing.statement import decode_statement, spec_digest
from gpufn_core.spec.function_spec import EntryPoint, FunctionSpec, MethodSpec
from gpufn_core.spec.image_spec import ImageSpec
from gpufn_core.spec.resources import Resources

_SPEC = FunctionSpec(name="f", entry=EntryPoint("app", "f"), methods=(MethodSpec(parameters={"type": "object"}),))
_WANTED = Deployable(_SPEC, Digest("a"), b"")
_NODE = {
    "devices": [
        {"type": "cpu", "kind": "EPYC", "memory_bytes": 8 << 30, "cores": 4.0},
        {"type": "gpu", "kind": "NVIDIA L4", "memory_bytes": 24 << 30},
    ]
}


def _view(active: int, serving: int, reason: str = "", **more: Any) -> FunctionView:
    return FunctionView(name="f", active=active, serving=serving, latest=active, reason=reason, **more)


class _Api:
    """Returns one view after the other, then the last one again. None raises FunctionNotFound."""

    def logs(self, name: str, *, tail: int = 100) -> Iterator[LogLine]:
        raise AssertionError

    def __init__(self, *views: FunctionView | None, bundle: str = "a", nodes: tuple[Any, ...] = (_NODE,)) -> None:
        self._views = list(views)
        self._bundle = bundle
        self._nodes = nodes
        self.signed_by = ""
        self.requests: list[str] = []

    def function(self, name: str, *, env_values: bool = False) -> FunctionView:
        view = self._views.pop(0) if len(self._views) > 1 else self._views[0]
        if view is None:
            raise FunctionNotFound
        return view

    def revisions(self, name: str) -> list[RevisionView]:
        return [
            RevisionView(number=number, created_at=1.0, bundle=self._bundle, state="live", signed_by=self.signed_by)
            for number in (1, 2)
        ]

    def nodes(self) -> list[dict[str, Any]]:
        return list(self._nodes)

    def put_bundle(self, digest: str, data: bytes) -> bool:
        self.requests.append(f"put {digest}")
        return True

    def revision(self, name: str, number: int, *, env_values: bool = False) -> RevisionProgress:
        raise AssertionError("none is built")

    def traffic(self, name: str) -> TrafficView:
        weights = {1: 90, 2: 10}
        return TrafficView(function=name, active=1, serving=1, weights=weights, return_if=("errors>2%",), min_calls=9)

    def set_traffic(self, name: str, weights: Mapping[int, int], **rules: Any) -> None:
        self.requests.append(f"split {dict(weights)}, {rules['return_if']}, {rules['min_calls']}")

    def rollback(self, name: str, revision: int | None = None) -> FunctionView:
        self.requests.append(f"activate {revision}")
        return _view(revision or 0, 1)

    def put_artifact(self, digest: str, path: Path, *, sent: Callable[[int], None]) -> bool:
        self.requests.append(f"put {digest}")
        sent(path.stat().st_size // 2)
        return True

    def create_revision(self, spec: FunctionSpec, bundle: str, **options: Any) -> FunctionView | BuildingRevision:
        self.requests.append(f"create {spec.name}")
        self.signature = options["signature"]
        return _view(3, 3)


def _as_json(spec: FunctionSpec) -> dict[str, Any]:
    spec_json: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(spec))
    return spec_json


@pytest.mark.parametrize(
    ("before", "force", "is_new"),
    [
        (None, False, True),
        (_view(2, 2, spec=_as_json(_SPEC)), False, False),
        (_view(2, 2, spec=_as_json(_SPEC)), True, True),
        (_view(2, 2, spec=_as_json(_SPEC) | {"concurrency": 2}), False, True),
        (_view(2, 1, spec=_as_json(_SPEC)), False, True),
        (_view(2, 2, spec=_as_json(_SPEC), start_error={"code": "x", "message": "no"}), False, True),
    ],
)
def test_only_an_unchanged_serving_revision_makes_no_revision(
    before: FunctionView | None, force: bool, is_new: bool
) -> None:
    api = _Api(before)
    assert deploy(api, _WANTED, force=force).is_new is is_new
    assert api.requests == ["put a", *(["create f"] if is_new else [])], "the bundle may have been lost"


@pytest.mark.parametrize(
    ("before", "now", "is_new"),
    [("", "", False), ("a", "a", False), ("a", "b", True), ("a", "", True), ("", "a", True)],
)
def test_a_change_of_the_lease_makes_a_revision(before: str, now: str, is_new: bool) -> None:
    leases = [Lease(id_, 30.0) if id_ else None for id_ in (before, now)]
    api = _Api(_view(2, 2, spec=_as_json(_SPEC), lease=leases[0]))
    assert deploy(api, _WANTED, lease=leases[1]).is_new is is_new


_CANARY = RevisionProgress(number=2, state=RevisionState.READY, bundle="a", spec=_as_json(_SPEC), signed_by="k")


@pytest.mark.parametrize(
    ("canary", "percent", "options", "made"),
    [
        (_CANARY, 10, {}, []),
        (_CANARY, 20, {}, ["split {1: 80, 2: 20}, ('errors>2%',), 9"]),
        (_CANARY, 10, {"force": True}, ["create f"]),
        (_CANARY, 10, {"signer": Signer.new()}, ["create f"]),
        (_CANARY, 10, {"lease": Lease("a", 30.0)}, ["create f"]),
        (msgspec.structs.replace(_CANARY, spec=_as_json(_SPEC) | {"concurrency": 2}), 10, {}, ["create f"]),
        (msgspec.structs.replace(_CANARY, bundle="b"), 10, {}, ["create f"]),
        (msgspec.structs.replace(_CANARY, state=RevisionState.FAILED), 10, {}, ["create f"]),
    ],
)
def test_a_canary_is_deployed_once(
    canary: RevisionProgress, percent: int, options: dict[str, Any], made: list[str]
) -> None:
    split = SplitView(weights={1: 90, 2: 10})
    api = _BuildingApi([canary], _view(1, 1, spec=_as_json(_SPEC) | {"timeout_s": 9.0}, traffic=split))
    deployment = deploy(api, _WANTED, traffic=percent, **options)
    assert api.requests == ["put a", *made]
    if not deployment.is_new:
        assert (deployment.revision, deployment.view and deployment.view.canary) == (2, 2)


def test_a_deploy_of_the_code_of_a_canary_without_a_split_gives_it_all_calls() -> None:
    split = SplitView(weights={1: 90, 2: 10})
    api = _BuildingApi([_CANARY], _view(1, 1, spec=_as_json(_SPEC) | {"timeout_s": 9.0}, traffic=split))
    deployment = deploy(api, _WANTED)
    assert api.requests == ["put a", "activate 2"]
    assert (deployment.revision, deployment.is_new, deployment.is_promoted) == (2, False, True)
    assert deployment.view is not None
    assert (deployment.view.active, deployment.view.canary) == (2, None)


def test_of_several_canaries_the_newest_is_compared_with_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    canaries = {number: msgspec.structs.replace(_CANARY, number=number) for number in (2, 3)}
    split = SplitView(weights={1: 80, 2: 10, 3: 10, 4: 0})
    api = _BuildingApi([_CANARY], _view(1, 1, spec=_as_json(_SPEC) | {"timeout_s": 9.0}, traffic=split))
    monkeypatch.setattr(api, "revision", lambda name, number, *, env_values: canaries[number])
    assert deploy(api, _WANTED).revision == 3
    assert api.requests == ["put a", "activate 3"]


def test_a_deploy_is_signed_as_the_gateway_stores_it() -> None:
    signer, api = Signer.new(), _Api(None)
    spec = msgspec.structs.replace(_SPEC, timeout_s=3, queue_timeout_s=2)  # floats once they are stored
    deploy(api, _WANTED._replace(spec=spec), signer=signer)
    assert is_signed_by(parse_public_key(signer.public_pem()), api.signature)
    statement = decode_statement(api.signature.payload)
    stored = msgspec.json.decode(msgspec.json.encode(spec), type=FunctionSpec)
    assert (statement.function, statement.bundle, statement.spec) == ("f", "a", spec_digest(stored))


def test_a_revision_signed_by_another_key_is_deployed_again() -> None:
    signer, api = Signer.new(), _Api(_view(2, 2, spec=_as_json(_SPEC)))
    assert deploy(api, _WANTED, signer=signer).is_new
    api.signed_by = signer.id
    assert not deploy(api, _WANTED, signer=signer).is_new
    assert not deploy(api, _WANTED).is_new


def test_another_bundle_is_another_revision() -> None:
    api = _Api(_view(2, 2, spec=_as_json(_SPEC)), bundle="b")
    assert deploy(api, _WANTED).is_new is True


def test_the_files_of_models_are_uploaded_before_the_revision_is_made(tmp_path: Path) -> None:
    (tmp_path / "net.onnx").write_bytes(b"1234")
    progress: list[str] = []
    api = _Api(None)
    deploy(api, _WANTED._replace(paths={"b": tmp_path / "net.onnx"}), on_progress=progress.append)
    assert api.requests == ["put a", "put b", "create f"]
    assert progress == ["uploading net.onnx, 50%"]


def test_a_revision_with_models_has_no_view_until_it_is_built() -> None:
    class _Builds(_Api):
        def create_revision(self, spec: FunctionSpec, bundle: str, **options: Any) -> BuildingRevision:
            return BuildingRevision(function="f", revision=3, builds=("b1",))

    deployment = deploy(_Builds(None), _WANTED)
    assert (deployment.view, deployment.revision, deployment.builds) == (None, 3, ("b1",))


class _BuildingApi(_Api):
    """Returns one revision after the other, then the last one again."""

    def __init__(self, revisions: list[RevisionProgress], *views: FunctionView | None) -> None:
        super().__init__(*views)
        self._revisions = revisions

    def revision(self, name: str, number: int, *, env_values: bool = False) -> RevisionProgress:
        return self._revisions.pop(0) if len(self._revisions) > 1 else self._revisions[0]


def _revision(state: RevisionState, stage: BuildStage | None = None, **more: Any) -> RevisionProgress:
    build = BuildView(id="b1", device="cpu", state=BuildState.BUILDING, stage=stage)
    return RevisionProgress(number=2, state=state, builds=(build,), **more)


_COMPILES = _revision(RevisionState.BUILDING, BuildStage.COMPILE)
_READY = _revision(RevisionState.READY)


def _wait_built(api: _Api, timeout_s: float | None = None, polled: list[Any] | None = None) -> FunctionView:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    on_builds = polled.append if polled is not None else lambda builds: None
    return wait_until_built(api, "f", 2, timeout_s, on_builds=on_builds, clock=lambda: now[0], sleep=sleep)


def test_the_wait_for_engines_ends_when_the_revision_is_active() -> None:
    polled: list[tuple[BuildView, ...]] = []
    view = _wait_built(_BuildingApi([_COMPILES, _READY], None, _view(1, 1), _view(2, 1)), polled=polled)
    assert (view.active, view.serving) == (2, 1)
    assert [builds[0].stage for builds in polled] == [BuildStage.COMPILE, None, None, None]


_LOG = "a\nb\n"
_CRASH = ErrorInfo("build_failed", "the compiler crashed", stage="compile", node="Conv_3", traceback=_LOG)


@pytest.mark.parametrize(
    ("revision", "view", "kind", "message"),
    [
        (
            _revision(RevisionState.FAILED, error=_CRASH),
            None,
            BuildFailed,
            "compile, node Conv_3: the compiler crashed",
        ),
        (
            _revision(
                RevisionState.FAILED, error=ErrorInfo("build_failed", "Foo_1 is unknown", node="Foo_1", stage="ingest")
            ),
            None,
            BuildFailed,
            "ingest: Foo_1 is unknown",
        ),
        (
            _revision(RevisionState.FAILED, error=ErrorInfo("build_failed", "cancelled")),
            None,
            BuildFailed,
            "cancelled",
        ),
        (_COMPILES, None, TimeoutError, "f@2 is not built after 10 s; the build continues"),
        (_READY, _view(3, 3), Conflict, "f@2 is built, but f@3 is active"),
        (_READY, None, Conflict, "f@2 is built, but no revision is active"),
        (_READY, _view(1, 1), Conflict, "f@2 is built, but f@1 is active"),
    ],
)
def test_the_wait_for_engines_ends_with_the_reason(
    revision: RevisionProgress, view: FunctionView | None, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind) as caught:
        _wait_built(_BuildingApi([_COMPILES, revision], view), 10.0 if kind is TimeoutError else None)
    assert str(caught.value) == message
    assert getattr(caught.value, "__notes__", []) == (["\nThe compiler's log:\na\nb"] if "node" in message else [])


def _wait(api: _Api, first: FunctionView, reasons: list[str] | None = None) -> FunctionView:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    on_reason = (reasons if reasons is not None else []).append
    return wait_until_serving(api, first, 10.0, on_reason=on_reason, clock=lambda: now[0], sleep=sleep)


def test_the_wait_ends_when_calls_go_to_the_new_revision() -> None:
    reasons: list[str] = []
    waits = _view(2, 1, "revision 2: 0 of 1 ready")
    assert _wait(_Api(waits, waits, _view(2, 2)), _view(2, 1), reasons).serving == 2
    assert reasons == ["revision 2: 0 of 1 ready"]


@pytest.mark.parametrize(
    ("view", "kind", "message"),
    [
        (
            _view(2, 1, "in other words", next=NextRevision(2, ErrorInfo("x", "no such file"))),
            FunctionStartFailed,
            "f@2 does not start, f@1 still serves: no such file",
        ),
        (_view(3, 3), Conflict, "f@2 was replaced by f@3 before it served"),
        (_view(3, 1), Conflict, "f@2 was replaced by f@3 before it served"),
        (_view(2, 1, "full"), TimeoutError, "f@2 does not serve after 10 s, f@1 still does: full"),
        (
            _view(2, 1, "full", next=NextRevision(1, ErrorInfo("x", "an error of another revision"))),
            TimeoutError,
            "f@2 does not serve after 10 s",
        ),
    ],
)
def test_the_wait_ends_with_the_reason(view: FunctionView, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as caught:
        _wait(_Api(view), _view(2, 1))
    assert str(caught.value).startswith(message)


def test_a_key_that_may_not_read_does_not_wait() -> None:
    class _Blind(_Api):
        def function(self, name: str, *, env_values: bool = False) -> FunctionView:
            raise Forbidden

    assert _wait(_Blind(None), _view(2, 1)).serving == 1


def _part(vram_bytes: int) -> Resources:
    return Resources(gpu=("L4",), share=Share.MPS, vram_bytes=vram_bytes)


@pytest.mark.parametrize(
    ("resources", "nodes", "lacks"),
    [
        (Resources(), [_NODE], ""),
        (Resources(gpu=("L4",)), [_NODE], ""),
        (Resources(gpu=("any",)), [_NODE], ""),
        (Resources(gpu=("H100", "any")), [_NODE], ""),
        (Resources(gpu=("H100", "A100")), [_NODE], "no node has the GPU 'H100' or 'A100'"),
        (Resources(gpu=("any",)), [{"devices": _NODE["devices"][:1]}], "no node has a GPU"),
        (_part(24 << 30), [_NODE], ""),
        (_part(25 << 30), [_NODE], "no GPU has 25 GiB of memory, the largest has 24 GiB"),
        (Resources(memory_bytes=9 << 30), [_NODE], "no node has 9 GiB of memory, the largest has 8 GiB"),
        (Resources(cpu=5), [_NODE], "no node has 5 cores, the largest has 4"),
        (Resources(gpu=("H100",)), [], ""),
    ],
)
def test_resources_that_no_node_has_are_reported(resources: Resources, nodes: list[dict[str, Any]], lacks: str) -> None:
    assert unmet_requirement(resources, nodes) == lacks


@pytest.mark.parametrize(
    ("needs", "troubles", "lacks"),
    [
        (["sandbox"], [{}, {"sandbox": "no Landlock"}], ""),
        (["sandbox"], [{"sandbox": "no Landlock"}], "no node offers isolation='sandbox' (no Landlock)"),
        (["egress"], [{"egress": "no root"}], "no node offers network='egress' (no root)"),
    ],
)
def test_an_isolation_that_no_node_offers_is_named(
    needs: list[str], troubles: list[dict[str, str]], lacks: str
) -> None:
    nodes = [_NODE | {"isolation_trouble": trouble} for trouble in troubles]
    assert unmet_requirement(Resources(), nodes, needs=needs) == lacks


@pytest.mark.parametrize(
    ("nodes", "is_met"),
    [
        ([{"machine": "x86_64", "pythons": ["3.12"]}, {"machine": "aarch64", "pythons": ["3.12"]}], True),
        ([{"machine": "x86_64", "pythons": ["3.11"]}, {"machine": "aarch64", "pythons": ["3.12"]}], False),
        ([{"machine": "aarch64", "contains_all": True}], True),
    ],
)
def test_packages_that_no_node_can_have_are_reported(nodes: list[dict[str, Any]], is_met: bool) -> None:
    packages = PackageNeeds("3.12", "x86_64", 0)
    lacking = unmet_requirement(Resources(), [_NODE | node for node in nodes], packages=packages)
    assert (lacking == "") == is_met


@pytest.mark.parametrize(
    ("troubles", "lacks"),
    [
        (["Docker does not answer"], "no node can start containers, which its image needs (Docker does not answer)"),
        (["no docker", "Docker does not answer"], "no node can start containers, which its image needs (no docker)"),
        (["Docker does not answer", ""], ""),
    ],
)
def test_a_function_with_an_image_warns_that_no_node_has_docker(troubles: list[str], lacks: str) -> None:
    nodes = [_NODE | {"container_trouble": trouble} for trouble in troubles]
    assert unmet_requirement(Resources(), nodes, in_container=True) == lacks
    assert bool(unmet_requirement(Resources(), nodes, in_container=True)) == bool(lacks)
    assert unmet_requirement(Resources(), nodes) == ""
    api = _Api(None, _view(1, 1), nodes=tuple(nodes))
    imaged = FunctionSpec(name="f", entry=_SPEC.entry, methods=_SPEC.methods, image=ImageSpec(python="3.12"))
    assert deploy(api, Deployable(imaged, Digest("a"), b"")).lacking == lacks


def test_a_function_with_an_image_and_a_gpu_needs_a_node_whose_containers_have_gpus() -> None:
    gpu = {"type": "gpu", "kind": "NVIDIA L4", "memory_bytes": 24 << 30}
    ill: dict[str, Any] = {"devices": [gpu], "gpu_container_trouble": "neither hook nor CDI"}
    wants = Resources(gpu=("L4",))
    assert "neither hook nor CDI" in unmet_requirement(wants, [ill], in_container=True)
    assert unmet_requirement(wants, [ill]) == ""
    assert unmet_requirement(wants, [ill, {"devices": [gpu]}], in_container=True) == ""
