"""Builds on a running platform: cached engines, refused models, cancelled builds, and deaths of processes."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper

import gpufn
from gpufn.deploy.model_files import file_of
from gpufn_core.spec.model_spec import ModelSpec
from tests.builder import models
from tests.builder.bench import scaled
from tests.conftest import Platform, running_platform
from tests.e2e.small_disk import fill, small_disk
from tests.waiting import until

pytestmark = pytest.mark.e2e

MEASURE_S = 2.0


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """A platform with long measurements, so that a test has time to interrupt a build."""
    with running_platform(tmp_path_factory.mktemp("home"), environ={"GPUFN_BUILD_MEASURE": str(MEASURE_S)}) as platform:
        yield platform


def written(proto: ModelProto | bytes, path: Path) -> Path:
    path.write_bytes(proto if isinstance(proto, bytes) else proto.SerializeToString())
    return path


def refused(platform: Platform, *arguments: str | Path) -> str:
    """Run a command that fails. Return the one line that gives the reason."""
    ended = platform.try_gpufn(*arguments)
    assert ended.returncode == 8, ended.stdout + ended.stderr
    [line] = [line for line in ended.stderr.splitlines() if line.startswith("gpufn: ")]
    return line.removeprefix("gpufn: ")


def build_of(platform: Platform, build: str) -> dict[str, Any]:
    found: dict[str, Any] = platform.client.get(f"/v1/builds/{build}").json()
    return found


def begun(platform: Platform, model: Path) -> str:
    """Start a build without waiting for it. Return its id."""
    return platform.gpufn("build", model, "--no-wait").strip()


# --- cached engines ---------------------------------------------------------------------------------------------------


def test_a_second_build_of_a_model_finds_the_engines_of_the_first(platform: Platform, tmp_path: Path) -> None:
    model = written(scaled(20), tmp_path / "twice.onnx")
    first, second = (json.loads(platform.gpufn("build", model, "--json")) for _ in range(2))
    assert (first["cached"], second["cached"], first["engines"]) == (False, True, second["engines"])
    for name in ("twice", "thrice"):
        platform.gpufn("deploy", model, "--name", name)
        assert platform.invoke(name, {"x": [[1, 2, 3]]}) == {"y": [[20, 40, 60]]}
    [engine] = [
        each for each in platform.client.get("/v1/engines").json()["engines"] if each["key"] in first["engines"]
    ]
    assert sorted(engine["used_by"]) == ["thrice@1", "twice@1"]


def test_two_builds_of_one_model_at_once_compile_once(platform: Platform, tmp_path: Path) -> None:
    model = written(scaled(21), tmp_path / "both.onnx")
    builds = [begun(platform, model) for _ in range(2)]
    until(lambda: all(build_of(platform, build)["state"] == "succeeded" for build in builds), "built")
    one, other = (build_of(platform, build) for build in builds)
    assert sorted((one["cached"], other["cached"])) == [False, True]
    assert one["engines"] == other["engines"]


# --- refused models ---------------------------------------------------------------------------------------------------


def test_a_revision_that_cannot_be_built_keeps_the_serving_one(platform: Platform, tmp_path: Path) -> None:
    platform.gpufn("deploy", written(scaled(22), tmp_path / "kept.onnx"))
    bad = models.model(
        [models.node("Reshape", "x shape", "y")],
        [models.value("x", [1, 3])],
        [models.value("y", [1, 4])],
        [models.constant("shape", [1, 4], np.int64)],
    )
    said = refused(platform, "deploy", written(bad, tmp_path / "bad.onnx"), "--name", "kept", "--replace")
    assert "bad.onnx for cpu: " in said
    answer = platform.post("kept", {"x": [[1, 2, 3]]})
    assert (answer.json(), answer.headers["x-gpufn-revision"]) == ({"y": [[22, 44, 66]]}, "kept@1")
    revision = platform.client.get("/v1/functions/kept/revisions/2").json()
    assert (revision["state"], revision["error"]["code"]) == ("failed", "build_failed")


def _with_dims(*dims: int | str | None, **options: Any) -> ModelProto:
    nodes = [models.node("Neg", "x", "y")]
    return models.model(nodes, [models.value("x", dims)], [models.value("y", dims)], **options)


def _of_a_custom_domain() -> ModelProto:
    node = helper.make_node("Warp", ["x"], ["y"], name="warp", domain="com.example")
    proto = models.model([node], [models.value("x", [1])], [models.value("y", [1])])
    proto.opset_import.append(helper.make_opsetid("com.example", 1))
    return proto


def _of_no_rank() -> ModelProto:
    proto = _with_dims(1)
    proto.graph.input[0].type.tensor_type.ClearField("shape")
    return proto


@pytest.mark.parametrize(
    ("proto", "words"),
    [
        (b"PK\x03\x04 and so on", ("ingest: ", "is not ONNX but a zip archive")),
        (models.mlp().SerializeToString()[:-40], ("ingest: ", "is truncated: at least ")),
        (_of_a_custom_domain(), ("ingest: ", "warp", "operators of the domain com.example are unknown here")),
        (
            _with_dims(1, opset=99),
            ("ingest: ", "the model uses opset 99 of ai.onnx, and this runtime supports opsets up to "),
        ),
        (_of_no_rank(), ("ingest: ", "input x has no declared number of dimensions")),
        (_with_dims("N", None), ("ingest: ", "set shapes= (--shape x=1x?) or samples= (--samples)")),
    ],
    ids=["zip", "truncated", "custom domain", "opset", "dynamic rank", "dynamic size"],
)
def test_a_bad_model_is_refused_in_one_line(
    platform: Platform, proto: ModelProto | bytes, words: tuple[str, ...], tmp_path: Path
) -> None:
    said = refused(platform, "build", written(proto, tmp_path / "m.onnx"))
    assert [word for word in words if word not in said] == [], said


def test_external_data_that_leave_the_upload_are_refused_whatever_client_sends_them(
    platform: Platform, tmp_path: Path
) -> None:
    proto = models.mlp()
    models.refer(proto.graph.initializer[0], "../../nats/credentials.json")
    model = written(proto, tmp_path / "m.onnx")
    with gpufn.Client(platform.url) as client:
        file = file_of(model)
        client.put_artifact(file.digest, model)
        build = client.create_build(ModelSpec(parameter="net", files=(file,)))
        until(lambda: client.build(build.id).state.ended, "ended")
        error = client.build(build.id).error
    assert error is not None
    assert (error.stage, error.message) == (
        "ingest",
        "w1: its external data '../../nats/credentials.json' is not a plain file name beside the model",
    )


def _looping(trips: int) -> ModelProto:
    """A model that adds 1 to x in `trips` iterations."""
    body = helper.make_graph(
        [models.node("Identity", "go_on", "goes_on"), models.node("Add", "sum one", "more")],
        "body",
        [
            models.value("trip", [], TensorProto.INT64),
            models.value("go_on", [], TensorProto.BOOL),
            models.value("sum", [1]),
        ],
        [models.value("goes_on", [], TensorProto.BOOL), models.value("more", [1])],
    )
    return models.model(
        [models.node("Loop", "trips true x", "y", body=body)],
        [models.value("x", [1])],
        [models.value("y", [1])],
        [
            models.constant("trips", trips, np.int64),
            models.constant("true", True, np.bool_),
            models.constant("one", [1]),
        ],
    )


def _growing() -> ModelProto:
    """A model that expands one number to 2 ** 31 numbers and sums them up."""
    return models.model(
        [models.node("Expand", "x shape", "big"), models.node("ReduceSum", "big", "y", keepdims=0)],
        [models.value("x", [1])],
        [models.value("y", [])],
        [models.constant("shape", [1 << 31], np.int64)],
    )


@pytest.mark.parametrize(
    ("proto", "option", "words"),
    [
        (
            models.mlp(),
            "build_memory='40Mi'",
            ("ingest: ", "needs more memory than its limit of 40 MiB"),
        ),
        (_growing(), "build_memory='1Gi'", ("reference: ", "'big_node'", "; the limit is 1 GiB")),
        (_looping(1 << 60), "build_timeout=1", ("reference: ", "the build made no progress for 1 s")),
    ],
)
def test_a_build_beyond_a_limit_ends_and_names_the_limit(
    platform: Platform, proto: ModelProto, option: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    written(proto, tmp_path / "net.onnx")
    app = tmp_path / "app.py"
    app.write_text(
        "from gpufn import Model, gpu_function\n\n\n"
        f"@gpu_function(models={{'net': Model('net.onnx', {option})}})\n"
        "def limited(net): ...\n"
    )
    said = refused(platform, "deploy", app)
    assert [word for word in words if word not in said] == [], said
    assert platform.client.get("/v1/functions/limited").status_code == 404, "the function does not exist"


def test_an_endless_model_does_not_block_the_next(platform: Platform, tmp_path: Path) -> None:
    endless = begun(platform, written(_looping((1 << 60) + 1), tmp_path / "endless.onnx"))
    until(lambda: build_of(platform, endless)["stage"] == "reference", "in the endless run")
    platform.gpufn("build", written(scaled(23), tmp_path / "beside.onnx"))
    assert build_of(platform, endless)["state"] == "building"
    platform.client.delete(f"/v1/builds/{endless}").raise_for_status()
    until(lambda: build_of(platform, endless)["state"] == "cancelled", "cancelled")


def test_nan_all_over_is_refused(platform: Platform, tmp_path: Path) -> None:
    model = written(
        models.model([models.node("Sqrt", "x", "y")], [models.value("x", [2])], [models.value("y", [2])]),
        tmp_path / "roots.onnx",
    )
    np.savez(tmp_path / "samples.npz", x=np.full((2, 2), -1, np.float32))
    said = refused(platform, "build", model, "--samples", tmp_path / "samples.npz")
    assert said == "reference: output y is entirely NaN for sample 0"
    proto = models.model(
        [models.node("Sub", "x x", "zero"), models.node("Div", "zero zero", "y")],
        [models.value("x", [2])],
        [models.value("y", [2])],
    )
    said = refused(platform, "build", written(proto, tmp_path / "nothing.onnx"))
    assert said.startswith("reference: output y is entirely NaN for all generated inputs")


# --- cancelled builds and deaths of processes -------------------------------------------------------------------------


def measuring(platform: Platform, build: str) -> None:
    until(lambda: build_of(platform, build)["stage"] == "measure", "measuring")


def compiling(platform: Platform) -> list[int]:
    """Return the pids of the compile processes of this platform."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
        except OSError:
            continue
        if b"gpufn_builder.processes.compile_process" in command and os.fsencode(platform.home) in command:
            found.append(int(process.name))
    return found


