"""The Open Inference Protocol over gRPC, with Triton's clients, on the port of HTTP/1.1."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import queue
import ssl
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.grpc import model_config_pb2, service_pb2
from tritonclient.utils import InferenceServerException

from gpufn_core.domain.invocation import OutcomeKind
from gpufn_core.domain.team import Team
from gpufn_core.encoding import media
from gpufn_core.errors import InvalidInput
from gpufn_core.protocol.codec import encode
from gpufn_core.spec.function_spec import MethodSpec
from gpufn_core.spec.tensor_signature import DATATYPE
from gpufn_gateway.auth.access import LOCAL, new_key
from gpufn_gateway.http.connection.certificate import server_context
from gpufn_gateway.http.connection.connection_limit import ConnectionLimit
from gpufn_gateway.http.connection.http2_tunnel import PREFACE, Http2
from gpufn_gateway.oip.grpc import messages_pb2 as messages
from gpufn_gateway.oip.grpc import translation
from gpufn_gateway.oip.grpc.server import _READERS, GrpcServer
from gpufn_gateway.settings import GatewaySettings
from gpufn_platform.bus.storage.key_value import Entry
from tests.certificates import Authority
from tests.gateway.listening import serving
from tests.gateway.oip.test_inference import ARRAYS, models_on_a_gateway  # noqa: F401  the fixture
from tests.waiting import until_async


def http2(models: Any, folder: Path, **settings: Any) -> Http2:
    server = functools.partial(
        GrpcServer, models.app, models.access, GatewaySettings(**settings), folder / "gateway.grpc"
    )
    return Http2(lambda: server, grace_s=5.0)


@contextlib.asynccontextmanager
async def listening(models: Any, folder: Path, **given: Any) -> AsyncIterator[str]:
    connections = http2(models, folder)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(connections.close)
        _, port = await stack.enter_async_context(serving(models.app, http2=connections, **given))
        yield f"127.0.0.1:{port}"


def tensor(datatype: str, **fields: Any) -> Any:
    array = ARRAYS[datatype]
    sent = triton.InferInput(fields.get("name", datatype.lower()), list(array.shape), datatype)
    sent.set_data_from_numpy(array)
    return sent


def code_of(ask: Callable[[], Any]) -> str:
    with pytest.raises(InferenceServerException) as caught:
        ask()
    return str(caught.value.status()).removeprefix("StatusCode.")


def call_all_methods(url: str) -> dict[str, Any]:
    got: dict[str, Any] = {}
    with contextlib.closing(triton.InferenceServerClient(url)) as client:
        got["live"] = client.is_server_live() and client.is_server_ready()
        got["server"] = client.get_server_metadata().name
        got["ready"] = client.is_model_ready("same")
        got["metadata"] = client.get_model_metadata("same").inputs[-1].name
        config = client.get_model_config("same").config
        preferred = config.dynamic_batching.preferred_batch_size
        got["max batch"] = (config.max_batch_size, config.input[-1].data_type, preferred)
        for datatype, array in ARRAYS.items():
            answer = client.infer("same", [tensor(datatype)]).as_numpy(f"{datatype.lower()}_out")
            np.testing.assert_array_equal(answer, array)
        wanted = [triton.InferRequestedOutput("int64_out"), triton.InferRequestedOutput("fp32_out")]
        several = [tensor("FP32"), tensor("INT64"), tensor("BYTES")]
        answer = client.infer("same", several, outputs=wanted, request_id="r-1", model_version="3")
        got["several"] = (answer.get_response().id, [output.name for output in answer.get_response().outputs])
        got["stats"] = client.get_inference_statistics("same").model_stats[0].inference_count
        got["index"] = client.get_model_repository_index().models[0].state
        got["unknown"] = code_of(lambda: client.get_model_metadata("none"))
        got["version"] = code_of(lambda: client.is_model_ready("same", "2"))
        client.load_model("same")
        client.unload_model("same", unload_dependents=True)
        got["config"] = code_of(lambda: client.load_model("same", config="{}"))
        got["files"] = code_of(lambda: client.load_model("same", config="{}", files={"file:1/model.onnx": b"\xff"}))
        got["load"] = code_of(lambda: client.load_model("none"))
        got["no load path"] = code_of(lambda: client.unload_model("../../../v1/keys"))
        got["wrong"] = code_of(lambda: client.infer("same", [tensor("FP32", name="other")]))
        got["no path"] = code_of(lambda: client.get_model_metadata("../../v1/keys"))
    return got


async def test_tritonclient_works_unmodified(models: Any, tmp_path: Path) -> None:
    async with listening(models, tmp_path) as url:
        got = await asyncio.to_thread(call_all_methods, url)
    assert models.scaled == [("same", 1), ("same", 0)]
    assert got == {
        "live": True,
        "server": "gpufn",
        "ready": True,
        "metadata": "bytes",
        "max batch": (8, model_config_pb2.TYPE_STRING, [8]),
        "several": ("r-1", ["int64_out", "fp32_out"]),
        "stats": len(ARRAYS) + 1,
        "index": "READY",
        "unknown": "NOT_FOUND",
        "version": "NOT_FOUND",
        "config": "INVALID_ARGUMENT",
        "files": "INVALID_ARGUMENT",
        "load": "NOT_FOUND",
        "no load path": "NOT_FOUND",
        "wrong": "INVALID_ARGUMENT",
        "no path": "NOT_FOUND",
    }


async def test_functions_with_arrays_have_statistics(models: Any, tmp_path: Path, make: Any) -> None:
    parameters = {"type": "object", "properties": {"x": {DATATYPE: "FP32"}}}
    methods = [MethodSpec(name=name, parameters=parameters) for name in ("add", "mean")]
    models.deploy(make.spec("counter", *methods, is_class=True))
    models.report(make.status("counter"), partial=True)
    models.queue.answer = lambda call: call.reply(
        b'{"model_name":"counter.add","model_version":"1","outputs":[]}', content_type=media.tensors(61)
    )
    async with listening(models, tmp_path) as url, triton_aio.InferenceServerClient(url) as client:
        await client.infer("counter.add", [tensor("FP32", name="x")])
        (one,) = (await client.get_inference_statistics("counter.add")).model_stats
        every = (await client.get_inference_statistics()).model_stats
    assert (one.name, one.version, one.inference_count, one.inference_stats.compute_infer.count) == (
        "counter.add", "1", 1, 1,
    )  # fmt: skip
    assert [each.name for each in every] == ["counter.add", "counter.mean", "same"]


async def test_http_and_grpc_share_the_port(models: Any, tmp_path: Path) -> None:
    async with listening(models, tmp_path) as url, triton_aio.InferenceServerClient(url) as client:
        assert await client.is_server_live()
        async with httpx.AsyncClient() as http:
            assert (await http.get(f"http://{url}/v2/health/live")).status_code == 200
        rows = [np.full((1, 2), number, np.float32) for number in range(4)]

        async def infer(row: np.ndarray[Any, Any]) -> Any:
            sent = triton_aio.InferInput("fp32", [1, 2], "FP32")
            sent.set_data_from_numpy(row)
            return (await client.infer("same", [sent])).as_numpy("fp32_out")

        np.testing.assert_array_equal(await asyncio.gather(*map(infer, rows)), rows)


async def test_requests_of_a_stream_end_in_order_and_an_error_does_not_end_it(models: Any, tmp_path: Path) -> None:
    def talk(url: str) -> list[tuple[Any, bool]]:
        got: queue.Queue[tuple[Any, Any]] = queue.Queue()
        with contextlib.closing(triton.InferenceServerClient(url)) as client:
            client.start_stream(lambda result, error: got.put((result, error)))
            for name, id_ in (("fp32", "1"), ("other", ""), ("fp32", "3")):
                client.async_stream_infer("same", [tensor("FP32", name=name)], request_id=id_)
            answers = [got.get(timeout=30) for _ in range(3)]
            client.stop_stream()
        return [(result and result.get_response().id, error is not None) for result, error in answers]

    async with listening(models, tmp_path) as url:
        assert await asyncio.to_thread(talk, url) == [("1", False), (None, True), ("3", False)]


async def test_tls_offers_http2_to_grpc_and_http1_to_the_others(models: Any, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair, root = authority.issue("localhost"), str(authority.file)
    async with listening(models, tmp_path, tls=server_context(str(pair.chain), str(pair.key))) as url:
        host = url.replace("127.0.0.1", "localhost")
        async with triton_aio.InferenceServerClient(host, ssl=True, root_certificates=root) as client:
            assert await client.is_server_ready()
        browser = ssl.create_default_context(cafile=root)
        browser.set_alpn_protocols(["h2", "http/1.1"])
        _, writer = await asyncio.open_connection("localhost", int(url.rpartition(":")[2]), ssl=browser)
        assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "http/1.1"
        writer.close()
        await writer.wait_closed()


async def test_a_key_sees_the_models_that_it_may_call(models: Any, tmp_path: Path) -> None:
    seen = {}
    async with listening(models, tmp_path) as url, triton_aio.InferenceServerClient(url) as client:
        for scope in ("", "invoke:same", "invoke:other"):
            headers = {}
            if scope:
                key, secret = new_key(scope, (scope,), 0.0)
                models.registry.on_key(key.id, Entry(key.id, encode(key), 1))
                headers = {"authorization": f"Bearer {secret}"}
            else:
                key, _ = new_key("first", ("admin",), 0.0)
                models.registry.on_key(key.id, Entry(key.id, encode(key), 1))
            try:
                await client.infer("same", [tensor("FP32")], headers=headers)
                seen[scope] = "OK"
            except InferenceServerException as error:
                seen[scope] = error.status().removeprefix("StatusCode.")
    assert seen == {"": "UNAUTHENTICATED", "invoke:same": "OK", "invoke:other": "NOT_FOUND"}
    assert [status for _, status in models.audit.refused] == [401]


async def test_errors_have_the_codes_and_metadata_of_grpc(models: Any, tmp_path: Path, make: Any) -> None:
    request = messages.ModelInferRequest(model_name="same").SerializeToString()
    async with listening(models, tmp_path) as url, grpc.aio.insecure_channel(url) as channel:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        models.queue.answer = lambda call: call.reply(kind=OutcomeKind.TIMED_OUT)
        codes = []
        for body in (request, b"\xff", messages.ModelInferRequest().SerializeToString()):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await infer(body)
            codes.append(caught.value.code())
        assert codes == [
            grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND,
        ]  # fmt: skip
        models.report(make.status("same", 3, ready=0, start_error=InvalidInput("no engine loads").info()))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await infer(request)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert dict(caught.value.trailing_metadata() or ())["retry-after"] == "15"


async def test_a_deadline_is_the_timeout_of_the_call_and_a_cancelled_request_cancels_it(
    models: Any, tmp_path: Path
) -> None:
    models.queue.answer = lambda call: None
    request = messages.ModelInferRequest(model_name="same").SerializeToString()
    async with listening(models, tmp_path) as url, grpc.aio.insecure_channel(url) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(request, timeout=50)
        await until_async(lambda: len(models.queue.calls) == 1)
        (queued,) = models.queue.calls
        assert 0 < queued.fields["deadline"] - models.clock.time() <= 50
        call.cancel()
        await until_async(lambda: queued.cancelled)


async def test_a_client_that_sends_no_message_does_not_keep_other_teams_waiting(models: Any, tmp_path: Path) -> None:
    """Bug: 16 requests without a message, which cost a client nothing, held all of the gateway's readers for 30 s."""
    headers = {}
    for team in ("a", "b"):
        key, secret = new_key(team, ("invoke:*",), 0.0, team=team)
        models.access.teams.put(Team(name=team, owns=("*",) if team == "a" else ("prod/*",)))
        models.registry.on_key(key.id, Entry(key.id, encode(key), 1))
        headers[team] = (("authorization", f"Bearer {secret}"),)
    async with listening(models, tmp_path) as url, grpc.aio.insecure_channel(url) as channel:
        index = "/inference.GRPCInferenceService/RepositoryIndex"
        silent = [channel.stream_unary(index)(metadata=headers["b"]) for _ in range(_READERS + 1)]
        await asyncio.gather(*(each.wait_for_connection() for each in silent))
        assert await channel.unary_unary(index)(b"", metadata=headers["a"], timeout=20) is not None
        for each in silent:
            each.cancel()


