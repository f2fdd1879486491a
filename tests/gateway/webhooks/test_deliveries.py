"""From a call's end to its receiver: signed, retried until it is answered, by whichever gateway is alive."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from gpufn import webhooks
from gpufn_core.domain.invocation import InvocationState
from gpufn_core.errors import BusUnavailable, ErrorInfo
from gpufn_core.ids import new_invocation_id
from gpufn_core.protocol import subjects
from gpufn_core.protocol.records import CallRecord
from gpufn_gateway.webhooks import concurrency, deliveries, retry_policy, sender
from gpufn_gateway.webhooks.address_policy import AddressPolicy
from gpufn_gateway.webhooks.deliveries import Deliveries
from gpufn_gateway.webhooks.sender import WebhookSender
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import streams
from gpufn_platform.queue.records import call_records
from tests.gateway.webhooks.receiver import OK, receiving
from tests.gateway.whole import DIGEST, Whole, gateway_on
from tests.waiting import until_async

GOOD = b'{"texts":["a"]}'
REFUSED = b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n"


@contextlib.asynccontextmanager
async def whole(nats: Any) -> AsyncIterator[Whole]:
    """A gateway on a bus without other tests' jobs."""
    async with gateway_on(nats) as gateway:
        await streams.purge(gateway.bus, subjects.WEBHOOKS, subjects.WEBHOOKS_FILTER)
        await streams.delete_consumer(gateway.bus, subjects.WEBHOOKS, subjects.WEBHOOK_CONSUMER)
        yield gateway


@contextlib.asynccontextmanager
async def delivering(gateway: Whole, bus: Bus | None = None) -> AsyncIterator[None]:
    task = asyncio.create_task(
        Deliveries(bus or gateway.bus, gateway.webhook_secrets, gateway.post, gateway.clock, gateway.telemetry).run()
    )
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def submit(gateway: Whole, function: str, webhook: str | None = None, **headers: str) -> CallRecord:
    given = {"content-type": "application/json"} | ({"x-gpufn-webhook": webhook} if webhook else {}) | headers
    answer = await gateway.http.post(f"/v1/functions/{function}/submit", content=GOOD, headers=given)
    assert answer.status_code == 202, answer.text
    found = await call_records.read(gateway.bus, answer.json()["id"])
    assert found is not None
    return found[0]


def ended(record: CallRecord, state: InvocationState = InvocationState.SUCCEEDED, **fields: Any) -> CallRecord:
    changed = {"state": state, "ended_at": 1_790_000_000.0, "content_type": "application/json"} | fields
    return CallRecord(**{name: getattr(record, name) for name in record.__struct_fields__} | changed)


async def waiting(gateway: Whole) -> int:
    info = await gateway.bus.js(f"STREAM.INFO.{subjects.WEBHOOKS}")
    return int(info["state"]["messages"])


async def test_the_webhook_receives_the_signed_end_of_a_call_with_its_result(nats: Any, make: Any) -> None:
    async with whole(nats) as gateway, receiving() as receiver, delivering(gateway):
        await gateway.deploys.deploy(make.spec("told"), DIGEST)
        record = await submit(gateway, "told", receiver.url())
        assert await call_records.end(gateway.bus, ended(record), b'{"label":"cat"}')
        request = await receiver.requests.get()
        (secret,) = await gateway.webhook_secrets.of("platform")
        webhooks.verify(secret, request.headers, request.body)
        assert request.headers["webhook-id"] == record.id
        letter = json.loads(request.body)
        assert (letter["type"], letter["timestamp"]) == ("invocation.succeeded", "2026-09-21T14:13:20Z")
        assert letter["data"]["result"] == {"label": "cat"}
        assert (letter["data"]["id"], letter["data"]["function"]) == (record.id, "told")
        shown = (await gateway.http.get(letter["data"]["links"]["self"])).json()
        assert letter["data"]["links"] == shown["links"]
        while await waiting(gateway):
            pass


