"""Splits over HTTP: what is refused, where calls go, and what ends a split."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gpufn_core.domain.revision import RevisionState
from gpufn_core.ids import new_invocation_id
from gpufn_core.protocol.codec import encode
from gpufn_core.protocol.reports import CallCounts, ControllerReport, FunctionStatus, RevisionStatus, WorkerCounts
from gpufn_gateway.buckets import decode_function
from gpufn_gateway.functions.deploy_checks import DeployOptions
from gpufn_gateway.functions.traffic_return import TrafficReturn
from tests.gateway.whole import DIGEST, Whole, gateway_on
from tests.waiting import until_async


async def deployed(gateway: Whole, spec: Any, revisions: int = 2) -> str:
    """Deploy revisions of a function, and make the first one active. Return its path."""
    for _ in range(revisions):
        await gateway.deploys.deploy(spec, DIGEST, DeployOptions(check=False))
    await until_async(lambda: len(gateway.registry.revisions.get(spec.name, ())) == revisions)
    await gateway.deploys.rollback(spec.name, 1)
    return f"/v1/functions/{spec.name}"


async def put(gateway: Whole, path: str, body: dict[str, Any]) -> Any:
    answer = await gateway.http.put(f"{path}/traffic", json=body)
    name = path.rpartition("/")[2]
    await until_async(lambda: gateway.registry.functions[name].traffic is not None or answer.status_code != 200)
    return answer


async def submitted(gateway: Whole, path: str, **headers: str) -> str:
    answer = await gateway.http.post(f"{path}/submit", json={"texts": []}, headers=headers)
    assert answer.status_code == 202
    return str(answer.headers["x-gpufn-revision"].rpartition("@")[2])


async def test_invalid_splits_are_refused(nats: Any, make: Any, problem: Any) -> None:
    async with gateway_on(nats) as gateway:
        path = await deployed(gateway, make.spec("refused"))
        for status, code, body in (
            (422, "invalid_input", {"weights": {"1": 90, "2": 20}}),
            (422, "invalid_input", {"weights": {"1": 110, "2": -10}}),
            (404, "revision_not_found", {"weights": {"1": 90, "7": 10}}),
            (404, "revision_not_found", {"mirror": {"revision": 7}}),
            (422, "invalid_input", {"headers": [{"name": "cookie", "value": "a", "revision": 2}]}),
            (422, "invalid_input", {"weights": {"1": 100}, "return_if": ["errors>2%"]}),
            (422, "invalid_input", {"weights": {"1": 50, "2": 50}, "return_if": ["p99>2%"]}),
            (422, "invalid_input", {"weights": {"1": 50, "2": 50}, "min_calls": 0}),
            (422, "invalid_input", {"weight": {"1": 50, "2": 50}}),
        ):
            answer = await gateway.http.put(f"{path}/traffic", json=body)
            assert problem(answer) == (status, code), body
        assert problem(await gateway.http.get("/v1/functions/nothing/traffic")) == (404, "function_not_found")
        await gateway.http.delete(path)


async def test_a_revision_that_cannot_be_called_gets_no_calls(nats: Any, make: Any, problem: Any) -> None:
    async with gateway_on(nats) as gateway:
        path = await deployed(gateway, make.spec("unready"), 3)
        name = "unready"
        for state, status in ((RevisionState.BUILDING, 409), (RevisionState.FAILED, 409), (RevisionState.RETIRED, 404)):
            record = gateway.registry.revision(name, 2)
            await gateway.revisions.change(f"{name}.2", lambda _: encode(msgspec.structs.replace(record, state=state)))  # noqa: B023
            await until_async(lambda: gateway.registry.revision(name, 2).state is state)  # noqa: B023
            answer = await gateway.http.put(f"{path}/traffic", json={"weights": {"1": 50, "2": 50}})
            assert answer.status_code == status, state
        await gateway.deploys.scale(name, None, 1)
        answer = await gateway.http.put(f"{path}/traffic", json={"weights": {"1": 50, "3": 50}})
        assert problem(answer) == (422, "invalid_spec")
        await gateway.http.delete(path)


async def test_the_view_of_a_function_has_its_split(nats: Any, make: Any) -> None:
    async with gateway_on(nats) as gateway:
        path = await deployed(gateway, make.spec("viewed"))
        assert (await gateway.http.get(path)).json()["traffic"] is None
        await put(gateway, path, {"weights": {"1": 90, "2": 10}, "mirror": {"revision": 2, "percent": 5}})
        split = {
            "weights": {"1": 90, "2": 10},
            "headers": [],
            "mirror": {"revision": 2, "percent": 5, "tolerance": 1e-5},
        }
        assert (await gateway.http.get(path)).json()["traffic"] == split
        assert (await gateway.http.get("/v1/functions")).json()["functions"][0]["traffic"] == split
        assert gateway.registry.split_functions() == ["viewed"]
        await gateway.http.delete(path)


async def test_calls_go_where_the_split_sends_them(nats: Any, make: Any) -> None:
    async with gateway_on(nats) as gateway:
        path = await deployed(gateway, make.spec("sends"), 3)
        rule = {"name": "X-Canary", "value": "on", "revision": 3}
        answer = await put(gateway, path, {"weights": {"1": 50, "2": 50}, "headers": [rule]})
        assert (answer.status_code, answer.json()["serving"]) == (200, 1)
        assert {await submitted(gateway, path) for _ in range(40)} == {"1", "2"}
        assert {await submitted(gateway, path, **{"x-canary": "on"}) for _ in range(3)} == {"3"}
        key = {"idempotency-key": "order 7"}
        assert len({await submitted(gateway, path, **key) for _ in range(5)}) == 1
        id_ = new_invocation_id()
        answers = [await gateway.http.put(f"{path}/invocations/{id_}", json={"texts": []}) for _ in range(5)]
        assert len({each.headers["x-gpufn-revision"] for each in answers}) == 1
        map_id = new_invocation_id()
        for first in range(5):
            chunk = await gateway.http.put(f"{path}/maps/{map_id}/items/{first}", content=b'{"texts":[]}\n')
            assert chunk.status_code == 202
        items = [(await gateway.http.get(f"/v1/invocations/{map_id}-{index}")).json()["revision"] for index in range(5)]
        assert len(set(items)) == 1
        target = gateway.registry.resolve("sends")
        assert [target.of("", revision=number).number for number in ("2", "3", "9")] == [2, 3, 1]
        shown = (await gateway.http.get(f"{path}/traffic")).json()
        assert [each["revision"] for each in shown["revisions"]] == [1, 2, 3]
        cleared = (await gateway.http.delete(f"{path}/traffic")).json()
        assert (cleared["weights"], cleared["set_at"]) == ({"1": 100}, None)
        await until_async(lambda: gateway.registry.functions["sends"].traffic is None)
        assert {await submitted(gateway, path) for _ in range(20)} == {"1"}
        await gateway.http.delete(path)


async def test_a_deploy_ends_a_split_when_it_serves(nats: Any, make: Any, problem: Any) -> None:
    async with gateway_on(nats) as gateway:
        path = await deployed(gateway, make.spec("ends"))
        await put(gateway, path, {"weights": {"1": 90, "2": 10}})
        function = await gateway.deploys.deploy(make.spec("ends"), DIGEST, DeployOptions(check=False))
        assert (function.active, function.serving) == (3, 1)
        assert function.traffic is not None  # until the controller moves `serving`
        await until_async(lambda: gateway.registry.functions["ends"].active == 3)
        refused = await gateway.http.put(f"{path}/traffic", json={"weights": {"1": 50, "3": 50}})
        assert problem(refused) == (409, "conflict")
        assert (await gateway.deploys.rollback("ends", 1)).traffic is None
        await gateway.http.delete(path)


async def test_all_calls_for_one_revision_make_it_active(nats: Any, make: Any) -> None:
    async with gateway_on(nats) as gateway:
        path = await deployed(gateway, make.spec("promotes"))
        await put(gateway, path, {"weights": {"1": 90, "2": 10}})
        view = (await gateway.http.put(f"{path}/traffic", json={"weights": {"2": 100}})).json()
        assert (view["active"], view["serving"], view["weights"]) == (2, 1, {"1": 90, "2": 10})
        view = (await gateway.http.put(f"{path}/traffic", json={"weights": {"1": 100, "2": 0}})).json()
        assert (view["active"], view["serving"], view["weights"], view["set_at"]) == (1, 1, {"1": 100}, None)
        await gateway.http.delete(path)


@pytest.mark.parametrize("is_replaced", [False, True])
async def test_a_return_restores_the_split_before(nats: Any, make: Any, is_replaced: bool) -> None:
    async with gateway_on(nats) as gateway:
        name = f"returns-{is_replaced}".lower()
        path = await deployed(gateway, make.spec(name))
        await put(gateway, path, {"weights": {"1": 90, "2": 10}, "return_if": ["errors>2%"]})
        await put(gateway, path, {"weights": {"1": 50, "2": 50}})
        split = await until_async(
            lambda: (split := gateway.registry.functions[name].traffic) and split.weights == {1: 50, 2: 50} and split
        )
        if is_replaced:
            await gateway.splits.clear(name)
        after = await gateway.splits.give_back(name, split, 2, "errors>2%: 5 of 100 failed")
        if is_replaced:
            assert (after.traffic, after.returned) == (None, None)
        else:
            assert after.traffic is not None
            assert after.returned is not None
            assert (after.traffic.weights, after.returned.weights) == ({1: 90, 2: 10}, "1=50, 2=50")
            again = await gateway.splits.give_back(name, after.traffic, 2, "errors>2%: 7 of 100 failed")
            assert again.traffic is None
        await gateway.http.delete(path)


@pytest.mark.parametrize("rules", [[], ["p99>1.5x"]])
async def test_a_return_does_not_restore_a_split_that_calls_the_bad_revision(
    nats: Any, make: Any, rules: list[str]
) -> None:
    async with gateway_on(nats) as gateway:
        name = f"recipe-{len(rules)}"
        path = await deployed(gateway, make.spec(name))
        # As `gpufn deploy --traffic 10%`, without rules; or with a rule that the revision does not break.
        await put(gateway, path, {"weights": {"1": 90, "2": 10}, "return_if": rules})
        await put(gateway, path, {"weights": {"1": 90, "2": 10}, "return_if": ["errors>2%"]})
        split = await until_async(
            lambda: (split := gateway.registry.functions[name].traffic) and split.before and split
        )
        after = await gateway.splits.give_back(name, split, 2, "errors>2%: 5 of 100 failed")
        assert (after.traffic, after.returned and after.returned.revision) == (None, 2)
        await gateway.http.delete(path)


async def test_a_return_does_not_restore_a_split_that_max_workers_no_longer_allows(nats: Any, make: Any) -> None:
    async with gateway_on(nats) as gateway:
        path = await deployed(gateway, make.spec("fits"), revisions=4)
        await put(gateway, path, {"weights": {"1": 80, "2": 10, "3": 10}})
        await put(gateway, path, {"weights": {"1": 90, "4": 10}, "return_if": ["errors>2%"]})
        await gateway.deploys.scale("fits", None, 2)
        split = await until_async(
            lambda: (split := gateway.registry.functions["fits"].traffic) and split.before and split
        )
        after = await gateway.splits.give_back("fits", split, 4, "its workers do not start")
        assert (after.traffic, after.max_workers) == (None, 2)
        await gateway.http.delete(path)


@pytest.mark.parametrize("is_of_this_split", [True, False])
async def test_a_split_returns_by_what_was_counted_since_it_was_set(
    nats: Any, make: Any, is_of_this_split: bool
) -> None:
    async with gateway_on(nats) as gateway:
        name = f"counted-{is_of_this_split}".lower()
        path = await deployed(gateway, make.spec(name))
        split = (await put(gateway, path, {"weights": {"1": 90, "2": 10}, "return_if": ["errors>2%"]})).json()
        bad = RevisionStatus(revision=2, workers=WorkerCounts(), recent=CallCounts(calls=100, errors=50))
        status = FunctionStatus(
            function=name,
            serving=1,
            workers=WorkerCounts(),
            split_at=split["set_at"] if is_of_this_split else split["set_at"] - 1,
            revisions=(bad,),
        )
        gateway.registry.statuses.take(ControllerReport("c", 1, 1.0, (status,)))
        await TrafficReturn(gateway.registry, gateway.splits, gateway.audit, leads=lambda: True).step()
        entry = await gateway.deploys.buckets.functions.get(name)
        assert entry is not None
        function = decode_function(entry.value)
        assert (function.traffic is None, function.returned is not None) == (is_of_this_split, is_of_this_split)
        await gateway.http.delete(path)
