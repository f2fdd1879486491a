"""Two gateways on one bus: each serves the calls of the other, and one of them leads."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from gpufn_core.errors import PlatformError
from gpufn_core.ids import new_invocation_id
from gpufn_core.protocol import subjects
from gpufn_gateway.metrics.catalogue import SERIES, Scope
from gpufn_gateway.monitoring.dashboards import Needs
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage.key_value import KeyValue
from tests.conftest import Platform, http_client, running_platform
from tests.e2e.chaos.gateway import Gateway, embedded_bus, name_of
from tests.e2e.prometheus import Prometheus, queries
from tests.e2e.test_survival import pids_of
from tests.waiting import until

pytestmark = pytest.mark.e2e

APPS = Path(__file__).parent / "apps"


class Pair:
    """A platform with a second gateway."""

    def __init__(self, platform: Platform, gateway: Gateway, other: httpx.Client) -> None:
        self.platform = platform
        self.gateway = gateway
        self.one, self.other = platform.client, other

    @property
    def each_way(self) -> tuple[tuple[httpx.Client, httpx.Client], ...]:
        return (self.one, self.other), (self.other, self.one)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    home = tmp_path_factory.mktemp("two") / "home"
    with (
        running_platform(home) as platform,
        Gateway(home, embedded_bus(home)) as gateway,
        http_client(gateway.url) as other,
    ):
        until(lambda: is_ready(other))
        platform.gpufn("deploy", APPS / "durable.py")
        platform.gpufn("deploy", APPS / "leaving.py")
        until(lambda: other.get("/v1/functions/counts").status_code == 200)
        yield Pair(platform, gateway, other)


def is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/readyz").status_code == 200
    except httpx.TransportError:
        return False


def runs(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


def states(client: httpx.Client, call: str) -> list[str]:
    """Return the states in the events of a call, up to its end."""
    with client.stream("GET", f"{call}/events") as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    return [json.loads(line)["state"] for line in lines]


def test_a_call_submitted_at_one_is_read_at_the_other(pair: Pair, tmp_path: Path) -> None:
    for number, (here, there) in enumerate(pair.each_way):
        body = {"path": str(tmp_path / "runs"), "number": number}
        made = here.post("/v1/functions/count/submit", json=body)
        call = made.headers["location"]
        assert there.get(f"{call}/result?wait=30").json() == number
        status = there.get(call).json()
        assert (status["state"], status["attempt"]) == ("succeeded", 1)
        assert made.json()["id"] in [each["id"] for each in there.get("/v1/calls").json()["calls"]]
    assert runs(tmp_path / "runs") == ["0", "1"]


def test_both_serve_callers_and_readers_of_streams_at_the_same_time(pair: Pair, tmp_path: Path) -> None:
    """The runner has a lane to each gateway, and one inbox for the credits of both."""

    def call(client: httpx.Client, first: int) -> list[int]:
        path = str(tmp_path / "runs")
        numbers = range(first, first + 50)
        return [client.post("/v1/functions/count/invoke", json={"path": path, "number": n}).json() for n in numbers]

    def read(client: httpx.Client, name: str) -> list[str]:
        body = {"path": str(tmp_path / name), "size": 1_000}
        headers = {"accept": "text/event-stream"}
        with client.stream("POST", "/v1/functions/counts/invoke", json=body, headers=headers) as answer:
            data = (line for line in answer.iter_lines() if line.startswith("data: "))
            return [json.loads(next(data).removeprefix("data: ")).strip() for _ in range(300)]

    with ThreadPoolExecutor(4) as callers:
        numbers = [callers.submit(call, client, at) for client, at in ((pair.one, 0), (pair.other, 1_000))]
        items = [callers.submit(read, client, name) for client, name in ((pair.one, "a"), (pair.other, "b"))]
        assert [each.result() for each in numbers] == [list(range(50)), list(range(1_000, 1_050))]
        assert [each.result() for each in items] == [[str(n) for n in range(300)]] * 2
    until(lambda: runs(tmp_path / "a") and runs(tmp_path / "b"))  # the generators end, because their readers left


def test_each_gateway_streams_the_events_of_the_others_calls(pair: Pair, tmp_path: Path) -> None:
    for here, there in pair.each_way:
        body = {"path": str(tmp_path / "runs"), "seconds": 0.5}
        call = here.post("/v1/functions/sleeper/submit", json=body).headers["location"]
        assert states(there, call)[-1] == "succeeded"


def test_a_repeat_at_the_other_is_the_same_call(pair: Pair, tmp_path: Path) -> None:
    for number, (here, there) in enumerate(pair.each_way):
        path = tmp_path / f"runs-{number}"
        body, headers = {"path": str(path), "seconds": 0.5}, {"idempotency-key": str(path)}
        with ThreadPoolExecutor(2) as callers:
            both = [
                callers.submit(client.post, "/v1/functions/sleeper/invoke", json=body, headers=headers)
                for client in (here, there)
            ]
            answers = [each.result() for each in both]
        assert [(each.status_code, each.json()) for each in answers] == [(200, "slept")] * 2
        assert len({each.headers["x-gpufn-invocation"] for each in answers}) == 1
        assert runs(path) == ["began", "ended"]
        other = there.post("/v1/functions/sleeper/invoke", json=body | {"seconds": 0}, headers=headers)
        assert (other.status_code, other.json()["code"]) == (409, "idempotency_mismatch")


def test_one_id_put_at_both_is_one_call(pair: Pair, tmp_path: Path) -> None:
    body = {"path": str(tmp_path / "runs"), "number": 7}
    calls = [new_invocation_id() for _ in range(20)]
    with ThreadPoolExecutor(2) as callers:
        for call in calls:
            at = f"/v1/functions/count/invocations/{call}"
            put = [callers.submit(client.put, at, json=body) for client in (pair.one, pair.other)]
            assert [each.result().status_code for each in put] == [202, 202]
    for call in calls:
        assert pair.other.get(f"/v1/invocations/{call}/result?wait=30").json() == 7
    assert runs(tmp_path / "runs") == ["7"] * len(calls)


def test_a_call_is_cancelled_at_the_other_whether_it_runs_or_waits(pair: Pair, tmp_path: Path) -> None:
    path, waiting = tmp_path / "runs", tmp_path / "waits"
    first = pair.one.post("/v1/functions/sleeper/submit", json={"path": str(path), "seconds": 60})
    until(lambda: runs(path))
    second = pair.one.post("/v1/functions/sleeper/submit", json={"path": str(waiting), "seconds": 0})
    for call in (second.headers["location"], first.headers["location"]):
        assert pair.other.delete(call).json()["cancelled"] is True
        assert pair.one.delete(call).json()["cancelled"] is False
        assert pair.one.get(f"{call}/result").json()["code"] == "invocation_cancelled"
    after = {"path": str(tmp_path / "after"), "seconds": 0}
    assert pair.other.post("/v1/functions/sleeper/invoke", json=after).json() == "slept"
    assert (runs(path), runs(waiting)) == (["began"], [])


def test_a_stream_whose_gateway_is_killed_does_not_keep_its_slot(pair: Pair, tmp_path: Path) -> None:
    """The killed gateway cannot report that the reader is gone; the generator would wait two minutes for credits."""
    ended = tmp_path / "ended"
    headers, body = {"accept": "text/event-stream"}, {"path": str(ended)}
    with pair.other.stream("POST", "/v1/functions/counts/invoke", json=body, headers=headers) as answer:
        lines = answer.iter_lines()
        while next(lines) != "id: 3":
            pass
        pair.gateway.kill()
    pair.gateway.start()
    until(lambda: runs(ended))
    until(lambda: is_ready(pair.other))


def series(client: httpx.Client) -> dict[str, float]:
    lines = client.get("/metrics").text.splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def attempts(*clients: httpx.Client) -> list[float]:
    """Return the attempts of `picky` from each gateway that exposes them."""
    return [
        value
        for client in clients
        for name, value in series(client).items()
        if name.startswith('gpufn_attempts_total{function="picky"')
    ]


def test_only_the_leader_exposes_figures_of_the_platform(pair: Pair) -> None:
    until(lambda: is_ready(pair.one) and is_ready(pair.other) and leader(pair))
    for client in (pair.one, pair.other):
        assert client.post("/v1/functions/picky/invoke", json={"number": 1}).status_code == 200
    until(lambda: attempts(pair.one, pair.other) == [2.0], lambda: attempts(pair.one, pair.other))
    own = 'gpufn_calls_total{function="picky",outcome="succeeded"}'
    both = [series(client) for client in (pair.one, pair.other)]
    assert [each[own] for each in both] == [1.0, 1.0]
    assert sorted(each["gpufn_controller_leading"] for each in both) == [0.0, 1.0]
    of_platform = {each.exposed_name for each in SERIES.values() if each.scope is Scope.PLATFORM}
    exposed = [{name.partition("{")[0] for name in each} for each in both]
    assert exposed[0] & exposed[1] & of_platform == set()


def test_prometheus_scrapes_both_and_each_query_has_data(pair: Pair, tmp_path: Path) -> None:
    """`test_monitoring.py --full` checks the queries that need a GPU, a fault or settings."""
    headers = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    with Prometheus(tmp_path, [str(pair.one.base_url), str(pair.other.base_url)]) as prometheus:
        expected = queries(Needs.CALLS)
        assert len(expected) > 40

        def lacking() -> list[str]:
            for client in (pair.one, pair.other):
                client.post("/v1/functions/picky/invoke", json={"number": 1}, headers=headers).raise_for_status()
            return prometheus.without_data(expected)

        lacking()
        until(lambda: prometheus.query('gpufn_starts_total{function="picky"}'))
        kill_workers(pair.one, "picky")  # the time of starts needs a start between two scrapes
        until(lambda: pair.one.post("/v1/functions/picky/invoke", json={"number": 1}).status_code == 200)
        until(lambda: not lacking(), lacking)
        assert prometheus.value("sum(up)") == 2
        assert prometheus.value("sum(gpufn_controller_leading)") == 1
        assert len(prometheus.query("gpufn_nodes{state='up'}")) == 1
        exemplars = prometheus.client.get("query_exemplars", params={
            "query": "gpufn_call_seconds_bucket", "start": 0, "end": 1 << 33,
        }).json()["data"]  # fmt: skip
        traces = {each["labels"].get("trace_id") for found in exemplars for each in found["exemplars"]}
        assert "0af7651916cd43dd8448eb211c80319c" in traces
        assert prometheus.firing() <= {"GpufnScaleIn", "GpufnErrorBudgetFast", "GpufnErrorBudgetSlow"}


def kill_workers(client: httpx.Client, function: str) -> None:

    def pids() -> list[int]:
        nodes = client.get("/v1/nodes").json()["nodes"]
        return [each["pid"] for node in nodes for each in node["processes"] if each["function"] == function]

    for pid in until(pids):
        os.kill(pid, signal.SIGKILL)


def leader(pair: Pair) -> str:
    """Return the name of the gateway that holds the controller's lease; "" while none holds it."""

    async def holder() -> str:
        bus = await Bus.connect(embedded_bus(pair.platform.home), name="test")
        try:
            entry = await (await KeyValue.open(bus, subjects.LEASES)).get("controller")
        finally:
            await bus.close()
        return "" if entry is None else entry.value.decode()

    with contextlib.suppress(PlatformError):
        return asyncio.run(holder())
    return ""


