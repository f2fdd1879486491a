"""Attacks on the regions of shared memory: keys, files, sizes and requests of clients that are not trusted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpufn_core.errors import (
    CapacityError,
    Conflict,
    InvalidInput,
    RequestError,
)
from gpufn_gateway.oip.shared_memory import requests
from gpufn_gateway.oip.shared_memory.regions import MAX_BYTES, MAX_REGIONS, Slice
from gpufn_gateway.oip.shared_memory.requests import MAX_HEAD_BYTES, MAX_TENSORS, Range, rewrite
from tests.gateway.oip.regions import INFER, OWNER, REGION, SIZE, Folder, gateway_with, request
from tests.gateway.oip.test_inference import error, same


@pytest.fixture(scope="module")
def registered(tmp_path_factory: Any) -> Folder:
    """A folder with the region r of 64 bytes, which no test changes."""
    folder = Folder(tmp_path_factory.mktemp("shm"))
    folder.file()
    folder.register()
    return folder


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
