"""Tensors in shared memory, with Triton's clients on the real /dev/shm; and attacks, on a folder of the test."""

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
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.utils import InferenceServerException, serialize_byte_tensor, shared_memory

from gpufn_core.domain.team import Team
from gpufn_core.errors import (
    ArtifactUnavailable,
    CapacityError,
    Conflict,
    DataNotFound,
    Forbidden,
    InvalidInput,
    RequestError,
)
from gpufn_core.protocol.codec import encode
from gpufn_core.spec.function_spec import Batch
from gpufn_gateway.auth.access import LOCAL, new_key
from gpufn_gateway.calls.shared_bodies import GatewaySharedBodies
from gpufn_gateway.http.body_reader import BodyBudget
from gpufn_gateway.oip.shared_memory import regions as shared_memory_regions
from gpufn_gateway.oip.shared_memory import requests
from gpufn_gateway.oip.shared_memory.files import ClientFiles
from gpufn_gateway.oip.shared_memory.regions import MAX_BYTES, MAX_REGIONS, Regions, Slice
from gpufn_gateway.oip.shared_memory.requests import MAX_HEAD_BYTES, MAX_TENSORS, Range, rewrite
from gpufn_gateway.oip.shared_memory.responses import ResponseSend
from gpufn_gateway.settings import GatewaySettings
from gpufn_platform.bus.storage.key_value import Entry
from gpufn_platform.process.settings import InvalidSetting
from tests.gateway.oip.test_grpc import listening
from tests.gateway.oip.test_inference import error, manifest, model, same

OWNER = LOCAL.owner
REGION = "/v2/systemsharedmemory/region/r"
INFER = "/v2/models/same/infer"
ROW = np.array([[1.5, 2.0]], np.float32)
SIZE = ROW.nbytes


@pytest.fixture
def prefix() -> Iterator[str]:
    """A prefix of this test in the real /dev/shm."""
    prefix = f"oip-{uuid.uuid4().hex[:12]}-"
    yield prefix
    for left in Path("/dev/shm").glob(f"{prefix}*"):
        left.unlink()


def gateway_with(make: Any, clock: Any, regions: Regions | None, **given: Any) -> Any:
    gateway = make.Gateway(clock, regions=regions, **given)
    gateway.registry.on_engine("k", Entry("k", encode(manifest()), 1))
    gateway.deploy(model(batch=Batch(8, max_wait_ms=2)), 3, {"net": {"cpu": ("k",)}})
    gateway.report(make.status("same", 3))
    gateway.queue.answer = same
    if regions is not None:
        gateway.registry.on_key_deleted.append(regions.forget)
    return gateway


@pytest.fixture(name="models")
def models_with_shared_memory(make: Any, clock: Any, prefix: str) -> Any:
    """The model `same`, at a gateway that allows shared memory."""
    return gateway_with(make, clock, Regions(prefix, ClientFiles(os.getuid())))


class Folder:
    """A folder in place of /dev/shm, and regions in it whose prefix is `t-`."""

    def __init__(self, path: Path, uid: int | None = None) -> None:
        self.path = path
        self.regions = Regions("t-", ClientFiles(os.getuid() if uid is None else uid, path))

    def file(self, name: str = "t-a", size: int = 64) -> Path:
        path = self.path / name
        path.write_bytes(bytes(range(256))[:size].ljust(size, b"\1"))
        return path

    def register(self, key: str = "t-a", **given: Any) -> Any:
        fields: dict[str, Any] = {"offset": 0, "byte_size": 64, "owner": OWNER, "name": "r"} | given
        return self.regions.register(key=key, **fields)

    def read(self, piece: Slice) -> bytes:
        buffer = bytearray(piece.size)
        self.regions.read_into(memoryview(buffer), piece, 0)
        return bytes(buffer)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    (tmp_path / "shm").mkdir()
    return Folder(tmp_path / "shm")


@pytest.fixture(scope="module")
def registered(tmp_path_factory: Any) -> Folder:
    """A folder with the region r of 64 bytes, which no test changes."""
    folder = Folder(tmp_path_factory.mktemp("shm"))
    folder.file()
    folder.register()
    return folder


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


