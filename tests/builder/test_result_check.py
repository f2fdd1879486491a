"""The builder publishes only requested engines of a build process, with files in the folder of the build."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpufn_builder import identity, result_check
from gpufn_builder.identity import Target
from gpufn_builder.processes.process_messages import BuiltEngine
from gpufn_core.domain.devices.engine import Accuracy, Backend, EngineManifest
from gpufn_core.errors import BuildFailed
from gpufn_core.ids import digest_of
from gpufn_core.spec.model_spec import ModelFile, ModelSpec

SPEC = ModelSpec(parameter="net", files=(ModelFile("m.onnx", "a" * 64, 1),))
ASKED = identity.identity(SPEC, Target("cpu", ""), Backend.ORT_CPU, {})
FILE = ModelFile("model.onnx", digest_of(b"engine"), 6)
MANIFEST = EngineManifest(
    key=ASKED.key, identity=ASKED, model="m.onnx", inputs=(), outputs=(), profiles=(), batched=False, max_batch=1,
    files=(FILE,), settings={}, accuracy=Accuracy(0.0, 0.0, 1.0), latency=None, built_at=1.0,
)  # fmt: skip


def made_in(folder: Path, **changes: Any) -> BuiltEngine:
    """An engine whose file exists."""
    engine = folder / "engine"
    engine.mkdir(parents=True)
    (engine / "model.onnx").write_bytes(b"engine")
    return BuiltEngine(msgspec.structs.replace(MANIFEST, **changes), str(engine))


def test_a_requested_engine_in_the_folder_of_the_build_is_published(tmp_path: Path) -> None:
    result_check.check(made_in(tmp_path / "build"), [ASKED], tmp_path / "build")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"key": "b" * 64}, "the build produced an engine that was not requested"),
        (
            {"identity": msgspec.structs.replace(ASKED, model="b" * 64)},
            "the build produced an engine that was not requested",
        ),
        ({"files": ()}, "the build produced an engine without files"),
        (
            {"files": (ModelFile("model.onnx", FILE.digest, 7),)},
            "the file model.onnx of the engine is missing or not as reported",
        ),
        (
            {"files": (ModelFile("absent", FILE.digest, 6),)},
            "the file absent of the engine is missing or not as reported",
        ),
    ],
)
def test_an_engine_that_differs_from_the_request_is_refused(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(BuildFailed) as failure:
        result_check.check(made_in(tmp_path / "build", **changes), [ASKED], tmp_path / "build")
    assert (failure.value.message, failure.value.stage) == (why, "publish")


@pytest.mark.parametrize("how", ["the folder", "a link", "a linked folder", "a circle", "a pipe"])
def test_nothing_is_read_outside_of_the_builds_folder(tmp_path: Path, how: str) -> None:
    engine_made, secret = made_in(tmp_path / "build"), made_in(tmp_path / "secret")
    engine = Path(engine_made.folder)
    (engine / "model.onnx").unlink()
    match how:
        case "the folder":
            engine_made = secret
        case "a link":
            (engine / "model.onnx").symlink_to(Path(secret.folder) / "model.onnx")
        case "a linked folder":
            engine.rmdir()
            engine.symlink_to(secret.folder)
        case "a circle":
            (engine / "model.onnx").symlink_to("model.onnx")
        case "a pipe":
            os.mkfifo(engine / "model.onnx")
    with pytest.raises(BuildFailed, match=r"model\.onnx .*missing"):
        result_check.check(engine_made, [ASKED], tmp_path / "build")
