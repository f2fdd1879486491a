"""GPU reports of all nodes: the latest report of each, for `/v1/nodes` and as Prometheus metrics."""

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
from gpufn_gateway.nodes.latest_reports import LatestReports
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.typed_handler import decoded
from gpufn_platform.process.clock import Clock

FRESH_S: Final = 10.0
_LABELS: Final = ["node", "gpu", "kind"]

_GAUGES: Final = {
    "utilisation": "Share of the last second in which any kernel ran",
    "memory_busy": "Share of time in which GPU memory was read or written",
    "encoder": "Share of time in which the video encoder was busy",
    "decoder": "Share of time in which the video decoder was busy",
    "memory_total_bytes": "GPU memory",
    "memory_used_bytes": "GPU memory in use",
    "memory_reserved_bytes": "GPU memory reserved by the driver",
    "temperature_c": "Temperature in degrees Celsius",
    "temperature_limit_c": "Temperature from which the hardware slows the GPU down",
    "fan": "Fan speed as a share of its maximum",
    "power_w": "Power in watts",
    "power_limit_w": "Power limit in watts",
    "sm_clock_mhz": "Clock of the multiprocessors in MHz",
    "sm_clock_max_mhz": "Highest clock of the multiprocessors in MHz",
    "memory_clock_mhz": "Memory clock in MHz",
    "performance_state": "Performance state; 0 is the fastest",
    "rows_pending": "1 if memory rows will be remapped at the next reset",
    "rows_failed": "1 if a memory row could not be remapped",
    "pcie_generation": "Generation of the PCIe link",
    "pcie_width": "Lanes of the PCIe link",
    "pcie_sent_bytes_per_s": "Bytes sent over PCIe per second",
    "pcie_received_bytes_per_s": "Bytes received over PCIe per second",
    "mps_clients": "Processes that share the GPU by MPS",
}
_COUNTERS: Final = {
    "energy_joules": "Energy that the GPU has used since its driver was loaded, in joules",
    "ecc_corrected": "Corrected memory errors",
    "ecc_uncorrected": "Uncorrected memory errors",
    "rows_remapped_corrected": "Rows remapped because of corrected errors",
    "rows_remapped_uncorrected": "Rows remapped because of uncorrected errors",
    "pcie_replays": "PCIe transfers that had to be repeated",
}


class DeviceReports(Collector):
    """`nodes` returns the reports of the live nodes."""

    def __init__(self, nodes: Callable[[], Iterable[NodeReport]], clock: Clock) -> None:
        self._nodes = nodes
        self.latest = LatestReports[DeviceReport](clock, FRESH_S)
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def start(self, bus: Bus) -> None:
        bus.subscribe(subjects.DEVICE_REPORTS, decoded(msgspec.msgpack.Decoder(DeviceReport), self.latest.put))

    def of(self, node: str) -> tuple[DeviceMetrics, ...]:
        """Return the metrics of a node's GPUs. Empty without GPUs, or without a recent report."""
        report = self.latest.get(node)
        return () if report is None else report.devices

    def exposition(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        measured: dict[str, GaugeMetricFamily | CounterMetricFamily] = {
            name: kind(f"gpufn_gpu_{name}", text, labels=_LABELS)
            for kind, texts in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS))
            for name, text in texts.items()
        }
        health = GaugeMetricFamily("gpufn_gpu_health", "1 for the current state", labels=[*_LABELS, "state"])
        limits = GaugeMetricFamily(
            "gpufn_gpu_clock_limited", "1 for each reason that limits the clocks", labels=[*_LABELS, "by"]
        )
        recovery = GaugeMetricFamily(
            "gpufn_gpu_recovery_action", "1 for the recovery that the driver requests", labels=[*_LABELS, "action"]
        )
        xids = CounterMetricFamily("gpufn_gpu_xids", "Error events of the driver", labels=[*_LABELS, "xid"])
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
                for name, family in measured.items():
                    if (value := getattr(each, name)) is not None:
                        family.add_metric(labels, value)
                for reason in each.clock_limits:
                    limits.add_metric([*labels, reason], 1)
                if each.recovery_action is not None:
                    recovery.add_metric([*labels, each.recovery_action], 1)
                for xid, count in each.xids.items():
                    xids.add_metric([*labels, xid], count)
        yield from (*measured.values(), health, limits, recovery, xids, *self._of_workers())

    def _of_workers(self) -> tuple[Metric, ...]:
        labels = ["node", "function", "revision", "worker"]
        busy = GaugeMetricFamily(
            "gpufn_worker_gpus_busy", "GPUs that a worker kept busy in the last second, as measured", labels=labels
        )
        held = GaugeMetricFamily("gpufn_worker_gpu_bytes", "GPU memory that a worker holds", labels=[*labels, "gpu"])
        for node in self._nodes():
            for each in node.processes:
                worker = [node.node, each.function, str(each.revision), each.worker]
                if each.gpus_busy is not None:
                    busy.add_metric(worker, each.gpus_busy)
                for uuid, count in each.gpu_bytes.items():
                    held.add_metric([*worker, uuid], count)
        return busy, held
