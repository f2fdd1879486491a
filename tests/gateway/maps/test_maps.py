"""Maps: items are accepted in chunks, and outcomes are followed. The bus is real; the tests play the runner."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest

from gpufn_core.domain.invocation import InvocationState
from gpufn_core.errors import ErrorInfo
from gpufn_core.ids import item_id, new_map_id
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import pack
from gpufn_core.protocol.messages import unpack_invocation
from gpufn_core.protocol.records import CallRecord, DeadLetter, Webhook
from gpufn_core.spec.function_spec import Retry
from gpufn_gateway.auth.access import new_key
from gpufn_gateway.functions.deploy_checks import DeployOptions
from gpufn_gateway.maps.map_closer import MapCloser
from gpufn_gateway.maps.maps import Maps
from gpufn_gateway.maps.outcomes import Cursor
from gpufn_local.nats_process import EmbeddedServer
from gpufn_platform.bus.storage import object_store, streams
from gpufn_platform.bus.storage.header_summary import summary
from gpufn_platform.queue import map_log, queue_position
from gpufn_platform.queue.records import call_records, dead_letters
from tests.gateway.whole import DIGEST, Whole, gateway_on
from tests.waiting import until_async

NO = ErrorInfo("function_raised", "no", error_type="ValueError")


def lines(*texts: str) -> bytes:
    return b"".join(msgspec.json.encode({"texts": [text]}) + b"\n" for text in texts)


async def put(gateway: Whole, function: str, map_id: str, first: int, content: bytes, *, last: bool = False) -> Any:
    url = f"/v1/functions/{function}/maps/{map_id}/items/{first}"
    headers = {"content-type": "application/x-ndjson", "accept": "application/json"}
    return await gateway.http.put(url, content=content, headers=headers, params={"last": "true"} if last else {})


async def queued_ids(gateway: Whole, function: str) -> list[str]:
    queue = subjects.async_queue(function, 1)
    return [message.id for _, message in await queue_position.queued(gateway.bus, subjects.ASYNC, queue, 1, 1000)]


async def end(gateway: Whole, function: str, invocation: str, body: bytes = b"1", **fields: Any) -> None:
    """End an item like a runner: it has no record before."""
    given: dict[str, Any] = {"state": InvocationState.SUCCEEDED, "content_type": "application/json"} | fields
    record = CallRecord(id=invocation, function=function, revision=1, submitted_at=0.5, ended_at=1.0, **given)
    assert await call_records.end(gateway.bus, record, body)


async def fail_once(gateway: Whole, invocation: str) -> None:
    """Retry an item like a runner: queue the next attempt, update the record, remove the first message."""
    found = await call_records.read(gateway.bus, invocation)
    assert found is not None
    stored = await streams.message_at(gateway.bus, subjects.ASYNC, found[0].queue_seq)
    assert stored is not None
    message, body = unpack_invocation(stored.payload)
    again = msgspec.structs.replace(message, attempt=2)
    next_seq = (await gateway.bus.publish_stored(stored.subject, pack(again, body))).seq
    await call_records.retry(gateway.bus, again, body, next_seq)
    await streams.delete_message(gateway.bus, subjects.ASYNC, stored.seq)


async def read(gateway: Whole, map_id: str, **params: Any) -> list[dict[str, Any]]:
    answer = await gateway.http.get(f"/v1/maps/{map_id}/outcomes", params=params)
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines() if line]


async def test_items_are_calls_in_the_queue(nats: Any, make: Any) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("queued"), DIGEST)
        map_id = new_map_id()
        answer = await put(gateway, "queued", map_id, 0, lines("a", "b"))
        assert answer.status_code == 202
        assert answer.json()["accepted"] == 2
        assert answer.headers["location"] == f"/v1/maps/{map_id}"
        await put(gateway, "queued", map_id, 2, lines("c"))
        assert await queued_ids(gateway, "queued") == [item_id(map_id, index) for index in range(3)]
        status = (await gateway.http.get(f"/v1/maps/{map_id}")).json()
        assert (status["state"], status["accepted"], status["ended"]) == ("open", 3, 0)
        item = (await gateway.http.get(f"/v1/invocations/{map_id}-2")).json()
        assert (item["state"], item["function"]) == ("queued", "queued")
        assert (await gateway.http.get(f"/v1/invocations/{map_id}-3")).status_code == 404
        depths = await streams.depths(gateway.bus)
        assert depths["queued", 1].asynchronous == 3


async def test_a_map_is_found_under_the_id_that_its_client_wrote(nats: Any, make: Any) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("capitals"), DIGEST)
        own = new_map_id().upper()
        await put(gateway, "capitals", own, 0, lines("a"), last=True)
        assert (await gateway.http.get(f"/v1/maps/{own}")).json()["accepted"] == 1
        assert (await gateway.http.get(f"/v1/invocations/{own}-0")).json()["state"] == "queued"
        assert (await gateway.http.delete(f"/v1/maps/{own}")).json()["cancelled"] is True
        assert [outcome["index"] for outcome in await read(gateway, own)] == [0]


async def test_a_repeated_chunk_makes_the_same_calls(nats: Any, make: Any, problem: Any) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("again"), DIGEST)
        map_id = new_map_id()
        first = await put(gateway, "again", map_id, 0, lines("a", "b"))
        assert (await put(gateway, "again", map_id, 0, lines("a", "b"))).json() == first.json()
        assert len(await queued_ids(gateway, "again")) == 2
        assert problem(await put(gateway, "again", map_id, 0, lines("a", "x"))) == (409, "conflict")
        answer = await put(gateway, "again", map_id, 3, lines("c"))
        assert problem(answer) == (409, "conflict")
        assert "continue with number 2" in answer.json()["detail"]
        assert answer.json()["retryable"] is False


async def test_a_gateway_that_knows_an_older_entry_looks_again(nats: Any, make: Any) -> None:
    async with gateway_on(nats) as one, gateway_on(nats) as other:
        await one.deploys.deploy(make.spec("two-doors"), DIGEST)
        await until_async(lambda: "two-doors" in other.registry.functions)
        map_id = new_map_id()
        await put(one, "two-doors", map_id, 0, lines("a"))
        assert (await put(other, "two-doors", map_id, 1, lines("b"))).json()["accepted"] == 2
        assert (await put(one, "two-doors", map_id, 1, lines("b"))).json()["accepted"] == 2
        assert (await put(one, "two-doors", map_id, 2, lines("c"))).json()["accepted"] == 3
        assert len(await queued_ids(one, "two-doors")) == 3


async def test_ends_are_listed_in_order_and_a_cursor_continues_after_them(nats: Any, make: Any) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("ends"), DIGEST)
        map_id = new_map_id()
        await put(gateway, "ends", map_id, 0, lines("a", "b", "c"), last=True)
        await end(gateway, "ends", item_id(map_id, 2), b"22")
        await end(gateway, "ends", item_id(map_id, 0), b"", state=InvocationState.FAILED, error=NO)
        await end(gateway, "ends", item_id(map_id, 1), b"11")
        found = await read(gateway, map_id)
        assert [each["index"] for each in found] == [2, 0, 1]
        assert [each.get("result") for each in found] == [22, None, 11]
        assert found[1]["error"]["code"] == "function_raised"
        assert [each["index"] for each in await read(gateway, map_id, after=found[1]["cursor"])] == [1]
        assert await read(gateway, map_id, after=found[2]["cursor"]) == []
        again = await put(gateway, "ends", map_id, 0, lines("a", "b", "c"), last=True)  # its response was lost
        assert (again.status_code, again.json()["accepted"]) == (202, 3)
        assert (await gateway.http.get(f"/v1/maps/{map_id}")).json()["state"] == "ended"
        assert (await gateway.http.get(f"/v1/invocations/{map_id}-1/result")).json() == 11


async def test_an_item_that_waits_for_another_attempt_has_not_ended(nats: Any, make: Any) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("tries"), DIGEST)
        map_id = new_map_id()
        await put(gateway, "tries", map_id, 0, lines("a"), last=True)
        ((seq, message),) = await queue_position.queued(
            gateway.bus, subjects.ASYNC, subjects.async_queue("tries", 1), 1
        )
        again = msgspec.structs.replace(message, attempt=2, not_before=5.0)
        stored = await gateway.bus.publish_stored(subjects.async_queue("tries", 1), pack(again), msg_id="again")
        await call_records.retry(gateway.bus, again, b"{}", stored.seq)
        await streams.delete_message(gateway.bus, subjects.ASYNC, seq)
        record = await call_records.read(gateway.bus, message.id)
        assert record is not None
        assert (record[0].state, record[0].attempt, record[0].queue_seq) == (InvocationState.QUEUED, 2, stored.seq)
        await end(gateway, "tries", message.id, b"7", attempt=2)
        assert [each["result"] for each in await read(gateway, map_id)] == [7]


async def test_items_that_have_not_ended_are_cancelled(nats: Any, make: Any, problem: Any) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("stopped"), DIGEST)
        map_id = new_map_id()
        await put(gateway, "stopped", map_id, 0, lines("a", "b", "c"))
        await end(gateway, "stopped", item_id(map_id, 1), b"1")
        answer = (await gateway.http.delete(f"/v1/maps/{map_id}")).json()
        assert (answer["state"], answer["cancelled"], answer["ended"]) == ("cancelled", True, 3)
        assert await queued_ids(gateway, "stopped") == [item_id(map_id, 1)]  # its runner has not acknowledged it yet
        states = {each["index"]: each["state"] for each in await read(gateway, map_id)}
        assert states == {0: "cancelled", 1: "succeeded", 2: "cancelled"}
        assert problem(await put(gateway, "stopped", map_id, 3, lines("d"))) == (409, "invocation_cancelled")
        assert (await gateway.http.delete(f"/v1/maps/{map_id}")).json()["cancelled"] is False


async def test_an_item_whose_result_is_forgotten_is_not_cancelled_with_its_map(nats: Any, make: Any) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("was-over"), DIGEST)
        other, map_id = new_map_id(), new_map_id()
        await put(gateway, "was-over", other, 0, lines("x"))
        await put(gateway, "was-over", map_id, 0, lines("a", "b"))
        (_, (seq, _), _) = await queue_position.queued(
            gateway.bus, subjects.ASYNC, subjects.async_queue("was-over", 1), 1
        )
        await end(gateway, "was-over", item_id(map_id, 0))
        await streams.delete_message(gateway.bus, subjects.ASYNC, seq)
        await forget(gateway, "was-over", map_id, 0)
        answer = (await gateway.http.delete(f"/v1/maps/{map_id}")).json()
        assert (answer["state"], answer["cancelled"], answer["ended"]) == ("cancelled", True, 2)
        assert await queued_ids(gateway, "was-over") == [item_id(other, 0)]
        assert [(each["index"], each["state"]) for each in await read(gateway, map_id)] == [(1, "cancelled")]


async def test_a_cancelled_item_has_its_webhook_and_the_retention_of_its_function(nats: Any, make: Any) -> None:
    async with gateway_on(nats) as gateway:
        webhook = "http://127.0.0.1:9/done"
        await gateway.deploys.deploy(make.spec("tells", webhook=webhook, retention_s=120.0), DIGEST)
        map_id = new_map_id()
        await put(gateway, "tells", map_id, 0, lines("a"))
        await gateway.http.delete(f"/v1/maps/{map_id}")
        assert [each["state"] for each in await read(gateway, map_id)] == ["cancelled"]
        record, _ = await call_records.read(gateway.bus, item_id(map_id, 0)) or (None, b"")
        assert record is not None
        assert (record.webhook, record.keep_s) == (Webhook(webhook), 120.0)
        job = await streams.last_message(gateway.bus, subjects.WEBHOOKS, subjects.webhook("tells"))
        assert job is not None
        assert job.payload.decode() == item_id(map_id, 0)


async def test_of_an_endless_map_the_items_are_cancelled_that_wait_and_no_others(
    nats: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log entries of the first items have expired; most of these items ended long ago."""
    for name in ("_KEPT_CHUNKS", "_PRUNE_INTERVAL"):
        monkeypatch.setattr(map_log, name, 1)
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("endless"), DIGEST)
        map_id, other = new_map_id(), new_map_id()
        await put(gateway, "endless", other, 0, lines("x"))
        for index in range(4):
            await put(gateway, "endless", map_id, index, lines("a"))
        queue = subjects.async_queue("endless", 1)
        await streams.delete_message(
            gateway.bus, subjects.ASYNC, (await queue_position.queued(gateway.bus, subjects.ASYNC, queue, 1))[1][0]
        )
        assert (await gateway.http.delete(f"/v1/maps/{map_id}")).json()["ended"] == 4
        assert sorted(each["index"] for each in await read(gateway, map_id)) == [1, 2, 3]
        assert await queued_ids(gateway, "endless") == [item_id(other, 0)]
        assert await call_records.read(gateway.bus, item_id(map_id, 0)) is None


