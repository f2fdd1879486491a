"""Submitted calls: idempotency, events, lists, replay. The bus is real; the tests play the runner."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import msgspec
import pytest

from gpufn_core.domain.invocation import InvocationState, Outcome, OutcomeKind
from gpufn_core.domain.worker import ColdStart
from gpufn_core.encoding import media
from gpufn_core.errors import ErrorInfo
from gpufn_core.ids import new_invocation_id, new_map_id
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import encode, pack
from gpufn_core.protocol.messages import CallLocation, LocateCall, Progress, unpack_invocation
from gpufn_core.protocol.records import AttemptRecord, CallRecord, Checkpoint, Webhook
from gpufn_core.protocol.reports import Waiting, WaitReason
from gpufn_core.spec.function_spec import MethodSpec, Retry
from gpufn_gateway.auth.access import new_key
from gpufn_gateway.functions.deploy_checks import DeployOptions
from gpufn_gateway.protocols.replicate import adapter
from gpufn_gateway.protocols.replicate.predictions import PREFIX
from gpufn_gateway.submitted import call_events
from gpufn_gateway.submitted import submit as submissions
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import object_store, streams
from gpufn_platform.queue import queue_position
from gpufn_platform.queue.records import call_records, checkpoints, dead_letters
from tests.gateway.whole import DIGEST, Whole, gateway_on
from tests.taking import take
from tests.waiting import until_async

GOOD = b'{"texts":["a"]}'
OTHER = b'{"texts":["b"]}'
NO = ErrorInfo("function_raised", "no", error_type="ValueError")


async def record_of(gateway: Whole, invocation: str) -> CallRecord:
    found = await call_records.read(gateway.bus, invocation)
    assert found is not None
    return found[0]


async def end(gateway: Whole, invocation: str, body: bytes = b"[1]", **fields: Any) -> None:
    given = {"state": InvocationState.SUCCEEDED, "content_type": "application/json", "ended_at": 1.0} | fields
    record = msgspec.structs.replace(await record_of(gateway, invocation), **given)
    assert await call_records.end(gateway.bus, record, body)


async def die(gateway: Whole, invocation: str) -> None:
    """End a call like a runner after its last failed attempt."""
    attempts = (AttemptRecord(1, OutcomeKind.RAISED, 2.0, 1.0, "w-1", NO.code, NO.message),)
    await end(gateway, invocation, b"", state=InvocationState.FAILED, error=NO, attempts=attempts)
    record = await record_of(gateway, invocation)
    queue = subjects.async_queue(record.function, record.revision, "*")
    stored = await streams.next_message(gateway.bus, subjects.ASYNC, queue, record.queue_seq)
    assert stored is not None
    await dead_letters.store(gateway.bus, record, *unpack_invocation(stored.payload))
    await streams.delete_message(gateway.bus, subjects.ASYNC, record.queue_seq)


class Holder:
    """A fake runner that reports to hold the calls that a test gives it."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.held: dict[str, CallLocation] = {}
        bus.subscribe(subjects.WHEREABOUTS, self._on_where)

    def _on_where(self, message: Any) -> None:
        wanted = msgspec.msgpack.decode(message.payload, type=LocateCall).invocation
        for held in self.held.values():
            if wanted in ("", held.invocation):
                self._bus.publish(message.reply, encode(held))

    def start(self, invocation: str, attempt: int = 1) -> None:
        held = self.held[invocation] = CallLocation(invocation, "w-1", "n", attempt, 5.0)
        self._bus.publish(subjects.call_started(invocation), encode(held))

    def progress(self, invocation: str, progress: Progress) -> None:
        self.held[invocation] = msgspec.structs.replace(self.held[invocation], progress=progress)
        self._bus.publish(subjects.progress(invocation), encode(progress))


async def submit(gateway: Whole, function: str, content: bytes = GOOD, **headers: str) -> str:
    given = {name.replace("_", "-"): text for name, text in headers.items()}
    answer = await gateway.http.post(f"/v1/functions/{function}/submit", content=content, headers=given)
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


