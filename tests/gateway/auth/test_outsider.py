"""Attempts of one team's key on the functions of another team, beyond the matrix."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from gpufn_core.domain.devices.engine import BuildState
from gpufn_core.domain.revision import Revision, RevisionState
from gpufn_core.home import Home
from gpufn_core.ids import Digest, invocation_id_for, new_ulid
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import encode
from gpufn_core.protocol.messages import LogLine
from gpufn_core.spec.function_spec import EntryPoint, FunctionSpec, MethodSpec
from gpufn_gateway.auth.access import new_key
from gpufn_gateway.functions.deploy_checks import DeployOptions
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage.key_value import Entry
from gpufn_platform.secrets.envelope import decode_secret
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
        administrator, secret_of_admin = new_key("administrator", ("admin",), 0.0)
        gateway.access.put(administrator)
        self.keys = self.key.id, administrator.id
        self.admin = {"authorization": f"Bearer {secret_of_admin}"}
        self.headers = {"authorization": f"Bearer {secret}"}

    async def send(self, method: str, path: str, **options: Any) -> httpx.Response:
        return await self.gateway.http.request(method, path, headers=self.headers, **options)


@contextlib.asynccontextmanager
async def outside(nats: Any, folder: Path) -> AsyncIterator[Outsider]:
    master_key = MasterKey.from_env({}, Home(folder))
    master_key.create_file()
    async with gateway_on(nats, master_key=master_key, history=folder / "history") as gateway:
        base = f"matrix-{new_ulid()[-8:]}"  # tests share the bus, and revisions keep their numbers
        own, foreign = objects("prod/search", base), objects("prod/ads", base)
        matrix = Matrix(gateway, own, foreign)
        await matrix.prepare()
        outsider = Outsider(gateway, own, foreign)
        try:
            yield outsider
        finally:
            for key in outsider.keys:
                gateway.access.remove(key)
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
        ("GET", "/v1/history?subject=function:{0.function}"),
        ("GET", "/v1/history?subject=function:{0.function}@1"),
        ("GET", "/v1/events?subject=function:{0.function}"),
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


async def test_a_foreign_id_causes_the_work_of_an_unknown_one(
    nats: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the response needed one read instead of three, so its time revealed that the call exists."""
    reads: list[str] = []
    request = Bus.request_server

    async def counted(bus: Bus, subject: str, *given: Any, **options: Any) -> Any:
        reads.append(subject)
        return await request(bus, subject, *given, **options)

    async with outside(nats, tmp_path) as outsider:
        monkeypatch.setattr(Bus, "request_server", counted)
        for path in ("/v1/invocations/{0.call}", "/v1/invocations/{0.call}/result", "/v1/maps/{0.map}"):
            counts = []
            for side in (outsider.foreign, outsider.nothing):
                reads.clear()
                assert (await outsider.send("GET", path.format(side))).status_code == 404
                counts.append(len([subject for subject in reads if "GET" in subject]))
            assert counts[0] == counts[1] > 0, path


async def test_a_limit_counts_only_readable_records(nats: Any, tmp_path: Path) -> None:
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


class Deployer:
    """Deploys one function of the team `search` with secrets, as the team or as an administrator."""

    def __init__(self, outsider: Outsider) -> None:
        self.outsider, self.gateway = outsider, outsider.gateway
        self.name = f"{outsider.own.function}-secret"

    def body(self, secrets: tuple[str, ...]) -> bytes:
        spec = FunctionSpec(name=self.name, entry=EntryPoint("app", "f"), methods=(MethodSpec(),), secrets=secrets)
        return msgspec.json.encode({"spec": spec, "bundle": DIGEST, "check": False})

    async def deploy(self, *secrets: str) -> httpx.Response:
        return await self._settled(await self.outsider.send("POST", "/v1/functions", content=self.body(secrets)))

    async def deploy_as_admin(self, *secrets: str) -> None:
        spec = FunctionSpec(name=self.name, entry=EntryPoint("app", "f"), methods=(MethodSpec(),), secrets=secrets)
        await self.gateway.deploys.deploy(spec, DIGEST, DeployOptions(check=False))
        await until_async(lambda: self.name in self.gateway.registry.functions)
        await until_async(lambda: self.active in self.gateway.registry.revisions.get(self.name, {}))

    async def rollback(self, revision: int | None = None) -> httpx.Response:
        body = {} if revision is None else {"revision": revision}
        return await self.outsider.send("POST", f"/v1/functions/{self.name}/rollback", json=body)

    async def move_calls(self) -> None:
        """Move the calls to the active revision, as a controller does."""
        moved = msgspec.structs.replace(self.gateway.registry.functions[self.name], serving=self.active)
        await self.gateway.buckets.functions.put(self.name, encode(moved))

    async def set_as_admin(self, secret: str) -> None:
        answer = await self.gateway.http.put(f"/v1/secrets/{secret}", json={"value": "v"}, headers=self.outsider.admin)
        assert answer.status_code == 200, answer.text

    @property
    def active(self) -> int:
        return self.gateway.registry.functions[self.name].active

    async def _settled(self, answer: httpx.Response) -> httpx.Response:
        if answer.status_code == 201:
            number = answer.json()["active"]
            await until_async(lambda: self.name in self.gateway.registry.functions and self.active == number)
            await until_async(lambda: number in self.gateway.registry.revisions[self.name])
        return answer


