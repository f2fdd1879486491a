from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

import msgspec
import pytest

from gpufn_core.domain.invocation import OutcomeKind
from gpufn_core.domain.worker import ColdStart
from gpufn_core.errors import BusUnavailable, CapacityError, ErrorInfo, QueueFull
from gpufn_core.protocol.reports import NodeReport, RunnerReport, WeightsReport
from gpufn_core.spec.function_spec import MethodSpec
from gpufn_gateway.http.body_reader import BodyBudget, BodyReader
from gpufn_gateway.problems import problem_of
from gpufn_platform.bus.connection import NoResponders, NotStored

URL = "/v1/functions/embed/invoke"
GOOD = b'{"texts":["a"]}'


async def test_a_call_returns_the_result_and_names_its_worker(gateway: Any) -> None:
    answer = await gateway.post(URL, GOOD, content_type="application/json")
    (call,) = gateway.queue.calls
    assert (answer.status_code, answer.content) == (200, GOOD)
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-gpufn-invocation"] == call.id
    assert answer.headers["x-gpufn-revision"] == "embed@1"
    assert answer.headers["server-timing"] == "queue;dur=1.2, run;dur=3.4"
    assert call.fields["deadline"] == 1000.0 + 600 + 300  # startup_timeout and timeout of the spec


async def test_a_cold_start_shows_its_phases(gateway: Any) -> None:
    cold = ColdStart(place_s=0.001, launch_s=0.05, load_s=0.2, warm_s=0.0)
    gateway.queue.answer = lambda call: call.reply(b"1", cold_start=cold)
    answer = await gateway.post(URL, GOOD)
    assert answer.headers["server-timing"] == (
        "queue;dur=1.2, run;dur=3.4, place;dur=1.0, fetch;dur=0.0, launch;dur=50.0, load;dur=200.0, warm;dur=0.0"
    )


@pytest.mark.parametrize(
    ("sent", "taken"),
    [
        ("application/json", "application/json"),
        ("application/json; charset=utf-8", "application/json"),
        ("application/x-www-form-urlencoded", "application/json"),
        ("APPLICATION/MSGPACK", "application/msgpack"),
        ("application/vnd.gpufn.msgpack", "application/vnd.gpufn.msgpack"),
        ("image/png", "image/png"),
    ],
)
async def test_the_body_is_passed_on_under_the_type_that_it_is_read_as(
    gateway: Any, make: Any, sent: str, taken: str
) -> None:
    gateway.deploy(make.spec("embed", MethodSpec(parameters={"type": "object"}, raw_parameter="image")), 2)
    body = b"{}" if taken == "application/json" else b"\x80"
    assert (await gateway.post(URL, body, content_type=sent)).status_code == 200
    assert (gateway.queue.calls[0].fields["content_type"], gateway.queue.calls[0].fields["body"]) == (taken, body)


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [
        ("*/*", ""),
        ("application/json", "application/json"),
        ("application/json, application/vnd.gpufn.msgpack;q=0.9", "application/vnd.gpufn.msgpack"),
        ("text/html, */*", "text/html"),
    ],
)
async def test_accept_reaches_the_worker(gateway: Any, accept: str, wanted: str) -> None:
    await gateway.post(URL, GOOD, accept=accept)
    assert gateway.queue.calls[0].fields["accept"] == wanted


async def test_no_body_is_an_empty_object(gateway: Any, make: Any) -> None:
    gateway.deploy(make.spec("hello", MethodSpec(parameters={"type": "object", "properties": {}})))
    assert (await gateway.post("/v1/functions/hello/invoke", b"")).content == b"{}"


@pytest.mark.parametrize("name", ["a-b", "a_b", "A_B", "_a_b"])
async def test_either_spelling_reaches_the_function(gateway: Any, make: Any, name: str) -> None:
    gateway.deploy(make.spec("a-b"))
    assert (await gateway.post(f"/v1/functions/{name}/invoke", GOOD)).status_code == 200


async def test_a_method_is_called_by_its_name(gateway: Any, make: Any, problem: Any) -> None:
    gateway.deploy(make.spec("model", MethodSpec(name="embed"), MethodSpec(name="rank"), is_class=True))
    assert (await gateway.post("/v1/functions/model.rank/invoke")).status_code == 200
    assert gateway.queue.calls[0].fields["method"] == "rank"
    for wrong in ("model", "model.fly"):
        answer = await gateway.post(f"/v1/functions/{wrong}/invoke")
        assert problem(answer) == (404, "function_not_found")
        assert answer.json()["detail"] == f"{wrong!r} cannot be called; call model.embed or model.rank."