async def test_open_streams_of_a_team_are_limited(models: Any, tmp_path: Path) -> None:
    models.access.streams.limit = 1
    async with listening(models, tmp_path) as url, grpc.aio.insecure_channel(url) as channel:
        infer = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
        first = infer()
        await first.write(messages.ModelInferRequest(model_name="unknown").SerializeToString())
        assert await first.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await infer().read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await first.done_writing()
        assert await first.read() is grpc.aio.EOF
        await until_async(lambda: models.access.streams.count(LOCAL.owner) == 0)


async def test_a_message_of_a_stream_is_refused_after_its_key_ended(models: Any, tmp_path: Path) -> None:
    models.registry.on_key("first", Entry("first", encode(new_key("first", ("admin",), 0.0)[0]), 1))
    key, secret = new_key("k", ("invoke:same",), 0.0)
    models.registry.on_key(key.id, Entry(key.id, encode(key), 1))
    unknown = messages.ModelInferRequest(model_name="unknown").SerializeToString()
    async with listening(models, tmp_path) as url, grpc.aio.insecure_channel(url) as channel:
        stream = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")(
            metadata=(("authorization", f"Bearer {secret}"),)
        )
        replies = []
        for _ in range(2):
            await stream.write(unknown)
            replies.append(messages.ModelStreamInferResponse.FromString(await stream.read()).error_message)
            models.registry.on_key(key.id, None)
        await stream.done_writing()
    assert "unknown" in replies[0]
    assert replies[1].startswith("This API key is unknown")


