"""Tensors in shared memory, with Triton's clients on the real /dev/shm; and in a folder of the test."""

from __future__ import annotations

import asyncio
import contextlib
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.grpc.aio as grpc_aio
import tritonclient.http as http_client
import tritonclient.http.aio as http_aio
from tritonclient.utils import InferenceServerException, serialize_byte_tensor, shared_memory

from gpufn_core.domain.team import Team
from gpufn_core.errors import (
    ArtifactUnavailable,
    DataNotFound,
    Forbidden,
    InvalidInput,
)
from gpufn_core.protocol.codec import encode
from gpufn_gateway.auth.access import new_key
from gpufn_gateway.calls.shared_bodies import GatewaySharedBodies
from gpufn_gateway.http.body_reader import BodyBudget
from gpufn_gateway.oip.shared_memory import regions as shared_memory_regions
from gpufn_gateway.oip.shared_memory.files import ClientFiles
from gpufn_gateway.oip.shared_memory.regions import Regions, Slice
from gpufn_gateway.oip.shared_memory.requests import MAX_HEAD_BYTES
from gpufn_gateway.oip.shared_memory.responses import ResponseSend
from gpufn_gateway.settings import GatewaySettings
from gpufn_platform.bus.storage.key_value import Entry
from gpufn_platform.process.settings import InvalidSetting
from tests.gateway.oip.regions import INFER, OWNER, REGION, ROW, SIZE, Folder, gateway_with, request
from tests.gateway.oip.test_grpc import listening
from tests.gateway.oip.test_inference import error, same


@pytest.fixture
def prefix() -> Iterator[str]:
    """A prefix of this test in the real /dev/shm."""
    prefix = f"oip-{uuid.uuid4().hex[:12]}-"
    yield prefix
    for left in Path("/dev/shm").glob(f"{prefix}*"):
        left.unlink()


@pytest.fixture(name="models")
def models_with_shared_memory(make: Any, clock: Any, prefix: str) -> Any:
    """The model `same`, at a gateway that allows shared memory."""
    return gateway_with(make, clock, Regions(prefix, ClientFiles(os.getuid())))


# --- Triton's clients ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def region(key: str, size: int) -> Iterator[Any]:
    handle = shared_memory.create_shared_memory_region("any", key, size)
    try:
        yield handle
    finally:
        shared_memory.destroy_shared_memory_region(handle)


def talk(client: Any, library: Any, prefix: str) -> dict[str, Any]:
    """Send the requests of Triton's example of shared memory, and return what the client saw."""
    got: dict[str, Any] = {}
    words = np.array([[b"one", b"zwei"]], np.object_)
    packed = serialize_byte_tensor(words)
    client.unregister_system_shared_memory()
    client.unregister_cuda_shared_memory()
    with region(f"/{prefix}in", 256) as given, region(f"{prefix}out", 256) as result:
        shared_memory.set_shared_memory_region(given, [ROW])
        shared_memory.set_shared_memory_region(given, [packed], offset=64)
        client.register_system_shared_memory("input", f"/{prefix}in", 192)
        client.register_system_shared_memory("output", f"{prefix}out", 224, offset=32)
        status = client.get_system_shared_memory_status()
        got["regions"] = len(getattr(status, "regions", status))
        inputs = [library.InferInput("fp32", [1, 2], "FP32"), library.InferInput("bytes", [1, 2], "BYTES")]
        inputs[0].set_shared_memory("input", SIZE)
        inputs[1].set_shared_memory("input", packed.item().__len__(), offset=64)
        inputs.append(library.InferInput("int64", [1, 2], "INT64"))
        inputs[2].set_data_from_numpy(np.array([[7, 8]], np.int64))
        outputs = [library.InferRequestedOutput(f"{name}_out") for name in ("fp32", "bytes", "int64")]
        outputs[0].set_shared_memory("output", 100)
        outputs[1].set_shared_memory("output", 64, offset=104)
        answer = client.infer("same", inputs, outputs=outputs, request_id="7")
        got["fp32"] = shared_memory.get_contents_as_numpy(result, np.float32, [1, 2], 32).tolist()
        got["bytes"] = shared_memory.get_contents_as_numpy(result, np.object_, [1, 2], 136).tolist()
        got["int64"] = answer.as_numpy("int64_out").tolist()
        got["parameters"] = parameters_of(answer.get_output("fp32_out"))
        outputs[0].set_shared_memory("output", SIZE - 1)
        got["too small"] = code_of(lambda: client.infer("same", inputs, outputs=outputs[:1]))
        client.unregister_system_shared_memory("input")
        got["unregistered"] = code_of(lambda: client.infer("same", inputs))
        got["status"] = code_of(lambda: client.get_system_shared_memory_status("input"))
        got["cuda"] = code_of(lambda: client.register_cuda_shared_memory("c", b"aGFuZGxl", 0, 64))
    client.unregister_system_shared_memory()
    got["left"] = len(getattr(client.get_system_shared_memory_status(), "regions", ()))
    return got