async def test_a_key_with_another_body_is_refused(nats: Any, make: Any, problem: Any) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("keyed"), DIGEST)
        here = f"/v1/invocations/{await submit(gateway, 'keyed', idempotency_key='k')}"
        for verb in ("submit", "invoke"):
            answer = await gateway.http.post(
                f"/v1/functions/keyed/{verb}", content=OTHER, headers={"idempotency-key": "k"}
            )
            assert problem(answer) == (409, "idempotency_mismatch")
            assert answer.json()["retryable"] is False
        own = "01arz3ndektsv4rrffq69g5faw"
        url = f"/v1/functions/keyed/invocations/{own}"
        assert [(await gateway.http.put(url, content=body)).status_code for body in (GOOD, OTHER)] == [202, 409]
        assert (await gateway.http.get(here)).json()["state"] == "queued"


async def test_a_call_is_found_under_the_id_that_its_client_wrote(nats: Any, make: Any) -> None:
    """Most ULID libraries write upper case."""
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("capitals"), DIGEST)
        own = "01ARZ3NDEKTSV4RRFFQ69G5FAX"
        await gateway.http.put(f"/v1/functions/capitals/invocations/{own}", content=GOOD)
        here = f"/v1/invocations/{own}"
        assert (await gateway.http.get(here)).status_code == 200
        assert (await gateway.http.get(f"{here}/result")).status_code == 202
        await die(gateway, own.lower())
        assert (await gateway.http.get(f"{here}/result")).status_code == 500
        assert (await gateway.http.get(f"{here}/events", headers={"last-event-id": "12"})).status_code == 204
        assert (await gateway.http.get(f"/v1/dlq/capitals/{own}")).json()["id"] == own.lower()
        assert (await gateway.http.delete(here)).json()["cancelled"] is False


async def test_an_invoke_with_a_key_can_be_taken_up_again(nats: Any, make: Any, connection: Any) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("again"), DIGEST)
        path, headers = "/v1/functions/again/invoke", {"idempotency-key": "k"}
        first = connection(path, GOOD, idempotency_key="k")
        waiting = first.start(gateway.app)
        while not (calls := (await gateway.http.get("/v1/calls?function=again")).json()["calls"]):
            pass
        invocation = calls[0]["id"]
        first.left.set()  # the client loses its connection
        await waiting
        assert first.sent == []
        assert (await record_of(gateway, invocation)).state is InvocationState.QUEUED
        second = asyncio.ensure_future(gateway.http.post(path, content=GOOD, headers=headers))
        cold = ColdStart(place_s=0.001, launch_s=0.05, load_s=0.2, warm_s=0.0)
        await end(gateway, invocation, queue_s=0.5, run_s=0.25, gpu_s=0.125, cold_start=cold)
        answer = await second
        assert (answer.status_code, answer.content) == (200, b"[1]")
        assert answer.headers["x-gpufn-invocation"] == invocation
        assert answer.headers["server-timing"] == (  # as for an invoke without a key
            "queue;dur=500.0, run;dur=250.0, gpu;dur=125.0, "
            "place;dur=1.0, fetch;dur=0.0, launch;dur=50.0, load;dur=200.0, warm;dur=0.0"
        )
        third = await gateway.http.post(path, content=GOOD, headers=headers)  # from the stored record
        assert (third.status_code, third.content) == (200, b"[1]")
        assert (await gateway.http.get(f"/v1/invocations/{invocation}/result")).content == b"[1]"


async def test_an_invoke_with_a_key_fails_as_one_without(nats: Any, make: Any, problem: Any) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("fails"), DIGEST)
        invocation = await submit(gateway, "fails", idempotency_key="k")
        await end(gateway, invocation, b"", state=InvocationState.FAILED, error=NO)
        path = "/v1/functions/fails/invoke"
        answer = await gateway.http.post(path, content=GOOD, headers={"idempotency-key": "k"})
        assert problem(answer) == (500, "function_raised")
        given = {"idempotency-key": "late", "x-gpufn-timeout": "0.01"}
        assert problem(await gateway.http.post(path, content=GOOD, headers=given)) == (504, "invocation_expired")
        given = {"idempotency-key": "k", "accept": "text/event-stream"}
        assert problem(await gateway.http.post(path, content=GOOD, headers=given)) == (422, "invalid_input")