async def test_a_function_reports_the_ends_of_all_its_calls_and_a_call_can_choose_its_own_webhook(
    nats: Any, make: Any
) -> None:
    async with whole(nats) as gateway, receiving() as receiver, delivering(gateway):
        await gateway.deploys.deploy(make.spec("tells", webhook=receiver.url("/all")), DIGEST)
        for webhook, path in ((None, "/all"), (receiver.url("/mine"), "/mine")):
            record = await submit(gateway, "tells", webhook)
            error = ErrorInfo("function_raised", "no", traceback="secret paths")
            await call_records.end(gateway.bus, ended(record, InvocationState.FAILED, error=error))
            request = await receiver.requests.get()
            letter = json.loads(request.body)
            assert (request.path, letter["type"], letter["data"]["error"]["message"]) == (
                path,
                "invocation.failed",
                "no",
            )
            assert b"secret paths" not in request.body


async def test_the_webhook_receives_the_end_of_a_call_cancelled_in_the_queue(nats: Any, make: Any) -> None:
    async with whole(nats) as gateway, receiving() as receiver, delivering(gateway):
        await gateway.deploys.deploy(make.spec("leaves"), DIGEST)
        record = await submit(gateway, "leaves", receiver.url())
        await gateway.http.delete(f"/v1/invocations/{record.id}")
        assert json.loads((await receiver.requests.get()).body)["type"] == "invocation.cancelled"


async def test_a_delivery_to_a_busy_receiver_is_repeated_with_the_same_id(
    nats: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry_policy, "delay_after", lambda age_s: 0.0)
    async with whole(nats) as gateway, receiving() as receiver, delivering(gateway):
        await gateway.deploys.deploy(make.spec("busy"), DIGEST)
        answers = [REFUSED, REFUSED, OK]
        receiver.answers = lambda _: answers.pop(0)
        record = await submit(gateway, "busy", receiver.url())
        await call_records.end(gateway.bus, ended(record))
        ids = [(await receiver.requests.get()).headers["webhook-id"] for _ in range(3)]
        assert ids == [record.id] * 3
        while await waiting(gateway):
            pass


async def test_a_receiver_that_does_not_answer_leaves_the_others_theirs(
    nats: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "_TIMEOUT_S", 600.0)
    monkeypatch.setattr(deliveries, "_AT_ONCE", 4)
    monkeypatch.setattr(concurrency, "MAX_CONCURRENT", 1)
    monkeypatch.setattr(concurrency, "SLOW_S", 0.0)
    async with whole(nats) as gateway, receiving() as silent, receiving() as other, delivering(gateway):
        silent.answers = lambda _: None
        await gateway.deploys.deploy(make.spec("silent"), DIGEST)
        for receiver in (silent, silent, silent, other):
            await call_records.end(gateway.bus, ended(await submit(gateway, "silent", receiver.url())))
        await asyncio.gather(silent.requests.get(), other.requests.get())
        assert silent.requests.empty()


