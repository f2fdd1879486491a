"""Models through the gateway, on a real bus: uploads, builds, revisions that wait for them, engines. No builder runs:
the tests write a builder's records."""

from __future__ import annotations

import asyncio
import contextlib
import io
import zipfile
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from gpufn_core.domain.devices.device import Device, DeviceType
from gpufn_core.domain.devices.engine import Accuracy, Backend, Build, BuildState, EngineIdentity, EngineManifest
from gpufn_core.domain.revision import Revision, RevisionState
from gpufn_core.errors import (
    BuildFailed,
    BuildNotFound,
    BusUnavailable,
    Conflict,
    FunctionNotFound,
    GpufnError,
    PlatformError,
)
from gpufn_core.ids import digest_of, new_ulid
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import encode
from gpufn_core.protocol.reports import NodeReport
from gpufn_core.spec.function_spec import EntryPoint, FunctionSpec, MethodSpec, Packaging
from gpufn_core.spec.model_spec import ModelFile, ModelSpec, Precision, TensorSpec
from gpufn_core.spec.resources import Resources
from gpufn_gateway.buckets import records
from gpufn_gateway.builds import engines
from gpufn_gateway.builds.builds import Builds
from gpufn_gateway.garbage_collection.rules import as_retired
from gpufn_platform.bus.storage import object_store, streams
from gpufn_platform.bus.storage.key_value import KeyValue
from tests import blobs
from tests.gateway.whole import ARTIFACT_LIMIT, Whole, gateway_on
from tests.waiting import until_async

ONNX = b"an ONNX file, as far as a gateway looks"
NET = ModelSpec(parameter="net", files=(ModelFile("net.onnx", digest_of(ONNX), len(ONNX)),))


def empty_bundle() -> bytes:
    buffer = io.BytesIO()
    zipfile.ZipFile(buffer, "w").close()
    return buffer.getvalue()


EMPTY = empty_bundle()


def model(name: str, *models: ModelSpec, **fields: Any) -> FunctionSpec:
    entry = EntryPoint("", "", Packaging.MODEL)
    return FunctionSpec(name=name, entry=entry, methods=(MethodSpec(),), models=models or (NET,), **fields)


async def test_a_build_that_waits_names_the_build_ahead(nats: Any) -> None:
    async with gateway_on(nats) as gateway:
        for name in ("first", "second"):
            await deploy(gateway, model(name))
        ids = [
            (await gateway.http.get(f"/v1/functions/{name}/revisions/1")).json()["builds"]
            for name in ("first", "second")
        ]
        [first], [second] = ids
        assert (first["function"], first["ahead"], second["ahead"]) == ("first", None, None)
        now = gateway.clock.time()
        running = msgspec.structs.replace(
            gateway.builds.get(first["id"]), state=BuildState.BUILDING, started_at=now - 60
        )
        await gateway.buckets.builds.put(running.id, encode(running))
        await until_async(lambda: gateway.builds.get(running.id) == running)
        [second] = (await gateway.http.get("/v1/functions/second/revisions/1")).json()["builds"]
        assert second["ahead"].pop("building_s") >= 60
        assert second["ahead"] == {"id": running.id, "model": "net.onnx", "function": "first"}
        [first] = (await gateway.http.get("/v1/functions/first/revisions/1")).json()["builds"]
        assert first["ahead"] is None
        for build in (first, second):
            await gateway.builds.cancel(build["id"])


async def upload(gateway: Whole, data: bytes = ONNX, digest: str | None = None, **headers: str) -> Any:
    return await gateway.http.put(f"/v1/artifacts/{digest or digest_of(data)}", content=data, headers=headers)


async def deploy(gateway: Whole, spec: FunctionSpec) -> Any:
    await gateway.deploys.put_bundle(digest_of(EMPTY), EMPTY)
    await upload(gateway)
    body = msgspec.json.encode({"spec": spec, "bundle": digest_of(EMPTY)})
    return await gateway.http.post("/v1/functions", content=body)


