"""The cost of a scrape: 200 functions and 16 GPUs on two nodes, without a bus.

    python benchmarks/scrape.py

The snapshot blocks the gateway's event loop. The lines are written in a thread, which shares the interpreter's lock.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable

import measure
from gpufn_core.domain.devices.device import Device, DeviceType
from gpufn_core.domain.devices.device_metrics import DeviceMetrics
from gpufn_core.domain.invocation import OutcomeKind
from gpufn_core.domain.worker import ColdStart
from gpufn_core.protocol.messages import ResultReply
from gpufn_core.protocol.reports import DeviceReport, FunctionTotals, NodeReport, ProcessReport, TotalsReport
from gpufn_gateway.metrics.families import Families
from gpufn_gateway.metrics.formats.format import Format
from gpufn_gateway.metrics.formats.protobuf import Protobuf
from gpufn_gateway.metrics.formats.text import OpenMetrics, Text
from gpufn_gateway.metrics.gpus import GpuSeries
from gpufn_gateway.metrics.platform_series import ReportSeries
from gpufn_gateway.metrics.telemetry import Telemetry
from gpufn_gateway.nodes.health_trends import HealthTrends

FUNCTIONS, NODES, GPUS_OF_NODE = 200, 2, 8
_TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
_METRICS = dict.fromkeys(
    ("utilisation", "memory_busy", "encoder", "decoder", "fan"), 0.5
) | dict.fromkeys(
    (
        "memory_total_bytes", "memory_used_bytes", "memory_reserved_bytes", "temperature_c", "temperature_limit_c",
        "power_w", "power_limit_w", "energy_joules", "sm_clock_mhz", "sm_clock_max_mhz", "memory_clock_mhz",
        "performance_state", "ecc_corrected", "ecc_uncorrected", "rows_remapped_corrected",
        "rows_remapped_uncorrected", "pcie_generation", "pcie_width", "pcie_replays", "pcie_sent_bytes_per_s",
        "pcie_received_bytes_per_s", "nvlink_sent_bytes", "nvlink_received_bytes", "mps_clients",
    ),
    7,
)  # fmt: skip


def platform() -> Telemetry:
    """Return the figures of a gateway that leads, with calls, starts and GPU workers of all functions."""
    telemetry, trends = Telemetry(lambda: 1), HealthTrends()
    names = [f"function-{number}" for number in range(FUNCTIONS)]
    for name in names:
        stats = telemetry.of(name)
        for seconds in (0.002, 0.03, 0.4, 2.0):
            reply = ResultReply("01hzzzzzzzzzzzzzzzzzzzzzzz", OutcomeKind.SUCCEEDED, None, "", 1, 1, 0.001, seconds)
            stats.count_end(reply, seconds, 1_700_000_000.0, _TRACE)
        stats.count_refusal("capacity")
    nodes, devices, totals = [], {}, []
    start = ColdStart(0.1, 0.2, 0.3, 0.4, 0.5).phases
    for node in (f"node-{number}" for number in range(NODES)):
        gpus = [f"GPU-{node}-{number}" for number in range(GPUS_OF_NODE)]
        nodes.append(
            NodeReport(
                node,
                0.0,
                tuple(Device(uuid, DeviceType.GPU, "NVIDIA H100 80GB HBM3", 80 << 30) for uuid in gpus),
                processes=tuple(
                    ProcessReport(
                        f"w-{name}", name, 1, 1, 0.0, gpus_busy=0.5, gpu_bytes={gpus[number % GPUS_OF_NODE]: 1}
                    )
                    for number, name in enumerate(names)
                ),
            )
        )
        devices[node] = tuple(DeviceMetrics(uuid=uuid, **_METRICS) for uuid in gpus)  # type: ignore[arg-type]
        trends.add_devices(DeviceReport(node, 0.0, devices[node]), 0.0)
        totals.append(
            TotalsReport(
                node, "r", 0.0, 0.0, tuple(FunctionTotals(name, 9, 1, 1, 2.0, 1.0, 3, 1, 1, start) for name in names)
            )
        )
    telemetry.of_platform += [
        ReportSeries(lambda: nodes, list, lambda: totals, list),
        GpuSeries(lambda: nodes, devices.__getitem__, trends),
    ]
    return telemetry


def milliseconds(action: Callable[[], object], rounds: int) -> float:
    """Return the median time of an action."""
    took = []
    for _ in range(rounds):
        began = time.perf_counter()
        action()
        took.append(time.perf_counter() - began)
    return statistics.median(took) * 1000


async def longest_stop_ms(telemetry: Telemetry, rounds: int) -> float:
    """Return the median, over the scrapes, of the longest time in which the event loop did nothing else."""
    longest = []
    for _ in range(rounds):
        stops = [0.0]
        scrape = asyncio.ensure_future(telemetry.scrape("application/openmetrics-text"))
        while not scrape.done():
            began = time.perf_counter()
            await asyncio.sleep(0)
            stops.append(time.perf_counter() - began)
        longest.append(max(stops))
    return statistics.median(longest) * 1000


def main() -> None:
    options = measure.arguments("The cost of a scrape.", rounds=15)
    telemetry = platform()

    def write(form: Format) -> bytes:
        families = Families(form)
        for fill in telemetry.snapshots():
            fill(families)
        return families.exposition()

    text, openmetrics, protobuf = Text(), OpenMetrics(), Protobuf()
    body = write(openmetrics)
    result = {
        "samples": sum(not line.startswith(b"#") for line in body.splitlines()),
        "bytes": len(body),
        "snapshot_ms": round(milliseconds(telemetry.snapshots, options.rounds), 1),
        "openmetrics_ms": round(milliseconds(lambda: write(openmetrics), options.rounds), 1),
        "text_ms": round(milliseconds(lambda: write(text), options.rounds), 1),
        "protobuf_ms": round(milliseconds(lambda: write(protobuf), options.rounds), 1),
        "protobuf_bytes": len(write(protobuf)),
        "longest_stop_of_the_loop_ms": round(asyncio.run(longest_stop_ms(telemetry, options.rounds)), 1),
    }
    for name, value in result.items():
        print(f"{name:30} {value:>12,}")


if __name__ == "__main__":
    main()