def parameters_of(output: Any) -> dict[str, Any]:
    if isinstance(output, dict):
        return dict(output["parameters"])
    return {str(name): value.string_param or value.int64_param for name, value in output.parameters.items()}


def code_of(ask: Callable[[], Any]) -> str:
    with pytest.raises(InferenceServerException) as caught:
        ask()
    return str(caught.value.status()).removeprefix("StatusCode.")


@pytest.mark.parametrize("library", [http_client, grpc_client], ids=["http", "grpc"])
async def test_tritonclients_shared_memory_works_unmodified(
    models: Any, tmp_path: Path, prefix: str, library: Any
) -> None:
    def run(url: str) -> dict[str, Any]:
        with contextlib.closing(library.InferenceServerClient(url)) as client:
            return talk(client, library, prefix)

    async with listening(models, tmp_path) as url:
        got = await asyncio.to_thread(run, url)
    codes = ("INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED") if library is grpc_client else ("422", "404", "501")
    assert got == {
        "regions": 2,
        "fp32": ROW.tolist(),
        "bytes": [[b"one", b"zwei"]],
        "int64": [[7, 8]],
        "parameters": {"shared_memory_region": "output", "shared_memory_byte_size": SIZE, "shared_memory_offset": 0},
        "too small": codes[0],
        "unregistered": codes[1],
        "status": codes[1],
        "cuda": codes[2],
        "left": 0,
    }


@pytest.mark.parametrize("library", [http_aio, grpc_aio], ids=["http", "grpc"])
async def test_the_async_clients_use_shared_memory_too(models: Any, tmp_path: Path, prefix: str, library: Any) -> None:
    async with listening(models, tmp_path) as url, library.InferenceServerClient(url) as client:
        with region(f"{prefix}both", 2 * SIZE) as both:
            shared_memory.set_shared_memory_region(both, [ROW])
            await client.register_system_shared_memory("both", f"{prefix}both", 2 * SIZE)
            sent, wanted = library.InferInput("fp32", [1, 2], "FP32"), library.InferRequestedOutput("fp32_out")
            sent.set_shared_memory("both", SIZE)
            wanted.set_shared_memory("both", SIZE, offset=SIZE)
            await client.infer("same", [sent], outputs=[wanted])
            np.testing.assert_array_equal(shared_memory.get_contents_as_numpy(both, np.float32, [1, 2], SIZE), ROW)
            await client.unregister_system_shared_memory("both")


async def test_requests_of_a_grpc_stream_use_shared_memory(models: Any, tmp_path: Path, prefix: str) -> None:
    async with listening(models, tmp_path) as url, grpc_aio.InferenceServerClient(url) as client:
        with region(f"{prefix}in", SIZE) as given:
            shared_memory.set_shared_memory_region(given, [ROW])
            await client.register_system_shared_memory("in", f"{prefix}in", SIZE)
            sent = grpc_aio.InferInput("fp32", [1, 2], "FP32")
            sent.set_shared_memory("in", SIZE)

            async def requests() -> Any:
                yield {"model_name": "same", "inputs": [sent]}

            async for result, failure in client.stream_infer(requests()):
                assert failure is None
                np.testing.assert_array_equal(result.as_numpy("fp32_out"), ROW)