@pytest.mark.parametrize(
    ("ahead_s", "wanted"),
    [(-1.0, (400, "deadline_passed")), (8 * 86400.0, (422, "invalid_input")), (None, (422, "invalid_input"))],
)
async def test_a_deadline_that_cannot_be_is_refused(
    nats: Any, make: Any, problem: Any, ahead_s: float | None, wanted: tuple[int, str]
) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("deadline"), DIGEST)
        text = "soon" if ahead_s is None else f"{gateway.clock.time() + ahead_s}"
        for verb in ("submit", "invoke"):
            answer = await gateway.http.post(
                f"/v1/functions/deadline/{verb}", content=GOOD, headers={"x-gpufn-deadline": text}
            )
            assert problem(answer) == wanted


async def test_a_deadline_travels_with_the_call(nats: Any, make: Any) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("until"), DIGEST)
        deadline = gateway.clock.time() + 60
        record = await record_of(gateway, await submit(gateway, "until", x_gpufn_deadline=f"{deadline:.3f}"))
        queue = subjects.async_queue("until", 1)
        stored = await streams.next_message(gateway.bus, subjects.ASYNC, queue, record.queue_seq)
        assert stored is not None
        assert unpack_invocation(stored.payload)[0].deadline == pytest.approx(deadline, abs=0.01)


async def test_a_call_shows_its_trace_while_it_waits_and_when_it_has_ended(nats: Any, make: Any) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("traced"), DIGEST)
        trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        made = await submit(gateway, "traced", traceparent=trace)
        for _ in range(2):
            told = (await gateway.http.get(f"/v1/invocations/{made}")).json()
            assert (told["trace"], told["parent"]) == (trace, None)
            await gateway.http.delete(f"/v1/invocations/{made}")
        assert told["state"] == "cancelled"


async def test_a_queued_call_shows_its_place_and_its_start_time(nats: Any, make: Any) -> None:
    async with gateway_on(nats) as gateway:
        for name in ("line", "aside"):
            await gateway.deploys.deploy(make.spec(name), DIGEST)
        made = []
        for _ in range(3):
            made.append(await submit(gateway, "line"))
            await submit(gateway, "aside")
        gateway.report(make.status("line", ready=1, service_s=2.0))

        async def waiting(number: int) -> Any:
            view = (await gateway.http.get(f"/v1/invocations/{made[number]}")).json()
            return view["state"], view["place"], view["eta_s"], view["waiting"]["reason"], view["waiting"]["detail"]

        assert (await waiting(0))[:4] == ("queued", 1, 2.0, "others")
        assert (await waiting(2))[:4] == ("queued", 3, 6.0, "others")
        assert "2 calls" in (await waiting(2))[4]
        await gateway.http.delete(f"/v1/invocations/{made[1]}")
        assert (await waiting(2))[1] == 2


async def test_a_cancelled_call_shows_that_it_ran(nats: Any, make: Any) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("ran"), DIGEST)
        runs, waits = [await submit(gateway, "ran") for _ in range(2)]
        runner = Holder(gateway.bus)
        await take(gateway.bus, "ran")
        runner.start(runs)
        told = [(await gateway.http.delete(f"/v1/invocations/{each}")).json() for each in (runs, waits)]
        assert [(each["state"], each["worker"], each["started_at"]) for each in told] == [
            ("cancelled", "w-1", 5.0),
            ("cancelled", "", None),
        ]


async def test_a_cancel_that_may_be_lost_is_refused_and_sent_again(
    nats: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("deaf"), DIGEST)
        invocation = await submit(gateway, "deaf")
        runner, told, back = await Bus.connect(nats.url, name="runner"), asyncio.Event(), asyncio.Event()
        runner.subscribe(subjects.CANCELS, lambda _: told.set())
        await runner.flush()
        publish = gateway.bus.publish
        gateway.bus.on_reconnect(back.set)

        def lost(subject: str, payload: bytes, **more: Any) -> None:
            publish(subject, payload, **more)
            if subject == subjects.CANCELS:
                gateway.bus._live().lose("a cable is pulled")

        with monkeypatch.context() as patch:
            patch.setattr(gateway.bus, "publish", lost)
            assert (await gateway.http.delete(f"/v1/invocations/{invocation}")).status_code == 503
        await back.wait()
        assert not told.is_set()
        answer = (await gateway.http.delete(f"/v1/invocations/{invocation}")).json()
        assert (answer["state"], answer["cancelled"]) == ("cancelled", False)
        await told.wait()
        await runner.close()