async def test_one_item_is_cancelled_by_itself(nats: Any, make: Any) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("one-less"), DIGEST)
        map_id = new_map_id()
        await put(gateway, "one-less", map_id, 0, lines("a"))
        await put(gateway, "one-less", map_id, 1, lines("b", "c"))
        assert (await gateway.http.delete(f"/v1/invocations/{map_id}-2")).json()["cancelled"] is True
        assert await queued_ids(gateway, "one-less") == [item_id(map_id, 0), item_id(map_id, 1)]


async def test_items_have_the_fields_of_a_submitted_call(nats: Any, make: Any, problem: Any) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("carried", retention_s=120.0), DIGEST)
        map_id = new_map_id()
        url = f"/v1/functions/carried/maps/{map_id}/items/0"
        asked = {
            "content-type": "application/x-ndjson",
            "x-gpufn-timeout": "60",
            "x-gpufn-priority": "low",
            "x-gpufn-webhook": "http://127.0.0.1:9/done",
        }
        assert (await gateway.http.put(url, content=lines("a"), headers=asked)).status_code == 202
        queue = subjects.async_queue("carried", 1, "low")
        ((_, message),) = await queue_position.queued(gateway.bus, subjects.ASYNC, queue, 1)
        assert message.deadline == pytest.approx(message.submitted_at + 60.0)
        assert (message.keep_s, message.webhook) == (120.0, Webhook("http://127.0.0.1:9/done"))
        large = await put(gateway, "carried", map_id, 1, b'{"texts":["%b"]}' % (b"x" * (1 << 20)))
        assert problem(large) == (413, "payload_too_large")