def request(shape: Any, size: Any, *, output: tuple[Any, Any] | None = None, **given: Any) -> bytes:
    """A request whose input, and with `output` (size and offset) whose output, are in the region r."""
    parameters = {"shared_memory_region": "r", "shared_memory_byte_size": size} | given
    head: dict[str, Any] = {
        "inputs": [{"name": "fp32", "datatype": "FP32", "shape": list(shape), "parameters": parameters}]
    }
    if output is not None:
        given = {"shared_memory_byte_size": output[0], "shared_memory_offset": output[1]}
        head["outputs"] = [{"name": "fp32_out", "parameters": {"shared_memory_region": "r", **given}}]
    return msgspec.json.encode(head)


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


# --- attacks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key",
    ["", "/", "t-", "a", "../t-a", "t-/../a", "/t-a/b", "//t-a", "t-a\0", "t-a/", "/dev/shm/t-a", "t-ä", "t-a" * 100],
)
def test_a_key_is_a_plain_name_with_the_prefix(folder: Folder, key: str) -> None:
    """CVE-2025-23319, -23320, -23334: clients named the memory of Triton's own backends. CVE-2026-24208: traversal."""
    folder.file("a")
    with pytest.raises(InvalidInput) as caught:
        folder.register(key)
    assert caught.value.field == "key"


def test_links_and_other_kinds_of_files_are_refused(folder: Folder, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(64))
    (folder.path / "t-symlink").symlink_to(secret)
    (folder.path / "t-hard").hardlink_to(secret)
    (folder.path / "t-folder").mkdir()
    (folder.path / "t-null").symlink_to("/dev/null")
    os.mkfifo(folder.path / "t-fifo")
    messages = set()
    for name in ("symlink", "hard", "folder", "null", "fifo", "missing"):
        with pytest.raises(InvalidInput) as caught:
            folder.register(f"t-{name}")
        messages.add(caught.value.message)
    assert len(messages) == 1  # the messages do not reveal which files exist


def test_files_of_another_user_are_refused(tmp_path: Path) -> None:
    folder = Folder(tmp_path, uid=os.getuid() + 1)
    folder.file()
    with pytest.raises(InvalidInput):
        folder.register()


@pytest.mark.parametrize(
    ("offset", "byte_size"),
    [(0, 65), (1, 64), (65, 1), (-1, 10), (0, 0), (0, -1), (2**64 - 8, 16), (2**63, 1), (2**63, 2**20)],
)
def test_a_region_is_within_its_file(folder: Folder, offset: int, byte_size: int) -> None:
    """triton-inference-server/server#8334: the offset was not checked, and sums of unsigned numbers overflow."""
    folder.file()
    with pytest.raises(InvalidInput):
        folder.register(offset=offset, byte_size=byte_size)


@pytest.mark.parametrize(
    ("size", "offset"),
    [(33, 0), (16, 17), (2**64 - 4, 8), (-8, 8), (8, -8), (True, 0), (8, 0.0), ("8", 0), (None, 0), (8, None)],
)
async def test_a_tensor_is_within_its_region(make: Any, clock: Any, folder: Folder, size: Any, offset: Any) -> None:
    gateway = gateway_with(make, clock, folder.regions)
    folder.file()
    folder.register(offset=16, byte_size=32)
    answers = [
        await gateway.post(INFER, request((1, 2), size, shared_memory_offset=offset)),
        await gateway.post(INFER, request((1, 2), SIZE, output=(size, offset))),
    ]
    assert [error(answer)[0] for answer in answers] == [422, 422]
    assert gateway.queue.calls == []


@pytest.mark.parametrize(
    "body", [b"[]", b'{"key":"t-a"}', b'{"key":"t-a","byte_size":1e3}', b'{"key":1,"byte_size":8}']
)
async def test_a_registration_that_is_none_is_refused(make: Any, clock: Any, folder: Folder, body: bytes) -> None:
    gateway = gateway_with(make, clock, folder.regions)
    assert error(await gateway.post(f"{REGION}/register", body))[0] == 422