async def test_the_time_in_the_queue_does_not_limit_later_attempts(nats: Any, make: Any) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("later", queue_timeout_s=2.0, retries=Retry(1, delay_s=9.0)), DIGEST)
        record = await record_of(gateway, await submit(gateway, "later"))
        stored = await streams.message_at(gateway.bus, subjects.ASYNC, record.queue_seq)
        assert stored is not None
        message = unpack_invocation(stored.payload)[0]
        again = msgspec.structs.replace(message, attempt=2)
        assert message.expires_at(2.0) == message.submitted_at + 2.0
        assert again.expires_at(2.0) == math.inf


async def test_runners_are_queried_only_for_a_delivered_call(nats: Any, make: Any) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("asked"), DIGEST)
        first, second = [await submit(gateway, "asked") for _ in range(2)]
        asked: list[str] = []
        gateway.bus.subscribe(
            subjects.WHEREABOUTS,
            lambda message: asked.append(msgspec.msgpack.decode(message.payload, type=LocateCall).invocation),
        )
        await take(gateway.bus, "asked")
        for invocation in (second, first):
            assert (await gateway.http.get(f"/v1/invocations/{invocation}")).json()["state"] == "queued"
        assert asked == [first]


async def test_a_running_call_has_no_place(nats: Any, make: Any) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("runs"), DIGEST)
        invocation = await submit(gateway, "runs")
        await take(gateway.bus, "runs")
        Holder(gateway.bus).start(invocation, attempt=2)
        view = (await gateway.http.get(f"/v1/invocations/{invocation}")).json()
        assert (view["state"], view["attempt"], view["worker"], view["place"], view["waiting"]) == (
            "running", 2, "w-1", None, None,
        )  # fmt: skip


async def test_calls_are_listed_by_function_state_and_time(nats: Any, make: Any, problem: Any) -> None:
    async with gateway_on(nats) as gateway:
        for name in ("one", "two"):
            await gateway.deploys.deploy(make.spec(name), DIGEST)
        first, second, third = [await submit(gateway, name) for name in ("one", "one", "two")]
        await end(gateway, first, ended_at=(await record_of(gateway, third)).submitted_at + 1)
        Holder(gateway.bus).start(second)

        async def listed(query: str) -> list[str]:
            answer = await gateway.http.get(f"/v1/calls?{query}")
            assert answer.status_code == 200, answer.text
            return [call["id"] for call in answer.json()["calls"] if call["id"] in (first, second, third)]

        assert await listed("") == [third, second, first]
        assert await listed("function=one") == [second, first]
        assert await listed("state=running") == [second]
        assert await listed("state=queued") == [third]
        assert await listed("state=succeeded&function=two") == []
        since = (await record_of(gateway, third)).submitted_at
        assert await listed(f"since={since}") == [third]
        assert await listed("limit=1") == [first]  # the call that changed last
        for query in ("state=lost", "since=x", "function=../x"):
            assert problem(await gateway.http.get(f"/v1/calls?{query}")) == (422, "invalid_input"), query