async def test_a_key_maps_and_reads_functions_that_it_may_invoke(nats: Any, make: Any, problem: Any) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("locked"), DIGEST)
        map_id = new_map_id()
        await put(gateway, "locked", map_id, 0, lines("a"))
        key, secret = new_key("other", ("invoke:another",), 1.0)
        gateway.access.put(key)
        gateway.http.headers["authorization"] = f"Bearer {secret}"
        assert problem(await put(gateway, "locked", map_id, 1, lines("b"))) == (404, "function_not_found")
        for answer in (
            await gateway.http.get(f"/v1/maps/{map_id}"),
            await gateway.http.get(f"/v1/maps/{map_id}/outcomes"),
            await gateway.http.delete(f"/v1/maps/{map_id}"),
        ):
            assert problem(answer) == (404, "map_not_found")
        assert problem(await gateway.http.get("/v1/maps")) == (403, "forbidden")


async def test_a_large_result_is_fetched_by_its_item(nats: Any, make: Any, tmp_path: Any) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("large"), DIGEST)
        map_id = new_map_id()
        await put(gateway, "large", map_id, 0, lines("a"), last=True)
        (path := tmp_path / "result").write_bytes(b"x" * 3000)
        item = item_id(map_id, 0)
        digest, size = await object_store.keep_file(gateway.bus, subjects.RESULT_FILES, path, owner=item, ttl_s=60)
        kind = "application/octet-stream"
        await end(gateway, "large", item, b"", blob=digest, size=size, content_type=kind)
        (found,) = await read(gateway, map_id)
        assert "result" not in found
        assert (await gateway.http.get(found["links"]["result"])).content == b"x" * 3000