async def test_a_job_that_was_delivered_often_but_not_tried_is_not_late(
    nats: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bus was away, or gateways died: that was not the receiver's fault."""
    asked: list[float] = []

    def at_once(age_s: float) -> float:
        asked.append(age_s)
        return 0.0

    monkeypatch.setattr(retry_policy, "delay_after", at_once)
    async with whole(nats) as gateway, receiving() as receiver:
        await gateway.deploys.deploy(make.spec("often"), DIGEST)
        answers = [REFUSED, OK]
        receiver.answers = lambda _: answers.pop(0)
        record = await submit(gateway, "often", receiver.url())
        wait, away = call_records.wait, [BusUnavailable("away")] * 3

        async def breaking_off(*given: Any) -> Any:
            if away:
                raise away.pop()
            return await wait(*given)

        monkeypatch.setattr(call_records, "wait", breaking_off)
        monkeypatch.setattr(deliveries, "_TICK_S", 0.01)
        await call_records.end(gateway.bus, ended(record))
        async with delivering(gateway):
            for _ in range(2):
                await receiver.requests.get()
    assert away == []
    assert len(asked) == 1
    assert 0.0 <= asked[0] < 4.0  # seconds, and not the number of redeliveries


async def test_an_abandoned_webhook_is_in_the_log_of_the_function(
    nats: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    delays = [0.0, None]
    monkeypatch.setattr(retry_policy, "delay_after", lambda age_s: delays.pop(0))
    async with whole(nats) as gateway, receiving() as receiver, delivering(gateway):
        await gateway.deploys.deploy(make.spec("deaf"), DIGEST)
        receiver.answers = lambda _: REFUSED
        record = await submit(gateway, "deaf", receiver.url())
        await call_records.end(gateway.bus, ended(record))
        while (line := await streams.last_message(gateway.bus, subjects.LOGS, subjects.logs("deaf"))) is None:
            pass
        assert all(fact.encode() in line.payload for fact in (receiver.url(), "0.0 hours", "503"))
        assert await waiting(gateway) == 0
        assert receiver.requests.qsize() == 2


async def test_a_webhook_whose_call_record_has_expired_is_reported_when_abandoned(
    nats: Any, make: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The retention may be shorter than the retries take."""
    delays = [0.0, None]
    monkeypatch.setattr(retry_policy, "delay_after", lambda age_s: delays.pop(0))
    async with whole(nats) as gateway, delivering(gateway):
        await gateway.deploys.deploy(make.spec("forgotten"), DIGEST)
        gone = new_invocation_id()
        await gateway.bus.publish_stored(subjects.webhook("forgotten"), gone.encode(), msg_id=f"{gone}.1")
        log_of = subjects.logs("forgotten")
        while (line := await streams.last_message(gateway.bus, subjects.LOGS, log_of)) is None:
            pass
        assert f"the webhook of {gone} was given up".encode() in line.payload
        assert len([each for each in caplog.records if gone in each.message]) == 1
        assert delays == []
        while await waiting(gateway):
            pass


async def test_a_webhook_that_fails_in_the_gateway_is_reported_when_abandoned(
    nats: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry_policy, "delay_after", lambda age_s: None)

    def broken(*_: Any) -> bytes:
        raise RuntimeError("what?")

    monkeypatch.setattr(deliveries, "encode_payload", broken)
    async with whole(nats) as gateway, receiving() as receiver, delivering(gateway):
        await gateway.deploys.deploy(make.spec("broken"), DIGEST)
        record = await submit(gateway, "broken", receiver.url())
        await call_records.end(gateway.bus, ended(record))
        while (line := await streams.last_message(gateway.bus, subjects.LOGS, subjects.logs("broken"))) is None:
            pass
        assert f"the webhook of {record.id} was given up".encode() in line.payload
        assert b"what?" not in line.payload


async def test_delivered_and_abandoned_webhooks_are_counted(nats: Any, make: Any) -> None:
    async with whole(nats) as gateway, receiving() as receiver, delivering(gateway):
        await gateway.deploys.deploy(make.spec("counted"), DIGEST)
        answers = [OK, OK, b"HTTP/1.1 410 Gone\r\ncontent-length: 0\r\n\r\n"]
        receiver.answers = lambda _: answers.pop(0)
        for _ in range(3):
            record = await submit(gateway, "counted", receiver.url())
            await call_records.end(gateway.bus, ended(record))
            await receiver.requests.get()
        while await waiting(gateway):
            pass
        body, _ = await gateway.telemetry.scrape("")
        lines = body.decode().splitlines()
        assert [line for line in lines if line.startswith("gpufn_webhooks_total{")] == [
            'gpufn_webhooks_total{function="counted",outcome="delivered"} 2.0',
            'gpufn_webhooks_total{function="counted",outcome="given_up"} 1.0',
        ]


async def test_an_address_that_is_refused_at_last_is_not_tried_again(nats: Any, make: Any) -> None:
    async with whole(nats) as gateway, receiving() as receiver:
        await gateway.deploys.deploy(make.spec("inside"), DIGEST)
        record = await submit(gateway, "inside", receiver.url(host="localhost"))
        gateway.post = WebhookSender(AddressPolicy())  # the address is no longer allowed
        async with delivering(gateway):
            await call_records.end(gateway.bus, ended(record))
            while (line := await streams.last_message(gateway.bus, subjects.LOGS, subjects.logs("inside"))) is None:
                pass
        assert b"given up: no webhook is sent to localhost" in line.payload
        assert receiver.requests.empty()


async def test_the_jobs_of_a_killed_gateway_are_delivered_by_another(
    nats: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deliveries, "_ACK_WAIT_S", 1.0)
    async with whole(nats) as gateway, receiving() as receiver:
        await gateway.deploys.deploy(make.spec("killed"), DIGEST)
        receiver.answers = lambda _: None
        record = await submit(gateway, "killed", receiver.url())
        bus = await Bus.connect(nats.url, name="killed")
        async with delivering(gateway, bus):
            await call_records.end(gateway.bus, ended(record))
            await receiver.requests.get()  # the attempt is in flight
            await bus.close()  # so the gateway neither acknowledges nor rejects it
        receiver.answers = lambda _: OK
        gateway.post = WebhookSender(AddressPolicy(("127.0.0.0/8",)))
        async with delivering(gateway):
            assert (await receiver.requests.get()).headers["webhook-id"] == record.id
            while await waiting(gateway):
                pass


async def test_a_slow_try_is_not_repeated_by_another_gateway_meanwhile(
    nats: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deliveries, "_TICK_S", 0.01)
    bus = await Bus.connect(nats.url, name="listens")
    said: asyncio.Queue[bytes] = asyncio.Queue()
    async with whole(nats) as gateway, receiving() as receiver, delivering(gateway):
        bus.subscribe(f"$JS.ACK.{subjects.WEBHOOKS}.>", lambda message: said.put_nowait(message.payload))
        await bus.flush()
        await gateway.deploys.deploy(make.spec("long"), DIGEST)
        receiver.answers = lambda _: None
        record = await submit(gateway, "long", receiver.url())
        await call_records.end(gateway.bus, ended(record))
        await receiver.requests.get()
        assert [await said.get() for _ in range(3)] == [b"+WPI"] * 3
    await bus.close()


async def test_a_job_that_precedes_the_end_of_its_call_waits_for_it(nats: Any, make: Any) -> None:
    async with whole(nats) as gateway, receiving() as receiver, delivering(gateway):
        await gateway.deploys.deploy(make.spec("early"), DIGEST)
        record = await submit(gateway, "early", receiver.url())
        await gateway.bus.publish_stored(
            subjects.webhook("early"), record.id.encode(), msg_id=f"{record.id}.1790000000.0"
        )
        await call_records.end(gateway.bus, ended(record))
        assert (await receiver.requests.get()).headers["webhook-id"] == record.id


@pytest.mark.parametrize("url", ["http://10.0.0.1/x", "http://169.254.169.254/latest", "ftp://example.org", "x"])
async def test_a_webhook_that_cannot_be_is_refused_with_the_call_and_with_the_function(
    nats: Any, make: Any, problem: Any, url: str
) -> None:
    async with whole(nats) as gateway:
        await gateway.deploys.deploy(make.spec("open"), DIGEST)
        headers = {"content-type": "application/json", "x-gpufn-webhook": url}
        answer = await gateway.http.post("/v1/functions/open/submit", content=GOOD, headers=headers)
        assert problem(answer) == (422, "invalid_input")
        assert answer.json()["field"] == "webhook"
        spec = msgspec.to_builtins(make.spec("closed")) | {"webhook": url}
        answer = await gateway.http.post("/v1/functions", json={"spec": spec, "bundle": DIGEST})
        assert problem(answer) == (422, "invalid_spec")
        assert "closed: " in answer.json()["detail"]


async def test_a_call_with_a_waiting_client_has_no_webhook(gateway: Any, problem: Any) -> None:
    answer = await gateway.post("/v1/functions/embed/invoke", GOOD, x_gpufn_webhook="https://example.org")
    assert problem(answer) == (422, "invalid_input")
    assert "Prefer: respond-async" in answer.json()["detail"]


async def test_secrets_are_made_once_changed_on_demand_and_shown_to_their_owner(nats: Any, problem: Any) -> None:
    async with whole(nats) as gateway:
        path = "/v1/keys/platform/webhook-secret"
        first = (await gateway.http.get(path)).json()["secret"]
        assert first.startswith("whsec_")
        assert (await gateway.http.get(path)).json()["secret"] == first
        second = (await gateway.http.post(path)).json()["secret"]
        assert await gateway.webhook_secrets.of("platform") == (second, first)
        third = (await gateway.http.post(path)).json()["secret"]
        assert await gateway.webhook_secrets.of("platform") == (third, second)
        assert problem(await gateway.http.get("/v1/keys/nobody/webhook-secret"))[0] == 404


async def test_a_key_sees_its_own_secret_and_no_others(nats: Any, problem: Any) -> None:
    async with whole(nats) as gateway:
        first = (await gateway.http.post("/v1/keys", json={"scopes": ["admin"]})).json()
        admin = {"authorization": f"Bearer {first['key']}"}
        caller = (await gateway.http.post("/v1/keys", json={"scopes": ["invoke:*"]}, headers=admin)).json()
        own = {"authorization": f"Bearer {caller['key']}"}
        try:
            shown = await gateway.http.get(f"/v1/keys/{caller['id']}/webhook-secret", headers=own)
            assert shown.json()["secret"] == (await gateway.webhook_secrets.of(caller["id"]))[0]
            for other in ("platform", first["id"]):
                refused = await gateway.http.get(f"/v1/keys/{other}/webhook-secret", headers=own)
                assert problem(refused) == (403, "forbidden")
        finally:
            for key in (caller, first):
                await gateway.keys.delete(key["id"])


async def test_a_team_with_many_receivers_that_hang_leaves_deliveries_to_others(
    nats: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: 64 receivers of one team that hang, each on its own host, blocked all deliveries of a gateway."""
    teams = {"hostile": "b", "quiet": "a"}
    async with whole(nats) as gateway:
        hanging, sent = asyncio.Event(), asyncio.Event()
        started: list[str] = []

        async def send(url: str, headers: Any, body: bytes) -> int:
            started.append(url)
            if "slow" in url:
                await hanging.wait()
            else:
                sent.set()
            return 200

        monkeypatch.setattr(gateway.post, "send", send)
        monkeypatch.setattr(concurrency, "SLOW_S", 0.0)  # every started delivery counts as hanging
        delivering_all = Deliveries(
            gateway.bus, gateway.webhook_secrets, gateway.post, gateway.clock, gateway.telemetry,
            team_of=teams.__getitem__,
        )  # fmt: skip
        for name in teams:
            await gateway.deploys.deploy(make.spec(name), DIGEST)
        for number in range(70):
            record = await submit(gateway, "hostile", f"http://127.0.1.{number}:9/slow")
            await call_records.end(gateway.bus, ended(record), b"1")
        task = asyncio.create_task(delivering_all.run())
        async with asyncio.timeout(30):
            await until_async(lambda: len(started) == 32)
            await call_records.end(gateway.bus, ended(await submit(gateway, "quiet", "http://127.0.2.1:9/fast")), b"1")
            await sent.wait()
        assert sum("slow" in url for url in started) == 32
        hanging.set()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        for name in teams:
            await gateway.http.delete(f"/v1/functions/{name}")
