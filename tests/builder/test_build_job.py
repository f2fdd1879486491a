"""A model becomes an engine, with a real NATS server and real processes."""

from __future__ import annotations

import asyncio
import io
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from onnx import TensorProto

from gpufn_builder import identity
from gpufn_builder.identity import Target
from gpufn_builder.processes.process_messages import ProgressUpdate
from gpufn_core.domain.devices.engine import Backend, BuildStage, BuildState, Latency
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import encode
from gpufn_core.signing.ed25519 import Signer, parse_public_key
from gpufn_core.signing.statement import Statement
from gpufn_core.signing.trust import TrustedKey
from gpufn_core.spec.function_spec import EntryPoint, FunctionSpec, MethodSpec
from gpufn_core.spec.model_spec import TOLERANCES, ModelFile, Precision, Tolerance
from gpufn_platform.bus.storage import object_store
from gpufn_platform.bus.storage.key_value import KeyValue
from gpufn_platform.signing.local_trust import LocalTrust
from gpufn_platform.signing.signatures import KEYS, REQUIRED, Signatures
from tests.builder import bench, models
from tests.builder.bench import CPU, ignore, key_of, report_of


async def test_a_model_becomes_an_engine_with_a_complete_manifest(connect: Any, nats: Any, tmp_path: Path) -> None:
    bus = await connect(nats)
    executor, store = await bench.open_executor(await connect(nats, "builder"), tmp_path)
    spec = await bench.upload(bus, models.mlp(), max_batch=4)
    updates: list[ProgressUpdate] = []
    ended = await executor.run(bench.build_of(spec), CPU, updates.append)

    assert (ended.engines, ended.cached, ended.error, ended.state) == (
        (key_of(spec),),
        False,
        None,
        BuildState.SUCCEEDED,
    )
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
    report = await report_of(bus, ended)
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
    ended = await executor.run(bench.build_of(await bench.upload(bus, proto)), CPU, ignore)
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
        ended = await executor.run(bench.build_of(spec), CPU, ignore)
        assert ended.error is None
        manifest = await store.find(ended.engines[0])
        assert manifest is not None
        assert (manifest.arithmetic, manifest.identity.recipe) == (arithmetic, precision)
        assert (await report_of(bus, ended))["tolerance"]["rel_l2"] == TOLERANCES[arithmetic].rel_l2


@pytest.mark.parametrize("make", [models.amplified_rounding, models.faint_scores])
async def test_a_model_whose_rounding_is_large_relative_to_its_outputs_needs_no_tolerance(
    connect: Any, nats: Any, tmp_path: Path, make: Any
) -> None:
    """Regression: fp32 allowed a relative L2 norm of 1e-5, which unchanged models exceed in ONNX Runtime itself."""
    bus = await connect(nats)
    executor, store = await bench.open_executor(await connect(nats, "builder"), tmp_path)
    ended = await executor.run(bench.build_of(await bench.upload(bus, make())), CPU, ignore)
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
    ended = await executor.run(bench.build_of(spec), CPU, ignore)
    assert ended.error is None
    manifest = await store.find(ended.engines[0])
    assert manifest is not None
    (remark,) = manifest.remarks
    assert re.match(r"kept in fp32: h_node; .* h_node ", remark)
    assert ended.remarks == (remark,)
    report = await report_of(bus, ended)
    assert report["candidates"][0]["remarks"] == [remark]
    assert report["stages"][3]["found"].endswith(": h_node")
    again = await executor.run(bench.build_of(spec), CPU, ignore)
    assert (again.cached, again.remarks) == (True, (remark,))


async def test_a_model_that_draws_random_numbers_is_built_with_a_seed_and_the_report_names_its_nodes(
    connect: Any, nats: Any, tmp_path: Path
) -> None:
    bus = await connect(nats)
    executor, store = await bench.open_executor(await connect(nats, "builder"), tmp_path)
    ended = await executor.run(bench.build_of(await bench.upload(bus, models.noisy())), CPU, ignore)
    assert ended.error is None
    manifest = await store.find(ended.engines[0])
    assert manifest is not None
    assert manifest.accuracy is not None
    (remark,) = manifest.remarks
    assert "seed" in remark
    assert remark.endswith(": noise_node")
    assert ended.remarks == manifest.remarks
    assert (await report_of(bus, ended))["candidates"][0]["remarks"] == [remark]
    assert remark in (await object_store.get(bus, subjects.ENGINE_FILES, ended.page)).decode()


async def test_a_long_name_of_a_node_is_cut_in_a_remark(connect: Any, nats: Any, tmp_path: Path) -> None:
    bus = await connect(nats)
    executor, _ = await bench.open_executor(await connect(nats, "builder"), tmp_path)
    proto = models.noisy()
    proto.graph.node[0].name = "n" * 2_000_000
    ended = await executor.run(bench.build_of(await bench.upload(bus, proto)), CPU, ignore)
    assert ended.error is None
    assert [len(remark) for remark in ended.remarks] == [1000]