async def test_the_end_of_a_map_outlives_its_records(nats: Any, make: Any) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("brief"), DIGEST)
        map_id = new_map_id()
        await put(gateway, "brief", map_id, 0, lines("a", "b"), last=True)
        for index in range(2):
            await end(gateway, "brief", item_id(map_id, index))
        assert len(await read(gateway, map_id)) == 2
        await streams.purge(gateway.bus, subjects.RESULTS, subjects.result("brief", item_id(map_id, 0)))
        await streams.purge(gateway.bus, subjects.ASYNC, subjects.async_queue("brief", 1))
        assert [each["index"] for each in await read(gateway, map_id)] == [1]
        assert (await gateway.http.get(f"/v1/maps/{map_id}")).json()["state"] == "ended"
        assert (await gateway.http.get(f"/v1/invocations/{map_id}-0")).status_code == 404


async def test_the_end_of_an_unread_map_is_recorded(nats: Any, make: Any) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("unread"), DIGEST)
        ended, running = new_map_id(), new_map_id()
        for map_id in (ended, running):
            await put(gateway, "unread", map_id, 0, lines("a"), last=True)
        await end(gateway, "unread", item_id(ended, 0))
        look = MapCloser(gateway.bus)
        assert await look.step() == 1
        assert await look.step() == 0
        await streams.purge(gateway.bus, subjects.RESULTS, subjects.result("unread", item_id(ended, 0)))
        views = (await gateway.http.get("/v1/maps?function=unread")).json()["maps"]
        assert {view["id"]: view["state"] for view in views} == {ended: "ended", running: "running"}


