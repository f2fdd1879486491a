"""Bodies that are too large for their messages: stored, passed by reference, removed. The bus is real; the test
plays the runner."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpufn_core.domain.invocation import InvocationState, OutcomeKind
from gpufn_core.errors import ErrorInfo
from gpufn_core.ids import item_id, new_map_id
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import pack
from gpufn_core.protocol.messages import InvocationMessage, ResultReply, unpack_invocation
from gpufn_core.protocol.records import BodyReference
from gpufn_gateway.garbage_collection import argument_files
from gpufn_gateway.garbage_collection.argument_files import ArgumentFiles
from gpufn_platform.bus.storage import object_store, streams
from gpufn_platform.queue import large_bodies, queued_calls
from gpufn_platform.queue.records import call_records, dead_letters
from tests.gateway.conftest import ManualClock
from tests.gateway.whole import DIGEST, Whole, gateway_on

LARGE = b'{"texts":["' + b"x" * (2 << 20) + b'"]}'
RAW = {"content-type": "application/vnd.gpufn.msgpack"}
NO = ErrorInfo("function_raised", "no")


@contextlib.asynccontextmanager
async def empty_gateway(nats: Any, folder: Path) -> AsyncIterator[Whole]:
    """A gateway on a bus without stored bodies of other tests."""
    async with gateway_on(nats, folder=folder) as gateway:
        for bucket in (subjects.ARGUMENT_FILES, subjects.RESULT_FILES):
            await streams.purge(gateway.bus, f"OBJ_{bucket}", ">")
        yield gateway


async def stored(gateway: Whole) -> list[object_store.Blob]:
    return await object_store.blobs(gateway.bus, subjects.ARGUMENT_FILES)


async def read(gateway: Whole, reference: BodyReference | None, bucket: str = subjects.ARGUMENT_FILES) -> bytes:
    assert reference is not None
    return b"".join([part async for part in large_bodies.read(gateway.bus, bucket, reference)])


async def message_of(gateway: Whole, invocation: str) -> tuple[InvocationMessage, bytes]:
    found = await call_records.read(gateway.bus, invocation)
    assert found is not None
    kept = await streams.message_at(gateway.bus, subjects.ASYNC, found[0].queue_seq)
    assert kept is not None
    return queued_calls.unpack(kept.payload, kept.seq)


async def submitted(gateway: Whole, function: str, content: bytes = LARGE, **headers: str) -> str:
    given = {name.replace("_", "-"): text for name, text in headers.items()}
    answer = await gateway.http.post(f"/v1/functions/{function}/submit", content=content, headers=given)
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


async def end(gateway: Whole, invocation: str, state: InvocationState, ended_at: float = 1.0) -> None:
    """End a call like a runner that dies before it removes the arguments."""
    found = await call_records.read(gateway.bus, invocation)
    assert found is not None
    message, body = await message_of(gateway, invocation)
    ended = msgspec.structs.replace(found[0], state=state, ended_at=ended_at, error=NO)
    assert await call_records.end(gateway.bus, ended)
    await dead_letters.store(gateway.bus, ended, message, body)
    await streams.delete_message(gateway.bus, subjects.ASYNC, found[0].queue_seq)


async def step(gateway: Whole, later_s: float) -> None:
    clock = ManualClock()
    clock.now = gateway.clock.time() + later_s
    await ArgumentFiles(gateway.bus, clock).step()


@pytest.mark.parametrize("headers", [{}, RAW])
async def test_the_arguments_of_a_submitted_call_are_stored_before_it(
    nats: Any, make: Any, tmp_path: Path, headers: dict[str, str]
) -> None:
    async with empty_gateway(nats, tmp_path) as gateway:
        await gateway.deploys.deploy(make.spec("stored"), DIGEST)
        message, body = await message_of(gateway, await submitted(gateway, "stored", LARGE, **headers))
        assert body == b""
        assert message.reference is not None
        assert (message.reference.owner, message.reference.size) == (message.id, len(LARGE))
        assert await read(gateway, message.reference) == LARGE
        assert gateway.shared_bodies is not None
        assert not gateway.shared_bodies._in_use, "the file of the gateway is not needed any more"


async def test_a_repeat_with_large_arguments_is_the_same_call(nats: Any, make: Any, tmp_path: Path) -> None:
    async with empty_gateway(nats, tmp_path) as gateway:
        await gateway.deploys.deploy(make.spec("again-large"), DIGEST)
        one, two = [await submitted(gateway, "again-large", idempotency_key="k") for _ in range(2)]
        assert one == two
        assert len([blob for blob in await stored(gateway) if blob.digest.startswith(one)]) == 1
        other = LARGE.replace(b"x", b"y", 1)
        answer = await gateway.http.post(
            "/v1/functions/again-large/submit", content=other, headers={"idempotency-key": "k"}
        )
        assert answer.status_code == 409


async def test_a_full_store_refuses_and_the_client_may_retry(
    nats: Any, make: Any, tmp_path: Path, problem: Any
) -> None:
    async with empty_gateway(nats, tmp_path) as gateway:
        await gateway.deploys.deploy(make.spec("full"), DIGEST)
        await object_store.ensure_bucket(gateway.bus, subjects.ARGUMENT_FILES, expires=True, max_bytes=1 << 20)
        answer = await gateway.http.post("/v1/functions/full/submit", content=LARGE)
        assert problem(answer) == (503, "capacity")
        assert answer.json()["retryable"] is True
        assert answer.headers["retry-after"] == "5"
        assert await stored(gateway) == []
        await large_bodies.ensure_buckets(gateway.bus)
        await submitted(gateway, "full")


async def test_large_items_of_a_map_are_stored_before_its_chunk(nats: Any, make: Any, tmp_path: Path) -> None:
    async with empty_gateway(nats, tmp_path) as gateway:
        await gateway.deploys.deploy(make.spec("mapped-large"), DIGEST)
        map_id, small = new_map_id(), b'{"texts":["a"]}'
        url = f"/v1/functions/mapped-large/maps/{map_id}/items/0"
        for _ in range(2):  # the second one repeats the chunk
            answer = await gateway.http.put(url, content=b"\n".join([LARGE, small, LARGE]))
            assert (answer.status_code, answer.json()["accepted"]) == (202, 3)
        for index, expected in enumerate((LARGE, small, LARGE)):
            message, body = await message_of(gateway, item_id(map_id, index))
            assert (body if message.reference is None else await read(gateway, message.reference)) == expected
            assert (message.reference is None) is (expected is small)
        assert len([blob for blob in await stored(gateway) if blob.digest.startswith(map_id)]) == 2


async def test_small_items_that_are_too_much_together_are_refused(
    nats: Any, make: Any, tmp_path: Path, problem: Any
) -> None:
    """They would be stored as one batch, which the bus holds in memory."""
    async with empty_gateway(nats, tmp_path) as gateway:
        await gateway.deploys.deploy(make.spec("batch"), DIGEST)
        item = b'{"texts":["' + b"x" * 600_000 + b'"]}'
        url = f"/v1/functions/batch/maps/{new_map_id()}/items/0"
        answer = await gateway.http.put(url, content=b"\n".join([item, item]))
        assert problem(answer) == (413, "payload_too_large")
        assert "1,200,028 bytes together" in answer.json()["detail"]


async def test_the_bodies_of_a_waiting_call_are_stored_until_its_deadline(nats: Any, make: Any, tmp_path: Path) -> None:
    async with empty_gateway(nats, tmp_path) as gateway:
        await gateway.deploys.deploy(make.spec("waited"), DIGEST)
        gateway.report(make.status("waited"))
        taken = list[InvocationMessage]()

        async def answer() -> None:
            queue = subjects.sync_queue("waited", 1)
            while (found := await streams.next_message(gateway.bus, subjects.SYNC, queue, 1)) is None:
                pass
            message, body = unpack_invocation(found.payload)
            assert (body, await read(gateway, message.reference)) == (b"", LARGE)
            description = await streams.last_message(gateway.bus, f"OBJ_{subjects.ARGUMENT_FILES}", "$O.*.M.>")
            assert description is not None
            assert int(description.headers["Nats-TTL"].removesuffix("s")) > 60
            result = await large_bodies.store(
                gateway.bus, subjects.RESULT_FILES, LARGE[::-1], owner=large_bodies.expiring_owner()
            )
            reply = ResultReply(message.id, OutcomeKind.SUCCEEDED, None, "x/y", 1, 1, 0.0, 0.0, reference=result)
            gateway.bus.publish(message.reply, pack(reply))
            taken.append(message)

        import asyncio

        played = asyncio.ensure_future(answer())
        got = await gateway.http.post("/v1/functions/waited/invoke", content=LARGE)
        await played
        assert (got.status_code, got.headers["content-type"], got.content) == (200, "x/y", LARGE[::-1])
        for bucket in (subjects.ARGUMENT_FILES, subjects.RESULT_FILES):  # both are removed
            while await streams.messages_per_subject(gateway.bus, f"OBJ_{bucket}"):
                pass


@pytest.mark.parametrize("state", [InvocationState.SUCCEEDED, InvocationState.CANCELLED])
async def test_arguments_that_were_left_are_collected(
    nats: Any, make: Any, tmp_path: Path, state: InvocationState
) -> None:
    async with empty_gateway(nats, tmp_path) as gateway:
        await gateway.deploys.deploy(make.spec("left"), DIGEST)
        waits, over = [await submitted(gateway, "left") for _ in range(2)]
        never_accepted = new_map_id()
        await large_bodies.store(gateway.bus, subjects.ARGUMENT_FILES, LARGE, owner=never_accepted)
        await end(gateway, over, state)
        await step(gateway, 0.0)
        assert len(await stored(gateway)) == 3, "they are young"
        await step(gateway, argument_files._SETTLED_S + 1)
        assert [blob.digest.partition(".")[0] for blob in await stored(gateway)] == [waits]


async def test_arguments_of_a_maps_items_stay_while_they_wait(nats: Any, make: Any, tmp_path: Path) -> None:
    async with empty_gateway(nats, tmp_path) as gateway:
        await gateway.deploys.deploy(make.spec("items"), DIGEST)
        map_id = new_map_id()
        url = f"/v1/functions/items/maps/{map_id}/items/0"
        assert (await gateway.http.put(url, content=LARGE + b"\n" + LARGE)).status_code == 202
        never_accepted = item_id(map_id, 2)
        await large_bodies.store(gateway.bus, subjects.ARGUMENT_FILES, LARGE, owner=never_accepted)
        await end(gateway, item_id(map_id, 1), InvocationState.SUCCEEDED)
        await step(gateway, argument_files._SETTLED_S + 1)
        assert [blob.digest.partition(".")[0] for blob in await stored(gateway)] == [item_id(map_id, 0)]


async def test_a_dead_letter_keeps_its_large_payload_and_is_replayed_with_it(
    nats: Any, make: Any, tmp_path: Path
) -> None:
    async with empty_gateway(nats, tmp_path) as gateway:
        await gateway.deploys.deploy(make.spec("dead-large"), DIGEST)
        one, two = [await submitted(gateway, "dead-large") for _ in range(2)]
        for each in (one, two):
            await end(gateway, each, InvocationState.FAILED)
        await step(gateway, argument_files._SETTLED_S + 1)
        letter = f"/v1/dlq/dead-large/{one}"
        assert (await gateway.http.get(letter)).json()["size"] == len(LARGE)
        assert (await gateway.http.get(f"{letter}/payload")).content == LARGE
        again = (await gateway.http.post(f"{letter}/replay")).json()["id"]
        message, _ = await message_of(gateway, again)
        assert message.reference is not None
        assert message.reference.owner == again
        assert await read(gateway, message.reference) == LARGE
        assert (await gateway.http.delete(f"/v1/dlq/dead-large/{two}")).status_code == 204
        assert [blob.digest.partition(".")[0] for blob in await stored(gateway)] == [again]
