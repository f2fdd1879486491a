"""Gateway tests with a real bus: deploys, submitted calls, keys, logs, and the process itself."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from gpufn_core.domain.invocation import InvocationState, OutcomeKind
from gpufn_core.domain.revision import RevisionState
from gpufn_core.errors import ErrorInfo, FunctionStartFailed, InvalidBundle, InvocationCancelled, RevisionNotFound
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import encode, pack
from gpufn_core.protocol.messages import CallLocation, LocateCall, LogLine, ResultReply, unpack_invocation
from gpufn_core.protocol.records import CallRecord
from gpufn_core.spec.weights_spec import WeightsFile, WeightsSpec
from gpufn_gateway.functions.deploys import DeployOptions
from gpufn_local.nats_process import find_binary
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import object_store, streams
from gpufn_platform.queue import queue_position
from gpufn_platform.queue.records import call_records
from tests.gateway.whole import BUNDLE, DIGEST, gateway_on
from tests.taking import take
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
        facts = ("owned@3", "from app.py", "from lib/app.py", "project vision", "bob@desk", "--replace")
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


class Holding:
    """A fake runner that reports to hold the invocations in `held`."""

    def __init__(self, bus: Bus) -> None:
        self.held: set[str] = set()
        self._bus = bus
        bus.subscribe(subjects.WHEREABOUTS, self._on_where)

    def _on_where(self, message: Any) -> None:
        asked = msgspec.msgpack.decode(message.payload, type=LocateCall).invocation
        if asked in self.held:
            self._bus.publish(message.reply, encode(CallLocation(asked, "w-1", "a", 1, 0.0)))


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


async def test_submitted_calls_that_run_outlive_their_function(nats: Any, make: Any) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("leaves"), DIGEST)
        runner = Holding(gateway.bus)
        runs, waits = [
            (await gateway.http.post("/v1/functions/leaves/submit", content=GOOD)).json()["id"] for _ in range(2)
        ]
        await take(gateway.bus, "leaves")
        runner.held.add(runs)
        for delete in (True, False):  # by the gateway, then by the controller for late calls
            if delete:
                assert (await gateway.http.delete("/v1/functions/leaves")).status_code == 204
            else:
                error = InvocationCancelled("leaves was deleted").info()
                ended = await queue_position.end_queued(
                    gateway.bus, "leaves", 1, kind=OutcomeKind.CANCELLED, error=error, now=2.0
                )
                assert ended == 0
            states = [(await gateway.http.get(f"/v1/invocations/{each}")).json()["state"] for each in (runs, waits)]
            assert states == ["running", "cancelled"]
            depth = await streams.depths(gateway.bus)
            assert depth["leaves", 1].asynchronous == 1
        runner.held.clear()
        assert (
            await queue_position.end_queued(
                gateway.bus,
                "leaves",
                1,
                kind=OutcomeKind.NOT_STARTED,
                error=FunctionStartFailed("boom").info(),
                now=3.0,
            )
            == 1
        )
        status = (await gateway.http.get(f"/v1/invocations/{runs}")).json()
        assert (status["state"], status["error"]["message"]) == ("failed", "boom")


async def test_the_caller_of_a_queued_call_receives_the_reason_of_its_end(nats: Any, make: Any, problem: Any) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("told"), DIGEST)
        waiting = asyncio.create_task(gateway.http.post("/v1/functions/told/invoke", content=GOOD))
        await until_async(lambda: gateway.caller.pending == 1)
        await gateway.bus.flush()
        error = FunctionStartFailed("no module named nope").info()
        await queue_position.end_queued(gateway.bus, "told", 1, kind=OutcomeKind.NOT_STARTED, error=error, now=1.0)
        assert problem(await waiting) == (503, "function_start_failed")
        assert ("told", 1) not in await streams.depths(gateway.bus)


async def test_a_submitted_call_is_stored_and_followed_to_its_end(nats: Any, make: Any, problem: Any) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("later"), DIGEST)
        answer = await gateway.http.post("/v1/functions/later/submit", content=GOOD)
        invocation = answer.json()["id"]
        here = f"/v1/invocations/{invocation}"
        assert (answer.status_code, answer.headers["location"]) == (202, here)
        assert answer.json() == {
            "id": invocation,
            "state": "queued",
            "links": {"self": here, "result": f"{here}/result", "events": f"{here}/events"},
        }
        status = (await gateway.http.get(here)).json()
        assert (status["id"], status["function"], status["state"], status["waiting"]["reason"]) == (
            invocation,
            "later",
            "queued",
            "unknown",
        )
        answer = await gateway.http.get(f"{here}/result")
        assert (answer.status_code, answer.json()["state"]) == (202, "queued")

        waiting = asyncio.create_task(gateway.http.get(f"{here}/result?wait=10"))
        await asyncio.sleep(0)
        found = await call_records.read(gateway.bus, invocation)
        assert found is not None
        ended = msgspec.structs.replace(
            found[0],
            state=InvocationState.SUCCEEDED,
            content_type="application/json",
            ended_at=1.0,
            queue_s=0.5,
            run_s=0.25,
        )
        assert await call_records.end(gateway.bus, ended, b"[1]")
        answer = await waiting
        assert (answer.status_code, answer.content) == (200, b"[1]")
        assert answer.headers["server-timing"] == "queue;dur=500.0, run;dur=250.0"
        assert answer.headers["x-gpufn-revision"] == "later@1"
        status = (await gateway.http.delete(here)).json()
        assert (status["state"], status["cancelled"]) == ("succeeded", False)
        calls = (await gateway.http.get("/v1/functions/later/calls")).json()["calls"]
        assert [(each["id"], each["state"], each["run_s"]) for each in calls] == [(invocation, "succeeded", 0.25)]


async def test_the_list_of_calls_does_not_fetch_their_results(nats: Any, make: Any) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("large"), DIGEST)
        made = [(await gateway.http.post("/v1/functions/large/submit", content=GOOD)).json()["id"] for _ in range(4)]
        error = ErrorInfo("function_raised", "no", error_type="ValueError", traceback="t" * 60_000)
        for number, each in enumerate(made[:3]):
            found = await call_records.read(gateway.bus, each)
            assert found is not None
            state = InvocationState.FAILED if number == 0 else InvocationState.SUCCEEDED
            ended = msgspec.structs.replace(found[0], state=state, error=error if number == 0 else None, run_s=0.25)
            assert await call_records.end(gateway.bus, ended, b"" if number == 0 else b"x" * (4 << 20))
        before = gateway.received_bytes
        calls = (await gateway.http.get("/v1/functions/large/calls?limit=1000")).json()["calls"]
        assert {each["id"]: (each["state"], each["run_s"]) for each in calls} == {
            made[0]: ("failed", 0.25),
            made[1]: ("succeeded", 0.25),
            made[2]: ("succeeded", 0.25),
            made[3]: ("queued", None),
        }
        assert [each["error"] for each in calls if each["state"] == "failed"] == [
            {"code": "function_raised", "message": "no", "error_type": "ValueError"}
        ]
        assert gateway.received_bytes - before < 20_000
        assert [
            len((await gateway.http.get(f"/v1/functions/large/calls?limit={n}")).json()["calls"]) for n in (1, 3)
        ] == [1, 3]


async def test_a_failed_call_answers_as_an_invoke_would_have(nats: Any, make: Any, problem: Any) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("bad"), DIGEST)
        answer = await gateway.http.post("/v1/functions/bad/invoke", content=GOOD, headers={"prefer": "respond-async"})
        assert answer.status_code == 202
        found = await call_records.read(gateway.bus, answer.json()["id"])
        assert found is not None
        failed = msgspec.structs.replace(found[0], state=InvocationState.TIMED_OUT)
        await call_records.end(gateway.bus, failed)
        assert problem(await gateway.http.get(answer.json()["links"]["result"])) == (504, "invocation_timed_out")


async def test_a_submitted_call_can_be_cancelled_once(nats: Any, make: Any, problem: Any) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("stop"), DIGEST)
        here = (await gateway.http.post("/v1/functions/stop/submit", content=GOOD)).headers["location"]
        status = (await gateway.http.delete(here)).json()
        assert (status["state"], status["cancelled"]) == ("cancelled", True)
        assert (await gateway.http.delete(here)).json()["cancelled"] is False
        assert problem(await gateway.http.get(f"{here}/result")) == (409, "invocation_cancelled")


async def test_the_same_id_or_key_is_the_same_call(nats: Any, make: Any, problem: Any) -> None:
    async with gateway_on(nats) as gateway:
        for name in ("once", "twice"):
            await gateway.deploys.deploy(make.spec(name), DIGEST)
        own = "01arz3ndektsv4rrffq69g5fav"
        for spelling in (own, own.upper()):
            answer = await gateway.http.put(f"/v1/functions/once/invocations/{spelling}", content=GOOD)
            assert (answer.status_code, answer.json()["id"]) == (202, own)
        answer = await gateway.http.put(f"/v1/functions/twice/invocations/{own}", content=GOOD)
        assert problem(answer) == (409, "idempotency_mismatch")
        assert answer.json()["retryable"] is False
        answer = await gateway.http.put("/v1/functions/once/invocations/not-a-ulid", content=GOOD)
        assert problem(answer) == (422, "invalid_input")

        async def submit(name: str, key: str) -> str:
            answer = await gateway.http.post(
                f"/v1/functions/{name}/submit", content=GOOD, headers={"idempotency-key": key}
            )
            assert answer.status_code == 202
            return str(answer.json()["id"])

        same = {await submit("once", "k1"), await submit("once", "k1")}
        different = {await submit("once", "k2"), await submit("twice", "k1")}
        assert (len(same), len(same | different)) == (1, 3)
        depth = await streams.depths(gateway.bus)
        assert (depth["once", 1].asynchronous, depth["twice", 1].asynchronous) == (3, 1)


async def test_an_unknown_invocation_is_not_found(nats: Any, problem: Any) -> None:
    async with gateway_on(nats) as gateway:
        for name in ("00000000000000000000000000", "x", "a.b", "*", ">"):
            for path in (f"/v1/invocations/{name}", f"/v1/invocations/{name}/result"):
                assert problem(await gateway.http.get(path)) == (404, "invocation_not_found"), path


async def test_logs_are_lines_of_json_and_may_be_followed(nats: Any, make: Any, connection: Any) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("chatty"), DIGEST)

        async def say(text: str) -> None:
            line = LogLine(1.0, "chatty", 1, "w-1", "stdout", text)
            await gateway.bus.publish_stored(subjects.logs("chatty"), encode(line))

        assert (await gateway.http.get("/v1/functions/chatty/logs")).content == b""
        for text in ("one", "two", "three"):
            await say(text)
        answer = await gateway.http.get("/v1/functions/chatty/logs?tail=2")
        assert answer.headers["content-type"] == "application/x-ndjson"
        assert [json.loads(line)["text"] for line in answer.text.splitlines()] == ["two", "three"]

        client = connection("/v1/functions/chatty/logs", b"", host="127.0.0.1")
        client.scope |= {"method": "GET", "query_string": b"tail=1&follow=true"}
        client._body.clear()
        task = client.start(gateway.app)
        await until_async(lambda: b"three" in client.body)
        await say("four")
        await until_async(lambda: b"four" in client.body)
        client.left.set()
        await task
        assert [json.loads(line)["text"] for line in client.body.splitlines()] == ["three", "four"]


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


class Process:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def url(self) -> str:
        assert self.process.stdout is not None
        line = json.loads(await self.process.stdout.readline())
        assert line["event"] == "listening"
        return str(line["url"])

    async def end(self) -> tuple[int, str]:
        _, log = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, log.decode()


async def start(nats: Any, **settings: str) -> Process:
    environ = (
        os.environ | {"GPUFN_PORT": "0"} | ({"GPUFN_NATS_URL": nats.url_for("gateway")} if nats else {}) | settings
    )
    environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    return Process(
        await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "gpufn_gateway"),
            env=environ,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    )


async def test_the_process_prints_its_address_and_ends_in_order(nats: Any) -> None:
    gateway = await start(nats)
    try:
        url = await gateway.url()
        async with httpx.AsyncClient(base_url=url) as client:
            assert (await client.get("/healthz")).status_code == 200
            answer = await client.get("/readyz")
            assert (answer.status_code, "server" in answer.headers) == (503, False)
            assert (await client.get("/v1/functions")).status_code == 200
    finally:
        gateway.process.send_signal(signal.SIGTERM)
    code, log = await gateway.end()
    assert (code, "Traceback" in log, "ERROR" in log) == (0, False, False), log


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"GPUFN_PORT": "x"}, "GPUFN_PORT='x'"),
        ({"GPUFN_HOST": "0.0.0.0"}, "cannot listen on 0.0.0.0 without an API key"),
        ({"GPUFN_HOST": "192.0.2.1"}, "cannot listen on 192.0.2.1"),
    ],
)
async def test_the_process_refuses_settings_that_it_cannot_serve(
    nats: Any, settings: dict[str, str], said: str
) -> None:
    code, log = await (await start(nats, **settings)).end()
    assert (code, log.splitlines()[-1].startswith(said), "Traceback" in log) == (78, True, False), log


@pytest.mark.parametrize(
    ("configuration", "said"),
    [
        ("", "runs without JetStream: add `jetstream {}`"),
        (
            "jetstream { store_dir: STORE }\nfeature_flags { js_ack_fc_v2: true }",
            "set `feature_flags { js_ack_fc_v2: false }`",
        ),
    ],
)
async def test_the_process_names_the_fault_of_a_foreign_server(tmp_path: Path, configuration: str, said: str) -> None:
    store = json.dumps(str(tmp_path))
    config = tmp_path / "nats.conf"
    config.write_text(f"listen: 127.0.0.1:-1\nports_file_dir: {store}\n" + configuration.replace("STORE", store))
    server = subprocess.Popen([find_binary(), "-c", config], stderr=subprocess.DEVNULL)  # noqa: ASYNC220
    try:
        # The file is written after it is created.
        while not (ports := [path for path in tmp_path.glob("*.ports") if path.stat().st_size]):  # noqa: ASYNC110, ASYNC240
            await asyncio.sleep(0.001)
        url = json.loads(ports[0].read_bytes())["nats"][0]
        code, log = await (await start(None, GPUFN_NATS_URL=url)).end()
        assert (code, said in log, "Traceback" in log) == (78, True, False), log
    finally:
        server.kill()
        server.wait()


async def test_openapi_describes_every_route(nats: Any) -> None:
    async with gateway_on(nats) as gateway:
        paths = (await gateway.http.get("/openapi.json")).json()["paths"]
        documented = {(verb.upper(), path) for path, operations in paths.items() for verb in operations}
        # A call is under its function's name; protocols of other platforms have specifications of their own.
        registered = {
            (method, route.path_format)
            for route in gateway.app._routes
            if not route.path.startswith("/v2")
            and gateway.app._protocols.at(route.path_format) is None
            and "{fn}/invocations" not in route.path_format
            and "{fn}/maps" not in route.path_format
            for method in route.methods or ()
            if method != "HEAD" or "GET" not in (route.methods or ())
        }
        assert registered - documented == set()


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
