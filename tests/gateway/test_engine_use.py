from __future__ import annotations

import msgspec
import pytest

from gpufn.engine import Accuracy, Backend, Build, BuildState, EngineIdentity, EngineManifest, model_digest
from gpufn.ids import Digest
from gpufn.model import ModelFile, ModelSpec, Precision
from gpufn.revision import Function, Revision, RevisionState
from gpufn.spec import EntryPoint, FunctionSpec, MethodSpec
from gpufn_gateway.engine_use import unused, users

MODEL = ModelSpec(parameter="net", files=(ModelFile("net.onnx", "0" * 64, 1),))


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
        ([], {}, [build(BuildState.BUILDING)], True),
        ([], {}, [build(BuildState.PENDING)], True),
    ],
)
def test_an_engine_stays_while_somebody_may_need_it(
    revisions: list[Revision], functions: dict[str, Function], builds: list[Build], is_kept: bool
) -> None:
    known = {"k": manifest("k", ("1", 10), model=model_digest(MODEL.files))}
    going = unused(known, revisions, functions, builds)
    assert ([each.key for each in going.engines], going.freed_bytes) == (([], 0) if is_kept else (["k"], 10))


def test_files_that_another_engine_shares_stay() -> None:
    known = {"k": manifest("k", ("1", 10), ("2", 20)), "l": manifest("l", ("2", 20), ("3", 30)), "m": manifest("m")}
    going = unused(known, [revision(1, RevisionState.READY, "k")], {}, [])
    assert ([each.key for each in going.engines], going.files) == (["l", "m"], {"3" * 64: 30})


def test_the_revisions_that_use_an_engine_are_named() -> None:
    shared = revision(1, RevisionState.READY, "k", "l")
    other = msgspec.structs.replace(revision(2, RevisionState.READY, "k"), function="g")
    assert users([shared, other]) == {"k": ["f@1", "g@2"], "l": ["f@1"]}