async def test_a_file_that_shrinks_after_its_registration_does_no_harm(make: Any, clock: Any, folder: Folder) -> None:
    """A mapped file would end the process with SIGBUS."""
    gateway = gateway_with(make, clock, folder.regions)
    path = folder.file()
    folder.register()
    os.truncate(path, 7)
    assert error(await gateway.post(INFER, request((1, 2), SIZE)))[0] == 422
    os.truncate(path, 64)

    def shrink(call: Any) -> None:
        os.truncate(path, 40)
        same(call)

    gateway.queue.answer = shrink
    assert error(await gateway.post(INFER, request((1, 2), SIZE, output=(SIZE, 40))))[0] == 422
    assert path.stat().st_size == 40


async def test_a_file_that_shrinks_while_it_is_read_does_no_harm(folder: Folder, monkeypatch: Any) -> None:
    path = folder.file()
    piece = Slice(folder.register(), 0, 64)
    check = os.fstat

    def fstat(file: int) -> os.stat_result:
        info = check(file)
        os.truncate(path, 10)
        return info

    monkeypatch.setattr(os, "fstat", fstat)
    with pytest.raises(InvalidInput):
        folder.read(piece)


async def test_a_name_that_becomes_another_file_is_refused(folder: Folder, tmp_path: Path) -> None:
    path = folder.file()
    piece = Slice(folder.register(), 0, 8)
    assert folder.read(piece) == bytes(range(8))
    other = folder.file("t-b")
    other.rename(path)
    with pytest.raises(InvalidInput):
        folder.read(piece)
    path.unlink()
    path.symlink_to("/etc/passwd")
    for use in (lambda: folder.read(piece), lambda: folder.regions.write(b"x", OWNER, piece, 0)):
        with pytest.raises(InvalidInput):
            use()


@pytest.mark.parametrize("again", [False, True])
async def test_a_region_that_is_unregistered_while_a_call_runs_is_not_written(
    make: Any, clock: Any, folder: Folder, again: bool
) -> None:
    gateway = gateway_with(make, clock, folder.regions)
    path = folder.file()
    folder.register()

    def unregister(call: Any) -> None:
        folder.regions.unregister(OWNER, "r")
        if again:
            folder.register(byte_size=32)
        same(call)

    gateway.queue.answer = unregister
    before = path.read_bytes()
    assert error(await gateway.post(INFER, request((1, 2), SIZE, output=(SIZE, 40))))[0] == (422 if again else 404)
    assert path.read_bytes() == before


def test_the_bytes_of_all_regions_are_bounded(folder: Folder) -> None:
    """A file may be sparse: outputs allocate its memory."""
    os.truncate(folder.file(), MAX_BYTES)
    folder.register(name="a", byte_size=MAX_BYTES - 64)
    folder.register(name="b", byte_size=64)
    for byte_size in (1, MAX_BYTES, 2**64 - 8):
        with pytest.raises(CapacityError):
            folder.register(name="c", byte_size=byte_size)


def test_the_number_of_regions_is_bounded_and_a_name_is_used_once(folder: Folder) -> None:
    folder.file()
    for number in range(MAX_REGIONS):
        folder.register(name=f"r{number}")
    with pytest.raises(CapacityError):
        folder.register(name="one-more")
    with pytest.raises(Conflict):
        folder.register(name="r1")
    folder.regions.unregister(OWNER, "r1")
    folder.register(name="r1", owner=OWNER)
    folder.regions.unregister(OWNER)
    assert len(folder.regions) == 0


@pytest.mark.parametrize("name", ["a b", "a/b", "x" * 129, "a\nINFO forged", "", "ä"])
def test_the_name_of_a_region_cannot_forge_a_line_of_a_log(folder: Folder, name: str) -> None:
    folder.file()
    with pytest.raises(InvalidInput):
        folder.register(name=name)


