"""Keys of a team, and the time of the last use of a key."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gpufn_core.errors import InvalidInput
from gpufn_gateway.auth.access import new_key
from tests.gateway.whole import DIGEST, gateway_on
from tests.waiting import until_async

OWN, FOREIGN = "prod/mine/predict", "prod/theirs/predict"


@contextlib.asynccontextmanager
async def a_team(nats: Any, make: Any) -> AsyncIterator[tuple[Any, Any]]:
    """A gateway with the team `mine`, as the administrator and as the team; its key may deploy and invoke."""
    async with gateway_on(nats) as gateway:
        for name in (OWN, FOREIGN):
            await gateway.deploys.deploy(make.spec(name), DIGEST)
        await gateway.http.put("/v1/teams/mine", json={"owns": ["*/mine/*"]})
        root = (await gateway.http.post("/v1/keys", json={"scopes": ["admin"]})).json()
        await until_async(lambda: gateway.access.keys)
        admin = {"authorization": f"Bearer {root['key']}"}
        body = {"scopes": ["deploy", "invoke:*"], "team": "mine"}
        made = (await gateway.http.post("/v1/keys", json=body, headers=admin)).json()
        await until_async(lambda: len(gateway.access.keys) == 2)

        async def send(method: str, path: str, is_admin: bool = False, **options: Any) -> Any:
            headers = admin if is_admin else {"authorization": f"Bearer {made['key']}"}
            return await gateway.http.request(method, path, headers=headers, **options)

        yield gateway, send
        for name in (OWN, FOREIGN):
            await send("DELETE", f"/v1/functions/{name}", is_admin=True)
        await send("DELETE", "/v1/teams/mine", is_admin=True)
        for key in (made["id"], root["id"]):
            await gateway.keys.delete(key)


async def test_a_team_sees_only_its_own(nats: Any, make: Any) -> None:
    async with a_team(nats, make) as (_, send):
        listed = (await send("GET", "/v1/functions")).json()["functions"]
        assert [each["name"] for each in listed] == [OWN]
        assert (await send("POST", "/v1/functions/predict/submit", json={"texts": []})).status_code == 202
        assert (await send("GET", f"/v1/functions/{FOREIGN}")).status_code == 404
        assert (await send("GET", "/v1/keys")).status_code == 403
        assert [team["name"] for team in (await send("GET", "/v1/teams")).json()["teams"]] == ["mine"]


async def test_the_scopes_follow_the_patterns_of_the_team(nats: Any, make: Any) -> None:
    async with a_team(nats, make) as (gateway, send):
        await send("PUT", "/v1/teams/mine", is_admin=True, json={"owns": ["*/theirs/*"]})
        await until_async(lambda: gateway.registry.teams.get("mine").owns == ("*/theirs/*",))
        assert [each["name"] for each in (await send("GET", "/v1/functions")).json()["functions"]] == [FOREIGN]
        await send("DELETE", "/v1/teams/mine", is_admin=True)
        await until_async(lambda: gateway.registry.teams.get("mine") is None)
        assert (await send("GET", "/v1/functions")).status_code == 403
        await send("PUT", "/v1/teams/mine", is_admin=True, json={"owns": ["*/mine/*"]})


async def test_the_last_use_is_listed_and_written_once(nats: Any, make: Any) -> None:
    async with a_team(nats, make) as (gateway, send):
        keys = (await send("GET", "/v1/keys", is_admin=True)).json()["keys"]
        used = {key["team"]: key["last_used_at"] for key in keys}
        assert used[""] is not None  # by this request
        assert used["mine"] is None
        await send("GET", "/v1/functions")
        await gateway.key_use.write()
        assert gateway.access.used == set()
        stored = await gateway.key_use.last_used()
        assert stored.keys() == {key["id"] for key in keys}


@pytest.mark.parametrize("scope", ["admin", "deploy:prod/mine/*", "invoke:f"])
def test_a_key_of_a_team_has_no_other_scopes(scope: str) -> None:
    with pytest.raises(InvalidInput):
        new_key("k", (scope,), 0.0, team="mine")


async def test_a_key_of_an_unknown_team_is_refused(nats: Any) -> None:
    async with gateway_on(nats) as gateway:
        answer = await gateway.http.post("/v1/keys", json={"scopes": ["deploy"], "team": "nobody"})
    assert (answer.status_code, answer.json()["field"]) == (422, "team")