async def forget(gateway: Whole, function: str, map_id: str, index: int) -> None:
    """Remove a record as if its retention had expired."""
    await streams.purge(gateway.bus, subjects.RESULTS, subjects.result(function, item_id(map_id, index)))


async def is_noted(gateway: Whole, map_id: str) -> bool:
    newest = await map_log.last(gateway.bus, map_id)
    assert newest is not None
    return newest.entry.is_ended


async def test_a_map_longer_than_the_retention_of_its_results_ends_with_and_without_a_reader(
    nats: Any, make: Any
) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("longer"), DIGEST)
        map_id = new_map_id()
        await put(gateway, "longer", map_id, 0, lines("a", "b"), last=True)
        await end(gateway, "longer", item_id(map_id, 0))
        await forget(gateway, "longer", map_id, 0)
        reading = asyncio.ensure_future(read(gateway, map_id))
        look = MapCloser(gateway.bus)
        await look.step()
        assert not await is_noted(gateway, map_id)  # the other item is queued
        await end(gateway, "longer", item_id(map_id, 1))
        await streams.purge(gateway.bus, subjects.ASYNC, subjects.async_queue("longer", 1))
        await look.step()
        assert [each["index"] for each in await reading] == [1]
        view = (await gateway.http.get(f"/v1/maps/{map_id}")).json()
        assert (view["state"], view["ended"]) == ("ended", 2)


async def test_a_reader_cannot_declare_the_end_of_a_map(nats: Any, make: Any) -> None:
    """Bug: a reader with the cursor of another map marked this one as ended, also for other readers and for cancel."""
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("believed"), DIGEST)
        map_id = new_map_id()
        await put(gateway, "believed", map_id, 0, lines("a", "b"), last=True)
        await end(gateway, "believed", item_id(map_id, 0))
        assert await read(gateway, map_id, after=f"{1 << 40}.2") == []
        assert not await is_noted(gateway, map_id)
        await end(gateway, "believed", item_id(map_id, 1))
        assert [each["index"] for each in await read(gateway, map_id)] == [0, 1]
        assert await is_noted(gateway, map_id)


async def test_a_map_has_not_ended_while_an_item_of_an_earlier_revision_waits_for_another_attempt(
    nats: Any, make: Any
) -> None:
    """Bug: only the retry policy of the newest revision was checked, so readers missed the outcome of this item."""
    async with gateway_on(nats) as gateway:
        map_id = new_map_id()
        await gateway.deploys.deploy(make.spec("redeployed", retries=Retry(1)), DIGEST)
        await put(gateway, "redeployed", map_id, 0, lines("a"))
        await fail_once(gateway, item_id(map_id, 0))
        gateway.report(make.status("redeployed", ready=0))
        await gateway.deploys.deploy(make.spec("redeployed"), DIGEST, DeployOptions(check=False))
        await put(gateway, "redeployed", map_id, 1, lines("b"), last=True)
        newest = await map_log.last(gateway.bus, map_id)
        assert newest is not None
        assert newest.entry.revision == 2
        await end(gateway, "redeployed", item_id(map_id, 1))
        look = MapCloser(gateway.bus)
        await look.step()
        assert not await is_noted(gateway, map_id)
        await end(gateway, "redeployed", item_id(map_id, 0))
        await look.step()
        assert await is_noted(gateway, map_id)


async def test_a_map_whose_results_are_forgotten_ends_though_others_wait_behind_it(nats: Any, make: Any) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("busy"), DIGEST)
        first, second = new_map_id(), new_map_id()
        for map_id in (first, second):
            await put(gateway, "busy", map_id, 0, lines("a", "b"), last=True)
        ((seq, _), *_) = await queue_position.queued(gateway.bus, subjects.ASYNC, subjects.async_queue("busy", 1), 1)
        for index in range(2):
            await end(gateway, "busy", item_id(first, index))
            await streams.delete_message(gateway.bus, subjects.ASYNC, seq + index)
        await forget(gateway, "busy", first, 0)
        await MapCloser(gateway.bus).step()
        assert [await is_noted(gateway, map_id) for map_id in (first, second)] == [True, False]


