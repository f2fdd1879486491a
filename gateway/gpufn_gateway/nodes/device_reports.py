"""How the GPUs of all nodes are: the last report of each, for `/v1/nodes`, and as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gpufn_core.domain.device import DeviceType, Health
from gpufn_core.domain.device_metrics import DeviceMetrics
from gpufn_core.protocol import subjects
from gpufn_core.protocol.reports import DeviceReport, NodeReport
from gpufn_gateway.nodes.latest_reports import Heard
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.typed_handler import decoded
from gpufn_platform.process.clock import Clock

FRESH_S: Final = 10.0
_LABELS: Final = ["node", "gpu", "kind"]

_GAUGES: Final = {
    "utilisation": "Share of the last second in which any kernel ran",
    "memory_busy": "Share of time in which its memory was read or written",
    "encoder": "Share of time in which its video encoder worked",
    "decoder": "Share of time in which its video decoder worked",
    "memory_total_bytes": "Its memory",
    "memory_used_bytes": "What is in use of it",
    "memory_reserved_bytes": "What its driver keeps of it",
    "temperature_c": "Temperature in degrees Celsius",
    "fan": "Share of the fan's full speed",
    "power_w": "Power in watts",
    "power_limit_w": "The most power that it may take, in watts",
    "sm_clock_mhz": "Clock of its multiprocessors in MHz",
    "sm_clock_max_mhz": "The highest such clock",
    "memory_clock_mhz": "Clock of its memory in MHz",
    "performance_state": "0 is the fastest",
    "rows_pending": "1 when rows of its memory are remapped at the next reset",
    "rows_failed": "1 when a row of its memory could not be remapped",
    "pcie_generation": "Generation of its PCIe link",
    "pcie_width": "Lanes of its PCIe link",
    "pcie_sent_bytes_per_s": "What it sends by PCIe",
    "pcie_received_bytes_per_s": "What it receives by PCIe",
    "mps_clients": "Processes that share it by MPS",
}
_COUNTERS: Final = {
    "energy_j": "Energy in joules",
    "ecc_corrected": "Memory errors that were corrected",
    "ecc_uncorrected": "Memory errors that were not",
    "rows_remapped_corrected": "Rows remapped for errors that were corrected",
    "rows_remapped_uncorrected": "Rows remapped for errors that were not",
    "pcie_replays": "Transfers by PCIe that had to be repeated",
}


class DeviceReports(Collector):
    """`nodes` are those that report now."""

    def __init__(self, nodes: Callable[[], Iterable[NodeReport]], clock: Clock) -> None:
        self._nodes = nodes
        self._last = Heard[DeviceReport](clock, FRESH_S)
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def start(self, bus: Bus) -> None:
        bus.subscribe(subjects.DEVICE_REPORTS, decoded(msgspec.msgpack.Decoder(DeviceReport), self.take))

    def take(self, report: DeviceReport) -> None:
        self._last.take(report.node, report)

    def of(self, node: str) -> tuple[DeviceMetrics, ...]:
        """Empty when the node has no GPUs, or has not told lately."""
        report = self._last.of(node)
        return () if report is None else report.devices

    def exposition(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        gauges = {name: GaugeMetricFamily(f"gpufn_gpu_{name}", text, labels=_LABELS) for name, text in _GAUGES.items()}
        counters = {
            name: CounterMetricFamily(f"gpufn_gpu_{name}", text, labels=_LABELS) for name, text in _COUNTERS.items()
        }
        health = GaugeMetricFamily("gpufn_gpu_health", "1 for the state that it is in", labels=[*_LABELS, "state"])
        limits = GaugeMetricFamily("gpufn_gpu_clock_limited", "1 for what holds its clocks", labels=[*_LABELS, "by"])
        xids = CounterMetricFamily("gpufn_gpu_xids", "Error events of its driver", labels=[*_LABELS, "xid"])
        for node in self._nodes():
            metrics = {each.uuid: each for each in self.of(node.node)}
            for device in node.devices:
                if device.type is not DeviceType.GPU:
                    continue
                labels = [node.node, device.uuid, device.kind]
                for state in Health:
                    health.add_metric([*labels, state.value], device.health is state)
                if (each := metrics.get(device.uuid)) is None:
                    continue
                for name, gauge in gauges.items():
                    if (value := getattr(each, name)) is not None:
                        gauge.add_metric(labels, value)
                for name, counter in counters.items():
                    if (value := getattr(each, name)) is not None:
                        counter.add_metric(labels, value)
                for reason in each.clock_limits:
                    limits.add_metric([*labels, reason], 1)
                for xid, count in each.xids.items():
                    xids.add_metric([*labels, xid], count)
        yield from (*gauges.values(), *counters.values(), health, limits, xids, *self._of_workers())

    def _of_workers(self) -> tuple[Metric, ...]:
        labels = ["node", "function", "revision", "worker"]
        busy = GaugeMetricFamily(
            "gpufn_worker_gpus_busy", "GPUs that a worker kept busy in the last second, as measured", labels=labels
        )
        held = GaugeMetricFamily("gpufn_worker_gpu_bytes", "What a worker holds of a GPU", labels=[*labels, "gpu"])
        for node in self._nodes():
            for each in node.processes:
                worker = [node.node, each.function, str(each.revision), each.worker]
                if each.gpus_busy is not None:
                    busy.add_metric(worker, each.gpus_busy)
                for uuid, count in each.gpu_bytes.items():
                    held.add_metric([*worker, uuid], count)
        return busy, held
