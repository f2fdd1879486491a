"""The priority of a call: where it comes from, who may set it, and its queue. Where a bus is used, it is real."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from gpufn_core.protocol import subjects
from gpufn_core.spec.priority import Priority
from gpufn_core.spec.schedule import Schedule
from gpufn_gateway.auth.access import new_key
from gpufn_platform.bus.storage import streams
from gpufn_platform.queue import queue_position
from gpufn_platform.queue.records import call_records
from tests.gateway.submitted.test_submitted_calls import GOOD, die, submit
from tests.gateway.whole import DIGEST, gateway_on
from tests.waiting import until_async

HI, NORMAL, LOW = Priority


def key_of(gateway: Any, *scopes: str) -> tuple[str, str]:
    """Return the id of a new key, and its Authorization header."""
    key, secret = new_key("", scopes, 0.0)
    gateway.access.put(key)
    return key.id, f"Bearer {secret}"


@pytest.mark.parametrize(
    ("declared", "header", "becomes"), [(NORMAL, None, NORMAL), (LOW, None, LOW), (LOW, "hi", HI), (HI, "low", LOW)]
)
async def test_a_call_has_the_class_of_its_function_unless_it_names_another(
    gateway: Any, make: Any, *, declared: Priority, header: str | None, becomes: Priority
) -> None:
    gateway.deploy(make.spec("embed", priority=declared))
    given = {} if header is None else {"X-Gpufn-Priority": header}
    answer = await gateway.post("/v1/functions/embed/invoke", GOOD, **given)
    assert answer.status_code == 200
    assert gateway.queue.calls[0].fields["priority"] is becomes


@pytest.mark.parametrize("header", ["high", "HI", "", "1", "no\u00e9l"])
async def test_an_unknown_class_is_refused_with_the_known_ones(
    gateway: Any, make: Any, problem: Any, header: str
) -> None:
    gateway.deploy(make.spec("embed"))
    answer = await gateway.post("/v1/functions/embed/invoke", GOOD, **{"X-Gpufn-Priority": header.encode("latin-1")})
    assert problem(answer) == (422, "invalid_input")
    assert answer.json()["field"] == "X-Gpufn-Priority"
    assert "hi, normal or low" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("scopes", "declared", "header", "status"),
    [
        (("invoke:*",), NORMAL, "hi", 403),
        (("invoke:*",), NORMAL, "low", 200),
        (("invoke:*", "hi"), NORMAL, "hi", 200),
        (("admin",), NORMAL, "hi", 200),
        (("invoke:*",), HI, "hi", 200),  # the deployer chose this priority
        (("hi",), NORMAL, "hi", 404),  # this key may call no function
    ],
)
async def test_a_key_needs_the_scope_hi_to_raise_a_call(
    gateway: Any, make: Any, *, scopes: tuple[str, ...], declared: Priority, header: str, status: int
) -> None:
    gateway.deploy(make.spec("embed", priority=declared))
    id_, bearer = key_of(gateway, *scopes)
    answer = await gateway.post(
        "/v1/functions/embed/invoke", GOOD, **{"X-Gpufn-Priority": header, "Authorization": bearer}
    )
    assert answer.status_code == status
    assert [call.fields["owner"] for call in gateway.queue.calls] == [id_] * (status == 200)


async def test_a_key_needs_the_scope_hi_to_deploy_a_function_of_that_class(nats: Any, make: Any, problem: Any) -> None:
    async with gateway_on(nats) as gateway:
        body = msgspec.json.encode({"spec": make.spec("first-class", priority=HI), "bundle": DIGEST})
        answers = [
            await gateway.http.post(
                "/v1/functions", content=body, headers={"authorization": key_of(gateway, *scopes)[1]}
            )
            for scopes in (("deploy",), ("deploy", "hi"))
        ]
        assert problem(answers[0]) == (403, "forbidden")
        assert answers[1].status_code == 201


async def test_calls_of_a_schedule_have_its_class_and_class_hi_needs_the_right(
    nats: Any, make: Any, problem: Any
) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("timed"), DIGEST)
        wanted = {"function": "timed", "cron": "0 0 1 1 *", "arguments": {"texts": []}}

        async def add(priority: str, *scopes: str) -> Any:
            headers = {"authorization": key_of(gateway, *scopes)[1]}
            return await gateway.http.post("/v1/schedules", json=wanted | {"priority": priority}, headers=headers)

        assert problem(await add("hi", "invoke:timed")) == (403, "forbidden")
        assert problem(await add("urgent", "invoke:timed", "hi")) == (422, "invalid_input")
        made = [(await add("hi", "invoke:timed", "hi")).json(), (await add("low", "invoke:timed")).json()]
        assert [each["priority"] for each in made] == ["hi", "low"]
        plain, admin = ({"authorization": key_of(gateway, scope)[1]} for scope in ("invoke:timed", "admin"))
        high, low = (f"/v1/schedules/{each['id']}/run" for each in made)
        assert problem(await gateway.http.post(high, headers=plain)) == (403, "forbidden")
        assert (await gateway.http.post(low, headers=plain)).status_code == 202
        assert (await gateway.http.post(high, headers=admin)).status_code == 202
        stored = await streams.messages_per_subject(gateway.bus, subjects.ASYNC, subjects.async_queues("timed"))
        assert {subjects.queue_class(each) for each in stored} == {HI, LOW}
        schedule = Schedule("0 0 1 1 *", arguments={"texts": []}, priority=HI)
        body = msgspec.json.encode({"spec": make.spec("own-class", schedule=schedule), "bundle": DIGEST})
        headers = {"authorization": key_of(gateway, "deploy")[1]}
        assert problem(await gateway.http.post("/v1/functions", content=body, headers=headers)) == (403, "forbidden")


async def test_a_submitted_call_waits_in_the_queue_of_its_class_and_of_its_key(nats: Any, make: Any) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("classed"), DIGEST)
        mine, bearer = key_of(gateway, "admin")
        low = await submit(gateway, "classed", authorization=bearer, x_gpufn_priority="low")
        normal = await submit(gateway, "classed", authorization=bearer)
        stored = await streams.messages_per_subject(gateway.bus, subjects.ASYNC, subjects.async_queues_of(mine))
        assert stored == {
            subjects.async_queue("classed", 1, LOW, mine): 1,
            subjects.async_queue("classed", 1, NORMAL, mine): 1,
        }
        views = [
            (await gateway.http.get(f"/v1/invocations/{id_}", headers={"authorization": bearer})).json()
            for id_ in (low, normal)
        ]
        assert [(view["priority"], view["place"]) for view in views] == [("low", 2), ("normal", 1)]
        why = (await gateway.http.get("/v1/functions/classed/why", headers={"authorization": bearer})).json()
        assert why["classes"] == {"hi": 0, "normal": 1, "low": 1}


async def test_a_deleted_functions_calls_of_all_classes_are_cancelled(nats: Any, make: Any) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("deleted"), DIGEST)
        ids = [await submit(gateway, "deleted", x_gpufn_priority=priority.value) for priority in Priority]
        waiting = asyncio.create_task(
            gateway.http.post("/v1/functions/deleted/invoke", content=GOOD, headers={"x-gpufn-priority": "hi"})
        )
        await until_async(lambda: gateway.caller.pending)
        while (await queue_position.stored(gateway.bus, "deleted", 1)).total() < 4:
            pass
        assert (await gateway.http.delete("/v1/functions/deleted")).status_code == 204
        assert (await waiting).status_code == 409
        states = [(await gateway.http.get(f"/v1/invocations/{id_}")).json()["state"] for id_ in ids]
        assert states == ["cancelled"] * 3
        assert not await queue_position.stored(gateway.bus, "deleted", 1)


async def test_a_call_of_class_hi_is_replayed_only_with_the_right_to_class_hi(
    nats: Any, make: Any, problem: Any
) -> None:
    async with gateway_on(nats) as gateway:
        for name, options in (("hi-now-and-then", {}), ("hi-always", {"priority": HI})):
            await gateway.deploys.deploy(make.spec(name, **options), DIGEST)
        dead = [await submit(gateway, "hi-now-and-then", x_gpufn_priority=each) for each in ("hi", "normal")]
        always = await submit(gateway, "hi-always")
        for invocation in (*dead, always):
            await die(gateway, invocation)
        without, may = ({"authorization": key_of(gateway, "invoke:*", *more)[1]} for more in ((), ("hi",)))
        url = "/v1/dlq/hi-now-and-then"
        assert problem(await gateway.http.post(f"{url}/{dead[0]}/replay", headers=without)) == (403, "forbidden")
        replayed = (await gateway.http.post(f"{url}/replay", headers=without)).json()["replayed"]
        assert [each["letter"] for each in replayed] == dead[1:]
        assert (await gateway.http.post(f"/v1/dlq/hi-always/{always}/replay", headers=without)).status_code == 202
        assert (await gateway.http.post(f"{url}/{dead[0]}/replay", headers=may)).status_code == 202


async def test_a_replayed_call_keeps_its_class(nats: Any, make: Any) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("replayed"), DIGEST)
        dead = await submit(gateway, "replayed", x_gpufn_priority="low")
        await die(gateway, dead)
        again = (await gateway.http.post(f"/v1/dlq/replayed/{dead}/replay")).json()["id"]
        found = await call_records.read(gateway.bus, again)
        assert found is not None
        assert found[0].priority is LOW
