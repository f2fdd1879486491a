"""Live pages: rates of the last minute, findings, lists, and streams of changes."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import msgspec
import pytest

from gpufn_core.domain.devices.device import Device, DeviceShare, DeviceType, Health, Share
from gpufn_core.domain.devices.device_metrics import DeviceMetrics
from gpufn_core.domain.revision import Function
from gpufn_core.domain.traffic import Mirror, Split
from gpufn_core.errors import CapacityError, ErrorInfo, FunctionNotFound
from gpufn_core.protocol.reports import (
    FunctionStatus,
    FunctionTotals,
    NextRevision,
    NodeReport,
    ProcessReport,
    TotalsReport,
    Waiting,
    WaitReason,
    WorkerCounts,
)
from gpufn_gateway.console.live import findings, stream
from gpufn_gateway.console.live.delta import delta
from gpufn_gateway.console.live.function_order import ORDERS, Query, Row, Show, Sort
from gpufn_gateway.console.live.rates import IDLE, Rates
from gpufn_gateway.console.live.stream import Streams
from gpufn_gateway.console.live.views import node_view, split_view, workers_of
from gpufn_gateway.console.live.window import STEP_S, WINDOW_S, Window
from gpufn_gateway.metrics.telemetry import Telemetry
from gpufn_gateway.nodes.health_trends import HealthTrends


class Counters:
    """The calls at this gateway, and the totals of the runners."""

    def __init__(self) -> None:
        self.telemetry = Telemetry(lambda: 0)
        self.reports: dict[str, TotalsReport] = {}
        self.window = Window(self.telemetry, self.reports.values)

    def report(self, node: str, ended: int, failed: int = 0, *, runner: str = "r") -> None:
        totals = FunctionTotals("f", ended, failed, run_seconds=ended * 0.5, gpu_seconds=ended)
        self.reports[node] = TotalsReport(node, runner, 0.0, 0.0, (totals,))


def test_rates_are_the_calls_of_the_last_minute_on_all_nodes() -> None:
    counters = Counters()
    window = counters.window
    counters.report("a", 100)
    counters.report("b", 50)
    window.sample(0.0)
    assert window.of("f") == IDLE, "the window excludes the time before the gateway started"
    counters.report("a", 106)
    counters.report("b", 54, failed=5)
    counters.report("c", 900)  # a runner that was not seen before
    for _ in range(3):
        counters.telemetry.of("f").latency.observe(0.2)
    window.sample(2.0)
    rates = window.of("f")
    assert (rates.seconds, rates.calls_per_s, rates.errors_per_s) == (2.0, 5.0, 2.5)
    assert (rates.error_share, rates.run_s, rates.gpus) == (0.5, 0.5, 5.0)
    assert rates.p50_s is not None
    assert 0.1 < rates.p50_s <= 0.25
    assert window.of_all(["f", "other"]) == rates


def test_calls_leave_the_window_after_a_minute() -> None:
    counters = Counters()
    window = counters.window
    counters.report("a", 0)
    window.sample(0.0)
    counters.report("a", 10)
    now = 0.0
    while now < WINDOW_S:
        now += STEP_S
        window.sample(now)
    assert window.of("f").calls_per_s > 0
    window.sample(now + STEP_S)
    assert window.of("f") == IDLE


def test_a_runner_that_restarts_makes_no_rate_negative() -> None:
    counters = Counters()
    window = counters.window
    counters.report("a", 100, 10)
    window.sample(0.0)
    counters.reports.clear()
    window.sample(2.0)
    counters.report("a", 3, runner="s")
    window.sample(4.0)
    counters.report("a", 1, runner="s")  # the runner has dropped its counters
    window.sample(6.0)
    assert window.of("f").calls_per_s >= 0
    assert window.of("f").errors_per_s >= 0


STATUS = FunctionStatus(function="f", serving=1, workers=WorkerCounts())
FAILING = Rates(seconds=60.0, calls_per_s=1.0, errors_per_s=0.1, error_share=0.1)
ERROR = ErrorInfo("function_start_failed", "No module named x")


@pytest.mark.parametrize(
    ("changes", "rates", "expected"),
    [
        ({}, IDLE, []),
        ({"queued": 3, "waiting": Waiting(WaitReason.NO_CAPACITY, "no GPU")}, IDLE, [("critical", "no_capacity")]),
        ({"queued": 0, "waiting": Waiting(WaitReason.NO_CAPACITY, "no GPU")}, IDLE, []),
        ({"queued": 3, "waiting": Waiting(WaitReason.STARTING, "a worker starts")}, IDLE, []),
        ({"queued": 3, "waiting": Waiting(WaitReason.STORE, "the disk is full")}, IDLE, [("critical", "store")]),
        ({"start_error": ERROR}, IDLE, [("critical", "function_start_failed")]),
        ({"next": NextRevision(2, ERROR)}, IDLE, [("warning", "function_start_failed")]),
        ({"next": NextRevision(2)}, IDLE, []),
        ({}, FAILING, [("warning", "errors")]),
        ({}, Rates(seconds=60.0, calls_per_s=1 / 60, errors_per_s=1 / 60, error_share=1.0), []),
        ({}, Rates(seconds=60.0, calls_per_s=2 / 60, errors_per_s=2 / 60, error_share=1.0), [("warning", "errors")]),
        ({}, Rates(seconds=60.0, calls_per_s=4 / 60, errors_per_s=2 / 60, error_share=0.5), [("warning", "errors")]),
        ({}, Rates(seconds=60.0, calls_per_s=4 / 60, errors_per_s=1 / 60, error_share=0.25), []),
        ({}, Rates(seconds=60.0, calls_per_s=10.0, errors_per_s=0.1, error_share=0.01), []),
    ],
)
def test_findings_about_a_function(changes: dict[str, Any], rates: Rates, expected: list[tuple[str, str]]) -> None:
    found = findings.of_function(msgspec.structs.replace(STATUS, **changes), rates)
    assert [(each.severity.value, each.code) for each in found] == expected


def test_findings_about_nodes_and_the_platform() -> None:
    failed = Device("u", DeviceType.GPU, "NVIDIA L4", 1 << 30, health=Health.FAILED, health_reason="xid 79")
    node = NodeReport("n", 0.0, (failed,), clock_skew_s=-3.0)
    assert [each.code for each in findings.of_node(node)] == ["device", "clock"]
    assert findings.of_node(NodeReport("n", 0.0, ())) == []
    critical = findings.of_platform("no agent has reported")
    mixed = [*findings.of_function(STATUS, FAILING), *critical]
    assert [each.code for each in findings.sorted_by_severity(mixed)] == ["not_ready", "errors"]
    assert findings.of_platform(None) == []


def row(name: str, rates: Rates = IDLE, **changes: Any) -> Row:
    function = Function(name=name, active=1, serving=1, latest=1, updated_at=0.0)
    return Row(function, msgspec.structs.replace(STATUS, **changes), rates)


ROWS = [
    row("prod/search/rank", FAILING),
    row("prod/search/embed", workers=WorkerCounts(ready=2)),
    row("dev/search/rank", queued=3, waiting=Waiting(WaitReason.LIMIT, "limit")),
]


@pytest.mark.parametrize(
    ("query", "names"),
    [
        (Query(), ["dev/search/rank", "prod/search/embed", "prod/search/rank"]),
        (Query(search="RANK prod"), ["prod/search/rank"]),
        (Query(search="nothing"), []),
        (Query(show=Show.FINDINGS), ["dev/search/rank", "prod/search/rank"]),
        (Query(show=Show.CALLED), ["prod/search/rank"]),
        (Query(show=Show.RUNNING), ["prod/search/embed"]),
        (Query(sort=Sort.WORKERS), ["prod/search/embed", "dev/search/rank", "prod/search/rank"]),
        (Query(sort=Sort.QUEUED), ["dev/search/rank", "prod/search/embed", "prod/search/rank"]),
        (Query(sort=Sort.ERRORS), ["prod/search/rank", "dev/search/rank", "prod/search/embed"]),
    ],
)
def test_functions_are_searched_and_sorted(query: Query, names: list[str]) -> None:
    matching = sorted((row for row in ROWS if query.matches(row)), key=ORDERS[query.sort])
    assert [each.function.name for each in matching] == names


@pytest.mark.parametrize(
    ("before", "after", "changes"),
    [
        ({"a": 1}, {"a": 1}, []),
        ({"a": 1}, {"a": None}, [[["a"], None]]),
        ({"a": {"b": {"c": 1}}}, {"a": {"b": {"c": 2}}}, [[["a", "b", "c"], 2]]),
        ({"a": [1]}, {"a": [1, 2]}, [[["a"], [1, 2]]]),
        ({"a": {"b": 1}}, {"a": 3}, [[["a"], 3]]),
        ({"a": 1, "b": 2}, {"b": 2, "c": {}}, [[["a"]], [["c"], {}]]),
        (1, {"a": 1}, [[[], {"a": 1}]]),
    ],
)
def test_a_delta_has_only_changed_values(before: Any, after: Any, changes: list[Any]) -> None:
    assert delta(before, after) == changes


async def test_a_stream_sends_a_snapshot_and_then_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "INTERVAL_S", 0.001)
    page = {"calls": 1, "name": "f"}
    streams = Streams(asyncio.get_running_loop().time)
    async with contextlib.aclosing(streams.follow("sender", "page", lambda: dict(page))) as events:  # type: ignore[type-var]
        assert await anext(events) == b'event: snapshot\ndata: {"calls":1,"name":"f"}\n\n'
        page["calls"] = 2
        assert await anext(events) == b'event: delta\ndata: [[["calls"],2]]\n\n'
        assert await anext(events) == b"event: delta\ndata: []\n\n", "a keep-alive"
        assert streams.open.total() == 1
    assert streams.open == {}


async def test_a_page_for_several_clients_is_made_once_and_their_number_is_bounded() -> None:
    made: list[int] = []

    def page() -> dict[str, int]:
        made.append(1)
        return {}

    streams = Streams(lambda: 0.0, limit=3, limit_of_sender=2)
    first, second = (streams.follow("sender", "page", page) for _ in range(2))
    assert await anext(first) == await anext(second)
    assert len(made) == 1
    with pytest.raises(CapacityError):
        streams.follow("sender", "page", dict)
    third = streams.follow("other", "page", page)
    await anext(third)
    with pytest.raises(CapacityError):
        streams.follow("another", "page", dict)
    await third.aclose()  # type: ignore[attr-defined]
    for each in (first, second):
        await each.aclose()  # type: ignore[attr-defined]
    streams.follow("sender", "page", dict)


async def test_a_stream_of_a_function_that_is_deleted_ends_with_the_error() -> None:
    def gone() -> Any:
        raise FunctionNotFound("There is no function f.")

    events = [event async for event in Streams(lambda: 0.0).follow("sender", "page", gone)]
    assert len(events) == 1
    assert b'"code":"function_not_found"' in events[0]


def test_a_node_shows_its_gpus_and_their_holders() -> None:
    gpu = Device("GPU-1", DeviceType.GPU, "NVIDIA L4", 24 << 30, health=Health.DEGRADED, health_reason="hot")
    cpu = Device("cpu", DeviceType.CPU, "EPYC", 64 << 30, cores=8.0)
    share = DeviceShare("cpu", 2.0, 1 << 30, gpus=("GPU-1",), mode=Share.MPS, sm_percent=25, gpu_part=0.25)
    held = {"GPU-1": 3 << 30}
    workers = tuple(ProcessReport(f"w-{number}", "f", 1, 7, 0.0, share=share, gpu_bytes=held) for number in range(2))
    node = NodeReport("n", 0.0, (gpu, cpu), processes=workers, container_trouble="no Docker")
    view = node_view(node, [DeviceMetrics(uuid="GPU-1", utilisation=0.5, temperature_c=80)], HealthTrends())
    assert (view["cores"], view["cores_reserved"], view["functions"]) == (8.0, 4.0, {"f": 2})
    assert (view["memory_bytes"], view["memory_reserved_bytes"]) == (64 << 30, 2 << 30)
    assert view["trouble"] == {"containers": "no Docker"}
    shown = view["gpus"]["GPU-1"]
    assert (shown["health"], shown["mode"], shown["utilisation"], shown["power_w"]) == ("degraded", "mps", 0.5, None)
    assert "hot" in shown["score"]["reasons"][0]
    assert (shown["score"]["value"] < 1, view["score"]["drain"]) == (True, False)
    assert list(shown["workers"]) == ["w-0", "w-1"]
    of_worker = shown["workers"]["w-1"]
    assert (of_worker["function"], of_worker["sm_percent"], of_worker["charged"]) == ("f", 25, 0.25)
    assert (of_worker["memory_bytes"], of_worker["busy"]) == (3 << 30, None)
    assert workers_of("f", [], [node]) == {}, "a runner reports workers"


def test_a_row_of_a_function_has_its_split() -> None:
    split = Split(weights={1: 90, 2: 10}, set_at=1.0, mirror=Mirror(3, 5.0))
    function = Function(name="f", active=1, serving=1, latest=3, updated_at=1.0, traffic=split)
    assert split_view(function) == {"weights": {"1": 90, "2": 10}, "mirror": 3}
    assert split_view(msgspec.structs.replace(function, traffic=None)) is None
