"""Limits of API keys over HTTP: with one gateway without a bus, then with two on a real bus."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import msgspec
import pytest

from gpufn_core.domain.usage import Usage, UsageKey, day_of
from gpufn_core.errors import BusUnavailable
from gpufn_core.ids import new_invocation_id, new_map_id
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import encode
from gpufn_core.protocol.records import KeyLimits
from gpufn_gateway.auth.access import new_key
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import streams
from gpufn_platform.queue.records import call_records
from tests.gateway.submitted.test_submitted_calls import GOOD, die, end, submit
from tests.gateway.whole import DIGEST, Whole, gateway_on
from tests.waiting import until_async

INVOKE = "/v1/functions/embed/invoke"


def key_with(*gateways: Any, **limits: Any) -> dict[str, str]:
    """Request headers with a new key."""
    key, secret = new_key("", ("admin",), 0.0, KeyLimits(**limits))
    for gateway in gateways:
        gateway.access.put(key)
    return {"authorization": f"Bearer {secret}"}


async def test_a_rate_is_enforced_and_each_response_has_the_remainder(gateway: Any, make: Any, problem: Any) -> None:
    gateway.deploy(make.spec("embed"))
    key = key_with(gateway, rate=2, burst=3)
    answers = [await gateway.post(INVOKE, GOOD, **key) for _ in range(5)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429, 429]
    assert [answer.headers["ratelimit"] for answer in answers[:4]] == [
        '"rate";r=2;t=1', '"rate";r=1;t=1', '"rate";r=0;t=2', '"rate";r=0;t=2',
    ]  # fmt: skip
    refused = answers[3]
    assert problem(refused) == (429, "rate_limited")
    assert (refused.json()["retryable"], refused.json()["retry_after_s"]) == (True, 0.5)
    assert refused.headers["ratelimit-policy"] == '"rate";q=3;w=2'
    assert refused.headers["retry-after"] == "1"
    gateway.clock.now += 0.5
    assert (await gateway.post(INVOKE, GOOD, **key)).status_code == 200


async def test_a_key_without_limits_has_no_limit_headers_and_uses_no_quota_of_others(gateway: Any, make: Any) -> None:
    gateway.deploy(make.spec("embed"))
    limited, free = key_with(gateway, rate=1), key_with(gateway)
    assert (await gateway.post(INVOKE, GOOD, **limited)).status_code == 200
    answers = [await gateway.post(INVOKE, GOOD, **free) for _ in range(3)]
    assert [(answer.status_code, answer.headers.get("ratelimit")) for answer in answers] == [(200, None)] * 3
    assert (await gateway.post(INVOKE, GOOD, **limited)).status_code == 429
    assert (await gateway.get("/v1/functions", **limited)).status_code == 200  # only calls are counted


@pytest.mark.parametrize("accept", ["application/json", "text/event-stream"])
async def test_concurrent_calls_are_bounded_for_every_end(
    gateway: Any, make: Any, problem: Any, connection: Any, *, settle: Any, accept: str
) -> None:
    gateway.deploy(make.spec("embed"))
    gateway.queue.answer = lambda call: None
    key = key_with(gateway, concurrency=2)
    clients = [connection(INVOKE, GOOD, accept=accept, **key) for _ in range(2)]
    tasks = [client.start(gateway.app) for client in clients]
    await until_async(lambda: len(gateway.queue.calls) == 2)
    refused = await gateway.post(INVOKE, GOOD, accept=accept, **key)
    assert problem(refused) == (429, "rate_limited")
    assert refused.headers["ratelimit"] == '"concurrency";r=0'
    gateway.queue.calls[0].reply(b"[]")
    clients[1].left.set()
    gateway.clock.now += 1.0
    while not tasks[1].done():
        gateway.invoke.tick(gateway.clock.now)
        await asyncio.sleep(0)
    await tasks[0]
    gateway.queue.answer = lambda call: call.reply(b"[]")
    for _ in range(3):
        assert (await gateway.post(INVOKE, GOOD, **key)).status_code == 200
        await settle()


async def test_a_call_that_the_bus_rejected_releases_its_place(gateway: Any, make: Any) -> None:
    gateway.deploy(make.spec("embed"))
    gateway.queue.refuses = BusUnavailable("no")
    key = key_with(gateway, concurrency=1)
    assert [(await gateway.post(INVOKE, GOOD, **key)).status_code for _ in range(2)] == [503, 503]
    gateway.queue.refuses = None
    assert (await gateway.post(INVOKE, GOOD, **key)).status_code == 200


async def put(gateway: Whole, key: dict[str, str], invocation: str | None = None) -> httpx.Response:
    url = f"/v1/functions/queued/invocations/{invocation or new_invocation_id()}"
    return await gateway.http.put(url, content=GOOD, headers=key)


async def stored(bus: Bus) -> int:
    return sum((await streams.messages_per_subject(bus, subjects.ASYNC, subjects.async_queues("queued"))).values())


async def test_submitted_calls_of_a_key_are_bounded_until_they_end(nats: Any, make: Any, problem: Any) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("queued"), DIGEST)
        key = key_with(gateway, queued=3)
        first = new_invocation_id()
        answers = await asyncio.gather(put(gateway, key, first), *(put(gateway, key) for _ in range(9)))
        assert sorted(answer.status_code for answer in answers) == [202] * 3 + [429] * 7
        assert await stored(gateway.bus) == 3
        taken = next(answer.json()["id"] for answer in answers if answer.status_code == 202)
        assert (await put(gateway, key, taken)).status_code == 202  # a repeat is the same call
        refused = await put(gateway, key)
        assert problem(refused) == (429, "rate_limited")
        assert "3 submitted" in refused.json()["detail"]
        assert int(refused.headers["retry-after"]) >= 1
        record = (await call_records.read(gateway.bus, taken)) or pytest.fail("it is gone")
        await end(gateway, taken)
        await streams.delete_message(gateway.bus, subjects.ASYNC, record[0].queue_seq)
        assert (await put(gateway, key)).status_code == 202  # the full queue was counted again
        assert await stored(gateway.bus) == 3


async def test_two_gateways_count_the_queue_together_and_exchange_their_usage(nats: Any, make: Any) -> None:
    async with gateway_on(nats, "gw-1") as one, gateway_on(nats, "gw-2") as other:
        await one.deploys.deploy(make.spec("embed"), DIGEST)
        await until_async(lambda: "embed" in other.registry.functions)
        key = key_with(one, other, rate=0.001, burst=5)
        url = "/v1/functions/embed/submit"
        assert [(await each.http.post(url, content=GOOD, headers=key)).status_code for each in (one, one, other)] == [
            202, 202, 202,
        ]  # fmt: skip
        one.quotas.publish()
        principal = other.access.authenticate({b"authorization": key["authorization"].encode()})
        await until_async(lambda: b'"rate";r=2' in dict(other.quotas.headers(principal))[b"ratelimit"])
        other.quotas.publish()
        await until_async(lambda: b'"rate";r=2' in dict(one.quotas.headers(principal))[b"ratelimit"])
        used_up = [(await one.http.post(url, content=GOOD, headers=key)).status_code for _ in range(3)]
        assert used_up == [202, 202, 429]


async def test_a_schedule_that_is_run_now_is_a_call_of_the_requesting_key(nats: Any, make: Any, problem: Any) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("run-now"), DIGEST)
        wanted = {"function": "run-now", "cron": "0 6 * * *", "arguments": {"texts": ["a"]}}
        made = (await gateway.http.post("/v1/schedules", json=wanted)).json()
        await until_async(lambda: made["id"] in gateway.schedules.known)
        here = f"/v1/schedules/{made['id']}/run"
        by_rate, by_queue = key_with(gateway, rate=0.001, burst=1), key_with(gateway, queued=1)
        for key in (by_rate, by_queue):
            answers = [await gateway.http.post(here, headers=key) for _ in range(2)]
            assert [answer.status_code for answer in answers] == [202, 429]
            assert problem(answers[1]) == (429, "rate_limited")
        submitted = await gateway.http.post("/v1/functions/run-now/submit", content=GOOD, headers=by_queue)
        assert problem(submitted) == (429, "rate_limited")  # the calls of the schedule count as queued
        free = key_with(gateway)
        assert (await gateway.http.post(here, headers=free)).status_code == 202  # it has no limits
        await gateway.http.delete(f"/v1/schedules/{made['id']}", headers=free)


async def test_dead_letters_are_replayed_within_the_limits_of_the_key(nats: Any, make: Any, problem: Any) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("often-dead"), DIGEST)
        dead = [await submit(gateway, "often-dead") for _ in range(4)]
        for invocation in dead:
            await die(gateway, invocation)
        key = key_with(gateway, queued=2, rate=0.001, burst=2)
        url = "/v1/dlq/often-dead"
        replayed = await gateway.http.post(f"{url}/replay", headers=key)
        # It counts as one call of the rate, and as two queued calls.
        assert [each["letter"] for each in replayed.json()["replayed"]] == dead[:2]
        assert problem(await gateway.http.post(f"{url}/{dead[2]}/replay", headers=key)) == (429, "rate_limited")
        over = await gateway.http.post(f"{url}/replay", headers=key)
        assert problem(over) == (429, "rate_limited")
        assert "one call in 1000 s" in over.json()["detail"]
        free = key_with(gateway)
        left = (await gateway.http.get(url, headers=free)).json()["letters"]
        assert [each["id"] for each in left] == [dead[3], dead[2]]
        await gateway.http.delete(url, headers=free)


async def test_limits_are_set_with_a_key_and_listed(nats: Any, problem: Any) -> None:
    async with gateway_on(nats) as gateway:
        limits = {"rate": 50.0, "concurrency": 8, "queued": 1000}
        made = await gateway.http.post("/v1/keys", json={"scopes": ["admin"], "limits": limits})
        assert (made.status_code, made.json()["limits"]) == (201, limits)
        gateway.http.headers["authorization"] = f"Bearer {made.json()['key']}"
        assert (await gateway.http.get("/v1/keys")).json()["keys"][0]["limits"] == limits
        for wrong in ({"rate": -1}, {"concurrency": 0}, {"queued": "many"}, {"speed": 3}):
            refused = await gateway.http.post("/v1/keys", json={"scopes": ["read"], "limits": wrong})
            assert problem(refused) == (422, "invalid_input")
        assert (await gateway.http.delete(f"/v1/keys/{made.json()['id']}")).status_code == 204


async def test_the_limits_of_a_key_are_changed_at_once(nats: Any, make: Any, problem: Any) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("limited"), DIGEST)
        made = (await gateway.http.post("/v1/keys", json={"scopes": ["admin"], "limits": {"queued": 1}})).json()
        gateway.http.headers["authorization"] = f"Bearer {made['key']}"
        url, here = "/v1/functions/limited/submit", f"/v1/keys/{made['id']}/limits"

        async def submitted() -> int:
            return (await gateway.http.post(url, content=GOOD)).status_code

        assert [await submitted(), await submitted()] == [202, 429]
        changed = await gateway.http.put(here, json={"queued": 2})
        assert (changed.status_code, changed.json()["limits"]) == (200, {"queued": 2})
        assert [await submitted(), await submitted()] == [202, 429]
        assert (await gateway.http.put(here, json={})).json()["limits"] == {}
        assert await submitted() == 202
        assert problem(await gateway.http.put(here, json={"queued": 0})) == (422, "invalid_input")
        assert (await gateway.http.put("/v1/keys/none/limits", json={})).status_code == 404
        assert (await gateway.http.delete(f"/v1/keys/{made['id']}")).status_code == 204


async def test_a_key_that_the_watch_sends_again_keeps_its_used_quota(gateway: Any, make: Any) -> None:
    """The watch of the keys sends all keys again after a reconnect."""
    gateway.deploy(make.spec("embed"))
    key, secret = new_key("", ("admin",), 0.0, KeyLimits(rate=0.001, burst=2))
    headers = {"authorization": f"Bearer {secret}"}
    stored = encode(key)

    async def answered(limits: KeyLimits | None = None) -> Any:
        told = msgspec.msgpack.decode(stored, type=type(key))
        gateway.access.put(told if limits is None else msgspec.structs.replace(told, limits=limits))
        return (await gateway.post(INVOKE, GOOD, **headers)).status_code

    assert [await answered() for _ in range(3)] == [200, 200, 429]
    assert await answered(KeyLimits(rate=0.001, burst=2, concurrency=1)) == 429
    assert await answered(KeyLimits(rate=0.001, burst=3)) == 200


async def test_the_usage_of_a_key_is_deleted_with_it(gateway: Any, make: Any) -> None:
    gateway.deploy(make.spec("embed"))
    key, secret = new_key("", ("admin",), 0.0, KeyLimits(rate=0.001, burst=1))
    headers = {"authorization": f"Bearer {secret}"}
    gateway.access.put(key)
    assert [(await gateway.post(INVOKE, GOOD, **headers)).status_code for _ in range(2)] == [200, 429]
    gateway.registry.on_key(key.id, None)
    gateway.access.put(key)  # a deleted key never comes back; this shows that its quota was removed
    assert (await gateway.post(INVOKE, GOOD, **headers)).status_code == 200


async def test_a_chunk_of_a_map_uses_a_place_for_each_item(nats: Any, make: Any, problem: Any) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("mapped"), DIGEST)
        gateway.http.headers.update(key_with(gateway, queued=5) | {"content-type": "application/x-ndjson"})
        url = f"/v1/functions/mapped/maps/{new_map_id()}/items"
        chunk = b'{"texts":["a"]}\n' * 4
        answers = [await gateway.http.put(f"{url}/{first}", content=chunk) for first in (0, 4, 8)]
        assert [answer.status_code for answer in answers] == [202, 202, 429]  # each completely or not at all
        assert problem(answers[2]) == (429, "rate_limited")
        assert (await gateway.http.put(f"{url}/4", content=chunk)).status_code == 202  # it is stored already


async def test_the_usage_of_a_key_today_is_the_sum_of_runner_records(nats: Any, make: Any) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("dear"), DIGEST)
        key = key_with(gateway, gpu_s=100)
        url = "/v1/functions/dear/submit"
        looking = asyncio.create_task(gateway.quotas.run())
        try:
            assert (await gateway.http.post(url, content=GOOD, headers=key)).status_code == 202
            principal = gateway.access.authenticate({b"authorization": key["authorization"].encode()})
            # The usage was read.
            await until_async(lambda: b";t=" in dict(gateway.quotas.headers(principal))[b"ratelimit"])
            day = day_of(gateway.clock.time())
            for function, node, gpu_s in (("dear", "n1", 40.0), ("dear", "n2", 40.0), ("other", "n1", 30.0)):
                record = UsageKey(day, function, principal.id).record(node)
                await gateway.buckets.usage.put(record, encode(Usage(calls=1, gpu_s=gpu_s)))
            await gateway.buckets.usage.put(UsageKey(day, "dear", "another").record("n1"), encode(Usage(gpu_s=1e6)))
            await gateway.quotas.refresh_usage()
            refused = await gateway.http.post(url, content=GOOD, headers=key)
            assert (refused.status_code, refused.json()["code"]) == (429, "rate_limited")
            assert 0 < int(refused.headers["retry-after"]) <= 86_400
            other = key_with(gateway, gpu_s=111)
            assert (await gateway.http.post(url, content=GOOD, headers=other)).status_code == 202
        finally:
            looking.cancel()


async def test_an_invoke_with_a_stored_result_has_the_remainder_as_well(nats: Any, make: Any) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("kept"), DIGEST)
        headers = key_with(gateway, rate=0.001, burst=5) | {"idempotency-key": "k"}
        waiting = asyncio.create_task(gateway.http.post("/v1/functions/kept/invoke", content=GOOD, headers=headers))
        calls: list[Any] = []
        while not calls:
            listed = await gateway.http.get("/v1/calls?function=kept", headers=headers)
            calls = listed.json()["calls"]
        await end(gateway, calls[0]["id"])
        answer = await waiting
        assert (answer.status_code, answer.headers["ratelimit"]) == (200, '"rate";r=4;t=1000')