async def test_connections_count_for_their_address(models: Any, tmp_path: Path) -> None:
    limit = ConnectionLimit(1)
    async with listening(models, tmp_path, limit=limit) as url:
        async with grpc.aio.insecure_channel(url) as channel:
            live = channel.unary_unary("/inference.GRPCInferenceService/ServerLive")
            assert messages.ServerLiveResponse.FromString(await live(b"")).live
            assert limit.add("127.0.0.1") is False
        await until_async(lambda: limit.add("127.0.0.1"))


async def test_a_server_that_does_not_start_closes_the_connection_and_is_tried_again(models: Any) -> None:
    tries = []

    def load() -> Any:
        tries.append(1)
        raise ImportError("a library is missing")

    async with serving(models.app, http2=Http2(load, grace_s=1.0)) as (_, port):
        for _ in range(2):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(PREFACE)
            assert await reader.read() == b""
            writer.close()
    assert len(tries) == 2


async def test_a_client_that_leaves_while_the_server_starts_is_forgotten(models: Any, tmp_path: Path) -> None:
    may_start, servers = threading.Event(), []

    def load() -> Any:
        may_start.wait()

        def make() -> GrpcServer:
            servers.append(GrpcServer(models.app, models.access, GatewaySettings(), tmp_path / "gateway.grpc"))
            return servers[0]

        return make

    limit, connections = ConnectionLimit(1), Http2(load, grace_s=1.0)
    async with serving(models.app, limit=limit, http2=connections) as (_, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(PREFACE)
        await until_async(lambda: limit.add("127.0.0.1") is False)
        writer.transport.abort()
        may_start.set()
        await until_async(lambda: bool(servers))
        await until_async(lambda: servers[0].clients == 0 and limit.add("127.0.0.1"))
        await connections.close()


async def test_without_grpc_the_error_names_the_package_to_install(models: Any) -> None:
    async with serving(models.app) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(PREFACE)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
    assert head.startswith(b"HTTP/1.1 400")
    assert b"gpufn[grpc]" in body


# --- translation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("datatype", "contents", "packed"),
    [
        ("BOOL", {"bool_contents": [True, False]}, b"\x01\x00"),
        ("INT8", {"int_contents": [-1]}, b"\xff"),
        ("UINT16", {"uint_contents": [258]}, b"\x02\x01"),
        ("INT64", {"int64_contents": [1]}, b"\x01" + bytes(7)),
        ("FP32", {"fp32_contents": [1.0]}, b"\x00\x00\x80\x3f"),
        ("BYTES", {"bytes_contents": [b"ab", b""]}, b"\x02\0\0\0ab\0\0\0\0"),
    ],
)
def test_typed_contents_become_the_bytes_of_the_tensor(datatype: str, contents: dict[str, Any], packed: bytes) -> None:
    request = messages.ModelInferRequest(inputs=[{"name": "x", "datatype": datatype, "contents": contents}])
    assert translation.inference_body(request)[1][1:] == [packed]