NO_JSON = "the body is not valid JSON: JSON is malformed"
HINT = 'send an object with the arguments, such as {"name": "value"}'


@pytest.mark.parametrize(
    ("body", "detail", "field"),
    [
        (b'{"texts":[1]}', "texts[0]: expected str, got int", "texts[0]"),
        (b"{}", "texts: this argument is missing", "texts"),
        (b'{"texts":[],"to":1}', "to: there is no such argument; it takes texts, top", "to"),
        (b'{"texts":[],"top":"x"}', "top: expected int, got str", "top"),
        (b"[]", "the body must be a JSON object of keyword arguments: expected object, got array", None),
        (b"{texts", f"{NO_JSON}: object keys must be strings (byte 1); {HINT}", None),
        (b"\xff", f"{NO_JSON}: invalid character (byte 0); {HINT}", None),
    ],
)
async def test_arguments_that_do_not_fit_are_named(
    gateway: Any, problem: Any, body: bytes, detail: str, field: str | None
) -> None:
    answer = await gateway.post(URL, body, content_type="application/json")
    assert problem(answer) == (422, "invalid_input")
    assert (answer.json()["detail"], answer.json().get("field")) == (detail, field)
    assert gateway.queue.calls == []


async def test_a_body_that_nests_too_deep_is_refused(gateway: Any, make: Any, problem: Any) -> None:
    gateway.deploy(make.spec("any", MethodSpec(parameters={"type": "object"})))
    for depth, expected in ((63, 200), (64, 422), (1900, 422)):
        body = b'{"a":' + b"[" * depth + b"]" * depth + b"}"
        answer = await gateway.post("/v1/functions/any/invoke", body)
        assert answer.status_code == expected, (depth, answer.text)
    assert "64 levels" in answer.json()["detail"]
    brackets = b'{"a":"' + b"[" * 200 + b'"}'
    assert (await gateway.post("/v1/functions/any/invoke", brackets)).status_code == 200


async def test_a_body_above_the_limit_is_refused_with_or_without_its_length(
    gateway: Any, make: Any, problem: Any
) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b" " * 1000

    for content, fault in ((b" " * (make.CALL_LIMIT + 1), "has 4,097 bytes"), (chunks(), "is too large")):
        answer = await gateway.post(URL, content)
        assert problem(answer) == (413, "payload_too_large")
        assert all(fact in answer.json()["detail"] for fact in (fault, "4 KiB"))
        assert answer.headers["connection"] == "close"


async def test_bodies_have_a_common_limit_and_a_complete_one_makes_room() -> None:
    budget = BodyBudget(1000)
    reader = BodyReader(800, 5, what="a test", budget=budget)
    arrived = asyncio.Event()

    def sender(size: int) -> Callable[[], Awaitable[MutableMapping[str, Any]]]:
        messages: list[dict[str, Any]] = [{"body": b"x" * size, "more_body": True}, {"body": b"y"}]
        sent = iter(messages)

        async def receive() -> MutableMapping[str, Any]:
            message = next(sent)
            if "more_body" not in message:
                await arrived.wait()
            return {"type": "http.request", **message}

        return receive

    slow = asyncio.create_task(reader.read({}, sender(700)))
    await asyncio.sleep(0)
    with pytest.raises(CapacityError) as caught:
        await reader.read({}, sender(301))
    answer = problem_of(caught.value)
    assert (answer.status, (b"retry-after", b"1") in answer.headers(), budget.used_bytes) == (503, True, 700)
    arrived.set()
    assert (len(await slow), len(await reader.read({}, sender(700)))) == (701, 701)
    assert budget.used_bytes == 0


async def test_a_raw_body_needs_a_bytes_parameter(gateway: Any, problem: Any) -> None:
    answer = await gateway.post(URL, b"\x89PNG", content_type="image/png")
    assert problem(answer) == (415, "unsupported_media_type")