async def built(gateway: Whole, build_id: str, state: BuildState = BuildState.SUCCEEDED, **fields: Any) -> None:
    """Record a build's end, and wait until the gateway has read it."""
    build = gateway.builds.get(build_id)
    given: dict[str, Any] = {"engines": (f"key-of-{build_id}",)} | fields
    ended = msgspec.structs.replace(build, state=state, **given)
    before = gateway.builds.change(build_id)
    await gateway.buckets.builds.put(build_id, encode(ended))
    await until_async(lambda: gateway.builds.change(build_id) > before)


async def state_of(gateway: Whole, name: str, number: int) -> tuple[Any, Any]:
    """Return the revision's state over HTTP, and the active revision."""
    view = (await gateway.http.get(f"/v1/functions/{name}/revisions/{number}")).json()
    function = gateway.registry.functions.get(name)
    return view["state"], function and function.active


# --- uploads ---------------------------------------------------------------------------------------------------------


async def test_a_models_file_is_uploaded_once(nats: Any) -> None:
    async with gateway_on(nats) as gateway:
        data = bytes(range(256)) * 20_000  # several chunks
        url = f"/v1/artifacts/{digest_of(data)}"
        assert (await gateway.http.head(url)).status_code == 404
        for _ in range(2):
            answer = await upload(gateway, data)
            assert (answer.status_code, answer.json()) == (201, {"artifact": digest_of(data), "size": len(data)})
        assert (await gateway.http.head(url)).status_code == 200
        assert await object_store.get(gateway.bus, subjects.MODEL_FILES, digest_of(data)) == data


async def test_an_upload_is_looked_at_though_its_file_is_there(nats: Any, problem: Any) -> None:
    """Otherwise a client that sent wrong bytes would only find out on a new platform."""
    async with gateway_on(nats) as gateway:
        data = b"the file"
        assert (await upload(gateway, data)).status_code == 201
        assert problem(await upload(gateway, b"another", digest_of(data))) == (422, "invalid_input")
        assert await object_store.get(gateway.bus, subjects.MODEL_FILES, digest_of(data)) == data


async def test_an_upload_with_a_wrong_digest_leaves_nothing(nats: Any, problem: Any) -> None:
    async def unannounced() -> AsyncIterator[bytes]:
        yield b"bytes"

    async with gateway_on(nats) as gateway:
        digest = "1" * 64
        before = (await gateway.bus.js(f"STREAM.INFO.OBJ_{subjects.MODEL_FILES}"))["state"]["messages"]
        assert problem(await upload(gateway, b"other bytes", digest)) == (422, "invalid_input")
        chunked = await gateway.http.put(f"/v1/artifacts/{digest}", content=unannounced())
        assert problem(chunked) == (411, "bad_request")
        assert problem(await upload(gateway, bytes(ARTIFACT_LIMIT + 1), digest)) == (413, "payload_too_large")
        assert problem(await upload(gateway, b"", "xyz")) == (422, "invalid_input")
        assert (await gateway.http.head(f"/v1/artifacts/{digest}")).status_code == 404
        after = (await gateway.bus.js(f"STREAM.INFO.OBJ_{subjects.MODEL_FILES}"))["state"]["messages"]
        assert after == before


# --- deploys ---------------------------------------------------------------------------------------------------------


async def test_a_model_is_deployed_when_its_engines_are_built(nats: Any, problem: Any) -> None:
    async with gateway_on(nats) as gateway:
        answer = await deploy(gateway, model("resnet"))
        view = answer.json()
        (build_id,) = view["builds"]
        here = "/v1/functions/resnet/revisions/1"
        assert (answer.status_code, answer.headers["location"]) == (202, here)
        assert (view["function"], view["revision"], view["state"]) == ("resnet", 1, "building")
        job = await streams.last_message(gateway.bus, subjects.BUILD, subjects.build_queue("cpu"))
        assert job is not None
        assert job.payload.decode() == build_id
        assert problem(await gateway.http.get("/v1/functions/resnet")) == (404, "function_not_found")
        await gateway.finishing.step()
        (build,) = (await gateway.http.get(here)).json()["builds"]
        assert (build["id"], build["state"], build["device"]) == (build_id, "pending", "cpu")

        await built(gateway, build_id)
        await gateway.finishing.step()
        view = (await gateway.http.get(here)).json()
        assert (view["state"], view["active"]) == ("ready", True)
        assert view["engines"] == {"net": {"cpu": [f"key-of-{build_id}"]}}
        assert (await gateway.http.get("/v1/functions/resnet")).json()["serving"] == 1


