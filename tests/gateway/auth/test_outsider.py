"""What a key of one team tries on the functions of another, beyond the matrix."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from gpufn_core.domain.engine import BuildState
from gpufn_core.domain.revision import Revision, RevisionState
from gpufn_core.home import Home
from gpufn_core.ids import Digest, invocation_id_for, new_ulid
from gpufn_core.protocol.codec import encode
from gpufn_core.spec.function_spec import EntryPoint, FunctionSpec, MethodSpec
from gpufn_gateway.auth.access import new_key
from gpufn_platform.bus.storage.key_value import Entry
from gpufn_platform.secrets.master_key import MasterKey
from tests.gateway.auth.matrix import Matrix, Objects, objects
from tests.gateway.whole import DIGEST, Whole, gateway_on
from tests.waiting import until_async

TEAM = ("deploy:prod/search/*", "invoke:prod/search/*")


class Outsider:
    """A client with the key of the team `search`. `own` and `foreign` have the same objects, `nothing` has none."""

    def __init__(self, gateway: Whole, own: Objects, foreign: Objects) -> None:
        self.gateway, self.own, self.foreign = gateway, own, foreign
        self.nothing = objects("prod/ads", "nothing")
        self.key, secret = new_key("team", TEAM, 0.0)
        gateway.access.put(self.key)
        self.headers = {"authorization": f"Bearer {secret}"}

    async def send(self, method: str, path: str, **options: Any) -> httpx.Response:
        return await self.gateway.http.request(method, path, headers=self.headers, **options)


@contextlib.asynccontextmanager
async def outside(nats: Any, folder: Path) -> AsyncIterator[Outsider]:
    master_key = MasterKey.from_env({}, Home(folder))
    master_key.create_file()
    async with gateway_on(nats, master_key=master_key) as gateway:
        base = f"matrix-{new_ulid()[-8:]}"  # tests share the bus, and revisions keep their numbers
        own, foreign = objects("prod/search", base), objects("prod/ads", base)
        matrix = Matrix(gateway, own, foreign)
        await matrix.prepare()
        outsider = Outsider(gateway, own, foreign)
        try:
            yield outsider
        finally:
            gateway.access.remove(outsider.key.id)
            await matrix.clean()


def refusal(answer: httpx.Response, side: Objects) -> tuple[int, str]:
    text = answer.text
    for name in sorted((*side, side.function.upper()), key=len, reverse=True):
        text = text.replace(name, "X")
    return answer.status_code, text


async def test_other_spellings_of_foreign_names_and_ids_find_nothing(nats: Any, tmp_path: Path) -> None:
    """Each request is compared with the same request about a function that does not exist."""
    paths = (
        ("GET", "/v1/functions/{0.function}"),
        ("HEAD", "/v1/functions/{0.function}"),
        ("GET", "/v1/functions/{0.function}.add"),
        ("GET", "/v1/functions/{upper}"),
        ("GET", "/v1/functions/{encoded}"),
        ("POST", "/v1/functions/{encoded}/invoke"),
        ("POST", "/v1/functions/{upper}/submit"),
        ("HEAD", "/v1/functions/{0.function}/revisions/1"),
        ("GET", "/v1/calls?function={0.function}"),
        ("GET", "/v1/maps?function={0.function}"),
        ("GET", "/v1/schedules?function={0.function}"),
        ("GET", "/v1/usage?function={0.function}"),
        ("GET", "/v1/models/{0.model}.net"),
        ("HEAD", "/v1/maps/{0.map}/outcomes"),
        ("HEAD", "/v1/invocations/{0.call}/result"),
        ("GET", "/v1/invocations/{0.map}-0"),
        ("GET", "/v1/dlq/{encoded}/{0.letter}/payload"),
        ("POST", "/v1/dlq/{encoded}/replay"),
        ("HEAD", "/v1/schedules/{0.schedule}"),
        ("HEAD", "/v1/builds/{0.build}"),
        ("GET", "/v1/builds/{0.build}?wait=30"),
        ("GET", "/v2/models/{encoded}"),
        ("POST", "/v2/models/{0.model}/infer"),
    )
    async with outside(nats, tmp_path) as outsider:
        for method, path in paths:
            answers = []
            for side in (outsider.foreign, outsider.nothing):
                encoded = side.function.replace("/", "%2F")
                url = path.format(side, upper=side.function.upper(), encoded=encoded)
                answer = await outsider.send(method, url)
                text = answer.text.replace(encoded, side.function)
                answers.append((answer.status_code, refusal(httpx.Response(answer.status_code, text=text), side)[1]))
            assert answers[0] == answers[1], path
            assert answers[0][0] == 404, path
        ids = outsider.foreign.call.upper(), outsider.foreign.map.upper()
        for path in (f"/v1/invocations/{ids[0]}", f"/v1/maps/{ids[1]}"):
            assert (await outsider.send("DELETE", path)).status_code == 404
        # A foreign id in the path of an own function: the objects of a function are stored under its name.
        letter = await outsider.send("GET", f"/v1/dlq/{outsider.own.function}/{outsider.foreign.letter}")
        assert letter.json()["code"] == "dead_letter_not_found"
        short = await outsider.send("GET", f"/v1/functions/{outsider.own.function.rpartition('/')[2]}")
        assert short.json()["name"] == outsider.own.function
        listed = await outsider.send("OPTIONS", f"/v1/functions/{outsider.foreign.function}")
        unknown = await outsider.send("OPTIONS", f"/v1/functions/{outsider.nothing.function}")
        assert (listed.status_code, listed.text) == (unknown.status_code, unknown.text)
        assert listed.status_code == 405
        for owner in ("platform", outsider.foreign.key, outsider.key.id.upper()):
            assert (await outsider.send("GET", f"/v1/keys/{owner}/webhook-secret")).status_code == 403


async def test_a_limit_counts_only_what_the_key_may_read(nats: Any, tmp_path: Path) -> None:
    """The foreign objects are newer."""
    async with outside(nats, tmp_path) as outsider:
        for path, kind in (("calls", "calls"), ("maps", "maps"), ("dlq", "letters"), ("builds", "builds")):
            listed = (await outsider.send("GET", f"/v1/{path}?limit=1")).json()[kind]
            assert [each["function"] in (outsider.own.function, outsider.own.model) for each in listed] == [True], path


async def test_values_of_env_are_shown_only_where_the_key_may_deploy(gateway: Any, make: Any) -> None:
    for name in ("prod/search/f", "prod/ads/f"):
        gateway.deploy(msgspec.structs.replace(make.spec(name), env={"TOKEN": "value"}))
    key, secret = new_key("", ("read", "deploy:prod/search/*"), 0.0)
    gateway.access.put(key)
    headers = {"authorization": f"Bearer {secret}"}
    functions = (await gateway.get("/v1/functions?env=values", **headers)).json()["functions"]
    assert {each["name"]: "env" in each["spec"] for each in functions} == {
        "embed": False, "prod/ads/f": False, "prod/search/f": True,
    }  # fmt: skip
    statuses = [
        (await gateway.get(f"/v1/functions/{name}?env=values", **headers)).status_code
        for name in ("prod/search/f", "prod/ads/f")
    ]
    assert statuses == [200, 403]


async def test_a_key_with_a_pattern_gives_a_function_no_further_secret(nats: Any, tmp_path: Path, make: Any) -> None:
    async with outside(nats, tmp_path) as outsider:
        gateway, name = outsider.gateway, f"{outsider.own.function}-secret"

        async def deploy(*secrets: str) -> httpx.Response:
            spec = FunctionSpec(name=name, entry=EntryPoint("app", "f"), methods=(MethodSpec(),), secrets=secrets)
            body = msgspec.json.encode({"spec": spec, "bundle": DIGEST, "check": False})
            return await outsider.send("POST", "/v1/functions", content=body)

        stored, unknown = await deploy("MATRIX_TOKEN"), await deploy("NO_SUCH_TOKEN")
        assert (stored.status_code, stored.text) == (unknown.status_code, unknown.text)
        assert stored.status_code == 403
        spec = FunctionSpec(name=name, entry=EntryPoint("app", "f"), methods=(MethodSpec(),), secrets=("MATRIX_TOKEN",))
        await gateway.deploys.deploy(spec, DIGEST)
        await until_async(lambda: name in gateway.registry.functions)
        await until_async(lambda: gateway.registry.revisions.get(name))
        assert (await deploy("MATRIX_TOKEN")).status_code == 201, "the active revision has it"
        assert (await deploy()).status_code == 201
        await until_async(lambda: gateway.registry.functions[name].active == 3)
        await until_async(lambda: 3 in gateway.registry.revisions[name])
        taken_away = [
            await deploy("MATRIX_TOKEN"),
            await outsider.send("POST", f"/v1/functions/{name}/rollback", json={"revision": 1}),
            await outsider.send("POST", f"/v1/functions/{name}/rollback"),
        ]
        assert [answer.status_code for answer in taken_away] == [403] * 3
        assert gateway.registry.functions[name].active == 3
        await gateway.deploys.delete(name)


@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_a_foreign_function_that_is_being_built_does_not_exist(gateway: Any, make: Any, method: str) -> None:
    building = Revision(
        function="prod/ads/new", number=1, spec=make.spec("prod/ads/new"), bundle=Digest("0" * 64), created_at=0.0,
        state=RevisionState.BUILDING,
    )  # fmt: skip
    gateway.registry.on_revision("prod/ads/new.1", Entry("prod/ads/new.1", encode(building), 1))
    key, secret = new_key("", TEAM, 0.0)
    gateway.access.put(key)
    path = "" if method == "DELETE" else "/revisions/1"
    async with gateway.client(authorization=f"Bearer {secret}") as client:
        answers = [await client.request(method, f"/v1/functions/prod/ads/{name}{path}") for name in ("new", "nothing")]
    assert [answer.status_code for answer in answers] == [404, 404]
    assert answers[0].text.replace("ads/new", "ads/nothing") == answers[1].text


async def test_a_build_that_waits_does_not_name_a_foreign_one(nats: Any, tmp_path: Path) -> None:
    async with outside(nats, tmp_path) as outsider:
        gateway = outsider.gateway
        ahead = gateway.builds.known[outsider.foreign.build]
        running = msgspec.structs.replace(ahead, state=BuildState.BUILDING, started_at=1.0)
        await gateway.buckets.builds.put(ahead.id, encode(running))
        await until_async(lambda: gateway.builds.known[ahead.id].state is BuildState.BUILDING)
        answer = await outsider.send("GET", f"/v1/builds/{outsider.own.build}")
        seen = answer.json()["ahead"]
        assert (seen["id"], seen["function"], seen["model"], seen["building_s"] > 0) == ("", "", "", True)
        assert outsider.foreign.model not in answer.text


async def test_a_build_without_a_function_belongs_to_no_team(nats: Any, tmp_path: Path, problem: Any) -> None:
    async with outside(nats, tmp_path) as outsider:
        gateway = outsider.gateway
        build = msgspec.structs.replace(gateway.builds.known[outsider.own.build], id=new_ulid(), function="")
        await gateway.buckets.builds.create(build.id, encode(build))
        await until_async(lambda: build.id in gateway.builds.known)
        for method in ("GET", "DELETE"):
            assert problem(await outsider.send(method, f"/v1/builds/{build.id}")) == (404, "build_not_found")
        listed = (await outsider.send("GET", "/v1/builds")).json()["builds"]
        assert build.id not in {each["id"] for each in listed}
        key, secret = new_key("", ("read",), 0.0)
        gateway.access.put(key)
        reader = {"authorization": f"Bearer {secret}"}
        statuses = [
            (await gateway.http.request(method, f"/v1/builds/{build.id}", headers=reader)).status_code
            for method in ("GET", "DELETE")
        ]
        gateway.access.remove(key.id)
        assert statuses == [200, 403]


async def test_nobody_can_take_the_id_that_the_platform_derives_for_another(nats: Any, tmp_path: Path) -> None:
    """Their parts can be known: the name of a function and the time of its schedule, or a key's id and an order."""
    async with outside(nats, tmp_path) as outsider:
        function = outsider.foreign.function
        for caller, key in ((f"schedule {function}", "1795219200"), (outsider.foreign.key, "order-1")):
            taken = invocation_id_for(function, caller, key)
            for path in (f"invocations/{taken}", f"maps/{taken}/items/0"):
                answer = await outsider.send("PUT", f"/v1/functions/{outsider.own.function}/{path}", content=b"{}")
                assert (answer.status_code, answer.json()["code"]) == (422, "invalid_input")


async def test_an_idempotency_key_belongs_to_the_key_that_sent_it(nats: Any, tmp_path: Path) -> None:
    async with outside(nats, tmp_path) as outsider:
        other, secret = new_key("colleague", TEAM, 0.0)
        outsider.gateway.access.put(other)
        ids = set()
        for headers in (outsider.headers, {"authorization": f"Bearer {secret}"}):
            answer = await outsider.gateway.http.post(
                f"/v1/functions/{outsider.own.function}/submit", content=b"{}",
                headers={**headers, "idempotency-key": "order-1"},
            )  # fmt: skip
            ids.add(answer.json()["id"])
        outsider.gateway.access.remove(other.id)
        assert len(ids) == 2