def kill_the_leader(pair: Pair, tmp_path: Path) -> httpx.Client:
    """Kill the leading gateway during a call, which continues. Return a client of the new leader."""
    until(lambda: is_ready(pair.one) and is_ready(pair.other))
    [ours] = pids_of(pair.platform, "gateway")
    names = {name_of(pair.platform.home, pid): pid for pid in (ours, pair.gateway.pid)}
    until(lambda: leader(pair) in names)
    before = leader(pair)
    gone, stays = (pair.one, pair.other) if names[before] == ours else (pair.other, pair.one)
    path = tmp_path / before
    body, headers = {"path": str(path), "seconds": 1.0}, {"idempotency-key": before}
    with ThreadPoolExecutor(1) as callers:
        lost = callers.submit(gone.post, "/v1/functions/sleeper/invoke", json=body, headers=headers)
        until(lambda: runs(path))
        if gone is pair.one:
            os.kill(ours, signal.SIGKILL)  # `gpufn up` starts another
        else:
            pair.gateway.kill()
            pair.gateway.start()
        with pytest.raises(httpx.TransportError):
            lost.result()
    again = stays.post("/v1/functions/sleeper/invoke", json=body, headers=headers)
    assert (again.status_code, again.json()) == (200, "slept")
    assert runs(path) == ["began", "ended"], "the call ran on after the death of its gateway"
    until(lambda: leader(pair) not in ("", before))
    return stays


