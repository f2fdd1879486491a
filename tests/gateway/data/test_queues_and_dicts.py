"""Queues and dicts of a gateway on a bus."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import httpx
import pytest
from starlette.requests import Request

from gpufn_core.domain.team import Team
from gpufn_core.errors import CapacityError, Conflict
from gpufn_core.protocol import codec, subjects
from gpufn_core.protocol.data import (
    MAX_DICTS_BYTES,
    AdmitValue,
    CommitVolume,
    DataReply,
    DataRequest,
    GetEntry,
    SetEntry,
    team_of_value,
    value_tag,
)
from gpufn_core.protocol.subjects import DATA_REQUESTS
from gpufn_core.spec.volume_spec import VolumeChange
from gpufn_gateway.auth.access import new_key
from gpufn_gateway.data.dicts import Dicts
from gpufn_gateway.data.function_requests import FunctionRequests
from gpufn_gateway.data.queues import Queues
from gpufn_gateway.http.body_reader import BodyBudget, BodyReader
from gpufn_gateway.routes.data import DataRoutes
from gpufn_gateway.routes.requests import CHECK_KEY
from gpufn_gateway.teams.data_use import DataUse
from gpufn_platform.bus.storage.key_value import KeyValue
from tests.gateway.whole import Whole, gateway_on

_unpack: codec.Unpacker[DataReply] = codec.Unpacker(DataReply)


@pytest.fixture
def http(nats: Any) -> Any:
    return lambda: gateway_on(nats)


async def put(gateway: Whole, queue: str, value: bytes, query: str = "") -> httpx.Response:
    return await gateway.http.post(f"/v1/queues/{queue}/items{query}", content=value)


async def take(gateway: Whole, queue: str, query: str = "") -> httpx.Response:
    return await gateway.http.post(f"/v1/queues/{queue}/lease{query}")


async def end(gateway: Whole, queue: str, verb: str, item: httpx.Response) -> int:
    lease = item.headers["x-gpufn-lease"]
    return (await gateway.http.post(f"/v1/queues/{queue}/{verb}", params={"lease": lease})).status_code


async def test_an_item_that_is_not_acknowledged_is_delivered_again(http: Any) -> None:
    async with http() as gateway:
        await put(gateway, "again", b"first")
        await put(gateway, "again", b"second")
        first = await take(gateway, "again", "?lease=1")
        assert (first.content, first.headers["x-gpufn-deliveries"]) == (b"first", "1")
        second = await take(gateway, "again", "?lease=1")
        assert await end(gateway, "again", "ack", second) == 204
        repeated = await take(gateway, "again", "?lease=1&wait=20")
        assert (repeated.content, repeated.headers["x-gpufn-deliveries"]) == (b"first", "2")
        assert await end(gateway, "again", "release", repeated) == 204
        released = await take(gateway, "again", "?lease=1&wait=20")
        assert (released.content, await end(gateway, "again", "ack", released)) == (b"first", 204)
        assert (await take(gateway, "again", "?lease=1")).status_code == 204
        assert (await gateway.http.get("/v1/queues/again")).json() == {"name": "again", "items": 0}


async def test_an_item_that_was_delivered_too_often_is_moved_to_the_dead_letters(http: Any) -> None:
    async with http() as gateway:
        await put(gateway, "poison", b"bad")
        await put(gateway, "poison", b"good")
        for _ in range(2):
            bad = await take(gateway, "poison", "?max_deliveries=2&wait=20")
            assert (bad.content, await end(gateway, "poison", "release", bad)) == (b"bad", 204)
        good = await take(gateway, "poison", "?max_deliveries=2&wait=20")
        assert (good.content, await end(gateway, "poison", "ack", good)) == (b"good", 204)
        dead = await take(gateway, "poison-dead")
        assert (dead.content, dead.headers["x-gpufn-deliveries"]) == (b"bad", "1")
        assert (await take(gateway, "poison", "?max_deliveries=2")).status_code == 204


async def test_dead_letters_need_a_name(http: Any) -> None:
    async with http() as gateway:
        refused = await take(gateway, "a" * 40, "?max_deliveries=2")
        assert (refused.status_code, refused.json()["field"]) == (422, "max_deliveries")


async def test_the_last_get_decides_the_lease_on_whatever_gateway(http: Any) -> None:
    async with http() as gateway:
        first, second = gateway.operations.queues, Queues(gateway.bus)
        for queues, lease_s in ((first, 60.0), (second, 30.0), (first, 60.0)):
            await queues.get("last", wait_s=0, lease_s=lease_s)
            consumer = f"{subjects.QUEUES}.{subjects.queue_consumer('last')}"
            info = await gateway.bus.js(f"CONSUMER.INFO.{consumer}")
            assert info["config"]["ack_wait"] == lease_s * 1e9


async def test_a_waiting_client_gets_the_next_item_and_a_disconnected_one_gets_none(http: Any, settle: Any) -> None:
    async with http() as gateway:
        await take(gateway, "wait")  # the queue's consumer exists now
        waiting = asyncio.create_task(take(gateway, "wait", "?wait=20"))
        left = asyncio.create_task(gateway.operations.queues.get("wait", wait_s=20, lease_s=60))
        await settle()
        await gateway.bus.flush()
        left.cancel()
        await put(gateway, "wait", b"a")
        await put(gateway, "wait", b"b")
        assert (await waiting).content in (b"a", b"b")
        assert (await take(gateway, "wait", "?wait=20")).content in (b"a", b"b")


async def test_the_limits_of_a_queue(http: Any) -> None:
    async with http() as gateway:
        assert (await put(gateway, "limits", bytes((1 << 20) + 1))).json()["code"] == "payload_too_large"
        assert (await put(gateway, "limits", b"a", "?ttl=0.5")).status_code == 422
        for number in range(3):
            answer = await put(gateway, "limits", b"%d" % number, "?max_items=2")
        assert (answer.status_code, answer.json()["code"]) == (429, "queue_full")
        assert (await put(gateway, "once", b"a", "?id=x")).status_code == 201
        assert (await put(gateway, "once", b"a", "?id=x")).status_code == 201
        assert (await gateway.http.get("/v1/queues/once")).json()["items"] == 1
        assert {each["name"] for each in (await gateway.http.get("/v1/queues")).json()["queues"]} >= {"limits", "once"}
        assert (await gateway.http.delete("/v1/queues/limits")).status_code == 204
        assert (await gateway.http.get("/v1/queues/limits")).json()["items"] == 0


async def test_what_does_not_exist_is_not_deleted(http: Any, problem: Any) -> None:
    async with http() as gateway:
        for kind in ("queues", "dicts"):
            assert problem(await gateway.http.delete(f"/v1/{kind}/nosuch")) == (404, "data_not_found")
        await put(gateway, "emptied", b"a")
        assert await end(gateway, "emptied", "ack", await take(gateway, "emptied")) == 204
        deleted = [(await gateway.http.delete("/v1/queues/emptied")).status_code for _ in range(2)]
        assert deleted == [204, 404], "its consumer was deleted"


@pytest.mark.parametrize(
    "lease",
    ["", "x", "GPUFN_QUEUES.Q-other.1.1.1.1.0", "GPUFN_ASYNC.Q-own.1.1.1.1.0", "GPUFN_QUEUES.Q-own.1.1.1.*.0"],
)
async def test_a_lease_names_no_item_of_another_queue(http: Any, lease: str) -> None:
    async with http() as gateway:
        refused = await gateway.http.post("/v1/queues/own/ack", params={"lease": lease})
        assert (refused.status_code, refused.json()["field"]) == (422, "lease")
        gone = await gateway.http.post("/v1/queues/own/ack", params={"lease": "GPUFN_QUEUES.Q-own.1.1.1.1.0"})
        assert (gone.status_code, gone.json()["retryable"]) == (409, False)


async def test_a_dict_keeps_values_by_any_text(http: Any) -> None:
    async with http() as gateway:
        entry = "/v1/dicts/prod/search/d/entry"
        for key in ("a.b>*", "ключ", " "):
            assert (await gateway.http.put(entry, params={"key": key}, content=key.encode())).status_code == 204
            assert (await gateway.http.get(entry, params={"key": key})).content == key.encode()
        taken = await gateway.http.put(entry, params={"key": " ", "only_new": "true"}, content=b"new")
        assert (taken.status_code, taken.json()["retryable"]) == (409, False)
        assert (await gateway.http.get("/v1/dicts/prod/search/d/keys")).json()["keys"] == ["a.b>*", "ключ", " "]
        assert (await gateway.http.delete(entry, params={"key": " "})).status_code == 204
        assert (await gateway.http.delete(entry, params={"key": " "})).json()["code"] == "data_not_found"
        assert (await gateway.http.put(entry, params={"key": "k" * 257}, content=b"")).status_code == 422
        assert {"name": "prod/search/d", "entries": 2} in (await gateway.http.get("/v1/dicts")).json()["dicts"]
        assert (await gateway.http.delete("/v1/dicts/prod/search/d")).status_code == 204
        assert (await gateway.http.get("/v1/dicts/prod/search/d/keys")).json()["keys"] == []


async def test_a_stored_value_is_sent_as_it_arrives(http: Any) -> None:
    async with http() as gateway:
        value = os.urandom(9 << 20)
        id_ = (await gateway.http.post("/v1/values", content=value)).json()["id"]
        sent: list[dict[str, Any]] = []
        answer = await gateway.http.get(f"/v1/values/{id_}")
        assert (answer.content, answer.headers["content-length"]) == (value, str(len(value)))
        routes = DataRoutes(gateway.bus, gateway.operations, BodyReader(1, 1, what="", budget=BodyBudget(1)))
        scope: Any = {"type": "http", "method": "GET", "path_params": {"id": id_}, CHECK_KEY: lambda: None}

        async def send(message: Any) -> None:
            sent.append(message)

        await (await routes.get_value(Request(scope)))(scope, asyncio.Event().wait, send)  # type: ignore[arg-type]
        parts = [message["body"] for message in sent if message.get("body")]
        assert b"".join(parts) == value
        assert len(parts) > 1
        absent = await gateway.http.get(f"/v1/values/{id_[:-1]}{'0' if id_[-1] != '0' else '1'}")
        assert (absent.status_code, absent.json()["code"]) == (404, "data_not_found")


async def test_a_function_uses_the_data_of_its_app(http: Any) -> None:
    async with http() as gateway:
        bus = gateway.bus

        async def synced() -> None: ...

        requests = FunctionRequests(gateway.bus, gateway.volumes, gateway.operations, synced)
        answering = asyncio.create_task(requests.run())
        await asyncio.sleep(0)

        async def send(operation: Any, value: bytes = b"") -> tuple[DataReply, bytes]:
            message = codec.pack(DataRequest("prod/search/f", operation), value)
            return _unpack((await bus.request(DATA_REQUESTS, message)).payload)

        await send(SetEntry("shared", "k", "text/plain"), b"v")
        assert await send(GetEntry("shared", "k")) == (DataReply(content_type="text/plain"), b"v")
        assert (await gateway.http.get("/v1/dicts/prod/search/shared/entry?key=k")).content == b"v"
        failed, _ = await send(CommitVolume("absent", VolumeChange(remove=("a",))))
        assert failed.error is not None
        assert failed.error.code == "invalid_input"
        answering.cancel()


async def test_dicts_have_a_limit_of_bytes_and_a_full_bucket_can_be_emptied(http: Any) -> None:
    async with http() as gateway:
        info = await gateway.bus.js(f"STREAM.INFO.{gateway.buckets.dicts.stream}")
        assert info["config"]["max_bytes"] == MAX_DICTS_BYTES
        dicts = Dicts(await KeyValue.open(gateway.bus, "small_dicts", max_bytes=100_000))

        async def set_(key: str, size: int) -> bool:
            return await dicts.set("d", key, "", bytes(size), ttl_s=None, only_new=False)

        async def fill() -> None:
            for number in range(1_000):
                await set_(f"small-{number}", 0)

        assert await set_("a", 50_000)
        for key, size in (("a", 60_000), ("b", 60_000)):
            with pytest.raises(CapacityError) as caught:
                await set_(key, size)
            assert caught.value.code == "capacity"
        await set_("b", 40_000)
        with pytest.raises(CapacityError):  # the last bytes are used up, so no deletion marker fits
            await fill()
        assert await dicts.remove("d", "a")
        assert await set_("c", 40_000)
        await dicts.clear("d")
        assert await dicts.keys("d") == []
        assert await set_("a", 60_000)


async def test_queues_dicts_and_values_count_as_storage_of_the_team(http: Any) -> None:
    """Bug: one team could use up the platform's limits of queues, dicts and values."""
    item, limit = bytes(400_000), 1_000_000
    async with http() as gateway:
        limited = {"owns": ["prod/own/*"], "limits": {"stored_bytes": limit}}
        assert (await gateway.http.put("/v1/teams/own", json=limited)).status_code == 200
        assert (await gateway.http.put("/v1/teams/other", json={"owns": ["prod/other/*"]})).status_code == 200
        assert (await put(gateway, "prod/own/q", item)).status_code == 201
        entry = "/v1/dicts/prod/own/d/entry"
        assert (await gateway.http.put(entry, params={"key": "a"}, content=item)).status_code == 204
        for refused in (
            await put(gateway, "prod/own/q", item),
            await gateway.http.put(entry, params={"key": "b"}, content=item),
        ):
            assert (refused.status_code, refused.json()["code"]) == (409, "conflict")
        assert (await put(gateway, "prod/other/q", item)).status_code == 201
        assert (await put(gateway, "q", item)).status_code == 201

        async def synced() -> None: ...

        # A value that a function stores, and one that a key of the team stores over HTTP.
        requests = FunctionRequests(gateway.bus, gateway.volumes, gateway.operations, synced)
        with pytest.raises(Conflict):
            await requests.execute(DataRequest("prod/own/f", AdmitValue("", len(item))), b"")
        await requests.execute(DataRequest("prod/other/f", AdmitValue("", len(item))), b"")
        use = DataUse(gateway.bus, gateway.buckets.dicts, gateway.clock)
        team = gateway.registry.teams.get("own")
        assert team is not None
        assert 800_000 <= await use.of(team) < 820_000
        taken = await take(gateway, "prod/own/q")
        assert await end(gateway, "prod/own/q", "ack", taken) == 204
        use = DataUse(gateway.bus, gateway.buckets.dicts, gateway.clock)
        assert 400_000 <= await use.of(team) < 410_000
        more = {"owns": ["prod/own/*"], "limits": {"stored_bytes": 2 * limit}}  # the freed room shows at the next count
        assert (await gateway.http.put("/v1/teams/own", json=more)).status_code == 200
        key, secret = new_key("own", ("deploy", "invoke:*"), 0.0, team="own")
        gateway.access.put(key)
        stored = await gateway.http.post("/v1/values", content=item, headers={"authorization": f"Bearer {secret}"})
        assert (stored.status_code, team_of_value(stored.json()["id"])) == (201, value_tag("own"))
        use = DataUse(gateway.bus, gateway.buckets.dicts, gateway.clock)
        assert 800_000 <= await use.of(team) < 820_000


async def test_the_items_that_were_taken_count_as_the_smallest_ones(http: Any) -> None:
    """Items are taken in any order, so a team could free large ones in the count and keep them."""
    team = Team(name="kept", owns=("prod/kept/*",))
    async with http() as gateway:
        use = DataUse(gateway.bus, gateway.buckets.dicts, gateway.clock)
        for size in (100_000, 10, 10):
            use.add_item(team, "prod/kept/q", size)
            await put(gateway, "prod/kept/q", bytes(size))
        first, second = await take(gateway, "prod/kept/q"), await take(gateway, "prod/kept/q")
        assert await end(gateway, "prod/kept/q", "ack", second) == 204
        assert 100_000 < await use.of(team) < 103_000
        assert await end(gateway, "prod/kept/q", "ack", first) == 204
        assert 10 <= await DataUse(gateway.bus, gateway.buckets.dicts, gateway.clock).of(team) < 100, "the newest one"
