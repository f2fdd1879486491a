"""API keys with a real bus: several gateways, and keys that are deleted at once."""

from __future__ import annotations

import asyncio
from typing import Any

from gpufn_core.domain.invocation import InvocationState
from gpufn_core.protocol.records import CallRecord
from gpufn_platform.queue.records import call_records
from tests.gateway.whole import DIGEST, gateway_on
from tests.waiting import until_async

GOOD = b'{"texts":["a"]}'


async def test_keys_close_the_gateway_and_deleting_the_last_opens_it(nats: Any, problem: Any) -> None:
    async with gateway_on(nats) as gateway, gateway_on(nats) as other:
        answer = await gateway.http.post("/v1/keys", json={"label": "boss", "scopes": ["admin"]})
        assert answer.status_code == 201
        boss = answer.json()
        assert problem(await gateway.http.get("/v1/functions")) == (401, "unauthorized")
        gateway.http.headers["authorization"] = other.http.headers["authorization"] = f"Bearer {boss['key']}"
        await until_async(lambda: other.access.keys)
        reader = (await other.http.post("/v1/keys", json={"scopes": ["read"]})).json()
        await until_async(lambda: len(gateway.access.keys) == 2)
        listed = (await gateway.http.get("/v1/keys")).json()["keys"]
        assert [(each["id"], each["scopes"]) for each in listed] == [
            (boss["id"], ["admin"]),
            (reader["id"], ["read"]),
        ]
        assert boss["key"] not in (await gateway.http.get("/v1/keys")).text
        assert problem(await gateway.http.delete(f"/v1/keys/{boss['id']}")) == (409, "conflict")
        assert problem(await gateway.http.delete("/v1/keys/nobody")) == (404, "bad_request")
        assert (await gateway.http.delete(f"/v1/keys/{reader['id']}")).status_code == 204
        assert (await gateway.http.delete(f"/v1/keys/{boss['id']}")).status_code == 204
        del gateway.http.headers["authorization"]
        assert (await gateway.http.get("/v1/functions")).status_code == 200


async def test_a_key_expires_and_is_rotated_over_http(nats: Any, problem: Any) -> None:
    async with gateway_on(nats) as gateway:
        first = {"scopes": ["admin"]}
        assert problem(await gateway.http.post("/v1/keys", json=first | {"expires_in_s": 60})) == (422, "invalid_input")
        boss = (await gateway.http.post("/v1/keys", json=first)).json()
        gateway.http.headers["authorization"] = f"Bearer {boss['key']}"
        for wrong in (0, -1, 1e12, "60"):
            answer = await gateway.http.post("/v1/keys", json=first | {"expires_in_s": wrong})
            assert answer.status_code == 422
        other = (await gateway.http.post("/v1/keys", json=first | {"expires_in_s": 60})).json()
        assert other["expires_at"] == other["created_at"] + 60
        assert problem(await gateway.http.delete(f"/v1/keys/{boss['id']}")) == (409, "conflict")
        assert problem(await gateway.http.post("/v1/keys/nobody/rotate", json={})) == (404, "bad_request")
        assert (await gateway.http.post(f"/v1/keys/{boss['id']}/rotate", json={"overlap_s": -1})).status_code == 422
        answer = await gateway.http.post(f"/v1/keys/{boss['id']}/rotate", json={"overlap_s": 3600})
        new = answer.json()
        assert (answer.status_code, new["id"], new["scopes"]) == (200, boss["id"], ["admin"])
        for secret in (boss["key"], new["key"]):
            gateway.http.headers["authorization"] = f"Bearer {secret}"
            assert (await gateway.http.get("/v1/functions")).status_code == 200
        listed = (await gateway.http.get("/v1/keys")).text
        assert new["key"] not in listed
        assert "sha256" not in listed
        await gateway.http.post(f"/v1/keys/{boss['id']}/rotate", json={})
        await until_async(lambda: next(key for key in gateway.access.keys if key.id == boss["id"]).replaced is None)
        assert problem(await gateway.http.get("/v1/functions")) == (401, "unauthorized")
        for key in (boss, other):
            await gateway.keys.delete(key["id"])