async def test_a_reader_of_an_open_map_receives_its_end(nats: Any, make: Any) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("closing"), DIGEST)
        map_id = new_map_id()
        await put(gateway, "closing", map_id, 0, lines("a"))
        reading = asyncio.ensure_future(read(gateway, map_id))
        await end(gateway, "closing", item_id(map_id, 0))
        await put(gateway, "closing", map_id, 1, b"", last=True)
        assert [each["index"] for each in await reading] == [0]


async def test_a_map_of_a_function_that_is_deleted_ends(nats: Any, make: Any) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("deleted"), DIGEST)
        map_id = new_map_id()
        await put(gateway, "deleted", map_id, 0, lines("a", "b"), last=True)
        await gateway.deploys.delete("deleted")
        assert [each["error"]["code"] for each in await read(gateway, map_id)] == ["invocation_cancelled"] * 2


async def test_an_invalid_item_is_named_by_its_index(nats: Any, make: Any, problem: Any) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("picky"), DIGEST)
        map_id = new_map_id()
        answer = await put(gateway, "picky", map_id, 0, lines("a") + b'{"texts":[1]}\n')
        assert problem(answer) == (422, "invalid_input")
        assert answer.json()["field"] == "items[1].texts[0]"
        assert answer.json()["detail"].count("items[1].texts[0]") == 1
        no_object = await put(gateway, "picky", map_id, 0, lines("a") + b"[1]\n")
        assert (no_object.json()["field"], no_object.json()["detail"][:10]) == ("items[1]", "items[1]: ")
        assert await map_log.last(gateway.bus, map_id) is None
        too_many = await put(gateway, "picky", map_id, 0, lines("a") * 1000)
        assert problem(too_many) == (413, "payload_too_large")
        assert problem(await put(gateway, "picky", "no-ulid", 0, lines("a"))) == (422, "invalid_input")
        assert problem(await put(gateway, "nobody", map_id, 0, lines("a"))) == (404, "function_not_found")
        assert problem(await gateway.http.get(f"/v1/maps/{map_id}")) == (404, "map_not_found")


async def test_openapi_describes_the_maps_of_each_function(nats: Any, make: Any) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("shown"), DIGEST)
        paths = (await gateway.http.get("/openapi.json")).json()["paths"]
        described = paths["/v1/functions/shown/maps/{id}/items/{first}"]["put"]
        assert {"id", "first", "last", "X-Gpufn-Webhook"} <= {each["name"] for each in described["parameters"]}
        assert "application/x-ndjson" in described["requestBody"]["content"]


async def test_a_full_queue_accepts_no_part_of_a_chunk(
    make: Any, problem: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = dict(streams.STREAMS[subjects.ASYNC]) | {"max_msgs_per_subject": 3}
    monkeypatch.setattr(streams, "STREAMS", dict(streams.STREAMS) | {subjects.ASYNC: short})
    with EmbeddedServer.start(tmp_path) as nats:
        async with gateway_on(nats) as gateway:
            await gateway.deploys.deploy(make.spec("full"), DIGEST)
            map_id = new_map_id()
            await put(gateway, "full", map_id, 0, lines("a", "b"))
            answer = await put(gateway, "full", map_id, 2, lines("c", "d"))
            assert problem(answer) == (429, "queue_full")
            assert int(answer.headers["retry-after"]) >= 1
            assert (await put(gateway, "full", map_id, 2, lines("c"))).json()["accepted"] == 3
            assert len(await queued_ids(gateway, "full")) == 3


async def test_maps_are_listed_and_their_items_are_not_calls_of_their_own(nats: Any, make: Any) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("listed"), DIGEST)
        map_id = new_map_id()
        await put(gateway, "listed", map_id, 0, lines("a", "b"))
        await put(gateway, "listed", map_id, 2, lines("c"), last=True)
        await end(gateway, "listed", item_id(map_id, 0))
        (found,) = (await gateway.http.get("/v1/maps?function=listed")).json()["maps"]
        assert (found["id"], found["state"], found["accepted"], found["ended"]) == (map_id, "running", 3, 1)
        assert (await gateway.http.get("/v1/functions/listed/calls")).json()["calls"] == []


