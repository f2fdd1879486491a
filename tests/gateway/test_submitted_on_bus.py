"""Submitted calls with a real bus: their records, cancels and ids."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec

from gpufn_core.domain.invocation import InvocationState, OutcomeKind
from gpufn_core.errors import ErrorInfo, FunctionStartFailed, InvocationCancelled
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import encode
from gpufn_core.protocol.messages import CallLocation, LocateCall, LogLine
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import streams
from gpufn_platform.queue import queue_position
from gpufn_platform.queue.records import call_records
from tests.gateway.whole import DIGEST, gateway_on
from tests.taking import take
from tests.waiting import until_async

GOOD = b'{"texts":["a"]}'


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
