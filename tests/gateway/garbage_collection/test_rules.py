from __future__ import annotations

import msgspec
import pytest

from gpufn_core.domain.devices.engine import (
    Accuracy,
    Backend,
    Build,
    BuildState,
    EngineIdentity,
    EngineManifest,
    model_digest,
)
from gpufn_core.domain.revision import Function, Lease, Revision, RevisionState
from gpufn_core.ids import Digest
from gpufn_core.protocol import subjects
from gpufn_core.spec.function_spec import EntryPoint, FunctionSpec, MethodSpec
from gpufn_core.spec.model_spec import ModelFile, ModelSpec, Precision
from gpufn_core.spec.weights_spec import WeightsFile, WeightsSpec
from gpufn_gateway.garbage_collection.rules import changes, expired_builds, named_blobs, tombstone, unused, users

MODEL = ModelSpec(parameter="net", files=(ModelFile("net.onnx", "0" * 64, 1),))
DAY = 86_400.0
NOW = 1_000 * DAY


def manifest(key: str, *files: tuple[str, int], model: str = "other") -> EngineManifest:
    identity = EngineIdentity(
        model=model, recipe=Precision.FP32, tools={}, profiles=(), max_batch=1, samples="", flags={},
        backend=Backend.ORT_CPU, versions={}, device="cpu", compute_capability="", os="", arch="",
    )  # fmt: skip
    return EngineManifest(
        key=key, identity=identity, model="net.onnx", inputs=(), outputs=(), profiles=(), batched=False, max_batch=1,
        files=tuple(ModelFile(name, digest * 64, size) for name, (digest, size) in zip("xyz", files, strict=False)),
        settings={}, accuracy=Accuracy(0.0, 0.0, 1.0), latency=None, built_at=0.0,
    )  # fmt: skip


def revision(number: int, state: RevisionState, *keys: str, builds: tuple[str, ...] = ()) -> Revision:
    spec = FunctionSpec(name="f", entry=EntryPoint("app", "f"), methods=(MethodSpec(),), models=(MODEL,))
    return Revision(
        function="f", number=number, spec=spec, bundle=Digest("0" * 64), created_at=0.0, state=state,
        builds=builds, engines={"net": {"cpu": keys}} if keys else {},
    )  # fmt: skip


def build(state: BuildState, *engines: str) -> Build:
    return Build(id="b", model=MODEL, device="cpu", created_at=0.0, state=state, engines=engines)


def ended(build_id: str, ended_at: float, *engines: str) -> Build:
    return msgspec.structs.replace(build(BuildState.SUCCEEDED, *engines), id=build_id, ended_at=ended_at)


FUNCTION = Function(name="f", active=2, serving=1, latest=2, updated_at=0.0)


@pytest.mark.parametrize(
    ("revisions", "functions", "builds", "is_kept"),
    [
        ([], {}, [], False),
        ([revision(7, RevisionState.READY, "k")], {}, [], True),
        ([revision(7, RevisionState.RETIRED, "k")], {}, [], False),
        ([revision(1, RevisionState.RETIRED, "k")], {"f": FUNCTION}, [], True),
        ([revision(3, RevisionState.RETIRED, "k")], {"f": FUNCTION}, [], False),
        ([revision(3, RevisionState.FAILED, builds=("b",))], {}, [build(BuildState.SUCCEEDED, "k")], False),
        ([revision(3, RevisionState.BUILDING, builds=("b",))], {}, [build(BuildState.SUCCEEDED, "k")], True),
        ([], {}, [build(BuildState.SUCCEEDED, "k")], False),
        ([], {}, [ended("b", NOW - 61, "k")], False),
        ([], {}, [ended("b", NOW - 59, "k")], True),  # its revision's record may still follow
        ([revision(3, RevisionState.FAILED, builds=("b",))], {}, [ended("b", NOW - 59, "k")], False),
        ([], {}, [build(BuildState.BUILDING)], True),
        ([], {}, [build(BuildState.PENDING)], True),
    ],
)
def test_an_engine_stays_while_it_may_be_needed(
    revisions: list[Revision], functions: dict[str, Function], builds: list[Build], is_kept: bool
) -> None:
    known = {"k": manifest("k", ("1", 10), model=model_digest(MODEL.files))}
    going = unused(known, revisions, functions, builds, NOW)
    assert ([each.key for each in going.engines], going.freed_bytes) == (([], 0) if is_kept else (["k"], 10))