@pytest.mark.parametrize(
    "fields",
    [
        {"inputs": [{"name": "x", "datatype": "INT8", "contents": {"int_contents": [300]}}]},
        {"inputs": [{"name": "x", "datatype": "FP16", "contents": {"fp32_contents": [1]}}]},
        {"inputs": [{"name": "x", "datatype": "FP32", "contents": {"int_contents": [1]}}]},
        {"inputs": [{"name": "x", "datatype": "FP32"}], "raw_input_contents": [b"", b""]},
        {"inputs": [{"name": "x", "contents": {}}], "raw_input_contents": [b""]},
    ],
)
def test_tensors_that_contradict_their_datatype_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        translation.inference_body(messages.ModelInferRequest(**fields))


def test_the_messages_have_tritons_fields() -> None:
    """Each field of ours has the number, the type and the label of Triton's."""
    theirs: dict[str, Any] = {
        **service_pb2.DESCRIPTOR.message_types_by_name,
        **model_config_pb2.DESCRIPTOR.message_types_by_name,
    }
    ours = messages.DESCRIPTOR.message_types_by_name
    shared = {f"Model{name}Request": "ModelRequest" for name in ("Ready", "Metadata", "Config", "Statistics")}
    shared |= {f"RepositoryModel{name}Request": "RepositoryModelRequest" for name in ("Load", "Unload")}
    for memory in ("System", "Cuda"):
        shared |= {f"{memory}SharedMemory{name}Request": "RegionRequest" for name in ("Status", "Unregister")}
    own = {name: message for name, message in ours.items() if name not in {*shared.values(), "Empty"}}
    requests = {theirs_name: ours[name] for theirs_name, name in shared.items()}
    pairs = [(theirs[name], message) for name, message in (own | requests).items()]
    checked = 0
    while pairs:
        their, our = pairs.pop()
        for field in our.fields:
            other = their.fields_by_name[field.name]
            assert (field.number, field.type, field.is_repeated) == (other.number, other.type, other.is_repeated)
            checked += 1
        pairs += [(their.nested_types_by_name[name], nested) for name, nested in our.nested_types_by_name.items()]
    assert checked > 80
    assert messages.DataType.items() == model_config_pb2.DataType.items()