async def test_a_key_with_a_pattern_grants_a_function_no_wider_secret(nats: Any, tmp_path: Path) -> None:
    async with outside(nats, tmp_path) as outsider:
        team = Deployer(outsider)
        await team.set_as_admin("WIDE_TOKEN")
        stored, unknown = await team.deploy("WIDE_TOKEN"), await team.deploy("NONE_TOKEN")
        assert stored.text.replace("WIDE", "NONE").partition("request_id")[0] == unknown.text.partition("request_id")[0]
        assert (stored.status_code, unknown.status_code) == (422, 422)
        assert "gpufn secrets set WIDE_TOKEN --env prod --app search" in stored.json()["detail"]
        await team.deploy_as_admin("WIDE_TOKEN")
        assert (await team.deploy("WIDE_TOKEN")).status_code == 201, "the active revision has it"
        assert (await team.deploy()).status_code == 201
        taken_away = [await team.rollback(1), await team.rollback(), await team.deploy("WIDE_TOKEN")]
        assert [answer.status_code for answer in taken_away] == [403, 403, 422]
        assert team.active == 3
        await team.gateway.deploys.delete(team.name)
        await team.gateway.buckets.secrets.delete("WIDE_TOKEN")


async def test_a_team_uses_its_own_secret_and_reaches_no_wider_one_through_it(nats: Any, tmp_path: Path) -> None:
    """The team deploys with a secret of its app, and then removes it, so that the wider one would be the next."""
    own = "/v1/secrets/MY_TOKEN?scope=prod/search/*"
    async with outside(nats, tmp_path) as outsider:
        team = Deployer(outsider)
        for wider in ("MY_TOKEN", "MY_TOKEN?scope=prod/*"):
            await team.set_as_admin(wider)
        assert (await outsider.send("PUT", own, json={"value": "mine"})).status_code == 200
        assert (await team.deploy("MY_TOKEN")).status_code == 201
        changed = await outsider.send("PUT", own, json={"value": "mine too"})
        assert changed.json()["functions"] == [team.name]
        removed = await outsider.send("DELETE", own)
        assert removed.status_code == 409, "the function would have no secret"
        assert (await team.deploy()).status_code == 201
        await team.move_calls()
        assert (await outsider.send("DELETE", own)).status_code == 204
        # The revisions with the secret can only receive the secret of the app.
        revisions = team.gateway.registry.revisions[team.name]
        assert [revisions[number].secret_scopes for number in (1, 2)] == [{"MY_TOKEN": "prod/search/*"}] * 2
        assert (await team.deploy("MY_TOKEN")).status_code == 422
        await team.gateway.deploys.delete(team.name)
        for key in ("MY_TOKEN", "prod/MY_TOKEN"):
            await team.gateway.buckets.secrets.delete(key)