async def test_an_unknown_function_is_not_found(gateway: Any, problem: Any) -> None:
    for name in ("nobody", "%2e%2e", "a" * 300, "x%00y", "é"):
        assert problem(await gateway.post(f"/v1/functions/{name}/invoke")) == (404, "function_not_found"), name


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon", "604801"])
async def test_a_timeout_must_make_sense(gateway: Any, problem: Any, value: str) -> None:
    answer = await gateway.post(URL, GOOD, X_Gpufn_Timeout=value)
    assert problem(answer) == (422, "invalid_input")
    assert answer.json()["field"] == "X-Gpufn-Timeout"


async def test_the_deadline_follows_the_timeout_of_the_client(gateway: Any, make: Any) -> None:
    await gateway.post(URL, GOOD, X_Gpufn_Timeout="2.5")
    gateway.deploy(make.spec(queue_timeout_s=10.0, timeout_s=5.0), 2)
    await gateway.post(URL, GOOD)
    assert [call.fields["deadline"] for call in gateway.queue.calls] == [1002.5, 1015.0]


@pytest.mark.parametrize(("took_s", "remaining_s"), [(0.0, 10.0), (4.0, 6.0), (15.0, -5.0)])
async def test_a_deadline_is_fixed_even_if_the_body_arrives_slowly(
    gateway: Any, clock: Any, connection: Any, took_s: float, remaining_s: float
) -> None:
    slow = connection(URL, GOOD, x_gpufn_deadline=str(clock.time() + 10.0))
    receive = slow.receive

    async def dribble() -> Any:
        clock.now += took_s
        return await receive()

    slow.receive = dribble
    await slow.start(gateway.app)
    (call,) = gateway.queue.calls
    assert call.fields["deadline"] - clock.time() == pytest.approx(remaining_s)


async def test_a_traceparent_travels_only_when_it_is_one(gateway: Any) -> None:
    good = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    await gateway.post(URL, GOOD, traceparent=good)
    await gateway.post(URL, GOOD, traceparent="nonsense")
    assert [call.fields["trace"] for call in gateway.queue.calls] == [good, ""]


@pytest.mark.parametrize(
    ("kind", "error", "expected"),
    [
        (
            OutcomeKind.RAISED,
            ErrorInfo("function_raised", "no", error_type="E", error_classes=("m:E",), traceback="Traceback ..."),
            (500, "function_raised"),
        ),
        (OutcomeKind.RAISED, ErrorInfo("result_not_encodable", "no"), (500, "result_not_encodable")),
        (OutcomeKind.REJECTED, ErrorInfo("invalid_input", "no", field="top"), (422, "invalid_input")),
        (OutcomeKind.TIMED_OUT, None, (504, "invocation_timed_out")),
        (OutcomeKind.CANCELLED, None, (409, "invocation_cancelled")),
        (OutcomeKind.EXPIRED, None, (504, "invocation_expired")),
        (OutcomeKind.LOST, ErrorInfo("worker_lost", "was killed by SIGSEGV", retryable=True), (502, "worker_lost")),
        (OutcomeKind.NOT_STARTED, None, (503, "function_start_failed")),
        (OutcomeKind.RAISED, ErrorInfo("from_the_future", "new"), (500, "from_the_future")),
    ],
)
async def test_each_outcome_is_its_problem(
    gateway: Any, problem: Any, kind: OutcomeKind, error: ErrorInfo | None, expected: tuple[int, str]
) -> None:
    gateway.queue.answer = lambda call: call.reply(b"", kind, error=error)
    answer = await gateway.post(URL, GOOD)
    assert problem(answer) == expected
    if error is not None:
        shown = {name: answer.json().get(name) for name in ("field", "error_type", "traceback")}
        assert shown == {"field": error.field, "error_type": error.error_type, "traceback": error.traceback}
        assert answer.json().get("error_classes", []) == list(error.error_classes)
    assert answer.headers["x-gpufn-invocation"] == gateway.queue.calls[0].id


async def test_a_full_queue_has_the_time_of_a_retry(gateway: Any, make: Any, problem: Any) -> None:
    gateway.report(make.status(queued=100, service_s=0.5, ready=5))
    gateway.queue.answer = lambda call: call.future.set_exception(QueueFull("gpufn.v1.inv.s.embed.1 is full"))
    answer = await gateway.post(URL, GOOD)
    assert problem(answer) == (429, "queue_full")
    assert (answer.headers["retry-after"], answer.json()["retry_after_s"]) == ("5", 5.0)
    assert "gpufn.v1" not in answer.text