async def test_the_tensors_of_a_request_together_are_bounded_before_they_are_read(
    make: Any, clock: Any, folder: Folder, monkeypatch: Any
) -> None:
    """CVE-2025-33201, CVE-2026-24146: large payloads, and many outputs, used up the memory."""
    gateway = gateway_with(make, clock, folder.regions)
    folder.file(size=make.CALL_LIMIT)
    folder.register(byte_size=make.CALL_LIMIT)
    monkeypatch.setattr(folder.regions, "read_into", lambda *given: pytest.fail("it was read"))
    head = msgspec.json.decode(request((1, make.CALL_LIMIT // 8), make.CALL_LIMIT // 2))
    head["inputs"] *= 3
    assert error(await gateway.post(INFER, msgspec.json.encode(head)))[0] == 413
    tensor = {"name": "x", "parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 0}}
    many = msgspec.json.encode({"inputs": [], "outputs": [tensor | {"name": str(n)} for n in range(MAX_TENSORS + 1)]})
    with pytest.raises(InvalidInput):
        rewrite(many, Range(len(many), len(many)), folder.regions, OWNER)
    assert gateway.queue.calls == []


@pytest.mark.parametrize(
    "others",
    [[{"name": "x"}] * MAX_TENSORS, [{"name": "x", "data": [0] * (MAX_HEAD_BYTES // 2)}]],
    ids=["tensors", "bytes"],
)
def test_the_json_of_a_request_with_regions_is_bounded_before_it_is_decoded(folder: Folder, others: Any) -> None:
    """Bug: a request with a million small inputs beside one in a region kept the event loop busy for ten seconds."""
    folder.file()
    folder.register()
    head = msgspec.json.decode(request((1, 2), SIZE))
    text = msgspec.json.encode(head | {"inputs": [*others, *head["inputs"]]})
    with pytest.raises(InvalidInput, match="at most"):
        rewrite(text, Range(len(text), len(text)), folder.regions, OWNER)


@pytest.mark.parametrize("at", [0, 1, requests._PART_BYTES - 5, requests._PART_BYTES, 3 * requests._PART_BYTES])
async def test_a_region_is_found_anywhere_in_a_head(at: int) -> None:
    assert await requests.names_regions(memoryview(b"x" * at + b"shared_memory_region" + b"x"))
    assert not await requests.names_regions(memoryview(b"x" * at + b"shared_memory_regio" + b"x"))


@pytest.mark.parametrize(
    "change",
    [
        {"data": [1.0, 2.0]},
        {"parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 8, "binary_data_size": 8}},
        {"parameters": {"shared_memory_region": ["r"], "shared_memory_byte_size": 8}},
        {"parameters": {"shared_memory_region": "r\\u0000", "shared_memory_byte_size": 8}},
    ],
)
async def test_a_tensor_has_its_data_in_one_place(make: Any, clock: Any, folder: Folder, change: Any) -> None:
    gateway = gateway_with(make, clock, folder.regions)
    folder.file()
    folder.register()
    head = msgspec.json.decode(request((1, 2), SIZE))
    head["inputs"][0] |= change
    assert error(await gateway.post(INFER, msgspec.json.encode(head)))[0] in (404, 422)
    assert gateway.queue.calls == []


async def test_a_hidden_region_reaches_no_memory(make: Any, clock: Any, folder: Folder) -> None:
    """An escaped name passes the search for regions, and the worker refuses it."""
    gateway = gateway_with(make, clock, folder.regions)
    folder.file()
    folder.register()
    hidden = request((1, 2), SIZE).replace(b"shared_memory_region", b"shared_memory\\u005fregion")
    assert error(await gateway.post(INFER, hidden))[0] == 422


_VALUES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.sampled_from(["r", "x", ""])
_PARAMETERS = st.dictionaries(
    st.sampled_from(
        ["shared_memory_region", "shared_memory_byte_size", "shared_memory_offset", "binary_data_size", "binary_data"]
    ),
    _VALUES | st.lists(_VALUES, max_size=2) | st.sampled_from([0, 8, 64]),
)
_TENSORS = st.lists(
    st.fixed_dictionaries({}, optional={"name": _VALUES, "parameters": _PARAMETERS | _VALUES, "data": _VALUES}),
    max_size=4,
)


@given(st.fixed_dictionaries({"inputs": _TENSORS | _VALUES}, optional={"outputs": _TENSORS | _VALUES}))
@settings(max_examples=300, deadline=None)
def test_any_request_is_rewritten_within_its_regions_or_refused(registered: Folder, head: Any) -> None:
    text = msgspec.json.encode(head)
    try:
        request = rewrite(text, Range(len(text), len(text) + 16), registered.regions, OWNER)
    except RequestError:
        return
    if request is None:
        return
    slices = [piece for piece in (*request.tensors, *request.outputs.values()) if isinstance(piece, Slice)]
    assert slices
    assert all(0 <= piece.offset <= piece.offset + piece.size <= 64 for piece in slices)
    assert b"shared_memory_region" not in request.head


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