def test_files_that_another_engine_shares_stay() -> None:
    known = {"k": manifest("k", ("1", 10), ("2", 20)), "l": manifest("l", ("2", 20), ("3", 30)), "m": manifest("m")}
    going = unused(known, [revision(1, RevisionState.READY, "k")], {}, [], NOW)
    assert ([each.key for each in going.engines], going.files) == (["l", "m"], {"3" * 64: 30})


def test_the_revisions_that_use_an_engine_are_named() -> None:
    shared = revision(1, RevisionState.READY, "k", "l")
    other = msgspec.structs.replace(revision(2, RevisionState.READY, "k"), function="g")
    assert users([shared, other], {}) == {"k": ["f@1", "g@2"], "l": ["f@1"]}


def test_a_revision_whose_engines_may_go_uses_none() -> None:
    called, left, failed = (
        revision(number, state, "k")
        for number, state in ((1, RevisionState.RETIRED), (3, RevisionState.RETIRED), (4, RevisionState.FAILED))
    )
    assert users([called, left, failed], {"f": FUNCTION}) == {"k": ["f@1"]}
    assert users([called, left, failed], {}) == {}


def numbered(states: str, *, created_at: float = NOW, retired_at: float = NOW) -> dict[int, Revision]:
    """Return revisions 1, 2, ... from a letter each: building, ready, failed, and x for retired."""
    names = {
        "b": RevisionState.BUILDING,
        "r": RevisionState.READY,
        "x": RevisionState.RETIRED,
        "f": RevisionState.FAILED,
    }
    return {
        number: msgspec.structs.replace(
            revision(number, names[letter]),
            created_at=created_at,
            retired_at=retired_at if letter == "x" else None,
        )
        for number, letter in enumerate(states, 1)
    }


def becomes(after: dict[int, Revision | None]) -> dict[int, str]:
    return {
        number: "gone" if left is None else "tombstone" if left == tombstone(left) else left.state.value
        for number, left in after.items()
    }


LIVE = Function(name="f", active=1, serving=1, latest=1, updated_at=0.0)


@pytest.mark.parametrize(
    ("states", "ages", "expected"),
    [
        # With its Function, whose active revision is 1.
        ("rrr", {}, {}),
        ("rrrr", {}, {2: "retired"}),  # 1 is active, two are kept for rollbacks
        ("rxrrr", {}, {3: "retired"}),  # retired within the last minute: a rollback may be in progress
        ("rxrr", {"retired_at": NOW - 61}, {2: "gone"}),
        ("rxrr", {"retired_at": None}, {2: "gone"}),  # by a release that did not record the time
        ("rfffr", {}, {2: "gone"}),
        ("rfrr", {"created_at": NOW - 8 * DAY}, {2: "gone"}),
        ("rf", {"created_at": NOW - 8 * DAY}, {2: "tombstone"}),
        ("rbbbbb", {"created_at": NOW - 8 * DAY}, {}),
    ],
)
def test_revisions_that_are_too_old_for_a_rollback_are_removed(
    states: str, ages: dict[str, float], expected: dict[int, str]
) -> None:
    assert becomes(changes(numbered(states, **ages), LIVE, set(), kept=2, now=NOW)) == expected


@pytest.mark.parametrize(
    ("states", "in_use", "ages", "expected"),
    [
        ("xxx", set(), {}, {1: "gone", 2: "gone", 3: "tombstone"}),
        ("xxx", {1, 3}, {}, {2: "gone"}),  # running calls finish
        ("xxb", set(), {}, {1: "gone", 2: "gone"}),
        ("xxf", set(), {}, {1: "gone", 2: "gone"}),
        ("xr", set(), {}, {1: "gone"}),  # its Function's record may still follow
        ("xr", set(), {"created_at": NOW - 2 * 3600}, {1: "gone", 2: "retired"}),  # the record never followed
        ("f", set(), {}, {}),
    ],
)
def test_of_a_deleted_function_only_the_newest_number_stays(
    states: str, in_use: set[int], ages: dict[str, float], expected: dict[int, str]
) -> None:
    assert becomes(changes(numbered(states, **ages), None, in_use, kept=10, now=NOW)) == expected