async def test_a_list_without_pages_continues_until_it_is_full(
    nats: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: after half a second Replicate's list had only what was found by then, and no further page."""
    monkeypatch.setattr(submissions, "_SEARCH_S", -1.0)
    monkeypatch.setattr(adapter, "MAX_LISTED", 1)
    async with gateway_on(nats) as gateway:
        for name in ("rare", "frequent"):
            await gateway.deploys.deploy(make.spec(name), DIGEST)
        ids = [await submit(gateway, name) for name in ("rare", *["frequent"] * 12)]
        for each in ids:
            await end(gateway, each)
            record = await record_of(gateway, each)
            await streams.delete_message(gateway.bus, subjects.ASYNC, record.queue_seq)
        key, secret = new_key("k", ("read:rare",), 0.0)
        gateway.access.put(key)
        headers = {"authorization": f"Bearer {secret}"}
        listed = await gateway.http.get(f"{PREFIX}/predictions", headers=headers)
        assert [each["id"] for each in listed.json()["results"]] == ids[:1]


async def test_calls_are_listed_by_key_and_by_the_call_that_made_them_page_by_page(
    nats: Any, make: Any, problem: Any
) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("paged"), DIGEST)
        key = (await gateway.http.post("/v1/keys", json={"scopes": ["admin"]})).json()
        owner = {"authorization": f"Bearer {key['key']}"}
        parent = new_invocation_id()
        ids = []
        for number in range(3):
            made = await gateway.http.post("/v1/functions/paged/submit", content=GOOD, headers=owner)
            ids.append(made.json()["id"])
            record = await record_of(gateway, ids[-1])
            ended = msgspec.structs.replace(
                record, state=InvocationState.SUCCEEDED, ended_at=record.submitted_at, parent=parent if number else ""
            )
            assert await call_records.end(gateway.bus, ended)

        async def page(query: str) -> Any:
            return (await gateway.http.get(f"/v1/calls?function=paged&{query}", headers=owner)).json()

        of_key, of_other = await page(f"key={key['id']}"), await page("key=platform")
        assert [call["id"] for call in of_key["calls"]] == ids[::-1]
        assert (of_key["calls"][0]["key"], of_key["next"], of_other["calls"]) == (key["id"], None, [])
        assert [call["id"] for call in (await page(f"parent={parent}"))["calls"]] == ids[:0:-1]
        first = await page("limit=2&state=succeeded")
        second = await page(f"limit=2&state=succeeded&before={first['next']}")
        assert [call["id"] for call in (*first["calls"], *second["calls"])] == ids[::-1]
        assert second["next"] is None
        wrong = await gateway.http.get("/v1/calls?before=yesterday", headers=owner)
        assert problem(wrong) == (422, "invalid_input")
        await gateway.http.delete(f"/v1/keys/{key['id']}", headers=owner)


async def test_a_list_shows_the_reason_of_waits_that_need_no_lookup_per_call(nats: Any, make: Any) -> None:
    async with gateway_on(nats) as gateway:
        for name in ("full", "short"):
            await gateway.deploys.deploy(make.spec(name), DIGEST)
            await submit(gateway, name)
        gateway.report(
            make.status("full", waiting=Waiting(WaitReason.LIMIT, "max_workers is reached: 1")),
            make.status("short", ready=1),
        )
        listed = (await gateway.http.get("/v1/calls")).json()["calls"]
        waiting = {call["function"]: call["waiting"] for call in listed if call["function"] in ("full", "short")}
        assert waiting["full"]["detail"] == "max_workers is reached: 1"
        assert waiting["short"] is None


class Events:
    """Read the events of one call like a client."""

    def __init__(self, connection: Any, gateway: Whole, invocation: str, **headers: str) -> None:
        self._connection = connection(f"/v1/invocations/{invocation}/events", b"", **headers)
        self._connection.scope["method"] = "GET"
        self.task = self._connection.start(gateway.app)

    @property
    def status(self) -> int:
        return int(self._connection.sent[0]["status"])

    @property
    def received(self) -> list[tuple[str, str, Any]]:
        found = []
        for block in self._connection.body.split(b"\n\n")[:-1]:
            fields = dict(line.split(": ", 1) for line in block.decode().splitlines() if not line.startswith(":"))
            data = json.loads(fields["data"])
            found.append((fields["event"], fields.get("id", ""), data.get("state", data.get("fraction"))))
        return found

    def leave(self) -> None:
        self._connection.left.set()


async def test_a_head_request_for_a_stream_returns_only_its_headers(nats: Any, make: Any, connection: Any) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("headed"), DIGEST)
        invocation, map_id = await submit(gateway, "headed"), new_map_id()
        url = f"/v1/functions/headed/maps/{map_id}/items/0"
        sent = await gateway.http.put(url, content=GOOD + b"\n", headers={"content-type": media.LINES})
        assert sent.status_code == 202, sent.text
        for path, query, told in (
            (f"/v1/invocations/{invocation}/events", b"", b"text/event-stream; charset=utf-8"),
            ("/v1/functions/headed/logs", b"follow=true", b"application/x-ndjson"),
            (f"/v1/maps/{map_id}/outcomes", b"", b"application/x-ndjson"),
        ):
            client = connection(path, b"", host="127.0.0.1")
            client.scope |= {"method": "HEAD", "query_string": query}
            await client.start(gateway.app)
            start, end = client.sent
            assert (start["status"], dict(start["headers"])[b"content-type"]) == (200, told), path
            assert (end.get("body", b""), end.get("more_body", False)) == (b"", False)