async def test_an_engine_built_without_verification_is_marked_in_the_report(
    connect: Any, nats: Any, tmp_path: Path
) -> None:
    bus = await connect(nats)
    executor, store = await bench.open_executor(await connect(nats, "builder"), tmp_path)
    spec = await bench.upload(bus, models.noisy(), verify=False)
    ended = await executor.run(bench.build_of(spec), CPU, ignore)
    assert ended.error is None
    manifest = await store.find(ended.engines[0])
    assert manifest is not None
    assert manifest.accuracy is None
    assert any("not verified" in remark for remark in manifest.remarks)
    assert any("without a seed: noise_node" in remark for remark in manifest.remarks)
    verified = await executor.run(bench.build_of(msgspec.structs.replace(spec, verify=True)), CPU, ignore)
    assert set(verified.engines).isdisjoint(ended.engines)


async def test_a_model_with_operators_of_the_runtimes_own_is_built(connect: Any, nats: Any, tmp_path: Path) -> None:
    bus = await connect(nats)
    executor, store = await bench.open_executor(await connect(nats, "builder"), tmp_path)
    ended = await executor.run(bench.build_of(await bench.upload(bus, models.fused(), max_batch=4)), CPU, ignore)
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
    ended = await executor.run(bench.build_of(spec), CPU, ignore)
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
    ended = await executor.run(bench.build_of(spec), CPU, ignore)
    assert ended.error is None
    manifest = await store.find(ended.engines[0])
    assert manifest is not None
    assert manifest.accuracy is not None
    assert 0 < manifest.accuracy.rel_l2 < 0.2
    assert manifest.identity.samples == digest
    reference = (await report_of(bus, ended))["stages"][2]
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
    ended = await executor.run(bench.build_of(spec), CPU, ignore)
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
    ended = await executor.run(bench.build_of(spec), CPU, ignore)
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
    ended = await executor.run(bench.build_of(await bench.upload(bus, models.over_rows(), max_batch=4)), CPU, ignore)
    manifest = await store.find(ended.engines[0])
    assert manifest is not None
    assert not manifest.batched
    assert manifest.why_alone.startswith("output y of a row depends")
    assert (await report_of(bus, ended))["why_alone"] == manifest.why_alone
    page = (await object_store.get(bus, subjects.ENGINE_FILES, ended.page)).decode()
    assert f"its own run: {manifest.why_alone}" in page


async def test_an_earlier_build_is_found_without_a_process(connect: Any, nats: Any, tmp_path: Path) -> None:
    bus = await connect(nats)
    executor, _ = await bench.open_executor(await connect(nats, "builder"), tmp_path)
    spec = await bench.upload(bus, bench.scaled(2))
    first = await executor.run(bench.build_of(spec), CPU, ignore)
    no_process, _ = await bench.open_executor(bus, tmp_path, process="there.is.none")
    second = await no_process.run(bench.build_of(spec), CPU, ignore)
    assert (second.engines, second.cached, second.error) == (first.engines, True, None)
    assert [row["found"] for row in (await report_of(bus, second))["candidates"]] == [True]


async def test_an_engine_that_was_built_for_a_greater_tolerance_is_not_reused(
    connect: Any, nats: Any, tmp_path: Path
) -> None:
    bus = await connect(nats)
    executor, _ = await bench.open_executor(await connect(nats, "builder"), tmp_path)
    spec = await bench.upload(bus, models.mlp(), precision=Precision.FP16)
    assert (await executor.run(bench.build_of(spec), CPU, ignore)).error is None
    exact = msgspec.structs.replace(spec, tolerance=Tolerance(rel_l2=1e-9))
    ended = await executor.run(bench.build_of(exact), CPU, ignore)
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
    [cpu] = (await executor.run(bench.build_of(spec), CPU, ignore)).engines
    manifest = await store.find(cpu)
    assert manifest is not None
    keys = {}
    for backend, median_s in ((Backend.TENSORRT, 0.001), (Backend.ORT_CUDA, cuda_s)):
        made = identity.identity(spec, target, backend, versions)
        keys[backend] = made.key
        latency = Latency(median_s, median_s, median_s, 1 / median_s, settled=True)
        engine = msgspec.structs.replace(manifest, identity=made, key=made.key, latency=latency)
        await KeyValue(bus, subjects.ENGINES).create(made.key, encode(engine))
    ended = await executor.run(bench.build_of(spec, target.kind), target, ignore)
    assert (ended.error, ended.cached, ended.engines) == (None, True, tuple(keys[backend] for backend in order))
    assert [row["backend"] for row in (await report_of(bus, ended))["candidates"]] == list(order)
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
    assert one.engines == other.engines == (key_of(spec),)
    assert sorted((one.cached, other.cached)) == [False, True]
    assert any(each.detail.startswith("waiting for another") for each in updates)


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
            ended = await executor.run(msgspec.structs.replace(build, signature=signature), CPU, ignore)
            assert (ended.state, ended.error and ended.error.code) == (BuildState.FAILED, "untrusted_deploy")
        signature = signer.sign(Statement.of(spec.name, spec, "", 1.0))
        ended = await executor.run(msgspec.structs.replace(build, signature=signature), CPU, ignore)
        assert ended.state is BuildState.SUCCEEDED
    finally:
        signatures.stop()
        for key in rules:
            await bucket.delete(key)