async def test_items_are_listed_by_state_page_by_page_and_failed_ones_are_counted(
    nats: Any, make: Any, problem: Any
) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("items"), DIGEST)
        map_id = new_map_id()
        await put(gateway, "items", map_id, 0, lines("a", "b", "c"), last=True)
        for index in (1, 0):
            await end(gateway, "items", item_id(map_id, index))
        await end(gateway, "items", item_id(map_id, 2), state=InvocationState.FAILED)
        await gateway.bus.publish_stored(subjects.dead_letter("items", item_id(map_id, 2)), b"", headers=letter(map_id))

        async def items(query: str = "") -> Any:
            return (await gateway.http.get(f"/v1/maps/{map_id}/items?{query}")).json()

        assert [each["id"][-1] for each in (await items())["items"]] == ["2", "0", "1"]
        assert [each["id"][-1] for each in (await items("state=failed"))["items"]] == ["2"]
        first = await items("limit=2&state=succeeded")
        assert [each["id"][-1] for each in first["items"]] == ["0", "1"]
        first = await items("limit=1")
        second = await items(f"limit=5&before={first['next']}")
        assert [each["id"][-1] for each in second["items"]] == ["0", "1"]
        assert (await gateway.http.get(f"/v1/maps/{map_id}")).json()["failed"] == 1
        for query in ("before=x", "state=lost"):
            answer = await gateway.http.get(f"/v1/maps/{map_id}/items?{query}")
            assert problem(answer) == (422, "invalid_input")


@pytest.mark.parametrize(("method", "path"), [("items", "/items"), ("status", "")])
async def test_requests_that_read_records_of_a_map_run_in_turns(
    nats: Any, monkeypatch: pytest.MonkeyPatch, method: str, path: str
) -> None:
    """Bug: one sender could read the records of many maps at the same time, while lists took turns."""
    running: list[int] = [0]

    async def read_records(*_: Any) -> Any:
        running.append(running[-1] + 1)
        await asyncio.sleep(0)
        running.append(running[-1] - 1)
        return ([], None) if method == "items" else {}

    monkeypatch.setattr(Maps, method, read_records)
    async with gateway_on(nats) as gateway:
        url = f"/v1/maps/{new_map_id()}{path}"
        answers = await asyncio.gather(*(gateway.http.get(url) for _ in range(8)))
        assert {answer.status_code for answer in answers} == {200}
        assert max(running) <= 2


async def test_dead_letters_are_read_only_after_one_has_changed(
    nats: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: each status of a map read up to a thousand dead letters, once a second for everybody who looked."""
    reads: list[str] = []
    recent = dead_letters.recent

    async def counted(bus: Any, function: str, limit: int) -> Any:
        reads.append(function)
        return await recent(bus, function, limit)

    monkeypatch.setattr(dead_letters, "recent", counted)
    now = [100.0]
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("items"), DIGEST)
        monkeypatch.setattr(gateway.clock, "monotonic", lambda: now[0])
        map_id = new_map_id()
        await put(gateway, "items", map_id, 0, lines("a", "b", "c"), last=True)

        async def failed() -> Any:
            return (await gateway.http.get(f"/v1/maps/{map_id}")).json()["failed"]

        assert (await failed(), reads) == (0, [])  # nothing has ended
        await end(gateway, "items", item_id(map_id, 2), state=InvocationState.FAILED)
        assert (await failed(), reads) == (0, ["items"])
        await gateway.bus.publish_stored(subjects.dead_letter("items", item_id(map_id, 2)), b"", headers=letter(map_id))
        assert (await failed(), len(reads)) == (0, 1)
        now[0] += 1.0
        assert (await failed(), len(reads)) == (1, 2)
        now[0] += 1.0
        assert (await failed(), len(reads)) == (1, 2)
        await dead_letters.drop(gateway.bus, "items", item_id(map_id, 2))
        now[0] += 1.0
        assert (await failed(), len(reads)) == (0, 3)


def letter(map_id: str) -> dict[str, str]:
    return summary(
        DeadLetter(
            id=item_id(map_id, 2), function="items", revision=1, method="", content_type="", accept="",
            state=InvocationState.FAILED, submitted_at=1.0, died_at=2.0,
        )
    )  # fmt: skip


@pytest.mark.parametrize("text", ["x", "1", "-1.2", "1.2.3"])
def test_only_issued_cursors_are_accepted(text: str) -> None:
    with pytest.raises(Exception, match="cursor"):
        Cursor.read(text)
    assert Cursor.read(str(Cursor(7, 3))) == (7, 3)