def test_the_other_gateway_succeeds_a_killed_leader(pair: Pair, tmp_path: Path) -> None:
    """Kill two leaders, so that each gateway leads once and each dies once while the other serves calls."""
    [earlier] = until(lambda: attempts(pair.one, pair.other))
    assert pair.one.post("/v1/functions/picky/invoke", json={"number": 1}).status_code == 200
    # The runner reports totals, so a new figure has the calls of earlier tests.
    [count] = until(lambda: [each for each in attempts(pair.one, pair.other) if each > earlier])
    for cold, arguments in (("large", {"size": 256}), ("picky", {"number": 1})):
        stays = kill_the_leader(pair, tmp_path)
        until(lambda: is_ready(pair.one) and is_ready(pair.other))
        [shown] = until(lambda: attempts(pair.one, pair.other))
        assert count <= shown < 2 * count, "a figure of the platform neither restarts with its leader nor jumps"
        # Only a leader starts a worker for a function without workers.
        assert stays.post(f"/v1/functions/{cold}/invoke", json=arguments).status_code == 200


def test_both_have_the_same_history_of_the_calls_of_either(pair: Pair) -> None:
    """Runs after the test above, which killed two leaders."""
    for client in (pair.one, pair.other):
        for _ in range(3):
            assert client.post("/v1/functions/picky/invoke", json={"number": 1}).status_code == 200

    def counts(client: httpx.Client) -> tuple[float, float]:
        """Return the attempts that runners counted, and the latencies that gateways measured."""
        answer = client.get("/v1/history?subject=function:picky&series=calls,latency&step=10")
        if answer.status_code != 200:  # the gateway has not loaded the history yet
            return 0, 0
        calls, latency = answer.json()["results"][0]["series"]
        return sum(filter(None, calls["values"])), sum(sum(each.values()) for each in latency["values"] if each)

    def are_recorded() -> bool:
        time.sleep(0.5)  # figures are published every ten seconds
        found = counts(pair.one)
        return min(found) >= 6 and found == counts(pair.other)

    until(are_recorded)