async def test_events_report_each_change_of_a_call(nats: Any, make: Any, connection: Any) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("told"), DIGEST)
        invocation = await submit(gateway, "told")
        holder = Holder(gateway.bus)
        events = Events(connection, gateway, invocation)
        await until_async(lambda: events.received == [("state", "10", "queued")])
        await take(gateway.bus, "told")
        holder.start(invocation)
        await until_async(lambda: events.received[1:] == [("state", "11", "running")])
        holder.progress(invocation, Progress(0.5, "half"))
        await until_async(lambda: events.received[2:] == [("progress", "", 0.5)])
        holder.held.clear()
        await end(gateway, invocation)
        await events.task
        assert events.received[3:] == [("state", "12", "succeeded")]


async def test_a_late_report_of_a_runner_does_not_revert_the_state_of_a_call(nats: Any) -> None:
    running = {"state": InvocationState.RUNNING, "attempt": 1}
    looks = [running | {"progress": told} for told in ({"fraction": 0.5}, None, {"fraction": 0.5}, {"fraction": 0.7})]
    looks.append({"state": InvocationState.SUCCEEDED, "attempt": 1, "progress": None})

    async def look() -> dict[str, Any]:
        return looks.pop(0)

    async with gateway_on(nats) as gateway:
        events = [event async for event in call_events.follow(gateway.bus, new_invocation_id(), 0, look)]
    assert [event.splitlines()[0] for event in events] == [b"event: state", b"event: progress", b"event: state"]


async def test_events_continue_after_the_last_received_one(nats: Any, make: Any, connection: Any) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("seen"), DIGEST)
        invocation = await submit(gateway, "seen")
        holder = Holder(gateway.bus)
        await take(gateway.bus, "seen")
        holder.start(invocation)
        again = Events(connection, gateway, invocation, last_event_id="11")
        missed = Events(connection, gateway, invocation, last_event_id="10")
        await until_async(lambda: missed.received == [("state", "11", "running")])
        assert again.received == []
        holder.held.clear()
        await end(gateway, invocation)
        await asyncio.gather(again.task, missed.task)
        assert again.received == missed.received[1:] == [("state", "12", "succeeded")]
        over = Events(connection, gateway, invocation, last_event_id="12")
        await over.task
        assert over.status == 204


async def test_events_of_nothing_are_not_found(nats: Any, problem: Any) -> None:
    async with gateway_on(nats) as gateway:
        for path in ("", "/result", "/events"):
            answer = await gateway.http.get(f"/v1/invocations/{'0' * 26}{path}")
            assert problem(answer) == (404, "invocation_not_found")
        assert problem(await gateway.http.delete(f"/v1/invocations/{'0' * 26}")) == (404, "invocation_not_found")


async def test_a_large_result_is_read_in_parts(nats: Any, make: Any, tmp_path: Any, connection: Any) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("large"), DIGEST)
        invocation = await submit(gateway, "large")
        body = bytes(range(256)) * 40_000
        path = tmp_path / "result"
        path.write_bytes(body)
        digest, size = await object_store.keep_file(
            gateway.bus, subjects.RESULT_FILES, path, owner=invocation, ttl_s=100
        )
        await end(gateway, invocation, b"", blob=digest, size=size, content_type="application/octet-stream")
        answer = await gateway.http.get(f"/v1/invocations/{invocation}/result")
        assert (answer.status_code, answer.headers["content-type"]) == (200, "application/octet-stream")
        assert answer.headers["content-length"] == str(len(body))
        assert answer.content == body
        head = connection(f"/v1/invocations/{invocation}/result", b"", host="127.0.0.1")
        head.scope |= {"method": "HEAD"}
        await head.start(gateway.app)
        start, nothing = head.sent
        assert dict(start["headers"])[b"content-length"] == b"%d" % len(body)
        assert (nothing.get("body", b""), nothing.get("more_body", False)) == (b"", False)
        await streams.purge(gateway.bus, f"OBJ_{subjects.RESULT_FILES}", ">")
        answer = await gateway.http.get(f"/v1/invocations/{invocation}/result")
        assert (answer.status_code, answer.json()["code"]) == (503, "artifact_unavailable")
        assert (await gateway.http.head(f"/v1/invocations/{invocation}/result")).status_code == 503