async def test_a_model_whose_files_are_not_here_is_refused(nats: Any, problem: Any) -> None:
    async with gateway_on(nats) as gateway:
        samples = ModelFile("samples.npz", "2" * 64, 1)
        answer = await deploy(gateway, model("absent", msgspec.structs.replace(NET, samples=samples)))
        assert problem(answer) == (422, "invalid_spec")
        assert "samples.npz" in answer.json()["detail"]
        assert f"PUT /v1/artifacts/{'2' * 64}" in answer.json()["detail"]
        assert gateway.registry.numbers("absent") == []


async def test_it_is_built_for_every_kind_of_device_where_it_can_run(nats: Any, problem: Any) -> None:
    async with gateway_on(nats) as gateway:
        spec = model("wide", resources=Resources(gpu=("any",)))
        assert problem(await deploy(gateway, spec)) == (503, "no_capacity")
        devices = [Device(kind, DeviceType.GPU, kind, 1 << 30) for kind in ("NVIDIA L4", "NVIDIA A100")]
        gateway.registry.receive_node_report(NodeReport("n", gateway.clock.time(), tuple(devices)))
        builds = (await deploy(gateway, spec)).json()["builds"]
        kinds = {each: gateway.builds.get(each).device for each in builds}
        assert sorted(kinds.values()) == ["NVIDIA A100", "NVIDIA L4"]
        for each in builds:
            await built(gateway, each, engines=(kinds[each],))
        await gateway.finishing.step()
        ready = gateway.registry.revisions["wide"][1]
        assert ready.engines == {"net": {kind: (kind,) for kind in ("NVIDIA A100", "NVIDIA L4")}}
        assert ready.device_kinds == frozenset({"NVIDIA A100", "NVIDIA L4"})


async def test_a_failed_build_keeps_the_serving_revision(nats: Any, problem: Any) -> None:
    async with gateway_on(nats) as gateway:
        for _ in range(3):
            await deploy(gateway, model("steady"))
        first, second, _ = (revision.builds[0] for revision in gateway.registry.revisions["steady"].values())
        await built(gateway, first)
        error = BuildFailed("Resize is not supported", stage="compile", node="up1").info()
        await built(gateway, second, BuildState.FAILED, engines=(), error=error)
        await gateway.finishing.step()
        assert await state_of(gateway, "steady", 1) == ("ready", 1)
        assert await state_of(gateway, "steady", 2) == ("failed", 1)
        told = (await gateway.http.get("/v1/functions/steady/revisions/2")).json()["error"]
        assert (told["stage"], told["node"]) == ("compile", "up1")
        assert all(name in told["message"] for name in ("net.onnx", "cpu", "Resize"))
        for number, why in ((2, "could not be built: net.onnx"), (3, "is being built")):
            answer = await gateway.http.post("/v1/functions/steady/rollback", json={"revision": number})
            assert problem(answer) == (409, "conflict")
            assert why in answer.json()["detail"]
        assert problem(await gateway.http.get("/v1/functions/steady/revisions/9")) == (404, "revision_not_found")


async def test_a_later_deploy_that_was_quicker_stays_active(nats: Any) -> None:
    async with gateway_on(nats) as gateway:
        slow, quick = [(await deploy(gateway, model("races"))).json()["builds"][0] for _ in range(2)]
        for build_id in (quick, slow):
            await built(gateway, build_id)
            await gateway.finishing.step()
        assert [await state_of(gateway, "races", number) for number in (1, 2)] == [("ready", 2), ("ready", 2)]


