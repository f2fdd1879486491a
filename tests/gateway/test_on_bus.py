"""Gateway tests with a real bus: deploys, deletes, logs and routes."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from gpufn_core.domain.invocation import InvocationState, OutcomeKind
from gpufn_core.domain.revision import RevisionState
from gpufn_core.errors import InvalidBundle, RevisionNotFound
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import pack
from gpufn_core.protocol.messages import ResultReply, unpack_invocation
from gpufn_core.spec.weights_spec import WeightsFile, WeightsSpec
from gpufn_gateway.functions.deploy_checks import DeployOptions
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import object_store, streams
from gpufn_platform.queue.records import call_records
from tests.gateway.whole import BUNDLE, DIGEST, gateway_on
from tests.waiting import until_async

GOOD = b'{"texts":["a"]}'


class Runner:
    """A fake runner: it ends the queued calls of one function with `kind`, and counts them."""

    def __init__(self, bus: Bus, function: str, kind: OutcomeKind = OutcomeKind.SUCCEEDED) -> None:
        self._bus = bus
        self._kind = kind
        self.heard: list[Any] = []
        bus.subscribe(subjects.sync_queue(function, 1), self._on_message)

    def _on_message(self, message: Any) -> None:
        invocation, body = unpack_invocation(message.payload)
        self.heard.append(invocation)
        reply = ResultReply(invocation.id, self._kind, None, "application/json", invocation.revision, 1, 0.0, 0.0, "w")
        self._bus.publish(invocation.reply, pack(reply, body))


async def test_deploy_then_invoke(nats: Any, make: Any) -> None:
    async with gateway_on(nats) as gateway:
        assert (await gateway.http.head(f"/v1/bundles/{'0' * 64}")).status_code == 404
        assert (await gateway.http.head(f"/v1/bundles/{DIGEST}")).status_code == 200
        answer = await gateway.http.put(
            f"/v1/bundles/{DIGEST}", content=BUNDLE, headers={"content-type": "application/zip"}
        )
        assert answer.status_code == 201
        body = msgspec.json.encode({"spec": make.spec("first"), "bundle": DIGEST})
        answer = await gateway.http.post("/v1/functions", content=body)
        assert (answer.status_code, answer.headers["location"]) == (201, "/v1/functions/first")
        assert {name: answer.json()[name] for name in ("name", "active", "serving", "latest")} == {
            "name": "first",
            "active": 1,
            "serving": 1,
            "latest": 1,
        }
        runner = Runner(gateway.bus, "first")
        answer = await gateway.http.post("/v1/functions/first/invoke", content=GOOD)
        assert (answer.status_code, answer.content) == (200, GOOD)
        assert [each.function for each in runner.heard] == ["first"]


async def test_a_deploy_after_a_revision_was_lost_is_another_revision(nats: Any, make: Any) -> None:
    async with gateway_on(nats) as gateway:
        body = msgspec.json.encode({"spec": make.spec("loses"), "bundle": DIGEST})
        assert (await gateway.http.post("/v1/functions", content=body)).json()["latest"] == 1
        stream = f"KV_{subjects.REVISIONS}"
        await streams.purge(gateway.bus, stream, f"$KV.{subjects.REVISIONS}.loses.1")
        assert (await gateway.http.post("/v1/functions", content=body)).json()["latest"] == 2


async def test_a_bundle_that_is_damaged_in_the_store_is_not_there_and_whole_once_it_is_put_again(nats: Any) -> None:
    async with gateway_on(nats) as gateway:
        stream = f"OBJ_{subjects.BUNDLES}"
        chunk = await streams.next_message(gateway.bus, stream, f"$O.{subjects.BUNDLES}.C.>", 1)
        assert chunk is not None
        await streams.delete_message(gateway.bus, stream, chunk.seq)
        await gateway.bus.publish_stored(chunk.subject, b"?" + chunk.payload[1:])
        url = f"/v1/bundles/{DIGEST}"
        assert (await gateway.http.head(url)).status_code == 404
        await gateway.http.put(url, content=BUNDLE, headers={"content-type": "application/zip"})
        assert (await gateway.http.head(url)).status_code == 200
        assert await object_store.get(gateway.bus, subjects.BUNDLES, DIGEST) == BUNDLE


async def test_a_bundle_that_was_not_uploaded_cannot_be_deployed(nats: Any, make: Any, problem: Any) -> None:
    async with gateway_on(nats) as gateway:
        body = msgspec.json.encode({"spec": make.spec("none"), "bundle": "0" * 64})
        assert problem(await gateway.http.post("/v1/functions", content=body)) == (422, "invalid_bundle")
        with pytest.raises(InvalidBundle, match="damaged in transit"):
            await gateway.deploys.put_bundle("0" * 64, BUNDLE)


async def test_weights_that_were_not_uploaded_cannot_be_deployed(nats: Any, make: Any, problem: Any) -> None:
    async with gateway_on(nats) as gateway:
        weights = WeightsSpec(source="./weights", files=(WeightsFile("w", 1, "0" * 64),))
        spec = msgspec.structs.replace(make.spec("none"), weights=(weights,))
        body = msgspec.json.encode({"spec": spec, "bundle": DIGEST})
        assert problem(await gateway.http.post("/v1/functions", content=body)) == (422, "invalid_spec")


async def test_deploys_at_once_all_succeed_with_numbers_of_their_own(nats: Any, make: Any) -> None:
    async with gateway_on(nats) as one, gateway_on(nats) as other:
        deployed = [gateway.deploys.deploy(make.spec("busy"), DIGEST) for gateway in (one, other) * 4]
        functions = await asyncio.gather(*deployed)
        assert {function.name for function in functions} == {"busy"}
        kept = await one.functions.get("busy")
        assert kept is not None
        function = msgspec.msgpack.decode(kept.value)
        assert (function["active"], function["latest"]) == (8, 8)
        assert sorted(await one.revisions.keys("busy.")) == [f"busy.{number}" for number in range(1, 9)]
        await until_async(lambda: other.registry.functions["busy"].active == 8)


@pytest.mark.parametrize(
    ("name", "ready", "check", "serving"),
    [("cold", 0, False, 2), ("warm", 1, False, 1), ("unknown", None, False, 1), ("checked", 0, True, 1)],
)
async def test_serving_moves_at_once_only_without_warm_workers_and_without_a_check(  # noqa: PLR0917
    nats: Any, make: Any, name: str, ready: int | None, check: bool, serving: int
) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec(name), DIGEST)
        await until_async(lambda: name in gateway.registry.functions)
        if ready is not None:
            gateway.report(make.status(name, ready=ready))
        function = await gateway.deploys.deploy(make.spec(name), DIGEST, DeployOptions(check=check))
        assert (function.active, function.serving, function.latest) == (2, serving, 2)


async def test_a_function_of_another_file_is_replaced_only_on_request(nats: Any, make: Any) -> None:
    async with gateway_on(nats) as gateway:
        spec = msgspec.to_builtins(make.spec("owned"))
        here = {"file": "app.py", "project": "vision", "project_id": "1", "deployer": "ada@laptop"}

        async def deploy(source: Any, **more: Any) -> tuple[int, str]:
            sent = {"spec": spec, "bundle": DIGEST, "check": False, "source": source, **more}
            answer = await gateway.http.post("/v1/functions", json=sent)
            assert answer.json().get("field") == ("replace" if answer.status_code == 409 else None)
            return answer.status_code, answer.json().get("detail", "")

        assert await deploy(None) == (201, "")
        assert await deploy(here) == (201, "")  # the previous deploy sent no source
        assert await deploy(here | {"deployer": "bob@desk"}) == (201, "")
        status, detail = await deploy(here | {"file": "lib/app.py"})
        assert status == 409
        facts = ("owned@3", "from app.py", "from lib/app.py", "project vision", "bob@desk", '"replace": true')
        assert all(fact in detail for fact in facts)
        status, detail = await deploy(here | {"project_id": "2"})
        assert (status, "another project" in detail) == (409, True)
        status, detail = await deploy(None)
        assert (status, "no source" in detail) == (409, True)
        assert await deploy(here | {"file": "lib/app.py", "key": "forged"}, replace=True) == (201, "")
        await until_async(lambda: 4 in gateway.registry.revisions["owned"])
        view = (await gateway.http.get("/v1/functions/owned")).json()
        assert (view["source"]["file"], view["source"]["key"], view["deployed_at"] > 0) == ("lib/app.py", "", True)


async def test_rollback_activates_an_earlier_revision(nats: Any, make: Any, problem: Any) -> None:
    async with gateway_on(nats) as gateway:
        for _ in range(3):
            await gateway.deploys.deploy(make.spec("back"), DIGEST)
        gateway.report(make.status("back", ready=0, serving=1))
        url = "/v1/functions/back/rollback"
        assert (await gateway.http.post(url)).json()["active"] == 2
        view = (await gateway.http.post(url, json={"revision": 3})).json()
        assert (view["active"], view["latest"]) == (3, 3)
        assert problem(await gateway.http.post(url, json={"revision": 9})) == (404, "revision_not_found")
        assert problem(await gateway.http.post(url, json={"revision": "x"})) == (422, "invalid_input")
        await gateway.deploys.rollback("back", 1)
        with pytest.raises(RevisionNotFound, match="no revision before 1"):
            await gateway.deploys.rollback("back", None)


async def test_scale_replaces_the_value_of_the_spec(nats: Any, make: Any, problem: Any) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("wide"), DIGEST)
        url = "/v1/functions/wide/scale"
        view = (await gateway.http.post(url, json={"min_workers": 1, "max_workers": 8})).json()
        assert (view["min_workers"], view["max_workers"]) == (1, 8)
        view = (await gateway.http.post(url, json={"min_workers": None})).json()
        assert (view["min_workers"], view["max_workers"]) == (None, 8)
        for wrong in ({"min_workers": 9}, {"max_workers": -1}):
            assert problem(await gateway.http.post(url, json=wrong)) == (422, "invalid_spec"), wrong
        assert problem(await gateway.http.post(url, json={"max": 1})) == (422, "invalid_input")


async def test_a_deleted_function_ends_its_queued_calls_and_never_reuses_a_number(
    nats: Any, make: Any, problem: Any
) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("gone"), DIGEST)
        waiting = asyncio.create_task(gateway.http.post("/v1/functions/gone/invoke", content=GOOD))
        submitted = (await gateway.http.post("/v1/functions/gone/submit", content=GOOD)).json()["id"]
        await until_async(lambda: gateway.caller.pending == 1)
        await gateway.bus.flush()
        assert (await gateway.http.delete("/v1/functions/gone")).status_code == 204
        assert problem(await waiting) == (409, "invocation_cancelled")
        found = await call_records.read(gateway.bus, submitted)
        assert found is not None
        assert found[0].state is InvocationState.CANCELLED
        assert problem(await gateway.http.delete("/v1/functions/gone")) == (404, "function_not_found")
        assert gateway.registry.revisions["gone"][1].state is RevisionState.RETIRED
        assert (await gateway.deploys.deploy(make.spec("gone"), DIGEST)).active == 2


async def test_a_deploy_while_a_function_is_deleted_is_not_deleted_with_it(
    nats: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("comes-back"), DIGEST)
        delete = gateway.functions.delete

        async def deleted(*which: Any) -> None:
            await delete(*which)
            await gateway.deploys.deploy(make.spec("comes-back"), DIGEST)  # another client deploys it again at once

        monkeypatch.setattr(gateway.functions, "delete", deleted)
        await gateway.deploys.delete("comes-back")
        assert gateway.registry.functions["comes-back"].active == 2
        states = {number: revision.state.value for number, revision in gateway.registry.revisions["comes-back"].items()}
        assert states == {1: "retired", 2: "ready"}


async def test_a_revision_has_the_values_of_its_env_only_on_request(nats: Any, make: Any) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("with-env", env={"TOKEN": "hunter2"}), DIGEST)
        path = "/v1/functions/with-env/revisions/1"
        await until_async(lambda: 1 in gateway.registry.revisions.get("with-env", {}))
        revision = (await gateway.http.get(path)).json()
        assert (revision["env"], "env" in revision["spec"]) == (["TOKEN"], False)
        assert (await gateway.http.get(f"{path}?env=values")).json()["spec"]["env"] == {"TOKEN": "hunter2"}


@pytest.mark.parametrize(
    ("method", "path", "next_step"),
    [
        ("GET", "/v1/builds/nope", "gpufn builds"),
        ("DELETE", "/v1/builds/nope", "gpufn builds"),
        ("DELETE", "/v1/nodes/nope/drain", "gpufn nodes"),
        ("POST", "/v1/apps/default/nope/rollback", "gpufn apps"),
        ("GET", "/v1/volumes/nope", "gpufn volume ls"),
    ],
)
async def test_what_is_not_there_is_named_with_the_next_step(nats: Any, method: str, path: str, next_step: str) -> None:
    async with gateway_on(nats) as gateway:
        answer = await gateway.http.request(method, path)
    detail = answer.json()["detail"]
    assert (answer.status_code, "nope" in detail, next_step in detail) == (404, True, True)
