"""Shared bodies of the gateway: large bodies of calls, and their cleanup."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpufn_core.encoding import media
from gpufn_core.errors import ArtifactUnavailable, CapacityError, PayloadTooLarge
from gpufn_gateway.calls import call_bodies
from gpufn_gateway.calls.call_bodies import CallBodies
from gpufn_gateway.calls.shared_bodies import GatewaySharedBodies
from gpufn_gateway.http.body_reader import BodyBudget, BodyReader, ClientDisconnected
from gpufn_gateway.http.responses import GPUFN_FORMAT, send_result
from gpufn_platform.shared_bodies.bodies import MIN_SHARED_BYTES, SharedBodies

LARGE = b"x" * MIN_SHARED_BYTES


def shared_bodies_in(
    root: Path, name: str = "gw-1", *, limit: int = 1 << 30, reaches_all: bool = True
) -> GatewaySharedBodies:
    shared_bodies = GatewaySharedBodies(root, name, budget=BodyBudget(limit), reaches_all=lambda: reaches_all)
    shared_bodies.open()
    return shared_bodies


def bodies_of(shared_bodies: GatewaySharedBodies) -> CallBodies:
    budget = BodyBudget(1 << 30)
    inline = BodyReader(MIN_SHARED_BYTES + 1, 30, what="a call's arguments", budget=budget)
    large = BodyReader(4 * MIN_SHARED_BYTES, 30, what="a call's arguments", budget=budget)
    return CallBodies(inline, large, shared_bodies)


def files_in(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()} - {"lock"}


class Client:
    def __init__(self, *parts: bytes, leaves: bool = False) -> None:
        self.headers = {b"content-length": b"%d" % sum(map(len, parts))}
        self._parts = list(parts)
        self._leaves = leaves

    async def receive(self) -> dict[str, object]:
        if not self._parts:
            return {"type": "http.disconnect"}
        part = self._parts.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(self._parts) or self._leaves}


@pytest.mark.parametrize("reaches_all", [True, False])
async def test_the_error_of_a_large_body_of_unknown_length_names_a_way_to_send_it(
    tmp_path: Path, reaches_all: bool
) -> None:
    bodies = bodies_of(shared_bodies_in(tmp_path, reaches_all=reaches_all))
    for receive in (bodies.read, bodies.receive_body):
        for may_share in (True, False):
            with pytest.raises(PayloadTooLarge) as refused:
                await receive({}, Client(LARGE, LARGE).receive, may_share=may_share)
            assert "send Content-Length" in refused.value.message


async def test_a_large_body_becomes_a_shared_body_of_the_received_bytes(tmp_path: Path) -> None:
    shared_bodies = shared_bodies_in(tmp_path)
    bodies = bodies_of(shared_bodies)
    client = Client(LARGE, LARGE)
    body = await bodies.receive_body(client.headers, client.receive, may_share=True)
    assert body.data == b""
    assert body.shared is not None
    assert body.size == 2 * MIN_SHARED_BYTES
    assert (tmp_path / "gw-1" / body.shared.name).read_bytes() == LARGE + LARGE
    bodies.discard(body)
    assert files_in(tmp_path / "gw-1") == set()


async def test_a_small_body_and_a_body_without_permission_are_in_memory(tmp_path: Path) -> None:
    bodies = bodies_of(shared_bodies_in(tmp_path))
    for client, may_share in ((Client(b"small"), True), (Client(LARGE), False)):
        body = await bodies.receive_body(client.headers, client.receive, may_share=may_share)
        assert body.shared is None
        assert body.data
    assert bodies.wrap(LARGE, may_share=False).data == LARGE
    assert bodies.wrap(LARGE, may_share=True).data == b""


async def test_runners_on_other_hosts_get_bodies_in_messages_if_they_fit(tmp_path: Path) -> None:
    bodies = bodies_of(shared_bodies_in(tmp_path, reaches_all=False))
    client = Client(LARGE)
    body = await bodies.receive_body(client.headers, client.receive, may_share=True)
    assert (body.data, body.exceeds_message) == (LARGE, False)
    client = Client(LARGE, b"more")
    body = await bodies.receive_body(client.headers, client.receive, may_share=True)
    assert body.shared is not None
    assert body.exceeds_message
    assert bytes(bodies.view(body)) == LARGE + b"more"
    bodies.discard(body)
    assert bodies.wrap(LARGE + b"more", may_share=True) == (LARGE + b"more", None, True)


async def test_a_queued_shared_body_makes_its_message_smaller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_bodies, "RECORD_BYTES", 100)
    bodies = bodies_of(shared_bodies_in(tmp_path))
    for size, by_reference in ((100, False), (101, True)):
        client = Client(b"x" * size)
        body = await bodies.receive_body(client.headers, client.receive, may_share=False, is_queued=True)
        assert (body.size, body.exceeds_message) == (size, by_reference)


async def test_a_client_that_leaves_midway_leaves_nothing(tmp_path: Path) -> None:
    shared_bodies = shared_bodies_in(tmp_path, limit=2 * MIN_SHARED_BYTES)
    client = Client(LARGE, leaves=True)
    with pytest.raises(ClientDisconnected):
        await bodies_of(shared_bodies).receive_body(client.headers, client.receive, may_share=True)
    assert files_in(tmp_path / "gw-1") == set()
    shared_bodies.share(LARGE + LARGE)  # the bytes of the rejected body were released


async def test_all_shared_bodies_together_are_bounded(tmp_path: Path) -> None:
    shared_bodies = shared_bodies_in(tmp_path, limit=MIN_SHARED_BYTES)
    first = shared_bodies.share(LARGE)
    with pytest.raises(CapacityError):
        shared_bodies.share(LARGE)
    with pytest.raises(CapacityError):
        await shared_bodies.receive(Client(LARGE).receive, MIN_SHARED_BYTES)
    shared_bodies.discard(first)
    shared_bodies.discard(await shared_bodies.receive(Client(LARGE).receive, MIN_SHARED_BYTES))


@pytest.fixture
def answering(clock: Any, make: Any, tmp_path: Path) -> Any:
    """A gateway whose calls have shared bodies as results; `gateway.result` sets the result."""
    shared_bodies = shared_bodies_in(tmp_path)
    gateway = make.Gateway(clock, shared_bodies=shared_bodies)
    gateway.deploy(make.spec())
    gateway.report(make.status())

    def answer(call: Any) -> None:
        content_type, body = gateway.result
        call.reply(content_type=content_type, shared_body=SharedBodies(tmp_path / shared_bodies.folder).write([body]))

    gateway.queue.answer = answer
    yield gateway
    assert files_in(tmp_path / shared_bodies.folder) == set(), "the reader of a result removes it"


@pytest.mark.parametrize("size", [0, 1, 3 * MIN_SHARED_BYTES, 5 << 20])
async def test_a_result_in_a_shared_body_is_the_answer(answering: Any, size: int) -> None:
    answering.result = "image/png", os.urandom(size)
    answer = await answering.post("/v1/functions/embed/invoke", b'{"texts":[]}')
    assert answer.content == answering.result[1]
    assert (answer.headers["content-type"], answer.headers["content-length"]) == ("image/png", str(size))


async def test_a_result_in_a_shared_body_is_a_stream_of_one_too(answering: Any, connection: Any) -> None:
    text = msgspec.json.encode("x" * MIN_SHARED_BYTES)
    answering.result = "application/json", text
    events = connection("/v1/functions/embed/invoke", b'{"texts":[]}', accept="text/event-stream")
    await events.start(answering.app)
    assert events.body == b'event: item\nid: 0\ndata: %b\n\nevent: end\ndata: {"items":1}\n\n' % text
    records = connection("/v1/functions/embed/invoke", b'{"texts":[]}', accept="application/vnd.gpufn.items")
    await records.start(answering.app)
    kind, name, size = media.RECORD.unpack_from(records.body)
    assert (kind, records.body[media.RECORD.size + name :][:size]) == (media.RecordKind.ITEM, text)


async def test_a_missing_shared_body_fails_only_its_call(
    answering: Any, connection: Any, problem: Any, tmp_path: Path
) -> None:
    answering.queue.answer = lambda call: call.reply(shared_body="0" * 26)
    answer = await answering.post("/v1/functions/embed/invoke", b'{"texts":[]}')
    assert problem(answer) == (503, "artifact_unavailable")
    events = connection("/v1/functions/embed/invoke", b'{"texts":[]}', accept="text/event-stream")
    await events.start(answering.app)
    assert events.body.startswith(b"event: error\n")
    assert b"artifact_unavailable" in events.body


async def test_a_result_that_its_worker_cuts_short_while_it_is_sent_breaks_off(tmp_path: Path) -> None:
    shared_bodies = shared_bodies_in(tmp_path)
    theirs = SharedBodies(tmp_path / "w-1")
    name = theirs.write([bytes(4 << 20)])
    ours = theirs.link_into(name, SharedBodies(tmp_path / shared_bodies.folder))
    sent = []

    async def send(message: Any) -> None:
        sent.append(message)
        if "body" in message:
            os.truncate(tmp_path / "w-1" / name, 1)

    with pytest.raises(ArtifactUnavailable, match="truncated"):
        await send_result(send, GPUFN_FORMAT, "image/png", shared_bodies.open_result(ours), [])
    assert sent[-1]["more_body"], "a reader that waits for the rest learns that it does not arrive"


def test_files_of_a_dead_gateway_are_removed_and_of_a_live_one_are_not(tmp_path: Path) -> None:
    dead = tmp_path / "gw-dead"
    dead.mkdir()
    (dead / "lock").touch()
    (dead / ("0" * 26)).write_bytes(b"left")
    living = shared_bodies_in(tmp_path, "gw-living")
    kept = living.share(LARGE)
    mine = shared_bodies_in(tmp_path, "gw-mine")
    assert not dead.exists()
    assert kept.name in files_in(tmp_path / "gw-living")
    mine.close()
    assert not (tmp_path / "gw-mine").exists()


def test_a_folder_without_a_lock_is_removed_unless_its_gateway_has_just_begun(tmp_path: Path) -> None:
    """A gateway died before it locked its folder, or a result arrived while the folder was removed."""
    for name in ("gw-begun", "gw-left"):
        (tmp_path / name).mkdir()
    (tmp_path / "gw-left" / ("0" * 26)).write_bytes(b"result")
    os.utime(tmp_path / "gw-left", (0, 0))
    shared_bodies_in(tmp_path).close()
    assert [folder.name for folder in tmp_path.iterdir()] == ["gw-begun"]


def test_results_without_a_receiver_are_swept(tmp_path: Path) -> None:
    shared_bodies = shared_bodies_in(tmp_path)
    kept = shared_bodies.share(LARGE)
    folder = tmp_path / "gw-1"
    stray, fresh = folder / ("0" * 26), folder / ("1" * 26)
    for path in (stray, fresh):
        path.write_bytes(b"result")
    for path in (stray, folder / kept.name):
        os.utime(path, (0, 0))
    shared_bodies.sweep()
    assert files_in(folder) == {kept.name, fresh.name}