async def test_only_the_leader_finishes_and_a_new_one_finishes_earlier_builds(nats: Any) -> None:
    async with gateway_on(nats) as one, gateway_on(nats) as other:
        build_id = (await deploy(one, model("heir"))).json()["builds"][0]
        await built(one, build_id)
        one.leads = False
        await one.finishing.step()
        assert await state_of(one, "heir", 1) == ("building", None)
        await until_async(lambda: "heir" in other.registry.revisions and other.builds.get(build_id).state.ended)
        # A leader died between the two records: the revision is READY but not active.
        half = msgspec.structs.replace(
            other.registry.revisions["heir"][1], state=RevisionState.READY, engines={"net": {"cpu": ("k",)}}
        )
        await other.revisions.put("heir.1", encode(half))
        await until_async(lambda: other.registry.revisions["heir"][1].state is RevisionState.READY)
        await other.finishing.step()
        assert await state_of(other, "heir", 1) == ("ready", 1)
        await other.finishing.step()
        assert other.registry.functions["heir"].latest == 1


@pytest.mark.parametrize("trouble", [BusUnavailable("no answer"), Conflict("changed by too many at once")])
async def test_a_revision_that_was_built_gets_active_though_the_bus_went_away_between_its_two_records(
    nats: Any, monkeypatch: pytest.MonkeyPatch, trouble: GpufnError
) -> None:
    async with gateway_on(nats) as gateway:
        name = f"halfway-{type(trouble).__name__.lower()}"
        await gateway.finishing.step()  # it has led for a while
        await built(gateway, (await deploy(gateway, model(name))).json()["builds"][0])

        async def fails(*_: Any) -> Any:
            raise trouble

        with monkeypatch.context() as patch, contextlib.suppress(PlatformError):
            patch.setattr(gateway.functions, "change", fails)
            await gateway.finishing.step()
        assert await state_of(gateway, name, 1) == ("ready", None)
        await gateway.finishing.step()
        assert await state_of(gateway, name, 1) == ("ready", 1)


async def test_deleting_a_function_cancels_its_builds_and_nothing_brings_it_back(nats: Any, problem: Any) -> None:
    async with gateway_on(nats) as gateway:
        first = (await deploy(gateway, model("gone"))).json()["builds"][0]
        await built(gateway, first, BuildState.BUILDING, engines=())
        assert (await gateway.http.delete("/v1/functions/gone")).status_code == 204
        assert gateway.builds.get(first).cancel
        await built(gateway, first)  # the builder was faster than the cancel request
        await gateway.finishing.step()
        assert await state_of(gateway, "gone", 1) == ("failed", None)
        with pytest.raises(FunctionNotFound):
            gateway.registry.function("gone")
        assert problem(await gateway.http.delete("/v1/functions/gone")) == (404, "function_not_found")