async def test_a_large_tensor_is_passed_in_a_shared_body(make: Any, clock: Any, folder: Folder, tmp_path: Path) -> None:
    bodies = GatewaySharedBodies(tmp_path / "bodies", "gw-test", budget=BodyBudget(1 << 30), reaches_all=lambda: True)
    bodies.open()
    gateway = gateway_with(make, clock, folder.regions, shared_bodies=bodies, limit_bytes=8 << 20)
    rows = np.arange(1 << 18, dtype=np.float32).reshape(-1, 2)
    folder.file(size=2 * rows.nbytes)
    with (folder.path / "t-a").open("r+b") as file:
        file.write(rows.tobytes())
    folder.register(byte_size=2 * rows.nbytes)

    def answer(call: Any) -> None:
        call.fields["body"] = (tmp_path / "bodies" / "gw-test" / call.fields["shared_body"]).read_bytes()
        same(call)

    gateway.queue.answer = answer
    response = await gateway.post(INFER, request(rows.shape, rows.nbytes, output=(rows.nbytes, rows.nbytes)))
    assert response.status_code == 200, response.text
    assert (folder.path / "t-a").read_bytes() == rows.tobytes() * 2
    assert bodies._budget.used_bytes == 0
    bodies.close()


# --- access -----------------------------------------------------------------------------------------------------------


async def test_without_the_setting_there_is_no_shared_memory(make: Any, clock: Any) -> None:
    gateway = gateway_with(make, clock, shared_memory_regions.allowed_by(GatewaySettings()))
    for method, path in (("post", f"{REGION}/register"), ("get", "/v2/systemsharedmemory/status")):
        status, message = error(await getattr(gateway, method)(path))
        assert (status, "GPUFN_SHARED_MEMORY_PREFIX" in message) == (501, True)
    assert "system_shared_memory" not in (await gateway.get("/v2")).json()["extensions"]
    assert error(await gateway.post(INFER, request((1, 2), SIZE)))[0] == 422


async def test_clients_on_other_hosts_may_not_use_it(folder: Folder) -> None:
    for address in ("127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1"):
        folder.regions.check_client((address, 1))
    for client in (("10.0.0.7", 1), ("", 0), None, ("::ffff:10.0.0.7", 1), ("not an address", 1)):
        with pytest.raises(Forbidden):
            folder.regions.check_client(client)
    Regions("t-", ClientFiles(0), ("172.17.0.0/16",)).check_client(("172.17.0.3", 1))


async def test_a_remote_client_with_the_same_key_cannot_read_a_region(make: Any, clock: Any, folder: Folder) -> None:
    gateway = gateway_with(make, clock, folder.regions)
    folder.file()
    folder.register()
    transport = httpx.ASGITransport(app=gateway.app, client=("10.0.0.7", 4711))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8090") as remote:
        for answer in (
            await remote.post(INFER, content=request((1, 2), SIZE)),
            await remote.post(f"{REGION}/register", content=b'{"key":"t-a","byte_size":8}'),
            await remote.get("/v2/systemsharedmemory/status"),
        ):
            assert error(answer)[0] == 403
    assert gateway.queue.calls == []


