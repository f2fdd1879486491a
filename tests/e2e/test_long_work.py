"""Long work on the whole platform while processes are killed: checkpoints, webhooks, schedules and traces."""

from __future__ import annotations

import http.server
import json
import os
import queue
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gpufn import webhooks
from gpufn_core.domain.trace_context import span_id, trace_id
from tests import otlp
from tests.conftest import Platform, running_platform
from tests.waiting import until

pytestmark = pytest.mark.e2e

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
APP = Path(__file__).parent / "apps" / "climb.py"


@pytest.fixture(scope="module")
def traces() -> Iterator[otlp.Collector]:
    with otlp.collector() as server:
        yield server


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory, traces: otlp.Collector) -> Iterator[Platform]:
    """Only calls whose client decides so are traced, and calls that fail."""
    environ = {"GPUFN_WEBHOOK_NETWORKS": "127.0.0.0/8", "GPUFN_TRACES_URL": traces.url}
    environ["GPUFN_LOGS_URL"] = traces.logs_url
    with running_platform(tmp_path_factory.mktemp("long") / "home", environ=environ) as platform:
        platform.gpufn("deploy", APP)
        yield platform


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    server = Receiver()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


class Receiver(http.server.ThreadingHTTPServer):
    """A receiver of webhooks. It keeps every delivery, and refuses the first `refuses` of them."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.deliveries: queue.Queue[tuple[dict[str, str], bytes]] = queue.Queue()
        self.refuses = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/done"


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server: Any = self.server
        body = self.rfile.read(int(self.headers["content-length"]))
        server.deliveries.put((dict(self.headers), body))
        server.refuses -= 1
        self.send_response(503 if server.refuses >= 0 else 200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


def submit(platform: Platform, gate: Path, **headers: str) -> str:
    body = {"steps": 6, "stop_at": 3, "gate": str(gate)}
    answer = platform.client.post("/v1/functions/climb/submit", json=body, headers=headers)
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


def wait_at_the_gate(platform: Platform, invocation: str, attempt: int = 1) -> None:
    def status() -> dict[str, Any]:
        found: dict[str, Any] = platform.client.get(f"/v1/invocations/{invocation}").json()
        return found

    def is_there() -> bool:
        found = status()
        return found["attempt"] >= attempt and (found["progress"] or {}).get("message") == "at the gate"

    until(is_there, status)
    assert status()["progress"]["fraction"] == 0.5


def reported_processes(platform: Platform) -> list[dict[str, Any]]:
    def processes() -> list[dict[str, Any]]:
        (node,) = platform.client.get("/v1/nodes").json()["nodes"]
        return list(node["processes"])

    found: list[dict[str, Any]] = until(processes, "the node reports no process")
    return found


def pid_of(platform: Platform, name: str) -> int:
    if name == "worker":
        return int(reported_processes(platform)[0]["pid"])
    return int(json.loads((platform.home / "up.json").read_bytes())["pids"][name])


@pytest.mark.parametrize(("victim", "attempts"), [("worker", [1, 1, 1, 2, 2, 2]), ("runner", None)])
def test_after_kill_9_a_call_continues_from_its_checkpoint(
    own: Platform, tmp_path: Path, victim: str, attempts: list[int] | None
) -> None:
    gate = tmp_path / "gate"
    invocation = submit(own, gate)
    wait_at_the_gate(own, invocation)
    os.kill(pid_of(own, victim), signal.SIGKILL)
    if victim == "worker":
        wait_at_the_gate(own, invocation, attempt=2)
    gate.touch()
    answer = own.client.get(f"/v1/invocations/{invocation}/result", params={"wait": 60}, timeout=90)
    assert answer.status_code == 200, answer.text
    steps = answer.json()
    assert len(steps) == 6  # none of the first three steps ran again
    assert attempts in (None, steps)


def test_a_webhook_survives_kill_9_of_the_gateway(own: Platform, tmp_path: Path, receiver: Receiver) -> None:
    secret = own.gpufn("keys", "webhook-secret").strip()
    gate = tmp_path / "gate"
    invocation = submit(own, gate, **{"x-gpufn-webhook": receiver.url, "traceparent": f"00-{TRACE[::-1]}-{SPAN}-00"})
    wait_at_the_gate(own, invocation)
    receiver.refuses = 1
    gate.touch()
    first, _ = receiver.deliveries.get(timeout=30)  # refused: the next delivery follows in 5 s
    os.kill(pid_of(own, "gateway"), signal.SIGKILL)
    headers, body = receiver.deliveries.get(timeout=60)
    webhooks.verify(secret, headers, body)
    assert headers["webhook-id"] == first["webhook-id"] == invocation
    assert headers["traceparent"] == f"00-{TRACE[::-1]}-{span_id(invocation)}-00"
    assert json.loads(body)["data"]["result"] == [1] * 6


def test_a_delayed_call_is_made_by_itself_also_after_kill_9_of_the_gateway(own: Platform, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    before = {call["id"] for call in json.loads(own.gpufn("calls", "climb", "--json"))}
    arguments = json.dumps({"steps": 2, "stop_at": 1, "gate": str(gate)})
    assert own.gpufn("schedules", "add", "climb", arguments, "--in", "3s").startswith("climb.")
    os.kill(pid_of(own, "gateway"), signal.SIGKILL)

    def states() -> list[str]:
        try:
            listed = own.client.get("/v1/calls?function=climb")
        except httpx.TransportError:  # the gateway starts
            return []
        calls = listed.json()["calls"] if listed.status_code == 200 else []
        return [call["state"] for call in calls if call["id"] not in before]

    until(lambda: states() == ["succeeded"], states)
    assert json.loads(own.gpufn("schedules", "ls", "--json")) == []


def test_the_spans_of_nested_calls_with_retries_form_one_tree(own: Platform, traces: otlp.Collector) -> None:
    own.gpufn("deploy", APP.with_name("traced.py"))
    answer = own.post("fan_out", {"numbers": 2}, headers={"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "a=1"})
    assert answer.status_code == 200, answer.text
    invocation = answer.headers["x-gpufn-invocation"]
    spans = traces.wait_for(TRACE, 11)

    call = spans[span_id(invocation)]
    assert (call.name, call.kind, call.parent_span_id.hex()) == ("fan-out", otlp.SERVER, SPAN)
    run = spans[span_id(invocation, 1)]
    assert (run.name, run.parent_span_id) == ("run", call.span_id)
    assert otlp.attributes(run)["gpufn.outcome"] == "succeeded"
    nested = [span for span in spans.values() if span.parent_span_id == run.span_id]
    assert [(span.name, span.kind) for span in nested] == [("flaky", otlp.SERVER)] * 2
    below = {span.span_id: [each for each in spans.values() if each.parent_span_id == span.span_id] for span in nested}
    runs = [[each for each in spans if each.name == "run"] for spans in below.values()]
    assert sorted(map(len, runs)) == [1, 2]
    (_, retried) = sorted(runs, key=len)
    failed, succeeded = sorted(retried, key=lambda span: otlp.attributes(span)["gpufn.attempt"])
    assert (failed.status.code, failed.events[0].name) == (otlp.ERROR, "exception")
    assert "1 is odd" in otlp.attributes(failed.events[0])["exception.message"]
    assert succeeded.status.code != otlp.ERROR
    assert otlp.attributes(succeeded)["gpufn.start_reason"] == "raised"
    for parent in (call, run):
        inside = [each for each in spans.values() if each.parent_span_id == parent.span_id and each.name != "queue"]
        assert all(parent.start_time_unix_nano <= each.start_time_unix_nano for each in inside)

    last_runs = {span_of[-1].span_id.hex() for span_of in ([succeeded], *(each for each in runs if len(each) == 1))}
    seen = [each[:3] for each in answer.json()]
    assert {current for _, _, current in seen} == last_runs  # user code sees its attempt as the current span
    assert all(text == f"00-{trace}-{span}-01" and trace == TRACE for text, trace, span in seen)
    assert [each[3:] for each in answer.json()] == [["a=1"] * 2] * 2

    kept = own.client.get(f"/v1/traces/{invocation}").json()
    assert {span["id"] for span in kept["spans"]} == set(spans)
    assert "1 is odd" in own.gpufn("trace", invocation)
    assert TRACE in own.gpufn("traces", "flaky")
    assert traces.services == {"gpufn"}
    assert 'gpufn_trace_spans_total{result="exported"}' in own.client.get("/metrics").text

    # The lines of the attempts, as JSON and as OTLP.
    lines = [json.loads(line) for line in own.gpufn("logs", "flaky", "--json").splitlines()]
    printed = {(each["invocation"], each["attempt"]): each for each in lines if each["text"].startswith("number")}
    assert {span_id(*attempt) for attempt in printed} == {run.span_id.hex() for attempts in runs for run in attempts}
    assert {(each["function"], each["trace"]) for each in printed.values()} == {("flaky", TRACE)}
    assert all(each["node"] == otlp.attributes(failed)["gpufn.node"] for each in lines)
    logged = traces.wait_for_lines(TRACE, len(printed))
    assert {(line.span_id.hex(), line.body.string_value) for line in logged if line.severity_text == "INFO"} == {
        (span_id(*attempt), each["text"]) for attempt, each in printed.items()
    }
    assert all(otlp.attributes(line)["gpufn.node"] == otlp.attributes(failed)["gpufn.node"] for line in logged)


def test_an_attempt_with_a_waiting_caller_that_its_runner_loses_has_a_span_with_the_error(
    own: Platform, tmp_path: Path, traces: otlp.Collector
) -> None:
    gate, trace, answers = tmp_path / "gate", TRACE.replace("0", "2"), queue.Queue[Any]()
    own.gpufn("deploy", APP.with_name("traced.py"))
    body = {"started": str(tmp_path / "started"), "gate": str(gate)}

    def call() -> None:
        answers.put(own.post("gated", body, headers={"traceparent": f"00-{trace}-{SPAN}-01"}))

    threading.Thread(target=call).start()
    until((tmp_path / "started").exists)
    # The worker has to die too, because the next runner would adopt the attempt.
    (worker,) = until(lambda: [each["pid"] for each in reported_processes(own) if each["function"] == "gated"])
    for pid in (pid_of(own, "runner"), worker):
        os.kill(pid, signal.SIGKILL)
    gate.touch()
    answer = answers.get(timeout=60)
    assert answer.status_code == 200, answer.text
    invocation = answer.headers["x-gpufn-invocation"]
    spans = traces.wait_for(trace, 4)
    runs = [spans[span_id(invocation, number)] for number in (1, 2)]
    assert [run.status.code for run in runs] == [otlp.ERROR, 0]
    assert {run.parent_span_id.hex() for run in runs} == {span_id(invocation)}


def test_an_item_of_a_map_has_a_trace_of_its_own_with_a_link_to_its_map(own: Platform, traces: otlp.Collector) -> None:
    map_id, trace = "01k9xq3zr7c8m2v5t0w4y6b1d3", TRACE.replace("0", "1")
    sent = own.client.put(
        f"/v1/functions/climb/maps/{map_id}/items/0?last=true",
        content=json.dumps({"steps": 1, "stop_at": 2, "gate": ""}) + "\n",
        headers={"content-type": "application/x-ndjson", "traceparent": f"00-{trace}-{SPAN}-01"},
    )
    assert sent.status_code == 202, sent.text
    (mapped,) = traces.wait_for(trace, 1).values()
    assert (mapped.kind, mapped.parent_span_id.hex()) == (otlp.PRODUCER, SPAN)
    item = f"{map_id}-0"
    call = traces.wait_for(trace_id(item), 3)[span_id(item)]
    assert (call.name, call.kind, call.parent_span_id) == ("climb", otlp.CONSUMER, b"")
    assert [(link.trace_id.hex(), link.span_id) for link in call.links] == [(trace, mapped.span_id)]