async def test_without_a_bus_calls_fail_at_once_and_name_nothing(gateway: Any, problem: Any) -> None:
    gateway.queue.refuses = BusUnavailable("Not connected to the message bus: nats://10.1.2.3:4222 gpufn.v1.x")
    answer = await gateway.post(URL, GOOD)
    assert problem(answer) == (503, "bus_unavailable")
    assert answer.json()["retryable"] is True
    assert "10.1.2.3" not in answer.text
    assert "retry-after" in answer.headers


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (BusUnavailable("gpufn.v1.x did not answer"), "does not respond right now"),
        (NotStored("gpufn.v1.x did not answer"), "did not confirm this write in time"),
        (NoResponders("nobody listens on gpufn.v1.x"), "does not respond right now"),
    ],
)
def test_a_bus_that_stores_nothing_and_an_unreachable_bus_have_different_errors(
    error: BusUnavailable, words: str
) -> None:
    told = problem_of(error)
    assert (told.status, told.code) == (503, "bus_unavailable")
    assert words in told.info.message
    assert "gpufn.v1" not in told.info.message


async def test_an_unexpected_exception_shows_an_incident_id_only(
    gateway: Any, problem: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def breaks(call: Any) -> None:
        raise ZeroDivisionError("/secret/path")

    gateway.queue.answer = breaks
    answer = await gateway.post(URL, GOOD)
    assert problem(answer) == (500, "platform_error")
    assert "secret" not in answer.text
    incident = answer.json()["detail"].removesuffix(".").split()[-1]
    assert [record.getMessage() for record in caplog.records] == [f"incident {incident}"]


async def test_the_result_of_a_function_cannot_act_as_a_page(gateway: Any) -> None:
    gateway.queue.answer = lambda call: call.reply(b"<script>", content_type="text/html")
    answer = await gateway.post(URL, GOOD)
    assert answer.headers["content-type"] == "text/html"
    assert answer.headers["content-security-policy"] == "sandbox; frame-ancestors 'none'"
    assert answer.headers["referrer-policy"] == "no-referrer"
    gateway.queue.answer = lambda call: call.reply(b"x", content_type="a\r\nset-cookie: b")
    assert (await gateway.post(URL, GOOD)).headers["content-type"] == "application/octet-stream"


async def test_a_wakeup_is_sent_when_no_worker_of_the_serving_revision_is_ready(gateway: Any, make: Any) -> None:
    async def rings() -> int:
        gateway.bus.published.clear()
        gateway.clock.now += 1
        await gateway.post(URL, GOOD)
        return len(gateway.bus.published)

    assert await rings() == 0
    gateway.report(make.status(ready=0))
    assert await rings() == 1
    await gateway.post(URL, GOOD)
    assert gateway.bus.published == ["gpufn.v1.dmd.embed"], "two calls at once ring once"
    gateway.report(make.status(serving=7))
    assert await rings() == 1
    gateway.report()
    assert await rings() == 1


async def test_a_client_that_leaves_is_noticed_once_its_call_is_slow(
    gateway: Any, connection: Any, settle: Any
) -> None:
    gateway.queue.answer = lambda call: None
    client = connection(URL, GOOD)
    task = client.start(gateway.app)
    await settle()
    (call,) = gateway.queue.calls
    gateway.invoke.tick(gateway.clock.time() + 0.1)
    client.left.set()
    await settle()
    assert not call.cancelled
    gateway.invoke.tick(gateway.clock.time() + 0.3)
    await settle()
    assert call.cancelled
    await task


async def test_a_slow_call_whose_client_stays_is_answered(gateway: Any, connection: Any, settle: Any) -> None:
    gateway.queue.answer = lambda call: None
    client = connection(URL, GOOD)
    task = client.start(gateway.app)
    await settle()
    gateway.invoke.tick(gateway.clock.time() + 0.3)
    await settle()
    gateway.queue.calls[0].reply(b"42")
    await task
    assert (client.body, gateway.queue.calls[0].cancelled) == (b"42", False)
    assert [task.get_name() for task in asyncio.all_tasks() if "slow" in task.get_name()] == []


async def test_a_call_that_a_stopping_gateway_breaks_off_is_cancelled_and_its_caller_gets_an_error(
    gateway: Any, connection: Any, settle: Any
) -> None:
    gateway.queue.answer = lambda call: None
    client = connection(URL, GOOD)
    task = client.start(gateway.app)
    await settle()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert gateway.queue.calls[0].cancelled
    told = msgspec.json.decode(client.body)
    assert (told["status"], told["code"], told["retryable"]) == (503, "gateway_unavailable", True)


async def test_too_many_headers_and_other_methods_are_refused(gateway: Any, problem: Any) -> None:
    answer = await gateway.post(URL, GOOD, **{f"x-{number}": "1" for number in range(101)})
    assert problem(answer) == (431, "bad_request")
    async with gateway.client() as client:
        for verb in ("TRACE", "OPTIONS", "PATCH"):
            assert problem(answer := await client.request(verb, "/v1/functions")) == (405, "bad_request")
            assert answer.headers["allow"] == "GET, HEAD, POST", "only the fields that exist"
        assert problem(await client.request("PATCH", "/v3")) == (405, "bad_request")
        answer = await client.get(URL)
        assert problem(answer) == (405, "bad_request")
        assert (answer.headers["allow"], "POST" in answer.json()["detail"]) == ("POST", True)
        assert problem(await client.get("/v3")) == (404, "bad_request")
        assert problem(answer := await client.delete("/v1/functions")) == (405, "bad_request")
        assert answer.headers["allow"] == "GET, HEAD, POST", "the methods of all routes at this path"


async def test_calls_are_counted(gateway: Any, problem: Any) -> None:
    await gateway.post(URL, GOOD)
    await gateway.post(URL, b"{}")
    gateway.queue.answer = lambda call: call.reply(b"", OutcomeKind.LOST)
    await gateway.post(URL, GOOD)
    text = (await gateway.get("/metrics")).text
    assert "# HELP gpufn_calls_total " in text
    assert 'gpufn_calls_total{function="embed",outcome="succeeded"} 1.0' in text
    assert 'gpufn_calls_total{function="embed",outcome="lost"} 1.0' in text
    assert 'gpufn_refusals_total{code="invalid_input",function="embed"} 1.0' in text
    assert 'gpufn_call_seconds_count{function="embed"} 2' in text
    assert 'gpufn_run_seconds_count{function="embed"} 2' in text
    assert 'gpufn_run_seconds_bucket{function="embed",le="0.0025"} 0' in text
    assert 'gpufn_run_seconds_bucket{function="embed",le="0.005"} 2' in text
    assert "gpufn_calls_in_flight 0.0" in text


async def test_weights_are_counted_by_node(gateway: Any) -> None:
    counts = WeightsReport(hits=1, misses=2, fetched_bytes=3, evicted_bytes=4, stored_bytes=5)
    gateway.registry.receive_node_report(NodeReport("a", gateway.clock.time(), (), weights=counts))
    text = (await gateway.get("/metrics")).text
    assert [line for line in text.splitlines() if line.startswith("gpufn_weights")] == [
        'gpufn_weights_starts_total{node="a",result="hit"} 1.0',
        'gpufn_weights_starts_total{node="a",result="miss"} 2.0',
        'gpufn_weights_fetched_bytes_total{node="a"} 3.0',
        'gpufn_weights_evicted_bytes_total{node="a"} 4.0',
        'gpufn_weights_stored_bytes{node="a"} 5.0',
    ]


async def test_dropped_lines_of_runners_are_counted_by_node(gateway: Any) -> None:
    for node, dropped in (("a", 3), ("b", 0), ("a", 4)):
        gateway.registry.receive_runner_report(RunnerReport(node, "r", gateway.clock.time(), dropped_outcomes=dropped))
    text = (await gateway.get("/metrics")).text
    told = [line for line in text.splitlines() if line.startswith("gpufn_dropped_outcomes_total")]
    assert told == ['gpufn_dropped_outcomes_total{node="a"} 4.0', 'gpufn_dropped_outcomes_total{node="b"} 0.0']


def test_a_problem_is_json(make: Any) -> None:
    from gpufn_gateway.problems import from_info

    body = msgspec.json.decode(from_info(ErrorInfo("conflict", "x", retryable=True)).body())
    assert body == {
        "type": "about:blank",
        "title": "Conflict",
        "status": 409,
        "detail": "x",
        "code": "conflict",
        "retryable": True,
    }