async def test_regions_belong_to_a_key_or_its_team_and_go_with_it(make: Any, clock: Any, folder: Folder) -> None:
    gateway = gateway_with(make, clock, folder.regions)
    gateway.access.teams.put(Team(name="search", owns=("*",)))
    headers = {}
    for name, team in (("a", ""), ("b", ""), ("c", "search"), ("d", "search")):
        key, secret = new_key(name, ("invoke:*",), 0.0, team=team)
        gateway.registry.on_key(key.id, Entry(key.id, encode(key), 1))
        headers[name] = (key.id, {"authorization": f"Bearer {secret}"})
    owners = {"a": headers["a"][0], "c": "team-search"}
    for name, owner in owners.items():
        folder.file(f"t-{owner}.x", 64)
        body = msgspec.json.encode({"key": f"t-{owner}.x", "byte_size": 64})
        assert (await gateway.post(f"{REGION}/register", body, **headers[name][1])).status_code == 200
    shape = ROW.shape
    statuses = {
        name: (await gateway.post(INFER, request(shape, SIZE), **fields)).status_code
        for name, (_, fields) in headers.items()
    }
    assert statuses == {"a": 200, "b": 404, "c": 200, "d": 200}
    # Another key can name neither the region nor the memory.
    stolen = msgspec.json.encode({"key": f"t-{owners['a']}.x", "byte_size": 64})
    status, message = error(await gateway.post(f"{REGION}/register", stolen, **headers["b"][1]))
    assert (status, owners["a"] in message, headers["b"][0] in message) == (422, False, True)
    assert (await gateway.get("/v2/systemsharedmemory/status", **headers["b"][1])).json() == []
    await gateway.post("/v2/systemsharedmemory/unregister", b"", **headers["b"][1])
    assert len(folder.regions) == 2
    gateway.registry.on_key(owners["a"], None)
    assert [*folder.regions.all(owners["a"]), *folder.regions.all("team/search")] == ["r"]


async def test_a_key_without_invoke_may_not_register(make: Any, clock: Any, folder: Folder) -> None:
    gateway = gateway_with(make, clock, folder.regions)
    key, secret = new_key("reader", ("read",), 0.0)
    gateway.registry.on_key(key.id, Entry(key.id, encode(key), 1))
    body = msgspec.json.encode({"key": f"t-{key.id}.x", "byte_size": 64})
    assert error(await gateway.post(f"{REGION}/register", body, authorization=f"Bearer {secret}"))[0] == 403


@pytest.mark.parametrize("prefix", ["abc", "gpufn-", "gpuf", "a/b/c", ".hidden", "../x", "a" * 65, "naïve", "a b c"])
def test_a_prefix_that_could_name_other_files_is_refused(prefix: str) -> None:
    with pytest.raises(InvalidSetting):
        GatewaySettings.from_env({"GPUFN_SHARED_MEMORY_PREFIX": prefix})


def test_the_settings_of_shared_memory() -> None:
    settings = GatewaySettings.from_env(
        {
            "GPUFN_SHARED_MEMORY_PREFIX": "triton-",
            "GPUFN_SHARED_MEMORY_UID": "0",
            "GPUFN_SHARED_MEMORY_NETWORKS": "172.17.0.0/16",
        }
    )
    assert (settings.shared_memory_prefix, settings.shared_memory_uid) == ("triton-", 0)
    assert settings.shared_memory_networks == ("172.17.0.0/16",)
    with pytest.raises(InvalidSetting):
        GatewaySettings.from_env({"GPUFN_SHARED_MEMORY_UID": "-1"})


async def test_no_use_leaves_a_descriptor_open(make: Any, clock: Any, folder: Folder) -> None:
    gateway = gateway_with(make, clock, folder.regions)
    path = folder.file()
    folder.register()
    before = os.listdir("/proc/self/fd")
    assert (await gateway.post(INFER, request((1, 2), SIZE, output=(SIZE, 8)))).status_code == 200
    os.truncate(path, 4)
    assert (await gateway.post(INFER, request((1, 2), SIZE, output=(SIZE, 8)))).status_code == 422
    with pytest.raises(InvalidInput):
        folder.register(name="other")
    assert os.listdir("/proc/self/fd") == before