async def test_a_dead_letter_is_shown_replayed_and_removed(nats: Any, make: Any, problem: Any) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("fails-x"), DIGEST)
        invocation = await submit(gateway, "fails-x")
        await die(gateway, invocation)
        letters = (await gateway.http.get("/v1/dlq/fails_x")).json()["letters"]
        here = f"/v1/dlq/fails-x/{invocation}"
        assert [(each["id"], each["error"]["message"], each["size"]) for each in letters] == [
            (invocation, "no", len(GOOD))
        ]
        assert letters[0]["attempts"][0] | {"worker": ""} == letters[0]["attempts"][0] | {
            "worker": "", "outcome": "raised", "code": "function_raised",
        }  # fmt: skip
        assert (await gateway.http.get(here)).json()["state"] == "failed"
        payload = await gateway.http.get(f"{here}/payload")
        assert (payload.content, payload.headers["content-type"]) == (GOOD, "application/json")
        answer = await gateway.http.post(f"{here}/replay")
        assert answer.status_code == 202
        again = await record_of(gateway, answer.json()["id"])
        assert (again.state, again.function, again.id == invocation) == (InvocationState.QUEUED, "fails-x", False)
        assert (await record_of(gateway, invocation)).state is InvocationState.FAILED
        for request in (gateway.http.get(here), gateway.http.post(f"{here}/replay"), gateway.http.delete(here)):
            assert problem(await request) == (404, "dead_letter_not_found")


async def test_a_replayed_call_uses_its_own_webhook_or_its_functions_current_one(nats: Any, make: Any) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("tells-again", webhook="https://example.org/old"), DIGEST)
        own, functions = (
            await submit(gateway, "tells-again", x_gpufn_webhook="https://example.org/mine"),
            await submit(gateway, "tells-again"),
        )
        gateway.report(make.status("tells-again", ready=0))  # so that the next revision serves at once
        await gateway.deploys.deploy(
            make.spec("tells-again", webhook="https://example.org/new"), DIGEST, DeployOptions(check=False)
        )
        await until_async(lambda: gateway.registry.functions["tells-again"].serving == 2)
        for invocation, url in ((own, "https://example.org/mine"), (functions, "https://example.org/new")):
            await die(gateway, invocation)
            here = f"/v1/dlq/tells-again/{invocation}"
            assert "example.org" not in (await gateway.http.get(here)).text  # readers must not see the URL
            again = await record_of(gateway, (await gateway.http.post(f"{here}/replay")).json()["id"])
            assert again.webhook == Webhook(url)


async def test_all_dead_letters_of_a_function_are_replayed_or_dropped(nats: Any, make: Any) -> None:
    async with gateway_on(nats) as gateway:
        for name in ("many", "spared"):
            await gateway.deploys.deploy(make.spec(name), DIGEST)
        dead = [await submit(gateway, name) for name in ("many", "many", "spared")]
        for invocation in dead:
            await die(gateway, invocation)
        replayed = (await gateway.http.post("/v1/dlq/many/replay")).json()["replayed"]
        assert [each["letter"] for each in replayed] == dead[:2]
        calls = (await gateway.http.get("/v1/calls?function=many&state=queued")).json()["calls"]
        assert {call["id"] for call in calls} == {each["invocation"] for each in replayed}
        ids = [each["id"] for each in (await gateway.http.get("/v1/dlq")).json()["letters"]]
        assert set(ids) & set(dead) == {dead[2]}
        assert (await gateway.http.delete("/v1/dlq/spared")).json() == {"dropped": 1}
        assert (await gateway.http.get("/v1/dlq/spared")).json() == {"letters": []}


async def test_a_list_of_dead_letters_of_an_unknown_function_is_not_found(nats: Any, make: Any, problem: Any) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("lives-on"), DIGEST)
        assert (await gateway.http.get("/v1/dlq/lives_on")).json() == {"letters": []}
        assert (await gateway.http.post("/v1/dlq/lives-on/replay")).json() == {"replayed": []}
        assert (await gateway.http.delete("/v1/dlq/lives-on")).json() == {"dropped": 0}
        here = "/v1/dlq/lives-no"
        for answer in (
            await gateway.http.get(here),
            await gateway.http.post(f"{here}/replay"),
            await gateway.http.delete(here),
        ):
            assert problem(answer) == (404, "function_not_found")