def engines_of(platform: Platform, model: str) -> list[str]:
    return [each["key"] for each in platform.client.get("/v1/engines").json()["engines"] if each["model"] == model]


def test_a_cancelled_build_ends_at_once_and_leaves_nothing(patient: Platform, tmp_path: Path) -> None:
    model = written(scaled(30), tmp_path / "cancelled.onnx")
    build = begun(patient, model)
    measuring(patient, build)
    [process] = compiling(patient)
    patient.client.delete(f"/v1/builds/{build}").raise_for_status()
    until(lambda: build_of(patient, build)["state"] == "cancelled", "cancelled")
    assert process not in compiling(patient)
    assert engines_of(patient, "cancelled.onnx") == []
    assert not (patient.home / "builds" / build).exists()


def test_the_error_of_a_build_whose_compiler_dies_has_its_stage(patient: Platform, tmp_path: Path) -> None:
    build = begun(patient, written(scaled(31), tmp_path / "killed.onnx"))
    measuring(patient, build)
    [process] = compiling(patient)
    os.kill(process, signal.SIGKILL)
    until(lambda: build_of(patient, build)["state"] == "failed", "failed")
    error = build_of(patient, build)["error"]
    assert (error["stage"], error["message"]) == ("measure", "onnxruntime-cpu was killed by SIGKILL")
    assert engines_of(patient, "killed.onnx") == []