async def test_binary_tensors_beside_regions_stay_in_order(make: Any, clock: Any, folder: Folder) -> None:
    gateway = gateway_with(make, clock, folder.regions)
    folder.file()
    folder.register()
    own, number = np.array([[5, 6]], np.int64), np.array([[7, 8]], np.int32)
    inputs = [
        {"name": "int64", "datatype": "INT64", "shape": [1, 2], "parameters": {"binary_data_size": 16}},
        msgspec.json.decode(request((1, 2), SIZE))["inputs"][0],
        {"name": "int32", "datatype": "INT32", "shape": [1, 2], "parameters": {"binary_data_size": 8}},
    ]
    head = msgspec.json.encode({"inputs": inputs, "parameters": {"binary_data_output": True}})
    body = head + own.tobytes() + number.tobytes()
    answer = await gateway.post(INFER, body, inference_header_content_length=str(len(head)))
    end = int(answer.headers["inference-header-content-length"])
    names = [output["name"] for output in msgspec.json.decode(answer.content[:end])["outputs"]]
    found = {"int64_out": own.tobytes(), "fp32_out": bytes(range(8)), "int32_out": number.tobytes()}
    assert answer.content[end:] == b"".join(found[name] for name in names)
    for wrong in (body[:-1], body + b"x"):
        refused = await gateway.post(INFER, wrong, inference_header_content_length=str(len(head)))
        assert error(refused)[0] == 422


# --- responses of workers, which are not trusted ----------------------------------------------------------------------


async def respond(folder: Folder, head: Any, *parts: bytes) -> bytes:
    """Send a worker's response with the output `a` in a slice of 8 bytes; return what the client receives."""
    sent: list[Any] = []

    async def send(event: Any) -> None:
        sent.append(event)

    outputs = {"a": Slice(folder.register(), 8, 8)}
    text = head if isinstance(head, bytes) else msgspec.json.encode(head)
    wrapped = ResponseSend(send, outputs, folder.regions, OWNER)
    headers = [(b"inference-header-content-length", b"%d" % len(text)), (b"content-length", b"0")]
    await wrapped({"type": "http.response.start", "status": 200, "headers": headers})
    for part in (text[:3], text[3:], *parts):
        await wrapped({"type": "http.response.body", "body": part, "more_body": True})
    await wrapped({"type": "http.response.body", "body": b""})
    lengths = dict(sent[0]["headers"])
    body = b"".join(event.get("body", b"") for event in sent)
    assert len(body) == int(lengths[b"content-length"])
    return body[int(lengths[b"inference-header-content-length"]) :]


def binary(name: str, size: Any) -> dict[str, Any]:
    return {"name": name, "parameters": {"binary_data_size": size}}


async def test_outputs_are_split_at_their_sizes(folder: Folder) -> None:
    path = folder.file()
    head = {"outputs": [binary("b", 2), binary("a", 4), binary("empty", 0), binary("c", 3), {"name": "json"}]}
    assert await respond(folder, head, b"b", b"bAA", b"AAc", b"cc") == b"bbccc"
    assert path.read_bytes()[6:14] == b"\6\7AAAA\x0c\x0d"


@pytest.mark.parametrize(
    ("head", "parts"),
    [
        ({"outputs": [binary("a", 4)]}, [b"AAA"]),
        ({"outputs": [binary("a", 4)]}, [b"AAAAA"]),
        ({"outputs": [binary("a", 9)]}, [b"A" * 9]),
        ({"outputs": [binary("a", -1)]}, []),
        ({"outputs": [binary("a", "4")]}, [b"AAAA"]),
        ({"outputs": [["a"]]}, []),
        ({"outputs": 7}, []),
        ([], []),
        (b"{{{{", []),
        ({"outputs": [binary("a", 4)], "model_name": "x" * MAX_HEAD_BYTES}, [b"AAAA"]),
    ],
)
async def test_a_response_that_contradicts_itself_is_an_error(folder: Folder, head: Any, parts: list[bytes]) -> None:
    path = folder.file()
    with pytest.raises((InvalidInput, ArtifactUnavailable)):
        await respond(folder, head, *parts)
    assert path.read_bytes()[16:] == bytes(range(16, 64))


def test_an_unknown_region_is_not_found(folder: Folder) -> None:
    with pytest.raises(DataNotFound):
        folder.regions.get(OWNER, "none")