async def test_the_dead_letters_of_a_deleted_function_are_found(nats: Any, make: Any) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("departed"), DIGEST)
        invocation = await submit(gateway, "departed")
        await die(gateway, invocation)
        assert (await gateway.http.delete("/v1/functions/departed")).status_code == 204
        await until_async(lambda: "departed" not in gateway.registry.functions)
        letters = (await gateway.http.get("/v1/dlq/departed")).json()["letters"]
        assert [each["id"] for each in letters] == [invocation]
        assert (await gateway.http.delete("/v1/dlq/departed")).json() == {"dropped": 1}


async def test_a_replay_of_all_dead_letters_survives_a_concurrent_replay_of_one(
    nats: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("shared"), DIGEST)
        dead = [await submit(gateway, "shared") for _ in range(3)]
        for invocation in dead:
            await die(gateway, invocation)
        listed = await dead_letters.recent(gateway.bus, "shared", 10)

        async def recent(*_: Any) -> Any:
            return listed

        monkeypatch.setattr(dead_letters, "recent", recent)
        assert (await gateway.http.post(f"/v1/dlq/shared/{dead[1]}/replay")).status_code == 202
        answer = await gateway.http.post("/v1/dlq/shared/replay")
        assert answer.status_code == 202
        assert [each["letter"] for each in answer.json()["replayed"]] == [dead[0], dead[2]]


async def test_a_replay_of_all_dead_letters_skips_those_of_a_removed_method(nats: Any, make: Any, problem: Any) -> None:
    """Bug: the oldest letter stopped the replay of all others."""
    async with gateway_on(nats) as gateway:
        old, new = (MethodSpec(name=name, parameters={"type": "object"}) for name in ("old", "new"))
        await gateway.deploys.deploy(make.spec("changed", old, new, is_class=True), DIGEST)
        dead = [await submit(gateway, name) for name in ("changed.old", "changed.new")]
        for invocation in dead:
            await die(gateway, invocation)
        gateway.report(make.status("changed", ready=0))
        await gateway.deploys.deploy(make.spec("changed", new, is_class=True), DIGEST, DeployOptions(check=False))
        answer = await gateway.http.post("/v1/dlq/changed/replay")
        assert answer.status_code == 202
        assert [each["letter"] for each in answer.json()["replayed"]] == [dead[1]]
        assert [each["id"] for each in (await gateway.http.get("/v1/dlq/changed")).json()["letters"]] == [dead[0]]
        assert problem(await gateway.http.post(f"/v1/dlq/changed/{dead[0]}/replay")) == (404, "function_not_found")
        await gateway.deploys.delete("changed")
        assert problem(await gateway.http.post("/v1/dlq/changed/replay")) == (404, "function_not_found")


@pytest.mark.parametrize("ends", ["cancelled", "expired"])
async def test_a_call_that_ends_between_attempts_leaves_no_checkpoint_for_the_next_call_with_its_id(
    nats: Any, make: Any, ends: str
) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec(f"waits-{ends}", retries=Retry(1)), DIGEST)
        invocation = await submit(gateway, f"waits-{ends}", idempotency_key="k")
        record = await record_of(gateway, invocation)
        stored = await streams.message_at(gateway.bus, subjects.ASYNC, record.queue_seq)
        assert stored is not None
        message, body = unpack_invocation(stored.payload)
        await checkpoints.store(gateway.bus, invocation, Checkpoint("application/json", 1, 1.0), b"7")
        failed = (AttemptRecord(1, OutcomeKind.RAISED, 2.0),)
        again = msgspec.structs.replace(message, attempt=2, attempts=failed)
        next_seq = (await gateway.bus.publish_stored(stored.subject, pack(again, body))).seq
        await call_records.retry(gateway.bus, again, body, next_seq)
        await streams.delete_message(gateway.bus, subjects.ASYNC, record.queue_seq)
        if ends == "cancelled":
            await gateway.http.delete(f"/v1/invocations/{invocation}")
        else:
            late = Outcome(OutcomeKind.EXPIRED)
            assert await queue_position.end_unless_held(gateway.bus, next_seq, again, late, 3.0)
        assert (await record_of(gateway, invocation)).state == ends
        assert await checkpoints.last(gateway.bus, invocation) is None