def test_active_serving_and_used_revisions_stay_at_any_age() -> None:
    function = Function(name="f", active=2, serving=1, latest=9, updated_at=0.0)
    after = changes(numbered("rrrrrrrrr"), function, {4}, kept=1, now=NOW)
    assert becomes(after) == dict.fromkeys((3, 5, 6, 7, 8), "retired")


def test_a_tombstone_names_nothing_and_stays_as_it_is() -> None:
    (left,) = changes(numbered("x"), None, set(), kept=1, now=NOW).values()
    assert left is not None
    assert (str(left), left.state, left.bundle, left.spec.models) == ("f@1", RevisionState.RETIRED, "", ())
    assert changes({1: left}, None, set(), kept=1, now=NOW) == {}
    assert len(msgspec.msgpack.encode(left)) < 1_000


def test_builds_go_when_they_are_old_or_many() -> None:
    many = [ended(f"n{each}", NOW - each) for each in range(502)]
    old = ended("old", NOW - 8 * DAY)
    runs = msgspec.structs.replace(build(BuildState.BUILDING), created_at=NOW - 8 * DAY)
    assert [each.id for each in expired_builds([*many, runs], [], NOW)] == ["n500", "n501"]
    assert [each.id for each in expired_builds([old, runs], [], NOW)] == ["old"]
    waits = revision(1, RevisionState.BUILDING, builds=("old",))
    assert expired_builds([old, runs], [waits], NOW) == []


def test_uploaded_weights_are_named_by_revisions() -> None:
    local = WeightsSpec(source="./weights", files=(WeightsFile("w", 1, "3" * 64),))
    fetched = WeightsSpec(source="hf://org/model", commit="c" * 40, files=(WeightsFile("w", 1, "4" * 64),))
    ready = revision(1, RevisionState.READY)
    spec = msgspec.structs.replace(ready.spec, weights=(local, fetched))
    named = named_blobs([msgspec.structs.replace(ready, spec=spec)], [], [])
    assert named[subjects.MODEL_FILES] == {"0" * 64, "3" * 64}


def test_blobs_are_named_by_revisions_builds_and_engines() -> None:
    samples = msgspec.structs.replace(
        MODEL, files=(ModelFile("o.onnx", "5" * 64, 1),), samples=ModelFile("s", "6" * 64, 1)
    )
    runs = msgspec.structs.replace(build(BuildState.BUILDING), model=samples)
    over = msgspec.structs.replace(runs, state=BuildState.FAILED, report="7" * 64, page="8" * 64)
    engine = manifest("k", ("1", 10), ("2", 20))
    assert named_blobs([revision(1, RevisionState.READY)], [runs], [engine]) == {
        subjects.BUNDLES: {"0" * 64},
        subjects.MODEL_FILES: {"0" * 64, "5" * 64, "6" * 64},
        subjects.ENGINE_FILES: {"1" * 64, "2" * 64, ""},
    }
    assert named_blobs([tombstone(revision(1, RevisionState.RETIRED))], [over], []) == {
        subjects.BUNDLES: {""},
        subjects.MODEL_FILES: set(),
        subjects.ENGINE_FILES: {"7" * 64, "8" * 64},
    }


@pytest.mark.parametrize(
    ("lease", "age_s", "is_deleted", "is_removed"),
    [
        (Lease("a", 30.0), 3601.0, True, True),
        (Lease("a", 30.0), 3599.0, True, False),  # something may still refer to the number
        (Lease("a", 30.0), 3601.0, False, False),
        (None, 3601.0, True, False),  # its number must not be reused
    ],
)
def test_a_temporary_function_leaves_no_tombstone(
    lease: Lease | None, age_s: float, is_deleted: bool, is_removed: bool
) -> None:
    retired = msgspec.structs.replace(
        revision(1, RevisionState.RETIRED), created_at=NOW - age_s, retired_at=NOW - age_s, lease=lease
    )
    left = tombstone(retired)
    assert left.lease == lease
    function = None if is_deleted else FUNCTION
    after = changes({1: left}, function, (), kept=2, now=NOW)
    assert (after.get(1, left) is None) is is_removed