async def test_a_key_for_one_function_uses_and_sets_no_secret_of_the_app(nats: Any, tmp_path: Path) -> None:
    async with outside(nats, tmp_path) as outsider:
        team = Deployer(outsider)
        await team.set_as_admin("APP_TOKEN?scope=prod/search/*")
        key, secret = new_key("", (f"deploy:{team.name}",), 0.0)
        team.gateway.access.put(key)
        outsider.headers = {"authorization": f"Bearer {secret}"}
        stored, unknown = await team.deploy("APP_TOKEN"), await team.deploy("NOT_TOKEN")
        own = await outsider.send("PUT", "/v1/secrets/APP_TOKEN?scope=prod/search/*", json={"value": "mine"})
        assert [answer.status_code for answer in (stored, unknown, own)] == [403, 403, 404]
        assert (await outsider.send("GET", "/v1/secrets")).json() == {"secrets": []}
        team.gateway.access.remove(key.id)
        await team.gateway.buckets.secrets.delete("prod/search/APP_TOKEN")


async def test_a_secret_of_a_revision_that_is_being_built_is_not_removed(nats: Any, tmp_path: Path) -> None:
    async with outside(nats, tmp_path) as outsider:
        gateway, name = outsider.gateway, f"{outsider.own.function}-built"
        own = "/v1/secrets/BUILT_TOKEN?scope=prod/search/*"
        await outsider.send("PUT", own, json={"value": "mine"})
        spec = FunctionSpec(name=name, entry=EntryPoint("app", "f"), methods=(MethodSpec(),), secrets=("BUILT_TOKEN",))
        building = Revision(
            function=name, number=1, spec=spec, bundle=Digest(DIGEST), created_at=0.0, state=RevisionState.BUILDING,
            secret_scopes={"BUILT_TOKEN": "prod/search/*"},
        )  # fmt: skip
        gateway.registry.on_revision(f"{name}.1", Entry(f"{name}.1", encode(building), 1))
        assert (await outsider.send("DELETE", own)).status_code == 409
        gateway.registry.on_revision(f"{name}.1", None)
        assert (await outsider.send("DELETE", own)).status_code == 204


async def test_foreign_secrets_do_not_exist(nats: Any, tmp_path: Path) -> None:
    async with outside(nats, tmp_path) as outsider:
        team = Deployer(outsider)
        await team.set_as_admin("A_SECRET?scope=prod/ads/*")
        for method, scope in itertools.product(
            ("PUT", "DELETE"), ("*", "prod/*", "prod/ads/*", "dev/search/*", "default/default/*")
        ):
            body = {"content": b'{"value": "theirs"}'} if method == "PUT" else {}
            answers = []
            for name in ("A_SECRET", "NO_SECRET"):
                answer = await outsider.send(method, f"/v1/secrets/{name}?scope={scope}", **body)
                answers.append((answer.status_code, refusal(answer, outsider.own)[1].replace(name, "X")))
            assert answers[0][0] == 404, (method, scope)
            assert [text.partition("request_id")[0] for _, text in answers[:1]] == [
                text.partition("request_id")[0] for _, text in answers[1:]
            ]
        listed = (await outsider.send("GET", "/v1/secrets")).json()["secrets"]
        assert {each["scope"] for each in listed} == {"prod/search/*"}
        record = await team.gateway.buckets.secrets.get("prod/ads/A_SECRET")
        assert record is not None
        assert decode_secret(record.value).version == 1, "no client has set it again"
        await team.gateway.buckets.secrets.delete("prod/ads/A_SECRET")


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


async def test_a_client_cannot_use_the_id_that_the_platform_derives_for_another(nats: Any, tmp_path: Path) -> None:
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


async def test_a_deleted_key_follows_no_logs_any_longer(nats: Any, tmp_path: Path, connection: Any) -> None:
    """An open stream continued for as long as its connection."""
    async with outside(nats, tmp_path) as outsider:
        gateway, name = outsider.gateway, outsider.own.function
        key, secret = new_key("left the team", TEAM, 0.0)
        gateway.access.put(key)
        client = connection(f"/v1/functions/{name}/logs", authorization=f"Bearer {secret}")
        client.scope |= {"method": "GET", "query_string": b"tail=0&follow=true"}
        client._body.clear()
        task = client.start(gateway.app)

        async def say(text: str) -> None:
            line = LogLine(1.0, name, 1, "w-1", "stdout", text)
            await gateway.bus.publish_stored(subjects.logs(name), encode(line))

        await until_async(lambda: client.sent)
        await say("before")
        await until_async(lambda: b"before" in client.body)
        gateway.access.remove(key.id)
        await say("after")
        await task
        assert b"after" not in client.body