def test_a_build_continues_when_its_builder_was_killed(patient: Platform, tmp_path: Path) -> None:
    build = begun(patient, written(scaled(32), tmp_path / "again.onnx"))
    measuring(patient, build)
    [process] = compiling(patient)
    pids = json.loads((patient.home / "up.json").read_bytes())["pids"]
    os.kill(pids["builder"], signal.SIGKILL)
    until(lambda: process not in compiling(patient), "without its compiler")
    assert engines_of(patient, "again.onnx") == [], "an unfinished engine is not published"
    until(lambda: build_of(patient, build)["state"] == "succeeded", "built", within_s=90)
    assert engines_of(patient, "again.onnx") == build_of(patient, build)["engines"]


def test_an_engine_that_the_disk_has_no_room_for_is_not_published(tmp_path: Path) -> None:
    proto = models.model(
        [models.node("MatMul", "x w", "y")],
        [models.value("x", ["N", 512])],
        [models.value("y", ["N", 512])],
        [models.weights("w", 512, 512)],
    )
    model = written(proto, tmp_path / "wide.onnx")
    with (
        small_disk(tmp_path, mebibytes=24) as disk,
        running_platform(disk / "home", environ={"GPUFN_BUILD_MEASURE": "2", "GPUFN_BUILD_RETRY": "0"}) as platform,
    ):
        build = begun(platform, model)
        measuring(platform, build)
        filler = fill(disk, but_bytes=512 << 10)  # half the size of the engine
        until(lambda: build_of(platform, build)["state"] == "failed", "failed", within_s=60)
        error = build_of(platform, build)["error"]
        assert error["stage"] == "publish"
        assert error["message"].startswith("the engine cannot be stored: ")
        assert engines_of(platform, "wide.onnx") == []
        filler.unlink()
        until(lambda: platform.try_gpufn("build", model).returncode == 0, "built", within_s=60)
        assert len(engines_of(platform, "wide.onnx")) == 1