async def test_a_built_revision_that_is_not_active_is_deleted_with_its_function(
    nats: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway_on(nats) as gateway:
        for _ in range(2):
            await built(gateway, (await deploy(gateway, model("half-gone"))).json()["builds"][0])
            with monkeypatch.context() as patch, contextlib.suppress(PlatformError):
                if "half-gone" in gateway.registry.functions:

                    async def fails(*_: Any) -> Any:
                        raise BusUnavailable("no answer")

                    patch.setattr(gateway.functions, "change", fails)
                await gateway.finishing.step()
        assert await state_of(gateway, "half-gone", 2) == ("ready", 1)
        await gateway.deploys.delete("half-gone")
        await gateway.finishing.step()
        assert await state_of(gateway, "half-gone", 2) == ("retired", None)


# --- builds ----------------------------------------------------------------------------------------------------------


async def test_a_model_is_built_without_a_function(nats: Any, problem: Any) -> None:
    async with gateway_on(nats) as gateway:
        absent = msgspec.structs.replace(NET, files=(ModelFile("x.onnx", "3" * 64, 1),))
        refused = await gateway.http.post("/v1/builds", content=msgspec.json.encode({"model": absent}))
        assert problem(refused) == (422, "invalid_spec")
        nameless = await gateway.http.post("/v1/builds", json={"model": {"parameter": "?", "files": []}})
        assert problem(nameless) == (422, "invalid_spec")
        await upload(gateway)
        file = msgspec.to_builtins(NET.files[0]) | {"size": 1 << 70}
        immense = await gateway.http.post("/v1/builds", json={"model": {"parameter": "net", "files": [file]}})
        assert problem(immense) == (422, "invalid_spec")
        body = msgspec.json.encode({"model": NET, "device": "NVIDIA L4"})
        answer = await gateway.http.post("/v1/builds", content=body)
        view = answer.json()
        here = f"/v1/builds/{view['id']}"
        assert (answer.status_code, answer.headers["location"], view["device"]) == (202, here, "NVIDIA L4")
        assert msgspec.convert(view, Build) == gateway.builds.get(view["id"])
        assert (await gateway.http.get(here)).json() == view
        assert (await gateway.http.get("/v1/builds?limit=1")).json() == {"builds": [view]}
        for none in ("none", "*", "%3E", "%00", "%F0%9F%98%80", "0" * 26):
            assert problem(await gateway.http.get(f"/v1/builds/{none}")) == (404, "build_not_found")
            assert problem(await gateway.http.delete(f"/v1/builds/{none}")) == (404, "build_not_found")


async def test_a_device_whose_name_no_subject_can_have_is_refused(nats: Any, problem: Any) -> None:
    async with gateway_on(nats) as gateway:
        await upload(gateway)
        answer = await gateway.http.post("/v1/builds", json={"model": msgspec.to_builtins(NET), "device": "x" * 5000})
        assert problem(answer) == (422, "invalid_input")
        assert answer.json()["field"] == "device"


async def begun(gateway: Whole) -> str:
    await upload(gateway)
    body = msgspec.json.encode({"model": NET})
    return str((await gateway.http.post("/v1/builds", content=body)).json()["id"])


async def test_a_wait_for_a_build_ends_with_its_next_change(nats: Any) -> None:
    async with gateway_on(nats) as gateway:
        build_id = await begun(gateway)
        url = f"/v1/builds/{build_id}?wait=30"
        waiting = asyncio.create_task(gateway.http.get(url))
        await until_async(lambda: gateway.builds._waiting)
        await built(gateway, build_id, BuildState.BUILDING, engines=(), progress=0.5)
        seen = (await waiting).json()
        assert (seen["state"], seen["progress"]) == ("building", 0.5)
        missed = await gateway.http.get(f"{url}&since={seen['change'] - 1}")
        assert missed.json() == seen
        await built(gateway, build_id)
        assert (await gateway.http.get(url)).json()["state"] == "succeeded"  # it cannot change any more


async def test_a_build_is_cancelled(nats: Any) -> None:
    async with gateway_on(nats) as gateway:
        waits, runs, ended = [await begun(gateway) for _ in range(3)]
        await built(gateway, runs, BuildState.BUILDING, engines=())
        await built(gateway, ended)
        states = []
        for build_id in (waits, runs, ended):
            view = (await gateway.http.delete(f"/v1/builds/{build_id}")).json()
            states.append((view["state"], view["cancel"], view["ended_at"] is not None))
        # No builder has started the first; the builder of the second has to end it.
        assert states == [("cancelled", True, True), ("building", True, False), ("succeeded", False, False)]


async def test_a_report_is_a_page_that_runs_nothing(nats: Any, problem: Any) -> None:
    async with gateway_on(nats) as gateway:
        build_id = await begun(gateway)
        here = f"/v1/builds/{build_id}"
        assert problem(await gateway.http.get(f"{here}/report")) == (404, "bad_request")
        report, page = [
            await object_store.put(gateway.bus, subjects.ENGINE_FILES, data)
            for data in (b'{"stages":[]}', b"<h1>net</h1>")
        ]
        await built(gateway, build_id, report=report, page=page)
        links = (await gateway.http.get(here)).json()["links"]
        assert links == {"self": here, "report": f"{here}/report", "page": f"{here}/report.html"}
        assert (await gateway.http.get(links["report"])).json() == {"stages": []}
        answer = await gateway.http.get(links["page"])
        assert (answer.text, answer.headers["content-type"]) == ("<h1>net</h1>", "text/html; charset=utf-8")
        assert answer.headers["content-security-policy"] == (
            "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'"
        )


# --- engines ---------------------------------------------------------------------------------------------------------


async def publish(gateway: Whole, key: str, data: bytes) -> None:
    identity = EngineIdentity(
        model=key, recipe=Precision.FP16, tools={}, profiles=(), max_batch=8, samples="", flags={},
        backend=Backend.ORT_CPU, versions={}, device="cpu", compute_capability="", os="", arch="",
    )  # fmt: skip
    digest = await object_store.put(gateway.bus, subjects.ENGINE_FILES, data)
    manifest = EngineManifest(
        key=key, identity=identity, model="net.onnx", inputs=(TensorSpec("x", "FP32", (-1, 3)),),
        outputs=(TensorSpec("y", "FP32", (-1, 5)),), profiles=(), batched=True, max_batch=8,
        files=(ModelFile("model.onnx", digest, len(data)),), settings={}, accuracy=Accuracy(0.0, 1e-4, 1.0),
        latency=None, built_at=1.0,
    )  # fmt: skip
    await gateway.buckets.engines.create(key, encode(manifest))
    await until_async(lambda: key in gateway.registry.manifests)


async def test_unused_engines_are_removed_with_their_files(nats: Any) -> None:
    async with gateway_on(nats) as gateway:
        build_id = (await deploy(gateway, model("kept"))).json()["builds"][0]
        await publish(gateway, "used", b"used")
        await publish(gateway, "idle", b"idle!")
        await built(gateway, build_id, engines=("used",))
        await gateway.finishing.step()
        listed = (await gateway.http.get("/v1/engines")).json()["engines"]
        assert {each["key"]: each["used_by"] for each in listed} == {"used": ["kept@1"], "idle": []}
        for dry_run in (True, False):
            swept = (await gateway.http.post("/v1/engines/gc", json={"dry_run": dry_run})).json()
            assert ([each["key"] for each in swept["engines"]], swept["files"], swept["bytes"]) == (["idle"], 1, 5)
            there = [await blobs.exists(gateway.bus, subjects.ENGINE_FILES, digest_of(b)) for b in (b"used", b"idle!")]
            assert there == [True, dry_run]
        assert await gateway.buckets.engines.keys() == ["used"]


async def collected(gateway: Whole) -> list[str]:
    answer = await gateway.http.post("/v1/engines/gc", json={"dry_run": False})
    return [each["key"] for each in answer.json()["engines"]]


async def test_used_engines_are_read_from_the_stored_records_and_not_from_watches(nats: Any) -> None:
    """The watches are silent from before the deploy."""
    async with gateway_on(nats) as gateway:
        build_id = (await deploy(gateway, model("unheard"))).json()["builds"][0]
        await publish(gateway, "unheard-1", b"unheard")
        await built(gateway, build_id, engines=("unheard-1",))
        await gateway.finishing.step()
        revision = gateway.registry.revisions.pop("unheard")[1]
        assert "unheard-1" not in await collected(gateway)
        assert await blobs.exists(gateway.bus, subjects.ENGINE_FILES, digest_of(b"unheard"))
        await gateway.deploys.delete("unheard")  # engines of a deleted function are removed on request
        await gateway.revisions.put("unheard.1", encode(as_retired(revision, gateway.clock.time())))
        assert "unheard-1" in await collected(gateway)
        assert not await blobs.exists(gateway.bus, subjects.ENGINE_FILES, digest_of(b"unheard"))


async def test_an_engine_that_a_build_finds_again_meanwhile_stays(nats: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway_on(nats) as gateway:
        await publish(gateway, "found-again", b"found again")
        entry = await gateway.buckets.engines.get("found-again")
        assert entry is not None

        async def found_meanwhile(*given: Any) -> Any:
            await gateway.buckets.engines.put(entry.key, entry.value)  # as a builder does that finds the engine
            return await records(*given)

        monkeypatch.setattr(engines, "records", found_meanwhile)
        assert "found-again" not in await collected(gateway)
        assert await gateway.buckets.engines.get("found-again") is not None
        assert await blobs.exists(gateway.bus, subjects.ENGINE_FILES, digest_of(b"found again"))


@pytest.mark.parametrize("heard", [True, False])
async def test_the_files_of_a_removed_engine_stay_that_another_names_meanwhile(
    nats: Any, monkeypatch: pytest.MonkeyPatch, heard: bool
) -> None:
    """Both when this gateway's watch reports the engine, and when it is published and touched unnoticed."""
    async with gateway_on(nats) as gateway:
        going, data = f"going-{heard}", f"shared bytes {heard}".encode()
        await publish(gateway, going, data)
        entry = await gateway.buckets.engines.get(going)
        assert entry is not None
        other = msgspec.structs.replace(msgspec.msgpack.decode(entry.value, type=EngineManifest), key=f"other-{heard}")

        async def published_meanwhile(bucket: KeyValue, decoder: Any) -> Any:
            found = [] if bucket is gateway.buckets.engines and not heard else await records(bucket, decoder)
            if bucket is gateway.buckets.functions or found == []:
                await gateway.buckets.engines.put(other.key, encode(other))
                await object_store.touch(gateway.bus, subjects.ENGINE_FILES, digest_of(data))
            return found

        monkeypatch.setattr(engines, "records", published_meanwhile)
        assert going in await collected(gateway)
        assert await gateway.buckets.engines.get(going) is None
        assert await object_store.get(gateway.bus, subjects.ENGINE_FILES, digest_of(data)) == data


async def test_a_model_is_described_with_its_engines(nats: Any, problem: Any) -> None:
    async with gateway_on(nats) as gateway:
        build_id = (await deploy(gateway, model("shown"))).json()["builds"][0]
        await publish(gateway, "shown-1", b"an engine")
        await built(gateway, build_id, engines=("shown-1",))
        await gateway.finishing.step()
        view = (await gateway.http.get("/v1/models/shown")).json()
        assert (view["name"], view["revision"], view["file"], view["batched"]) == ("shown", 1, "net.onnx", True)
        assert view["why_alone"] == ""
        assert view["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}]
        (engine,) = view["engines"]["cpu"]
        assert (engine["key"], engine["size"], engine["accuracy"]["rel_l2"]) == ("shown-1", 9, 1e-4)
        assert view in (await gateway.http.get("/v1/models")).json()["models"]
        assert problem(await gateway.http.get("/v1/models/none")) == (404, "function_not_found")


def test_a_revision_has_engines_where_all_its_models_have() -> None:
    other = msgspec.structs.replace(NET, parameter="other")
    spec = FunctionSpec(name="two", entry=EntryPoint("app", "f"), methods=(MethodSpec(),), models=(NET, other))
    revision = Revision(
        function="two", number=1, spec=spec, bundle=digest_of(EMPTY), created_at=0.0,
        engines={"net": {"cpu": ("a",), "NVIDIA L4": ("b",)}, "other": {"NVIDIA L4": ("c",)}},
    )  # fmt: skip
    assert revision.device_kinds == frozenset({"NVIDIA L4"})
    without = msgspec.structs.replace(spec, models=())
    assert msgspec.structs.replace(revision, spec=without).device_kinds is None


async def test_a_build_that_began_at_another_gateway_just_now_is_known(nats: Any) -> None:
    async with gateway_on(nats) as gateway:
        other = Builds(gateway.bus, await KeyValue.open(gateway.bus, subjects.BUILDS), gateway.clock)
        await other.start()
        assert other._watch is not None
        assert other._watch._feed is not None
        other._watch._feed._on_message = lambda *_: None  # the watch has not reported it yet
        begun = await gateway.builds.begin(NET, "cpu")
        assert begun.id not in other.known
        assert await other.changed(begun.id, 0, wait_s=0.0) == begun
        for unknown in (new_ulid(), "no.id"):
            with pytest.raises(BuildNotFound):
                await other.changed(unknown, 0, wait_s=0.0)
