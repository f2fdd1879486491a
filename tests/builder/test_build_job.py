"""A build from end to end, with a real NATS server and real processes."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from onnx import TensorProto

from gpufn_builder import build_job, identity
from gpufn_builder.build_job import BuildOutcome
from gpufn_builder.identity import Target
from gpufn_builder.processes.process_messages import ProgressUpdate
from gpufn_builder.store import Store
from gpufn_core.domain.devices.engine import Backend, BuildStage, BuildState, EngineManifest, Latency
from gpufn_core.errors import ArtifactUnavailable, BuildFailed, BusUnavailable
from gpufn_core.ids import digest_of
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import encode
from gpufn_core.signing.ed25519 import Signer, parse_public_key
from gpufn_core.signing.statement import Statement
from gpufn_core.signing.trust import TrustedKey
from gpufn_core.spec.function_spec import EntryPoint, FunctionSpec, MethodSpec
from gpufn_core.spec.model_spec import TOLERANCES, ModelFile, Precision, Tolerance
from gpufn_platform.bus.storage import object_store
from gpufn_platform.bus.storage.key_value import KeyValue
from gpufn_platform.process.clock import SystemClock
from gpufn_platform.signing.local_trust import LocalTrust
from gpufn_platform.signing.signatures import KEYS, REQUIRED, Signatures
from tests import blobs
from tests.builder import bench, models
from tests.e2e.small_disk import fill, small_disk
from tests.platform.late_answers import LateAnswers
from tests.waiting import until_async

CPU = identity.cpu_target()


def _ignore(update: ProgressUpdate) -> None: ...


def _key(spec: Any) -> str:
    return identity.identity(spec, CPU, Backend.ORT_CPU, identity.installed()[Backend.ORT_CPU]).key


async def _report(bus: Any, ended: BuildOutcome) -> Any:
    return json.loads(await object_store.get(bus, subjects.ENGINE_FILES, ended.report))


async def _engine_files(bus: Any) -> set[str]:
    return {blob.digest for blob in await object_store.blobs(bus, subjects.ENGINE_FILES)}


async def test_a_model_becomes_an_engine_with_a_complete_manifest(connect: Any, nats: Any, tmp_path: Path) -> None:
    bus = await connect(nats)
    executor, store = await bench.open_executor(await connect(nats, "builder"), tmp_path)
    spec = await bench.upload(bus, models.mlp(), max_batch=4)
    updates: list[ProgressUpdate] = []
    ended = await executor.run(bench.build_of(spec), CPU, updates.append)

    assert (ended.engines, ended.cached, ended.error, ended.state) == ((_key(spec),), False, None, BuildState.SUCCEEDED)
    manifest = await store.find(ended.engines[0])
    assert manifest is not None
    assert (manifest.backend, manifest.batched, manifest.max_batch) == (Backend.ORT_CPU, True, 4)
    assert [str(spec) for spec in manifest.profiles[0].inputs.values()] == ["[1, 8] to [4, 8], tuned for [4, 8]"]
    assert (manifest.gpu_nodes, manifest.cpu_nodes > 0, manifest.settings["graph_optimization"]) == (0, True, "all")
    assert [file.name for file in manifest.files] == ["model.onnx", "golden.npz"]
    for file in manifest.files:
        await object_store.get_file(bus, subjects.ENGINE_FILES, file.digest, tmp_path / file.name)
        assert (tmp_path / file.name).stat().st_size == file.size
    with np.load(tmp_path / "golden.npz") as golden:
        assert {name: golden[name].shape for name in golden} == {"in.x": (1, 8), "out.y": (1, 4)}

    assert sorted({each.stage for each in updates}, key=list(BuildStage).index) == list(BuildStage)
    assert [each.progress for each in updates] == sorted(each.progress for each in updates)
    report = await _report(bus, ended)
    assert [row["stage"] for row in report["stages"]] == list(BuildStage)
    assert [(row["backend"], row["key"]) for row in report["candidates"]] == [("onnxruntime-cpu", manifest.key)]
    assert (await object_store.get(bus, subjects.ENGINE_FILES, ended.page)).startswith(b"<!doctype html>")
    assert list((tmp_path / "builds").iterdir()) == []


async def test_a_model_with_an_optional_input_is_checked_with_its_default(
    connect: Any, nats: Any, tmp_path: Path
) -> None:
    bus = await connect(nats)
    executor, store = await bench.open_executor(await connect(nats, "builder"), tmp_path)
    threshold = models.constant("threshold", 0.5)
    proto = models.model(
        [models.node("Add", "x threshold", "y")],
        [models.value("x", ["N", 4]), models.value("threshold", [])],
        [models.value("y", ["N", 4])],
        [threshold],
    )
    ended = await executor.run(bench.build_of(await bench.upload(bus, proto)), CPU, _ignore)
    manifest = await store.find(ended.engines[0])
    assert manifest is not None
    default = np.array(0.5, np.float32).tobytes()
    assert [(spec.name, spec.default) for spec in manifest.inputs] == [("x", None), ("threshold", default)]
    golden = next(file for file in manifest.files if file.name == "golden.npz")
    await object_store.get_file(bus, subjects.ENGINE_FILES, golden.digest, tmp_path / golden.name)
    with np.load(tmp_path / golden.name) as sample:
        assert sample["in.threshold"] == np.float32(0.5)


async def test_a_model_uploaded_in_half_precision_is_verified_in_half_precision(
    connect: Any, nats: Any, tmp_path: Path
) -> None:
    bus = await connect(nats)
    executor, store = await bench.open_executor(await connect(nats, "builder"), tmp_path)
    for element, arithmetic, precision in (
        (TensorProto.FLOAT16, Precision.FP16, Precision.FP32),
        (TensorProto.FLOAT, Precision.BF16, Precision.BF16),
    ):
        spec = await bench.upload(bus, models.mlp(element=element), precision=precision)
        ended = await executor.run(bench.build_of(spec), CPU, _ignore)
        assert ended.error is None
        manifest = await store.find(ended.engines[0])
        assert manifest is not None
        assert (manifest.arithmetic, manifest.identity.recipe) == (arithmetic, precision)
        assert (await _report(bus, ended))["tolerance"]["rel_l2"] == TOLERANCES[arithmetic].rel_l2


@pytest.mark.parametrize("make", [models.amplified_rounding, models.faint_scores])
async def test_a_model_whose_rounding_is_large_relative_to_its_outputs_needs_no_tolerance(
    connect: Any, nats: Any, tmp_path: Path, make: Any
) -> None:
    """Regression: fp32 allowed a relative L2 norm of 1e-5, which unchanged models exceed in ONNX Runtime itself."""
    bus = await connect(nats)
    executor, store = await bench.open_executor(await connect(nats, "builder"), tmp_path)
    ended = await executor.run(bench.build_of(await bench.upload(bus, make())), CPU, _ignore)
    assert ended.error is None
    manifest = await store.find(ended.engines[0])
    assert manifest is not None
    assert manifest.accuracy is not None
    assert manifest.accuracy.rel_l2 > 1e-5


async def test_the_report_names_the_layers_that_are_kept_in_fp32(connect: Any, nats: Any, tmp_path: Path) -> None:
    bus = await connect(nats)
    executor, store = await bench.open_executor(await connect(nats, "builder"), tmp_path)
    data = io.BytesIO()
    np.savez(data, x=np.random.default_rng(1).standard_normal((6, 3, 8), np.float32))
    digest = await object_store.put(bus, subjects.MODEL_FILES, data.getvalue())
    samples = ModelFile("samples.npz", digest, len(data.getvalue()))
    spec = await bench.upload(bus, models.outlier(), precision=Precision.INT8, max_batch=4, samples=samples)
    ended = await executor.run(bench.build_of(spec), CPU, _ignore)
    assert ended.error is None
    manifest = await store.find(ended.engines[0])
    assert manifest is not None
    (remark,) = manifest.remarks
    assert re.match(r"kept in fp32: h_node; .* h_node ", remark)
    assert ended.remarks == (remark,)
    report = await _report(bus, ended)
    assert report["candidates"][0]["remarks"] == [remark]
    assert report["stages"][3]["found"].endswith(": h_node")
    again = await executor.run(bench.build_of(spec), CPU, _ignore)
    assert (again.cached, again.remarks) == (True, (remark,))


async def test_a_model_that_draws_random_numbers_is_built_with_a_seed_and_the_report_names_its_nodes(
    connect: Any, nats: Any, tmp_path: Path
) -> None:
    bus = await connect(nats)
    executor, store = await bench.open_executor(await connect(nats, "builder"), tmp_path)
    ended = await executor.run(bench.build_of(await bench.upload(bus, models.noisy())), CPU, _ignore)
    assert ended.error is None
    manifest = await store.find(ended.engines[0])
    assert manifest is not None
    assert manifest.accuracy is not None
    (remark,) = manifest.remarks
    assert "seed" in remark
    assert remark.endswith(": noise_node")
    assert ended.remarks == manifest.remarks
    assert (await _report(bus, ended))["candidates"][0]["remarks"] == [remark]
    assert remark in (await object_store.get(bus, subjects.ENGINE_FILES, ended.page)).decode()


async def test_a_long_name_of_a_node_is_cut_in_a_remark(connect: Any, nats: Any, tmp_path: Path) -> None:
    bus = await connect(nats)
    executor, _ = await bench.open_executor(await connect(nats, "builder"), tmp_path)
    proto = models.noisy()
    proto.graph.node[0].name = "n" * 2_000_000
    ended = await executor.run(bench.build_of(await bench.upload(bus, proto)), CPU, _ignore)
    assert ended.error is None
    assert [len(remark) for remark in ended.remarks] == [1000]


async def test_an_engine_built_without_verification_is_marked_in_the_report(
    connect: Any, nats: Any, tmp_path: Path
) -> None:
    bus = await connect(nats)
    executor, store = await bench.open_executor(await connect(nats, "builder"), tmp_path)
    spec = await bench.upload(bus, models.noisy(), verify=False)
    ended = await executor.run(bench.build_of(spec), CPU, _ignore)
    assert ended.error is None
    manifest = await store.find(ended.engines[0])
    assert manifest is not None
    assert manifest.accuracy is None
    assert any("not verified" in remark for remark in manifest.remarks)
    assert any("without a seed: noise_node" in remark for remark in manifest.remarks)
    verified = await executor.run(bench.build_of(msgspec.structs.replace(spec, verify=True)), CPU, _ignore)
    assert set(verified.engines).isdisjoint(ended.engines)


async def test_a_model_with_operators_of_the_runtimes_own_is_built(connect: Any, nats: Any, tmp_path: Path) -> None:
    bus = await connect(nats)
    executor, store = await bench.open_executor(await connect(nats, "builder"), tmp_path)
    ended = await executor.run(bench.build_of(await bench.upload(bus, models.fused(), max_batch=4)), CPU, _ignore)
    assert ended.error is None
    manifest = await store.find(ended.engines[0])
    assert manifest is not None
    assert manifest.batched


async def test_an_engine_needs_nothing_of_the_external_data_that_its_model_had(
    connect: Any, nats: Any, tmp_path: Path
) -> None:
    bus = await connect(nats)
    executor, store = await bench.open_executor(await connect(nats, "builder"), tmp_path)
    proto = models.mlp()
    models.externalise(proto, tmp_path)
    spec = await bench.upload(bus, proto, max_batch=4)
    weights = (tmp_path / "weights.bin").read_bytes()
    digest = await object_store.put(bus, subjects.MODEL_FILES, weights)
    spec = msgspec.structs.replace(spec, files=(*spec.files, ModelFile("weights.bin", digest, len(weights))))
    ended = await executor.run(bench.build_of(spec), CPU, _ignore)
    assert ended.error is None
    manifest = await store.find(ended.engines[0])
    assert manifest is not None
    assert "weights.bin" not in [file.name for file in manifest.files]


async def test_samples_determine_the_shapes_and_calibrate(connect: Any, nats: Any, tmp_path: Path) -> None:
    bus = await connect(nats)
    executor, store = await bench.open_executor(await connect(nats, "builder"), tmp_path)
    data = io.BytesIO()
    np.savez(data, x=np.random.default_rng(1).standard_normal((6, 3, 8), np.float32))
    digest = await object_store.put(bus, subjects.MODEL_FILES, data.getvalue())
    samples = ModelFile("model.onnx", digest, len(data.getvalue()))  # any name is valid, even the model's
    spec = await bench.upload(bus, models.mlp(), precision=Precision.INT8, max_batch=4, samples=samples)
    ended = await executor.run(bench.build_of(spec), CPU, _ignore)
    assert ended.error is None
    manifest = await store.find(ended.engines[0])
    assert manifest is not None
    assert manifest.accuracy is not None
    assert 0 < manifest.accuracy.rel_l2 < 0.2
    assert manifest.identity.samples == digest
    reference = (await _report(bus, ended))["stages"][2]
    assert reference["found"].startswith("6 samples: ")


async def test_a_model_that_only_samples_make_sense_to_runs_nothing_else_though_they_have_fewer_rows_than_a_run(
    connect: Any, nats: Any, tmp_path: Path
) -> None:
    bus = await connect(nats)
    executor, store = await bench.open_executor(await connect(nats, "builder"), tmp_path)
    proto = models.model(
        [models.node("Gather", "table x", "y")],  # one of the generated indices is outside of the table
        [models.value("x", ["N"], TensorProto.INT64)],
        [models.value("y", ["N", 4])],
        [models.weights("table", 1, 4)],
    )
    data = io.BytesIO()
    np.savez(data, x=np.array([[0], [-1]]))
    digest = await object_store.put(bus, subjects.MODEL_FILES, data.getvalue())
    samples = ModelFile("samples.npz", digest, len(data.getvalue()))
    spec = await bench.upload(bus, proto, max_batch=4, samples=samples)
    ended = await executor.run(bench.build_of(spec), CPU, _ignore)
    assert ended.error is None
    manifest = await store.find(ended.engines[0])
    assert manifest is not None
    assert (manifest.batched, manifest.why_alone) == (True, "")


async def test_samples_whose_inputs_have_unlike_rows_show_that_there_are_no_rows(
    connect: Any, nats: Any, tmp_path: Path
) -> None:
    bus = await connect(nats)
    executor, store = await bench.open_executor(await connect(nats, "builder"), tmp_path)
    proto = models.model(
        [models.node("CastLike", "x like", "y")],
        [models.value("x", [None]), models.value("like", [None])],
        [models.value("y", [None])],
    )
    data = io.BytesIO()
    np.savez(data, x=np.ones((1, 3), np.float32), like=np.ones((1, 1), np.float32))
    digest = await object_store.put(bus, subjects.MODEL_FILES, data.getvalue())
    samples = ModelFile("samples.npz", digest, len(data.getvalue()))
    spec = await bench.upload(bus, proto, max_batch=4, samples=samples)
    ended = await executor.run(bench.build_of(spec), CPU, _ignore)
    assert ended.error is None
    manifest = await store.find(ended.engines[0])
    assert manifest is not None
    assert (manifest.batched, [str(each) for each in manifest.profiles[0].inputs.values()]) == (
        False, ["[3] to [3], tuned for [3]", "[1] to [1], tuned for [1]"],
    )  # fmt: skip


async def test_a_model_with_dependent_rows_serves_each_call_alone_and_reports_the_reason(
    connect: Any, nats: Any, tmp_path: Path
) -> None:
    bus = await connect(nats)
    executor, store = await bench.open_executor(await connect(nats, "builder"), tmp_path)
    ended = await executor.run(bench.build_of(await bench.upload(bus, models.over_rows(), max_batch=4)), CPU, _ignore)
    manifest = await store.find(ended.engines[0])
    assert manifest is not None
    assert not manifest.batched
    assert manifest.why_alone.startswith("output y of a row depends")
    assert (await _report(bus, ended))["why_alone"] == manifest.why_alone
    page = (await object_store.get(bus, subjects.ENGINE_FILES, ended.page)).decode()
    assert f"its own run: {manifest.why_alone}" in page


async def test_an_earlier_build_is_found_without_a_process(connect: Any, nats: Any, tmp_path: Path) -> None:
    bus = await connect(nats)
    executor, _ = await bench.open_executor(await connect(nats, "builder"), tmp_path)
    spec = await bench.upload(bus, bench.scaled(2))
    first = await executor.run(bench.build_of(spec), CPU, _ignore)
    no_process, _ = await bench.open_executor(bus, tmp_path, process="there.is.none")
    second = await no_process.run(bench.build_of(spec), CPU, _ignore)
    assert (second.engines, second.cached, second.error) == (first.engines, True, None)
    assert [row["found"] for row in (await _report(bus, second))["candidates"]] == [True]


async def test_an_engine_that_was_built_for_a_greater_tolerance_is_not_reused(
    connect: Any, nats: Any, tmp_path: Path
) -> None:
    bus = await connect(nats)
    executor, _ = await bench.open_executor(await connect(nats, "builder"), tmp_path)
    spec = await bench.upload(bus, models.mlp(), precision=Precision.FP16)
    assert (await executor.run(bench.build_of(spec), CPU, _ignore)).error is None
    exact = msgspec.structs.replace(spec, tolerance=Tolerance(rel_l2=1e-9))
    ended = await executor.run(bench.build_of(exact), CPU, _ignore)
    assert ended.error is not None
    assert (ended.engines, ended.cached, ended.error.stage) == ((), False, "transform")
    assert "rel_l2 is " in ended.error.message
    assert "at most 1e-09 is allowed" in ended.error.message


_ORDERS = {0.0005: (Backend.ORT_CUDA, Backend.TENSORRT), 0.00095: (Backend.TENSORRT, Backend.ORT_CUDA)}


@pytest.mark.parametrize("cuda_s", _ORDERS)
async def test_the_faster_engine_of_a_gpu_is_the_first(
    connect: Any, nats: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda_s: float
) -> None:
    order = _ORDERS[cuda_s]
    versions = identity.installed()[Backend.ORT_CPU]
    monkeypatch.setattr(identity, "installed", lambda: dict.fromkeys(Backend, versions))
    bus, target = await connect(nats), Target("NVIDIA L4", "8.9", "GPU-1")
    executor, store = await bench.open_executor(await connect(nats, "builder"), tmp_path)
    spec = await bench.upload(bus, bench.scaled(64 + cuda_s))
    [cpu] = (await executor.run(bench.build_of(spec), CPU, _ignore)).engines
    manifest = await store.find(cpu)
    assert manifest is not None
    keys = {}
    for backend, median_s in ((Backend.TENSORRT, 0.001), (Backend.ORT_CUDA, cuda_s)):
        made = identity.identity(spec, target, backend, versions)
        keys[backend] = made.key
        latency = Latency(median_s, median_s, median_s, 1 / median_s, settled=True)
        engine = msgspec.structs.replace(manifest, identity=made, key=made.key, latency=latency)
        await KeyValue(bus, subjects.ENGINES).create(made.key, encode(engine))
    ended = await executor.run(bench.build_of(spec, target.kind), target, _ignore)
    assert (ended.error, ended.cached, ended.engines) == (None, True, tuple(keys[backend] for backend in order))
    assert [row["backend"] for row in (await _report(bus, ended))["candidates"]] == list(order)
    page = (await object_store.get(bus, subjects.ENGINE_FILES, ended.page)).decode()
    assert "10%" in page


async def test_two_builds_of_one_model_at_once_compile_once(connect: Any, nats: Any, tmp_path: Path) -> None:
    spec = await bench.upload(await connect(nats), bench.scaled(3))
    updates: list[ProgressUpdate] = []
    ends = []
    for folder in ("a", "b"):
        executor, _ = await bench.open_executor(await connect(nats, "builder"), tmp_path / folder)
        ends.append(executor.run(bench.build_of(spec), CPU, updates.append))
    one, other = await asyncio.gather(*ends)
    assert one.engines == other.engines == (_key(spec),)
    assert sorted((one.cached, other.cached)) == [False, True]
    assert any(each.detail.startswith("waiting for another") for each in updates)


async def test_a_disk_that_is_full_publishes_nothing(connect: Any, nats: Any, tmp_path: Path) -> None:
    bus = await connect(nats)
    executor, store = await bench.open_executor(bus, tmp_path)
    spec = await bench.upload(bus, bench.scaled(4))
    stream = f"OBJ_{subjects.ENGINE_FILES}"
    config = (await bus.js(f"STREAM.INFO.{stream}"))["config"]
    await bus.js(f"STREAM.UPDATE.{stream}", config | {"max_bytes": 1})
    try:
        ended = await executor.run(bench.build_of(spec), CPU, _ignore)
    finally:
        await bus.js(f"STREAM.UPDATE.{stream}", config)
    assert ended.error is not None
    assert (ended.engines, ended.error.stage, ended.report) == ((), "publish", "")
    assert "cannot be stored: " in ended.error.message
    assert await store.find(_key(spec)) is None
    assert (await executor.run(bench.build_of(spec), CPU, _ignore)).engines == (_key(spec),)


async def test_a_disk_with_no_room_to_build_in_fails_the_build_once(connect: Any, nats: Any, tmp_path: Path) -> None:
    bus = await connect(nats)
    with small_disk(tmp_path, mebibytes=1) as disk:
        executor, _ = await bench.open_executor(bus, disk)
        spec = await bench.upload(bus, bench.scaled(4.5))
        fill(disk)
        ended = await executor.run(bench.build_of(spec), CPU, _ignore)
    assert ended.error is not None
    assert ended.error.stage == "ingest"
    assert "disk is full" in ended.error.message


async def test_a_build_waits_while_the_bus_is_away(
    connect: Any, nats: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = await connect(nats)
    executor, _ = await bench.open_executor(bus, tmp_path)
    spec = await bench.upload(bus, bench.scaled(60))
    away = dict.fromkeys(("get_file", "put_file", "put"), 1)

    def breaking_off(name: str) -> Any:
        work = getattr(object_store, name)

        async def once(*given: Any, **more: Any) -> Any:
            if away[name]:
                away[name] -= 1
                raise BusUnavailable
            return await work(*given, **more)

        return once

    monkeypatch.setattr("gpufn_builder.store._POLL_S", 0.01)
    for name in away:
        monkeypatch.setattr(object_store, name, breaking_off(name))
    ended = await executor.run(bench.build_of(spec), CPU, _ignore)
    assert (ended.error, ended.engines, bool(ended.report)) == (None, (_key(spec),), True)
    assert set(away.values()) == {0}


async def test_a_build_fails_if_the_bus_stays_away(
    connect: Any, nats: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = await connect(nats)
    executor, _ = await bench.open_executor(bus, tmp_path, retry_for_s=0.0)
    spec = await bench.upload(bus, bench.scaled(61))

    async def away(*given: Any, **more: Any) -> Any:
        raise BusUnavailable

    monkeypatch.setattr(object_store, "put_file", away)
    ended = await executor.run(bench.build_of(spec), CPU, _ignore)
    assert ended.error is not None
    assert (ended.error.stage, ended.engines) == ("publish", ())


async def test_the_error_of_a_missing_file_has_its_name(connect: Any, nats: Any, tmp_path: Path) -> None:
    bus = await connect(nats)
    executor, _ = await bench.open_executor(await connect(nats, "builder"), tmp_path)
    spec = await bench.upload(bus, bench.scaled(5))
    gone = msgspec.structs.replace(spec, files=(*spec.files, ModelFile("weights.bin", digest_of(b"gone"), 4)))
    ended = await executor.run(bench.build_of(gone), CPU, _ignore)
    assert ended.error is not None
    assert ended.error.stage == "ingest"
    assert re.match(r"weights\.bin .*: g", ended.error.message)


async def test_a_file_whose_bytes_are_damaged_is_absent_once_a_build_has_met_it_so_that_it_is_put_again(
    connect: Any, nats: Any, tmp_path: Path
) -> None:
    bus = await connect(nats)
    executor, _ = await bench.open_executor(await connect(nats, "builder"), tmp_path)
    spec = await bench.upload(bus, bench.scaled(41))
    await bench.damage_newest(bus, subjects.MODEL_FILES)
    ended = await executor.run(bench.build_of(spec), CPU, _ignore)
    assert ended.error is not None
    assert " is damaged: " in ended.error.message
    assert not await object_store.touch(bus, subjects.MODEL_FILES, spec.files[0].digest)
    assert await bench.upload(bus, bench.scaled(41)) == spec
    assert (await executor.run(bench.build_of(spec), CPU, _ignore)).error is None


async def test_a_refused_model_has_a_report_with_the_position(connect: Any, nats: Any, tmp_path: Path) -> None:
    bus = await connect(nats)
    executor, store = await bench.open_executor(await connect(nats, "builder"), tmp_path)
    broken = models.model([models.node("NoSuchOperator", "x", "y")], [models.value("x", [1])], [models.value("y", [1])])
    spec = await bench.upload(bus, broken)
    ended = await executor.run(bench.build_of(spec), CPU, _ignore)
    assert ended.error is not None
    assert (ended.state, ended.error.stage in ("ingest", "normalise")) == (BuildState.FAILED, True)
    assert await store.find(_key(spec)) is None
    report = await _report(bus, ended)
    assert (report["state"], report["error"]["message"]) == ("failed", ended.error.message)
    assert report["stages"][-1]["found"] == ended.error.message


async def test_a_build_whose_process_dies_fails_with_the_cause(connect: Any, nats: Any, tmp_path: Path) -> None:
    bus = await connect(nats)
    executor, _ = await bench.open_executor(await connect(nats, "builder"), tmp_path, process="there.is.none")
    ended = await executor.run(bench.build_of(await bench.upload(bus, bench.scaled(6))), CPU, _ignore)
    assert ended.error is not None
    assert " code 1: " in ended.error.message
    assert "ModuleNotFoundError" in (ended.error.traceback or "")
    assert ended.page


@pytest.mark.parametrize("has_cuda", [False, True])
async def test_a_gpu_build_without_a_gpu_engine_fails_with_the_reason_of_each_candidate(
    connect: Any, nats: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_cuda: bool
) -> None:
    """Regression: the deploy succeeded, and the worker held a GPU and computed on the CPU."""
    versions = identity.installed()[Backend.ORT_CPU]
    backends = (Backend.ORT_CPU, Backend.ORT_CUDA) if has_cuda else (Backend.ORT_CPU,)
    monkeypatch.setattr(identity, "installed", lambda: dict.fromkeys(backends, versions))
    bus = await connect(nats)
    executor, _ = await bench.open_executor(await connect(nats, "builder"), tmp_path)
    spec = await bench.upload(bus, bench.scaled(7))
    ended = await executor.run(bench.build_of(spec, "NVIDIA L4"), Target("NVIDIA L4", "8.9", "GPU-1"), _ignore)
    assert ended.engines == ()
    assert ended.error is not None
    assert "tensorrt: it is not installed here; onnxruntime-cuda: " in ended.error.message
    assert ("CUDAExecutionProvider" in ended.error.message) == has_cuda
    assert "--allow-cpu" in ended.error.message
    assert [row["backend"] for row in (await _report(bus, ended))["candidates"]] == ["tensorrt", "onnxruntime-cuda"]


async def test_candidates_that_are_not_installed_are_reported_and_the_next_is_built(
    connect: Any, nats: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = {Backend.ORT_CPU: identity.installed()[Backend.ORT_CPU]}
    monkeypatch.setattr(identity, "installed", lambda: here)
    bus = await connect(nats)
    executor, _ = await bench.open_executor(await connect(nats, "builder"), tmp_path)
    spec = await bench.upload(bus, bench.scaled(8), allow_cpu=True)
    ended = await executor.run(bench.build_of(spec, "NVIDIA L4"), Target("NVIDIA L4", "8.9", "GPU-1"), _ignore)
    assert ended.engines == (_key(spec),)
    reasons = [(row["backend"], row["reason"]) for row in (await _report(bus, ended))["candidates"]]
    missing = "it is not installed here"
    assert reasons == [("tensorrt", missing), ("onnxruntime-cuda", missing), ("onnxruntime-cpu", "")]


async def test_a_build_that_is_cancelled_ends_its_process_and_leaves_nothing(
    connect: Any, nats: Any, tmp_path: Path
) -> None:
    bus = await connect(nats)
    executor, store = await bench.open_executor(
        await connect(nats, "builder"), tmp_path, process="tests.builder.hanging"
    )
    spec = await bench.upload(bus, bench.scaled(9))
    updates: list[ProgressUpdate] = []
    build = bench.build_of(spec)
    run = asyncio.create_task(executor.run(build, CPU, updates.append))
    await until_async(lambda: updates)
    assert updates[0].detail == f"in {build.id}"
    children = _children()
    assert any(b"tests.builder.hanging" in _command(pid) for pid in children)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert not any(b"tests.builder.hanging" in _command(pid) for pid in children)
    assert list((tmp_path / "builds").iterdir()) == []
    assert await store.find(_key(spec)) is None
    assert await KeyValue(bus, subjects.LEASES).get(f"build.{_key(spec)}") is None


async def test_a_build_without_progress_ends_with_its_process_and_a_remedy(
    connect: Any, nats: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_job, "_GRACE_S", 0.0)
    bus = await connect(nats)
    executor, _ = await bench.open_executor(
        await connect(nats, "builder"), tmp_path, process="tests.builder.hanging", timeout_s=3.0
    )
    ended = await executor.run(bench.build_of(await bench.upload(bus, bench.scaled(62))), CPU, _ignore)
    assert ended.error is not None
    assert (ended.state, ended.error.stage, ended.engines) == (BuildState.FAILED, "ingest", ())
    assert "--build-timeout" in ended.error.message
    assert not any(b"tests.builder.hanging" in _command(pid) for pid in _children())
    assert list((tmp_path / "builds").iterdir()) == []


async def test_a_model_sets_the_timeout_of_its_build(
    connect: Any, nats: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_job, "_GRACE_S", 0.0)
    bus = await connect(nats)
    executor, _ = await bench.open_executor(await connect(nats, "builder"), tmp_path, process="tests.builder.hanging")
    spec = await bench.upload(bus, bench.scaled(63), build_timeout_s=1.0)
    ended = await executor.run(bench.build_of(spec), CPU, _ignore)
    assert ended.error is not None
    assert "no progress for 1 s" in ended.error.message


def _children() -> list[str]:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


def _command(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return b""


async def test_a_build_cancelled_during_its_claim_leaves_the_engine_to_the_next(connect: Any, nats: Any) -> None:
    bus = await connect(nats)
    leases = await LateAnswers.open(bus, "late-leases")
    store = Store(bus, KeyValue(bus, subjects.ENGINES), leases, SystemClock())

    async def build() -> None:
        async with store.exclusive("k" * 64, "first", lambda: None):
            raise AssertionError("it has not begun")

    task = asyncio.create_task(build())
    await leases.stored.wait()
    task.cancel()
    leases.may_answer.set()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    async with store.exclusive("k" * 64, "second", lambda: pytest.fail("it waits")):
        pass


async def test_files_of_an_earlier_builder_are_swept(connect: Any, nats: Any, tmp_path: Path) -> None:
    executor, _ = await bench.open_executor(await connect(nats), tmp_path)
    left = tmp_path / "builds" / "01abc" / "model"
    left.mkdir(parents=True)
    executor.sweep()
    assert not left.exists()


async def test_a_manifest_is_never_replaced(connect: Any, nats: Any, tmp_path: Path) -> None:
    bus = await connect(nats)
    executor, store = await bench.open_executor(await connect(nats, "builder"), tmp_path)
    spec = await bench.upload(bus, bench.scaled(10))
    await executor.run(bench.build_of(spec), CPU, _ignore)
    first = await store.find(_key(spec))
    assert first is not None
    for file in first.files:
        await object_store.get_file(bus, subjects.ENGINE_FILES, file.digest, tmp_path / file.name)
    later = msgspec.structs.replace(first, built_at=first.built_at + 1)
    assert await store.publish(later, tmp_path) == await store.find(_key(spec)) == first


async def test_an_engine_whose_files_are_others_than_its_manifest_names_is_not_published(
    connect: Any, nats: Any, tmp_path: Path
) -> None:
    bus = await connect(nats)
    executor, store = await bench.open_executor(await connect(nats, "builder"), tmp_path)
    spec = await bench.upload(bus, bench.scaled(11))
    await executor.run(bench.build_of(spec), CPU, _ignore)
    first = await store.find(_key(spec))
    assert first is not None
    reports = await _engine_files(bus) - {file.digest for file in first.files}
    for file in first.files:
        (tmp_path / file.name).write_bytes(bytes(file.size))
    with pytest.raises(BuildFailed, match=r"cannot be stored: model\.onnx .*digest"):
        await store.publish(msgspec.structs.replace(first, key="0" * 64), tmp_path)
    assert await store.find("0" * 64) is None
    assert await _engine_files(bus) == {file.digest for file in first.files} | reports


async def test_an_engine_that_cannot_be_stored_whole_leaves_none_of_its_files(
    connect: Any, nats: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = await connect(nats)
    executor, store = await bench.open_executor(await connect(nats, "builder"), tmp_path)
    spec = await bench.upload(bus, bench.scaled(14))

    before = await _engine_files(bus)

    async def refused(key: str, value: bytes) -> int:
        raise ArtifactUnavailable("insufficient storage resources available")

    monkeypatch.setattr(store._engines, "create", refused)
    ended = await executor.run(bench.build_of(spec), CPU, _ignore)
    assert ended.error is not None
    assert ended.error.stage == "publish"
    assert await _engine_files(bus) - before == {ended.report, ended.page}


async def test_a_file_that_was_collected_before_its_manifest_was_there_is_put_again(
    connect: Any, nats: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = await connect(nats)
    executor, store = await bench.open_executor(await connect(nats, "builder"), tmp_path)
    spec = await bench.upload(bus, bench.scaled(12))
    create = store._engines.create

    async def collected_before(key: str, value: bytes) -> int:
        for file in msgspec.msgpack.decode(value, type=EngineManifest).files:
            await blobs.delete(bus, subjects.ENGINE_FILES, file.digest)
        return await create(key, value)

    monkeypatch.setattr(store._engines, "create", collected_before)
    ended = await executor.run(bench.build_of(spec), CPU, _ignore)
    manifest = await store.find(ended.engines[0])
    assert manifest is not None
    for file in manifest.files:
        assert await blobs.exists(bus, subjects.ENGINE_FILES, file.digest)


async def test_an_engine_that_lost_a_file_is_built_again(connect: Any, nats: Any, tmp_path: Path) -> None:
    bus = await connect(nats)
    executor, store = await bench.open_executor(await connect(nats, "builder"), tmp_path)
    spec = await bench.upload(bus, bench.scaled(13))
    await executor.run(bench.build_of(spec), CPU, _ignore)
    manifest = await store.find(_key(spec))
    assert manifest is not None
    await blobs.delete(bus, subjects.ENGINE_FILES, manifest.files[0].digest)
    ended = await executor.run(bench.build_of(spec), CPU, _ignore)
    assert (ended.engines, ended.cached, ended.error) == ((_key(spec),), False, None)
    manifest = await store.find(_key(spec))
    assert manifest is not None
    for file in manifest.files:
        assert await blobs.exists(bus, subjects.ENGINE_FILES, file.digest)


async def test_an_engine_replaces_one_that_lost_a_file_during_the_build(
    connect: Any, nats: Any, tmp_path: Path
) -> None:
    bus = await connect(nats)
    executor, store = await bench.open_executor(await connect(nats, "builder"), tmp_path)
    spec = await bench.upload(bus, bench.scaled(14))
    await executor.run(bench.build_of(spec), CPU, _ignore)
    ours = await store.find(_key(spec))
    assert ours is not None
    for file in ours.files:
        await object_store.get_file(bus, subjects.ENGINE_FILES, file.digest, tmp_path / file.name)
    lost = ModelFile("model.onnx", "0" * 64, 1)
    entry = await store._engines.get(ours.key)
    assert entry is not None
    await store._engines.update(ours.key, encode(msgspec.structs.replace(ours, files=(lost,))), entry.revision)
    assert await store.publish(ours, tmp_path) == ours == await store.find(ours.key)


async def test_no_model_is_read_that_no_trusted_key_signed(connect: Any, nats: Any, tmp_path: Path) -> None:
    signer, bus = Signer.new(), await connect(nats)
    public = parse_public_key(signer.public_pem())
    trusted = TrustedKey(name="test", id=signer.id, public_key=public, patterns=("signed/*",))
    bucket = await KeyValue.open(bus, subjects.SIGNING)
    rules = {f"{KEYS}builder-test": encode(trusted), f"{REQUIRED}signed": b""}
    for key, value in rules.items():
        await bucket.put(key, value)
    reader = await connect(nats, "builder")
    signatures = Signatures(KeyValue(reader, subjects.SIGNING), LocalTrust())
    await signatures.start()
    try:
        executor, _ = await bench.open_executor(reader, tmp_path, signatures=signatures)
        model = await bench.upload(bus, bench.scaled(71.0))
        spec = FunctionSpec(name="signed/a/f", entry=EntryPoint("", ""), methods=(MethodSpec(),), models=(model,))
        build = msgspec.structs.replace(bench.build_of(model), function=spec.name)
        other = msgspec.structs.replace(spec, models=(msgspec.structs.replace(model, verify=False),))
        for signed in (None, other):
            signature = signed and signer.sign(Statement.of(spec.name, signed, "", 1.0))
            ended = await executor.run(msgspec.structs.replace(build, signature=signature), CPU, _ignore)
            assert (ended.state, ended.error and ended.error.code) == (BuildState.FAILED, "untrusted_deploy")
        signature = signer.sign(Statement.of(spec.name, spec, "", 1.0))
        ended = await executor.run(msgspec.structs.replace(build, signature=signature), CPU, _ignore)
        assert ended.state is BuildState.SUCCEEDED
    finally:
        signatures.stop()
        for key in rules:
            await bucket.delete(key)
