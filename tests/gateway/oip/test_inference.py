"""The Open Inference Protocol, with third-party clients. The worker code that reads and writes tensors is real; the
model returns its input."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import zlib
from collections.abc import AsyncIterator, Callable
from typing import Any
from unittest.mock import ANY

import ml_dtypes
import msgspec
import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from tritonclient.utils import InferenceServerException

from gpufn_core.domain.devices.engine import Accuracy, Backend, EngineIdentity, EngineManifest
from gpufn_core.domain.invocation import OutcomeKind
from gpufn_core.domain.revision import Revision, RevisionState
from gpufn_core.encoding import media
from gpufn_core.errors import ErrorInfo, InvalidInput
from gpufn_core.ids import Digest
from gpufn_core.protocol.codec import encode
from gpufn_core.protocol.records import ApiKey
from gpufn_core.spec.function_spec import Batch, EntryPoint, FunctionSpec, MethodSpec, Packaging
from gpufn_core.spec.model_spec import DATATYPES, ModelFile, ModelSpec, Precision, TensorSpec
from gpufn_gateway.auth.access import new_key
from gpufn_gateway.oip import inference as gateway_oip
from gpufn_gateway.routes.calls import oip as oip_routes
from gpufn_platform.bus.storage.key_value import Entry
from gpufn_runtime.worker.engines import oip
from tests.gateway.listening import serving

INPUTS = tuple(TensorSpec(name.lower(), name, (-1, 2)) for name in DATATYPES)
OUTPUTS = tuple(TensorSpec(f"{spec.name}_out", spec.datatype, spec.shape) for spec in INPUTS)
NET = ModelSpec(parameter="net", files=(ModelFile("net.onnx", "0" * 64, 1),), max_batch=8)
REQUEST = b'{"inputs":[{"name":"fp32","datatype":"FP32","shape":[1,2],"data":[1.5,2]}]}'
INFER = "/v2/models/same/infer"


def model(name: str = "same", **fields: Any) -> FunctionSpec:
    entry = EntryPoint("", "", Packaging.MODEL)
    given: dict[str, Any] = {"methods": (MethodSpec(),), "models": (NET,)} | fields
    return FunctionSpec(name=name, entry=entry, **given)


def manifest(**fields: Any) -> EngineManifest:
    identity = EngineIdentity(
        model="m", recipe=Precision.FP32, tools={}, profiles=(), max_batch=8, samples="", flags={},
        backend=Backend.ORT_CPU, versions={}, device="cpu", compute_capability="", os="", arch="",
    )  # fmt: skip
    given: dict[str, Any] = {"inputs": INPUTS, "outputs": OUTPUTS, "batched": True, "max_batch": 8} | fields
    return EngineManifest(
        key="k", identity=identity, model="net.onnx", profiles=(), files=(), settings={},
        accuracy=Accuracy(0.0, 0.0, 1.0), latency=None, built_at=0.0, **given,
    )  # fmt: skip


def same(call: Any) -> None:
    """Respond like a worker with an identity model."""
    fields = call.fields
    assert fields["accept"] == media.TENSORS
    try:
        request = oip.decode(fields["content_type"], fields["body"], INPUTS, OUTPUTS)
    except InvalidInput as error:
        call.reply(kind=OutcomeKind.REJECTED, error=error.info())
        return
    results = {f"{name}_out": array for name, array in request.inputs.items()}
    given = oip.Request(request.id, {}, {name: binary for name, binary in request.outputs.items() if name in results})
    revision: Revision = fields["revision"]
    content_type, parts = oip.encode(given, results, OUTPUTS, revision.function, str(revision.number))
    body = b"".join(parts)
    call.reply(body, content_type=content_type)


@pytest.fixture(name="models")
def models_on_a_gateway(gateway: Any, make: Any) -> Any:
    """A gateway with the model `same` at revision 3, and the function `embed`."""
    gateway.registry.on_engine("k", Entry("k", encode(manifest()), 1))
    gateway.deploy(model(batch=Batch(8, max_wait_ms=2)), 3, {"net": {"cpu": ("k",)}})
    gateway.report(make.status("embed"), make.status("same", 3))
    gateway.queue.answer = same
    return gateway


def error(answer: Any) -> tuple[int, str]:
    """Return status and message of an error, and check that it has no other fields."""
    assert answer.headers["content-type"] == "application/json", answer.text
    (message,) = msgspec.json.decode(answer.content, type=dict[str, str]).values()
    assert answer.json() == {"error": message}
    return answer.status_code, message


# --- inference -------------------------------------------------------------------------------------------------------


async def test_a_request_reaches_the_worker_unchanged(models: Any) -> None:
    answer = await models.post(INFER, REQUEST, content_type="application/json")
    (call,) = models.queue.calls
    assert (call.fields["body"], call.fields["content_type"]) == (REQUEST, media.TENSORS)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    assert answer.headers["x-gpufn-revision"] == "same@3"
    assert answer.json() == {
        "model_name": "same",
        "model_version": "3",
        "outputs": [{"name": "fp32_out", "datatype": "FP32", "shape": [1, 2], "data": [1.5, 2.0]}],
    }


async def test_a_version_is_the_number_of_the_serving_revision(models: Any) -> None:
    answers = [await models.post(f"/v2/models/same/versions/{number}/infer", REQUEST) for number in (3, 2)]
    assert answers[0].status_code == 200
    assert error(answers[1]) == (404, "same serves version 3, not 2.")


@pytest.mark.parametrize("length", [str(len(REQUEST) + 1), "-1", "x", "9" * 30])
async def test_the_head_is_a_part_of_the_body(models: Any, length: str) -> None:
    answer = await models.post(INFER, REQUEST, inference_header_content_length=length)
    status, message = error(answer)
    assert (status, "Inference-Header-Content-Length" in message) == (422, True)
    assert models.queue.calls == []


@pytest.mark.parametrize(
    ("encoding", "pack"), [("gzip", gzip.compress), ("GZIP", gzip.compress), ("deflate", zlib.compress)]
)
async def test_a_packed_request_is_unpacked_within_the_limit(
    models: Any, make: Any, encoding: str, pack: Callable[[bytes], bytes]
) -> None:
    answer = await models.post(INFER, pack(REQUEST), content_encoding=encoding)
    assert (answer.status_code, models.queue.calls[0].fields["body"]) == (200, REQUEST)
    too_much = await models.post(INFER, pack(bytes(make.CALL_LIMIT + 1)), content_encoding=encoding)
    assert error(too_much)[0] == 413
    for broken in (pack(REQUEST)[:-3], pack(REQUEST) + b"more", REQUEST):
        status, message = error(await models.post(INFER, broken, content_encoding=encoding))
        assert (status, "Content-Encoding" in message) == (422, True)
    assert error(await models.post(INFER, REQUEST, content_encoding="br"))[0] == 422


async def test_a_large_packed_request_is_unpacked_beside_the_loop(models: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(gateway_oip, "_INLINE_BYTES", 8)
    answer = await models.post(INFER, gzip.compress(REQUEST), content_encoding="gzip")
    assert answer.status_code == 200


async def test_errors_have_the_form_of_the_protocol(models: Any, make: Any) -> None:
    for answer, expected, fact in (
        (await models.post(INFER, b"{"), 422, "truncated"),
        (await models.post("/v2/models/none/infer", REQUEST), 404, "'none'"),
        (await models.post("/v2/models/embed/infer", REQUEST), 404, "/v1/functions/embed/invoke"),
        (await models.get(INFER), 405, "POST"),
    ):
        status, message = error(answer)
        assert (status, fact in message) == (expected, True)
    assert error(await models.post(INFER, bytes(make.CALL_LIMIT + 1)))[0] == 413
    models.queue.answer = lambda call: call.reply(kind=OutcomeKind.TIMED_OUT)
    assert error(await models.post(INFER, REQUEST))[0] == 504
    models.report(make.status("same", 3, ready=0, start_error=ErrorInfo("function_start_failed", "no engine loads")))
    refused = await models.post(INFER, REQUEST)
    assert error(refused)[0] == 503
    assert refused.headers["retry-after"] == "15"


async def test_a_model_that_is_being_built_is_not_ready_yet(models: Any) -> None:
    revision = Revision(
        function="new", number=1, spec=model("new"), bundle=Digest("0" * 64), created_at=0.0,
        state=RevisionState.BUILDING, builds=("b",),
    )  # fmt: skip
    models.registry.on_revision("new.1", Entry("new.1", encode(revision), 9))
    for answer in (await models.post("/v2/models/new/infer", REQUEST), await models.get("/v2/models/new/ready")):
        status, message = error(answer)
        assert (status, "'new'" in message) == (503, True)
        assert "retry-after" in answer.headers
    index = (await models.post("/v2/repository/index", b"")).json()
    assert index == [
        {"name": "same", "version": "3", "state": "READY", "reason": ""},
        {"name": "new", "version": "1", "state": "LOADING", "reason": ANY},
    ]


# --- metadata and statistics ------------------------------------------------------------------------------------------


async def test_the_server_reports_its_capabilities(models: Any) -> None:
    assert (await models.get("/v2")).json()["extensions"] == [
        "binary_tensor_data", "model_configuration", "model_repository", "statistics",
    ]  # fmt: skip
    assert (await models.get("/v2/health/live")).status_code == 200
    assert (await models.get("/v2/health/ready")).json() == {"ready": True}
    models.reason = "no agent has reported: is one running?"
    assert error(await models.get("/v2/health/ready")) == (503, f"Not ready: {models.reason}.")


@pytest.mark.parametrize(
    ("path", "extension"),
    [
        ("/v2/cudasharedmemory/region/r/register", "cudasharedmemory"),
        ("/v2/logging", "logging"),
        ("/v2/trace/setting", "trace"),
        ("/v2/models/same/trace/setting", "setting"),
        ("/v2/models/same/versions/3/generate", "generate"),
    ],
)
async def test_an_extension_that_is_missing_is_unsupported_and_not_absent(
    models: Any, path: str, extension: str
) -> None:
    said = f"gpufn does not support the extension {extension!r} of the Open Inference Protocol."
    assert error(await models.post(path, b"{}")) == (501, said)


@pytest.mark.parametrize("path", ["/v2/models/Same", "/v2/models/same/versions/3"])
async def test_metadata_is_that_of_the_engine(models: Any, path: str) -> None:
    view = (await models.get(path)).json()
    assert (view["name"], view["versions"], view["platform"]) == ("same", ["3"], "onnxruntime_onnx")
    assert view["inputs"] == [{"name": spec.name, "datatype": spec.datatype, "shape": [-1, 2]} for spec in INPUTS]
    assert view["outputs"][0]["name"] == "bool_out"


async def test_the_configuration_is_in_tritons_terms(models: Any) -> None:
    view = (await models.get("/v2/models/same/config")).json()
    assert (view["max_batch_size"], view["backend"]) == (8, "onnxruntime")
    assert view["dynamic_batching"] == {"preferred_batch_size": [8], "max_queue_delay_microseconds": 2000}
    assert view["input"][-1] == {"name": "bytes", "data_type": "TYPE_STRING", "dims": [2]}
    models.registry.on_engine("k", Entry("k", encode(manifest(batched=False)), 2))
    view = (await models.get("/v2/models/same/config")).json()
    assert (view["max_batch_size"], view["input"][0]["dims"], "dynamic_batching" in view) == (0, [-1, 2], False)


async def test_a_model_whose_engine_is_not_known_yet_is_temporarily_unavailable(models: Any) -> None:
    models.registry.on_engine("k", None)
    assert error(await models.get("/v2/models/same"))[0] == 503
    assert (await models.get("/v2/models/same/ready")).status_code == 200


async def test_statistics_count_the_calls_of_this_gateway(models: Any) -> None:
    await models.post(INFER, REQUEST)
    await models.post(INFER, b"{")
    for path in ("/v2/models/same/stats", "/v2/models/same/versions/3/stats", "/v2/models/stats"):
        (view,) = (await models.get(path)).json()["model_stats"]
        counts = {name: each["count"] for name, each in view["inference_stats"].items()}
        assert (view["name"], view["version"]) == ("same", "3")
        assert counts == {"success": 1, "fail": 1, "queue": 2, "compute_infer": 2}


async def test_statistics_separate_the_time_of_runs_from_the_whole_call(models: Any) -> None:
    def answer(call: Any) -> None:
        models.clock.now += 5.0
        call.reply(b"{}", content_type=media.TENSORS, queue_s=0.5, run_s=0.25)

    models.queue.answer = answer
    await models.post(INFER, REQUEST)
    (view,) = (await models.get("/v2/models/same/stats")).json()["model_stats"]
    took = {name: each["ns"] for name, each in view["inference_stats"].items()}
    assert took == {"success": 5_000_000_000, "fail": 0, "queue": 500_000_000, "compute_infer": 250_000_000}


async def test_statistics_separate_the_time_of_failures_from_successes(models: Any) -> None:
    for seconds, kind in ((2.0, OutcomeKind.SUCCEEDED), (3.0, OutcomeKind.LOST)):

        def answer(call: Any, seconds: float = seconds, kind: OutcomeKind = kind) -> None:
            models.clock.now += seconds
            call.reply(b"{}", kind, content_type=media.TENSORS)

        models.queue.answer = answer
        await models.post(INFER, REQUEST)
    (view,) = (await models.get("/v2/models/same/stats")).json()["model_stats"]
    stats = view["inference_stats"]
    assert (stats["success"], stats["fail"]) == (
        {"count": 1, "ns": 2_000_000_000},
        {"count": 1, "ns": 3_000_000_000},
    )


async def test_a_model_is_loaded_and_unloaded_by_its_minimum_of_workers(models: Any) -> None:
    path = "/v2/repository/models"
    kept = b'{"parameters": {"unload_dependents": true}}'
    answers = [await models.post(f"{path}/same/{change}", kept) for change in ("load", "unload")]
    assert [(answer.status_code, answer.json()) for answer in answers] == [(200, {})] * 2
    assert models.scaled == [("same", 1), ("same", 0)]
    config = b'{"parameters": {"config": "{}"}}'
    assert error(await models.post(f"{path}/same/load", config))[0] == 422
    assert error(await models.post(f"{path}/none/load"))[0] == 404
    assert error(await models.post(f"{path}/same/reload"))[0] == 404
    assert len(models.scaled) == 2


async def test_a_load_ends_with_the_reason_if_no_worker_starts(
    models: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oip_routes, "_LOAD_TIMEOUT_S", 0.0)
    models.report(make.status("same", ready=0), partial=True)
    assert error(await models.post("/v2/repository/models/same/load"))[0] == 503


async def test_openapi_describes_inference_of_deployed_functions(models: Any) -> None:
    document = (await models.get("/openapi.json")).json()
    assert [path for path in document["paths"] if path.startswith("/v2")] == [INFER]
    body = document["paths"][INFER]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/InferenceRequest"}
    assert document["components"]["schemas"]["Tensor"]["properties"]["datatype"]["enum"] == list(DATATYPES)


async def test_a_key_sees_the_models_that_it_may_call(models: Any) -> None:
    keys: dict[str, str] = {}
    for scope in ("invoke:same", "invoke:other", "read"):
        key, keys[scope] = new_key(scope, (scope,), 0.0)
        models.registry.on_key(key.id, Entry(key.id, encode(key), 1))
        assert isinstance(key, ApiKey)
    assert (await models.get("/v2/health/live")).status_code == 200
    assert error(await models.get("/v2"))[0] == 401
    assert error(await models.post(INFER, REQUEST))[0] == 401
    seen = {}
    for scope, secret in keys.items():
        headers = {"authorization": f"Bearer {secret}"}
        metadata = (await models.get("/v2/models/same", **headers)).status_code
        inferred = (await models.post(INFER, REQUEST, **headers)).status_code
        listed = len((await models.post("/v2/repository/index", b"", **headers)).json())
        seen[scope] = (metadata, inferred, listed)
    assert seen == {"invoke:same": (200, 200, 1), "invoke:other": (404, 404, 0), "read": (200, 403, 1)}


# --- tritonclient, unmodified ----------------------------------------------------------------------------------------

ARRAYS: dict[str, np.ndarray[Any, Any]] = {
    "BOOL": np.array([[True, False]]),
    **{f"UINT{bits}": np.array([[1, 2]], f"uint{bits}") for bits in (8, 16, 32, 64)},
    **{f"INT{bits}": np.array([[-1, 2]], f"int{bits}") for bits in (8, 16, 32, 64)},
    "FP16": np.array([[0.5, -2]], np.float16),
    "FP32": np.array([[0.1, -2], [3, 4]], np.float32),
    "FP64": np.array([[0.1, -2]], np.float64),
    "BF16": np.array([[0.5, -2]], ml_dtypes.bfloat16),
    "BYTES": np.array([[b"a", "grün".encode()]], np.object_),
}


@contextlib.asynccontextmanager
async def listening(models: Any) -> AsyncIterator[str]:
    async with serving(models.app) as (_, port):
        yield f"127.0.0.1:{port}"


def talk(url: str) -> dict[str, Any]:
    """Call all methods of the blocking client; return the results."""
    got: dict[str, Any] = {}
    with contextlib.closing(triton.InferenceServerClient(url)) as client:
        got["live"] = client.is_server_live() and client.is_server_ready()
        got["ready"] = [client.is_model_ready("same"), client.is_model_ready("same", "2")]
        got["metadata"] = client.get_model_metadata("same")["versions"]
        got["config"] = client.get_model_config("same")["max_batch_size"]
        for datatype, array in ARRAYS.items():
            sent = triton.InferInput(datatype.lower(), list(array.shape), datatype)
            sent.set_data_from_numpy(array, binary_data=True)
            got[datatype] = client.infer("same", [sent]).as_numpy(f"{datatype.lower()}_out")
        several = []
        for datatype in ("FP32", "INT64", "BYTES"):
            sent = triton.InferInput(datatype.lower(), list(ARRAYS[datatype].shape), datatype)
            sent.set_data_from_numpy(ARRAYS[datatype], binary_data=datatype != "INT64")
            several.append(sent)
        wanted = [
            triton.InferRequestedOutput("int64_out", binary_data=True),
            triton.InferRequestedOutput("fp32_out", binary_data=False),
        ]
        answer = client.infer("same", several, outputs=wanted, request_id="r-1", request_compression_algorithm="gzip")
        response = answer.get_response()
        got["several"] = (response["id"], [output["name"] for output in response["outputs"]])
        got["values"] = (answer.as_numpy("int64_out").tolist(), answer.as_numpy("fp32_out").tolist())
        got["stats"] = client.get_inference_statistics("same")["model_stats"][0]["inference_count"]
        got["index"] = client.get_model_repository_index()[0]["state"]
        client.load_model("same")
        client.unload_model("same", unload_dependents=True)
        stranger = triton.InferInput("other", [1], "FP32")
        stranger.set_data_from_numpy(np.zeros(1, np.float32))
        asked: dict[str, Callable[[], Any]] = {
            "unknown": lambda: client.get_model_metadata("none"),
            "load": lambda: client.load_model("same", config="{}"),
            "wrong": lambda: client.infer("same", [stranger]),
        }
        for name, ask in asked.items():
            with pytest.raises(InferenceServerException) as caught:
                ask()
            got[name] = caught.value.status()
    return got


async def test_tritonclient_works_unmodified(models: Any) -> None:
    async with listening(models) as url:
        got = await asyncio.to_thread(talk, url)
    for datatype, array in ARRAYS.items():
        np.testing.assert_array_equal(got.pop(datatype), array)
    assert got == {
        "live": True,
        "ready": [True, False],
        "metadata": ["3"],
        "config": 8,
        "several": ("r-1", ["int64_out", "fp32_out"]),
        "values": ([[-1, 2]], ARRAYS["FP32"].tolist()),
        "stats": len(ARRAYS) + 1,
        "index": "READY",
        "unknown": "404",
        "load": "422",
        "wrong": "422",
    }


async def test_tritonclients_aio_works_unmodified(models: Any) -> None:
    async with listening(models) as url, triton_aio.InferenceServerClient(url) as client:
        assert await client.is_server_ready()
        rows = [np.full((1, 2), number, np.float32) for number in range(4)]

        async def infer(row: np.ndarray[Any, Any]) -> Any:
            sent = triton_aio.InferInput("fp32", [1, 2], "FP32")
            sent.set_data_from_numpy(row)
            return (await client.infer("same", [sent])).as_numpy("fp32_out")

        np.testing.assert_array_equal(await asyncio.gather(*map(infer, rows)), rows)
        with pytest.raises(InferenceServerException, match="'none'"):
            await client.get_model_config("none")