async def test_two_keys_that_delete_each_other_at_once_leave_one(nats: Any) -> None:
    async with gateway_on(nats) as gateway:
        keys = [(await gateway.http.post("/v1/keys", json={"scopes": ["admin"]})).json()]
        gateway.http.headers["authorization"] = f"Bearer {keys[0]['key']}"
        keys += [(await gateway.http.post("/v1/keys", json={"scopes": [scope]})).json() for scope in ("admin", "read")]
        answers = await asyncio.gather(*(gateway.http.delete(f"/v1/keys/{key['id']}") for key in keys[:2]))
        for key in keys:
            await gateway.keys.delete(key["id"])
        assert sorted(answer.status_code for answer in answers) == [204, 409]


async def test_two_keys_that_delete_each_other_at_two_gateways_leave_one(nats: Any) -> None:
    async with gateway_on(nats, "gw-1") as one, gateway_on(nats, "gw-2") as other:
        first = (await one.http.post("/v1/keys", json={"scopes": ["admin"]})).json()
        for gateway in (one, other):
            gateway.http.headers["authorization"] = f"Bearer {first['key']}"
            gateway.access._loopback = False
        second = (await one.http.post("/v1/keys", json={"scopes": ["admin"]})).json()
        await until_async(lambda: len(one.access.keys) == len(other.access.keys) == 2)
        both_go_on = asyncio.Barrier(2)

        def at_once(keys: Any) -> Any:
            delete = keys.delete

            async def deleted(key: str, revision: int | None = None) -> None:
                await both_go_on.wait()  # both gateways see that there is another key
                await delete(key, revision)

            return deleted

        for gateway in (one, other):
            gateway.keys.delete = at_once(gateway.keys)  # type: ignore[method-assign]
        deleted = (one.http.delete(f"/v1/keys/{first['id']}"), other.http.delete(f"/v1/keys/{second['id']}"))
        answers = [answer.status_code for answer in await asyncio.gather(*deleted)]
        left = await one.keys.entries()
        for gateway in (one, other):
            del gateway.keys.delete
        for entry in left:
            await one.keys.delete(entry.key)
        assert answers in ([204, 409], [409, 204], [409, 409])
        assert len(left) == answers.count(409)


async def test_a_deleted_key_is_refused_at_every_gateway_on_a_connection_that_is_open(nats: Any, problem: Any) -> None:
    async with gateway_on(nats) as gateway, gateway_on(nats) as other:
        boss = (await gateway.http.post("/v1/keys", json={"scopes": ["admin"]})).json()
        gateway.http.headers["authorization"] = f"Bearer {boss['key']}"
        gone = (await gateway.http.post("/v1/keys", json={"scopes": ["read"]})).json()
        await until_async(lambda: len(other.access.keys) == 2)
        with_gone = {"authorization": f"Bearer {gone['key']}"}
        before = [(await each.http.get("/v1/functions", headers=with_gone)).status_code for each in (gateway, other)]
        await gateway.http.delete(f"/v1/keys/{gone['id']}")
        await until_async(lambda: len(other.access.keys) == 1)
        after = [problem(await each.http.get("/v1/functions", headers=with_gone)) for each in (gateway, other)]
        await gateway.keys.delete(boss["id"])
        assert (before, after) == ([200, 200], [(401, "unauthorized")] * 2)


async def test_a_key_sees_only_the_calls_that_it_may_make(nats: Any, make: Any, problem: Any) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("mine"), DIGEST)
        here = (await gateway.http.post("/v1/functions/mine/submit", content=GOOD)).headers["location"]
        boss = (await gateway.http.post("/v1/keys", json={"scopes": ["admin"]})).json()
        gateway.http.headers["authorization"] = f"Bearer {boss['key']}"
        made = [
            (await gateway.http.post("/v1/keys", json={"scopes": [scope]})).json()
            for scope in ("invoke:mine", "invoke:other", "read")
        ]
        expected = [(200, 202), (404, 404), (200, 403)]
        for key, (status, result) in zip(made, expected, strict=True):
            headers = {"authorization": f"Bearer {key['key']}"}
            assert (await gateway.http.get(here, headers=headers)).status_code == status
            assert (await gateway.http.get(f"{here}/result", headers=headers)).status_code == result
        for key in [*made, boss]:
            await gateway.http.delete(f"/v1/keys/{key['id']}")


async def test_two_records_of_one_id_do_not_meet(nats: Any) -> None:
    async with gateway_on(nats) as gateway:
        record = CallRecord(
            id="1" * 26, function="nobody", revision=1, state=InvocationState.SUCCEEDED, submitted_at=0.0
        )
        assert await call_records.end(gateway.bus, record, b"x")
        assert not await call_records.end(gateway.bus, record, b"y")
