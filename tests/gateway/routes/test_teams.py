"""Teams: who owns which functions, and the limits of their calls."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gpufn_core.domain import team as teams
from gpufn_core.domain.usage import Usage, UsageKey, day_of
from gpufn_core.errors import InvalidSpec
from gpufn_core.ids import digest_of
from gpufn_core.protocol.codec import encode
from gpufn_core.spec.isolation import Isolation
from gpufn_core.spec.weights_spec import WeightsFile, WeightsSpec
from gpufn_gateway.auth.access import new_key
from tests.gateway.whole import BUNDLE, DIGEST, gateway_on
from tests.waiting import until_async


async def test_a_team_is_set_listed_and_removed(nats: Any, problem: Any) -> None:
    async with gateway_on(nats) as gateway:
        body = {"owns": ["prod/search/*", "ranker"], "weight": 2, "limits": {"workers": 10, "gpus": 1.5}}
        made = await gateway.http.put("/v1/teams/search", json=body)
        assert made.json() == {"name": "search", **body}
        for pattern in ("prod/*", "*/search/*", "prod/search/predict", "ranker", "*"):
            other = await gateway.http.put("/v1/teams/other", json={"owns": ["dev/ads/*", pattern]})
            assert problem(other) == (409, "conflict"), pattern
        assert (await gateway.http.put("/v1/teams/other", json={"owns": ["dev/search/*"]})).status_code == 200
        assert (await gateway.http.put("/v1/teams/search", json={"owns": ["prod/search/*"]})).json()["owns"] == [
            "prod/search/*"
        ]
        listed = (await gateway.http.get("/v1/teams")).json()["teams"]
        assert [team["name"] for team in listed] == ["other", "search"]
        for name in ("other", "search"):
            assert (await gateway.http.delete(f"/v1/teams/{name}")).status_code == 204
        assert (await gateway.http.delete("/v1/teams/search")).status_code == 404


@pytest.mark.parametrize(
    ("name", "body", "field"),
    [
        ("Search", {"owns": ["*"]}, "team"),
        ("search", {"owns": []}, "owns"),
        ("search", {"owns": ["prod/se*"]}, "owns"),
        ("search", {"owns": ["prod/search"]}, "owns"),
        ("search", {"owns": ["*"], "weight": 0}, "weight"),
        ("search", {"owns": ["*"], "limits": {"workers": -1}}, "limits.workers"),
        ("search", {"owns": ["*"], "limits": {"queued": 0}}, "limits.queued"),
        ("search", {"owns": ["*"], "limits": {"storage": 1}}, "limits.storage"),
        ("search", {"owns": ["*"], "isolation": "gvisor"}, "isolation"),
        ("search", {"owns": ["*"], "callers": ["prod/se*"]}, "callers"),
        ("search", {"owns": ["*"], "trust_domains": ["team/ads"]}, "trust_domains"),
    ],
)
async def test_a_wrong_team_names_the_field(nats: Any, name: str, body: dict[str, Any], field: str) -> None:
    async with gateway_on(nats) as gateway:
        answer = await gateway.http.put(f"/v1/teams/{name}", json=body)
        assert (answer.status_code, answer.json()["field"]) == (422, field)


async def test_the_queued_calls_of_a_team_are_limited_together(nats: Any, make: Any, problem: Any) -> None:
    async with gateway_on(nats) as gateway:
        names = ("prod/batch/one", "prod/batch/two", "free")
        for name in names:
            await gateway.deploys.deploy(make.spec(name), DIGEST)
        await gateway.http.put("/v1/teams/batch", json={"owns": ["prod/batch/*"], "limits": {"queued": 2}})

        async def submit(name: str) -> Any:
            return await gateway.http.post(f"/v1/functions/{name}/submit", json={"texts": []})

        assert [(await submit(name)).status_code for name in names] == [202, 202, 202]
        refused = await submit("prod/batch/one")
        assert problem(refused) == (429, "rate_limited")
        assert "team batch" in refused.json()["detail"]
        assert (await submit("free")).status_code == 202
        await gateway.http.delete("/v1/teams/batch")
        assert (await submit("prod/batch/one")).status_code == 202
        for name in names:
            await gateway.http.delete(f"/v1/functions/{name}")


async def test_the_gpu_seconds_of_a_team_are_the_sum_of_its_functions(nats: Any, make: Any, problem: Any) -> None:
    async with gateway_on(nats) as gateway:
        for name in ("prod/spent/f", "kept"):
            await gateway.deploys.deploy(make.spec(name), DIGEST)
        day = day_of(gateway.clock.time())
        for name in ("prod/spent/f", "kept"):
            await gateway.buckets.usage.put(UsageKey(day, name, "platform").record("a"), encode(Usage(1, gpu_s=60.0)))
        await gateway.http.put("/v1/teams/spent", json={"owns": ["prod/spent/*"], "limits": {"gpu_s": 100}})
        assert (await gateway.http.post("/v1/functions/prod/spent/f/submit", json={"texts": []})).status_code == 202
        await gateway.buckets.usage.put(UsageKey(day, "prod/spent/f", "k").record("b"), encode(Usage(1, gpu_s=40.0)))
        await gateway.quotas.refresh_usage()
        refused = await gateway.http.post("/v1/functions/prod/spent/f/submit", json={"texts": []})
        assert problem(refused) == (429, "rate_limited")
        assert (await gateway.http.post("/v1/functions/kept/submit", json={"texts": []})).status_code == 202
        await gateway.http.delete("/v1/teams/spent")
        for name in ("prod/spent/f", "kept"):
            await gateway.http.delete(f"/v1/functions/{name}")


async def test_a_team_is_bound_to_a_tier(nats: Any, make: Any, problem: Any) -> None:
    async with gateway_on(nats) as gateway:
        weak = make.spec("prod/search/rank")
        strong = msgspec.structs.replace(weak, isolation=Isolation.SANDBOX)
        bound = {"owns": ["prod/search/*"], "isolation": "sandbox"}
        await gateway.deploys.deploy(weak, DIGEST)
        refused = await gateway.http.put("/v1/teams/search", json=bound)
        assert problem(refused) == (409, "conflict")
        assert "prod/search/rank" in refused.json()["detail"]
        await gateway.deploys.deploy(strong, DIGEST)
        assert (await gateway.http.put("/v1/teams/search", json=bound)).json()["isolation"] == "sandbox"
        back = {"revision": 1}
        rolled_back = await gateway.http.post("/v1/functions/prod/search/rank/rollback", json=back)
        assert problem(rolled_back) == (422, "invalid_spec")
        assert problem(await gateway.http.post("/v1/apps/prod/search/rollback")) == (422, "invalid_spec")
        for spec in (weak, msgspec.structs.replace(weak, isolation=Isolation.PROCESS)):
            with pytest.raises(InvalidSpec):
                await gateway.deploys.deploy(spec, DIGEST)
        await gateway.deploys.deploy(msgspec.structs.replace(weak, isolation=Isolation.CONTAINER), DIGEST)
        await gateway.deploys.deploy(make.spec("prod/ads/rank"), DIGEST)
        await gateway.http.delete("/v1/teams/search")
        for name in ("prod/search/rank", "prod/ads/rank"):
            await gateway.http.delete(f"/v1/functions/{name}")


async def test_a_team_sees_its_own_use_and_limits_only(nats: Any, make: Any) -> None:
    async with gateway_on(nats) as gateway:
        for name in ("prod/seen/f", "prod/other/f"):
            await gateway.deploys.deploy(make.spec(name), DIGEST)
        day = day_of(gateway.clock.time())
        used = Usage(1, run_s=5.0, gpu_s=2.5)
        await gateway.buckets.usage.put(UsageKey(day, "prod/seen/f", "k").record("a"), encode(used))
        limits = {"gpus": 4.0, "queued": 10}
        await gateway.http.put("/v1/teams/seen", json={"owns": ["prod/seen/*"], "limits": limits})
        await gateway.http.put("/v1/teams/other", json={"owns": ["prod/other/*"]})
        await gateway.http.post("/v1/functions/prod/seen/f/submit", json={"texts": []})
        seen = {}
        for scope in ("read:prod/seen/f", "deploy:prod/*", "read:dev/seen/*", "read"):
            key, secret = new_key("", (scope, "deploy:prod/other2/*"), 0.0)
            gateway.access.put(key)
            answer = await gateway.http.get("/v1/teams", headers={"authorization": f"Bearer {secret}"})
            gateway.access.remove(key.id)
            seen[scope] = {team["name"]: team for team in answer.json()["teams"]}
        assert {scope: sorted(teams) for scope, teams in seen.items()} == {
            "read:prod/seen/f": ["seen"], "deploy:prod/*": [], "read:dev/seen/*": [], "read": ["other", "seen"],
        }  # fmt: skip
        team = seen["read:prod/seen/f"]["seen"]
        assert team["limits"] == limits
        assert team["use"] == {
            "workers": 0, "gpus": 0.0, "borrowed_gpus": 0.0, "queued": 1, "run_s": 5.0, "gpu_s": 2.5,
            "stored_bytes": len(BUNDLE), "functions": 1,
        }  # fmt: skip
        for name in ("seen", "other"):
            await gateway.http.delete(f"/v1/functions/prod/{name}/f")
            await gateway.http.delete(f"/v1/teams/{name}")


async def test_a_deploy_beyond_the_storage_of_its_team_is_refused(nats: Any, make: Any, problem: Any) -> None:
    """A file that the team already has counts once, with the size of the upload, not the declared size."""
    async with gateway_on(nats) as gateway:
        big = b"weights of a team" * 100
        digest = digest_of(big)
        await gateway.http.put(f"/v1/artifacts/{digest}", content=big)
        weights = WeightsSpec(source="./w", files=(WeightsFile("w", 0, digest),))

        async def deploy(name: str, *files: WeightsSpec, **headers: str) -> Any:
            spec = msgspec.structs.replace(make.spec(name), weights=files)
            body = msgspec.json.encode({"spec": spec, "bundle": DIGEST, "check": False})
            return await gateway.http.post("/v1/functions", content=body, headers=headers)

        async def limit(stored_bytes: int) -> None:
            team = {"owns": ["prod/hoard/*"], "limits": {"stored_bytes": stored_bytes}}
            assert (await gateway.http.put("/v1/teams/hoard", json=team)).status_code == 200

        await limit(len(BUNDLE) + len(big) - 1)
        for name in ("prod/hoard/a", "prod/hoard/b"):
            assert (await deploy(name)).status_code == 201
        refused = await deploy("prod/hoard/b", weights)
        assert problem(refused) == (409, "conflict")
        assert "team hoard" in refused.json()["detail"]
        assert "prod/hoard/a" in refused.json()["detail"]
        key, secret = new_key("", ("deploy:prod/hoard/b",), 0.0)
        gateway.access.put(key)
        hidden = await deploy("prod/hoard/b", weights, authorization=f"Bearer {secret}")
        gateway.access.remove(key.id)
        assert problem(hidden) == (409, "conflict")
        assert "prod/hoard/a" not in hidden.json()["detail"], "the key may not see it"
        assert gateway.registry.functions["prod/hoard/b"].active == 1
        assert (await deploy("free", weights)).status_code == 201, "it belongs to no team"
        await limit(len(BUNDLE) + len(big))
        for name in ("prod/hoard/a", "prod/hoard/b"):
            assert (await deploy(name, weights)).status_code == 201
        stored = (await gateway.http.get("/v1/teams")).json()["teams"][0]["use"]["stored_bytes"]
        assert stored == len(BUNDLE) + len(big)
        await limit(0)
        assert (await deploy("prod/hoard/a", weights)).status_code == 201, "it adds nothing"
        await gateway.http.delete("/v1/teams/hoard")
        for name in ("prod/hoard/a", "prod/hoard/b", "free"):
            await gateway.http.delete(f"/v1/functions/{name}")


async def test_the_functions_of_a_team_are_limited(nats: Any, make: Any, problem: Any) -> None:
    async with gateway_on(nats) as gateway:
        names = [f"prod/many/{name}" for name in "abc"]

        async def deploy(name: str) -> Any:
            body = msgspec.json.encode({"spec": make.spec(name), "bundle": DIGEST, "check": False})
            answer = await gateway.http.post("/v1/functions", content=body)
            if answer.status_code == 201:
                await until_async(lambda: name in gateway.registry.functions)
            return answer

        team = {"owns": ["prod/many/*"], "limits": {"functions": 2}}
        await gateway.http.put("/v1/teams/many", json=team)
        assert [(await deploy(name)).status_code for name in (*names[:2], names[0], "free")] == [201] * 4
        refused = await deploy(names[2])
        assert problem(refused) == (409, "conflict")
        assert "team many" in refused.json()["detail"]
        assert (await gateway.http.get("/v1/teams")).json()["teams"][0]["use"]["functions"] == 2
        await gateway.http.delete(f"/v1/functions/{names[0]}")
        await until_async(lambda: names[0] not in gateway.registry.functions)
        assert (await deploy(names[2])).status_code == 201
        await gateway.http.delete("/v1/teams/many")
        for name in (*names[1:], "free"):
            await gateway.http.delete(f"/v1/functions/{name}")


async def test_the_functions_of_a_team_without_a_limit_are_bounded(
    nats: Any, make: Any, problem: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teams, "MAX_FUNCTIONS", 0)
    async with gateway_on(nats) as gateway:
        await gateway.http.put("/v1/teams/many", json={"owns": ["prod/many/*"]})
        body = msgspec.json.encode({"spec": make.spec("prod/many/a"), "bundle": DIGEST, "check": False})
        assert problem(await gateway.http.post("/v1/functions", content=body)) == (409, "conflict")
        await gateway.http.delete("/v1/teams/many")
