"""Each series of the catalogue is exposed, and nothing else: with everything that the platform can report."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families as parse_text

from gpufn_core.domain.devices.device import Device, DeviceShare, DeviceType, Health, Share
from gpufn_core.domain.devices.engine import BuildState
from gpufn_core.domain.invocation import OutcomeKind
from gpufn_core.domain.worker import ColdStart
from gpufn_core.protocol import subjects
from gpufn_core.protocol.messages import ResultReply
from gpufn_core.protocol.records import KeyLimits
from gpufn_core.protocol.reports import (
    DeviceReport,
    FunctionStatus,
    FunctionTotals,
    NodeReport,
    ProcessReport,
    RevisionTraffic,
    RunnerReport,
    TotalsReport,
    WorkerCounts,
)
from gpufn_gateway.auth.quotas import KeyQuota
from gpufn_gateway.controller.state.leases import LeaseBook
from gpufn_gateway.controller.state.views import NODE_LOST_S, RUNNER_LOST_S, NodeView
from gpufn_gateway.controller.state.world import World
from gpufn_gateway.metrics.bus_figures import BusFigures, Reading
from gpufn_gateway.metrics.catalogue import SERIES, Kind, Scope
from gpufn_gateway.metrics.families import Families
from gpufn_gateway.metrics.fragmentation import fragmentation
from gpufn_gateway.metrics.gateway_series import GatewaySeries
from gpufn_gateway.metrics.gpus import GpuSeries
from gpufn_gateway.metrics.histogram import Histogram
from gpufn_gateway.metrics.platform_series import PlatformSeries, ReportSeries, node_state
from gpufn_gateway.metrics.telemetry import Telemetry
from gpufn_gateway.nodes.health_trends import HealthTrends
from gpufn_gateway.otlp.log_export import LogExport
from gpufn_gateway.traces.receiver import Receiver
from gpufn_gateway.traces.store import TraceStore
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import streams
from tests.e2e.gpu_node_stand_in import FULL

GPU = Device("GPU-1", DeviceType.GPU, "NVIDIA L4", 24 << 30)
NODE = NodeReport(
    "n", 1.0, (GPU,), processes=(ProcessReport("w", "f", 1, 7, 0.0, gpus_busy=0.5, gpu_bytes={"GPU-1": 9}),)
)
STREAM = {
    "config": {"name": "OBJ_gpufn_bundles", "max_bytes": 100},
    "state": {"bytes": 40, "messages": 2},
    "cluster": {"replicas": [{"lag": 3}, {"lag": 7}]},
}
NOW = 1_000.0


class Clock:
    def time(self) -> float:
        return NOW

    def monotonic(self) -> float:
        return NOW


def _controller(world: World) -> Any:
    return SimpleNamespace(world=world, epoch=3, leads=lambda: True, step_seconds=Histogram())


def everything(tmp_path: Path, *, leads: bool = True) -> Families:
    world = World(NOW)
    world.on_node_report(NODE, NOW)
    controller, bus, status = _controller(world), SimpleNamespace(connected=True, certificate_ends_at=NOW), _status()
    telemetry, trends = Telemetry(lambda: 1, lambda: leads), HealthTrends()
    trends.add_devices(DeviceReport("n", 1.0, (FULL,)), NOW)
    reply = ResultReply("01hz", OutcomeKind.SUCCEEDED, None, "", 1, 1, 0.5, 0.25, cold_start=ColdStart(load_s=1.0))
    telemetry.of("f").count_end(reply, 0.7, NOW)
    telemetry.of("f").count_refusal("capacity")
    telemetry.of("f").count_webhook("delivered")
    figures = BusFigures(Any, Clock(), leads=lambda: True, functions=lambda: ["f", "g"])  # type: ignore[arg-type]
    account = {"storage": 5, "memory": 6, "limits": {"max_storage": 50, "max_memory": -1}}
    figures._reading = Reading(account, (STREAM, {"config": {"name": "SOMEBODYS"}, "state": {}}), {"f": NOW - 9}, 0.002)
    registry: Any = SimpleNamespace(functions={"f": None}, statuses={"f": status})
    totals = FunctionTotals("f", 5, 1, 1, 2.0, 1.5, 1, 1, 1, {"load": 1.0})
    builds = [SimpleNamespace(state=state, created_at=NOW - 60) for state in BuildState]
    telemetry.of_gateway.append(
        GatewaySeries(
            controller=controller,
            audit=SimpleNamespace(waiting=0, failures=2),  # type: ignore[arg-type]
            bus=bus,  # type: ignore[arg-type]
            limits_used=lambda: [("k1", "queued", 0.5)],
            certificate_ends_at=lambda: NOW,
            store=tmp_path,
        )
    )
    exporter: Any = SimpleNamespace(counts=lambda: {"exported": 1, "refused": 0, "dropped": 2})
    telemetry.of_gateway.append(Receiver(bus, TraceStore(), SimpleNamespace(), exporter))  # type: ignore[arg-type]
    telemetry.of_gateway.append(LogExport(bus, exporter))  # type: ignore[arg-type]
    telemetry.of_platform += [
        PlatformSeries(
            controller=controller,
            registry=registry,
            builds=lambda: builds,  # type: ignore[arg-type,return-value]
            clock=Clock(),
        ),
        ReportSeries(
            lambda: [NODE],
            lambda: [RunnerReport("n", "r", 1.0, (), (RevisionTraffic("f", 2, ended=3), RevisionTraffic("g", 1)))],
            lambda: [TotalsReport("n", "r", 0.0, 1.0, (totals,), 4)],
            lambda: ["f"],
        ),
        GpuSeries(lambda: [NODE], {"n": (FULL,)}.__getitem__, trends),
        figures,
    ]
    families = Families()
    for fill in telemetry.snapshots():
        fill(families)
    families.add("gpufn_metrics_dropped_series", families.dropped)
    return families


def _status() -> FunctionStatus:
    return FunctionStatus(function="f", serving=1, workers=WorkerCounts(ready=1), queued=2, running=1, wanted=1)


def _exposed(families: Families) -> dict[str, list[Any]]:
    samples = [sample for metric in parse_text(families.exposition().decode()) for sample in metric.samples]
    return {name: [sample for sample in samples if sample.name == name] for name in {sample.name for sample in samples}}


def test_every_series_of_the_catalogue_is_exposed_with_its_labels_and_nothing_else(tmp_path: Path) -> None:
    exposed = _exposed(everything(tmp_path))
    expected = {
        f"{each.name}_{end}" if end else each.exposed_name: each
        for each in SERIES.values()
        for end in (("bucket", "count", "sum") if each.kind is Kind.HISTOGRAM else ("",))
    }
    assert exposed.keys() == expected.keys()
    for name, samples in exposed.items():
        for sample in samples:
            assert sample.labels.keys() - {"le"} == set(expected[name].labels), sample


def test_only_split_functions_have_series_of_their_revisions(tmp_path: Path) -> None:
    exposed = _exposed(everything(tmp_path))
    assert [(each.labels, each.value) for each in exposed["gpufn_revision_attempts_total"]] == [
        ({"node": "n", "function": "f", "revision": "2"}, 3.0)
    ]


def test_a_gateway_that_does_not_lead_exposes_only_its_own_figures(tmp_path: Path) -> None:
    exposed = _exposed(everything(tmp_path, leads=False))
    scopes = {each.exposed_name: each.scope for each in SERIES.values() if each.kind is not Kind.HISTOGRAM}
    assert {scopes[name] for name in exposed if name in scopes} == {Scope.GATEWAY}


def test_the_figures_match_the_reports(tmp_path: Path) -> None:
    exposed = _exposed(everything(tmp_path))
    values = {
        name: {tuple(sample.labels.values()): sample.value for sample in exposed[name]}
        for name in ("gpufn_function_oldest_wait_seconds", "gpufn_bus_stream_lag", "gpufn_builds", "gpufn_nodes")
    }
    assert values == {
        "gpufn_function_oldest_wait_seconds": {("f",): 9.0, ("g",): 0.0},
        "gpufn_bus_stream_lag": {("OBJ_gpufn_bundles",): 7.0},
        "gpufn_builds": {("pending",): 1.0, ("building",): 1.0},
        "gpufn_nodes": {("up",): 1.0, ("silent",): 0.0, ("gone",): 0.0},
    }
    (limit,) = exposed["gpufn_bus_storage_limit_bytes"]  # -1 is no limit
    assert (limit.labels, limit.value) == ({"storage": "file"}, 50.0)


@pytest.mark.parametrize(
    ("agent_s", "runner_s", "state"),
    [
        (0, 0, "up"),
        (0, RUNNER_LOST_S + 1, "up"),
        (NODE_LOST_S + 1, 0, "silent"),
        (NODE_LOST_S + 1, RUNNER_LOST_S + 1, "gone"),
    ],
)
def test_a_node_is_silent_while_only_its_runner_reports_and_gone_without(
    agent_s: float, runner_s: float, state: str
) -> None:
    view = NodeView(NOW)
    view.seen_at, view.runner_seen_at = NOW - agent_s, NOW - runner_s
    assert node_state(view, NOW) == state


@pytest.mark.parametrize(
    ("leased", "part"),
    [
        ({}, 0.0),
        ({"GPU-1": 4}, 20 / 44),
        ({"GPU-1": 24}, 0.0),
        ({"GPU-1": 24, "GPU-2": 24}, 0.0),
        ({"GPU-1": 4, "GPU-2": 4}, 1.0),
    ],
)
def test_memory_beside_a_small_share_is_fragmented(leased: dict[str, int], part: float) -> None:
    book = LeaseBook()
    for gpu, gib in leased.items():
        share = DeviceShare(cpu_device="c", cores=1, memory_bytes=1, gpus=(gpu,), mode=Share.MPS, vram_bytes=gib << 30)
        book.grant(f"w-{gpu}", "n", share)
    gpus = (GPU, msgspec.structs.replace(GPU, uuid="GPU-2"))
    assert fragmentation(gpus, book.used("n")) == pytest.approx(part)
    failed = tuple(msgspec.structs.replace(gpu, health=Health.FAILED) for gpu in gpus)
    assert fragmentation(failed, book.used("n")) is None


def test_the_used_part_of_a_limit_is_shown_if_it_is_known() -> None:
    quota = KeyQuota("k", KeyLimits(concurrency=4, queued=10, rate=5.0), now=0.0)
    assert quota.used(1.0) == {"concurrency": 0.0}
    quota.begin(1.0)
    quota.set_queued(9, 0, 2.0)
    assert quota.used(3.0) == {"concurrency": 0.25, "queued": 0.9}
    assert quota.used(100.0) == {"concurrency": 0.25}  # the last count is too old


async def test_the_sizes_and_the_oldest_wait_come_from_the_bus(nats: Any) -> None:
    bus = await Bus.connect(nats.url, name="test")
    await streams.ensure_streams(bus)
    await bus.publish_stored(subjects.async_queue("f", 1), b"x", msg_id="a")
    figures = BusFigures(bus, Clock(), leads=lambda: True, functions=lambda: ["f"])
    await figures.read()
    await bus.close()
    families = Families()
    figures.snapshot()(families)
    exposed = _exposed(families)
    sizes = {sample.labels["stream"]: sample.value for sample in exposed["gpufn_bus_stream_messages"]}
    assert sizes[subjects.ASYNC] == 1
    assert exposed["gpufn_bus_stream_limit_bytes"]
    reading = figures._reading
    assert reading is not None
    assert reading.waits.keys() == {"f"}
