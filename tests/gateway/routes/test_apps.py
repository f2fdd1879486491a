"""Functions in apps and environments: their paths, short names, and the rollback of an app."""

from __future__ import annotations

from typing import Any

import msgspec

from gpufn_core.spec.function_spec import FunctionSpec
from gpufn_gateway.auth.access import new_key
from gpufn_gateway.functions.deploy_checks import DeployOptions
from tests.gateway.whole import DIGEST, gateway_on

A, B = "prod/search/predict", "prod/ads/predict"


async def deploy(gateway: Any, spec: FunctionSpec, deploy_id: str = "", code: str = "") -> None:
    await gateway.deploys.deploy(spec, DIGEST, DeployOptions(check=False, deploy_id=deploy_id, code=code))


async def test_two_apps_have_a_function_of_the_same_name(nats: Any, make: Any, problem: Any) -> None:
    async with gateway_on(nats) as gateway:
        for name in (A, B):
            await deploy(gateway, make.spec(name))
        for name in (A, B):
            shown = (await gateway.http.get(f"/v1/functions/{name}")).json()
            assert (shown["name"], shown["spec"]["name"]) == (name, name)
        assert (await gateway.http.get("/v1/functions/-/ads/predict")).json()["name"] == B
        assert (await gateway.http.get("/v1/functions/prod%2Fads%2Fpredict")).json()["name"] == B
        ambiguous = await gateway.http.get("/v1/functions/predict")
        assert problem(ambiguous) == (409, "function_ambiguous")
        assert A in ambiguous.json()["detail"]
        assert B in ambiguous.json()["detail"]
        assert problem(await gateway.http.get("/v1/functions/dev/ads/predict")) == (404, "function_not_found")
        revisions = (await gateway.http.get(f"/v1/functions/{A}/revisions")).json()["revisions"]
        assert [each["number"] for each in revisions] == [1]
        assert (await gateway.http.get(f"/v1/functions/{A}/revisions/1")).json()["function"] == A
        assert (await gateway.http.delete(f"/v1/functions/{A}")).status_code == 204
        assert (await gateway.http.get("/v1/functions/predict")).json()["name"] == B
        await gateway.http.delete(f"/v1/functions/{B}")


async def test_a_submitted_call_and_a_schedule_have_the_full_name(nats: Any, make: Any) -> None:
    async with gateway_on(nats) as gateway:
        await deploy(gateway, make.spec("prod/search/nightly"))
        submitted = await gateway.http.post("/v1/functions/nightly/submit", json={"texts": ["x"]})
        assert submitted.status_code == 202
        listed = (await gateway.http.get("/v1/calls?function=search/nightly")).json()["calls"]
        assert [each["function"] for each in listed] == ["prod/search/nightly"]
        body = {"function": "nightly", "cron": "0 6 * * *", "arguments": {"texts": ["x"]}}
        schedule = (await gateway.http.post("/v1/schedules", json=body)).json()
        assert schedule["function"] == "prod/search/nightly"
        assert (await gateway.http.get(f"/v1/schedules/{schedule['id']}")).json()["id"] == schedule["id"]
        assert (await gateway.http.delete(f"/v1/schedules/{schedule['id']}")).status_code == 204
        await gateway.http.delete("/v1/functions/prod/search/nightly")


async def test_a_short_name_is_unique_for_the_key(nats: Any, make: Any, problem: Any) -> None:
    async with gateway_on(nats) as gateway:
        for name in ("score", "prod/search/score"):
            await deploy(gateway, make.spec(name))
        key, secret = new_key("ads", ("invoke:prod/search/score",), 1.0)
        gateway.access.put(key)
        bearer = {"authorization": f"Bearer {secret}"}
        mine = await gateway.http.post("/v1/functions/score/submit", json={"texts": []}, headers=bearer)
        assert (await gateway.http.get(mine.headers["location"], headers=bearer)).json()["function"] == (
            "prod/search/score"
        )
        foreign = await gateway.http.post("/v1/functions/default/default/score/submit", json={}, headers=bearer)
        unknown = await gateway.http.post("/v1/functions/default/default/nothing/submit", json={}, headers=bearer)
        assert problem(foreign) == problem(unknown) == (404, "function_not_found")
        assert foreign.json()["detail"].replace("score", "nothing") == unknown.json()["detail"]
        gateway.access.remove(key.id)
        for name in ("default/default/score", "prod/search/score"):
            assert (await gateway.http.delete(f"/v1/functions/{name}")).status_code == 204


async def test_an_app_returns_to_the_deploy_before(nats: Any, make: Any, problem: Any) -> None:
    def spec(name: str, timeout_s: float = 300.0) -> FunctionSpec:
        changed: FunctionSpec = msgspec.structs.replace(make.spec(f"prod/shop/{name}"), timeout_s=timeout_s)
        return changed

    async with gateway_on(nats) as gateway:

        async def active() -> dict[str, int]:
            functions = (await gateway.http.get("/v1/functions")).json()["functions"]
            return {each["name"]: each["active"] for each in functions if each["name"].startswith("prod/shop/")}

        async def rollback() -> Any:
            return await gateway.http.post("/v1/apps/prod/shop/rollback")

        for name in ("buy", "sell", "same"):
            await deploy(gateway, spec(name), "d1")
        assert problem(await rollback()) == (404, "revision_not_found")
        for name in ("buy", "sell"):
            await deploy(gateway, spec(name, 10.0), "d2")
        await deploy(gateway, spec("buy", 11.0), "d3")
        await deploy(gateway, spec("fresh"), "d3")
        changed = (await rollback()).json()["functions"]
        assert [(each["name"], each["active"]) for each in changed] == [("prod/shop/buy", 2)]
        assert await active() == {
            "prod/shop/buy": 2, "prod/shop/fresh": 1, "prod/shop/same": 1, "prod/shop/sell": 2,
        }  # fmt: skip
        await rollback()
        assert await active() == {
            "prod/shop/buy": 1, "prod/shop/fresh": 1, "prod/shop/same": 1, "prod/shop/sell": 1,
        }  # fmt: skip
        assert problem(await rollback()) == (404, "revision_not_found")
        assert problem(await gateway.http.post("/v1/apps/dev/shop/rollback")) == (404, "function_not_found")
        apps = (await gateway.http.get("/v1/apps")).json()["apps"]
        shop = next(each for each in apps if each["app"] == "shop")
        assert (shop["environment"], len(shop["functions"])) == ("prod", 4)
        for name in ("buy", "sell", "same", "fresh"):
            await gateway.http.delete(f"/v1/functions/prod/shop/{name}")
