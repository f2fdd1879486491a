"""The last hour of each node and GPU, for their health scores. Pure.

A reading is kept per minute, so a trend costs 60 small records per GPU. Counters that decreased, after a reload of the
driver or a restart of the runner, count from zero.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final, TypeVar

import msgspec

from gpufn_core.domain.devices.device import Device, DeviceType
from gpufn_core.domain.devices.device_metrics import DeviceMetrics
from gpufn_core.protocol.reports import DeviceReport, FunctionTotals, NodeReport, TotalsReport
from gpufn_gateway.nodes.health_score import GpuTrend, NodeTrend, Score, gpu_score, node_score

SPAN_S: Final = 3600.0
_STEP_S: Final = 60.0
_TOTALS_STEP_S: Final = 600.0  # between two kept reports of a runner
_MAX_NODES: Final = 1_000
_MAX_GPUS: Final = 256  # per node
_BRAKES: Final = frozenset({"thermal", "hardware_thermal", "hardware", "power_brake"})
_COUNTERS: Final = ("ecc_corrected", "ecc_uncorrected", "rows_remapped", "pcie_replays", "xids")

T = TypeVar("T")


class _Step(msgspec.Struct):
    """Counters at the end of a minute. `samples` of that minute, of which `limited` had limited clocks."""

    at: float
    counters: tuple[int | None, ...]
    samples: int = 0
    limited: int = 0


class _History:
    def __init__(self) -> None:
        self._steps: deque[_Step] = deque()
        self.last: DeviceMetrics | None = None

    def add(self, counters: tuple[int | None, ...], now: float, *, limited: bool = False) -> None:
        steps = self._steps
        # The first reading stays as it is: the sums start there.
        if len(steps) < 2 or now - steps[-1].at >= _STEP_S:
            steps.append(_Step(now, counters))
        step = steps[-1]
        step.counters, step.samples, step.limited = counters, step.samples + 1, step.limited + limited
        while len(steps) > 2 and now - steps[1].at > SPAN_S:
            steps.popleft()

    def increases(self) -> list[int | None]:
        """Return how much each counter has grown; None for an unknown function."""
        grown: list[int | None] = [None if value is None else 0 for value in self._steps[-1].counters]
        for before, after in zip(self._steps, list(self._steps)[1:], strict=False):
            for index, (old, new) in enumerate(zip(before.counters, after.counters, strict=True)):
                if new is not None and old is not None:
                    grown[index] = (grown[index] or 0) + (new - old if new >= old else new)
        return grown

    def limited_share(self) -> float | None:
        samples = sum(step.samples for step in self._steps)
        return sum(step.limited for step in self._steps) / samples if samples else None


class HealthTrends:
    """Times are monotonic seconds."""

    def __init__(self) -> None:
        self._gpus: dict[str, dict[str, _History]] = {}  # by node and uuid
        self._totals: dict[str, deque[tuple[float, TotalsReport]]] = {}  # by node, with the time of arrival

    def add_devices(self, report: DeviceReport, now: float) -> None:
        histories = _room(self._gpus, report.node, {})
        for each in report.devices[:_MAX_GPUS]:
            history = histories.setdefault(each.uuid, _History())
            history.last = each
            history.add(_counters(each), now, limited=not _BRAKES.isdisjoint(each.clock_limits))
        present = {each.uuid for each in report.devices}
        for uuid in [uuid for uuid in histories if uuid not in present]:
            del histories[uuid]

    def add_totals(self, report: TotalsReport, now: float) -> None:
        reports = _room(self._totals, report.node, deque())
        if reports and reports[-1][1].runner != report.runner:
            reports.clear()
        if len(reports) < 2 or now - reports[-2][0] >= _TOTALS_STEP_S:
            reports.append((now, report))
        reports[-1] = now, report
        while len(reports) > 2 and now - reports[1][0] > SPAN_S:
            reports.popleft()

    def of_gpu(self, node: str, device: Device) -> Score:
        history = self._gpus.get(node, {}).get(device.uuid)
        if history is None or history.last is None:
            return gpu_score(GpuTrend(device.health, device.health_reason))
        grown = dict(zip(_COUNTERS, history.increases(), strict=True))
        trend = GpuTrend(
            device.health,
            device.health_reason,
            ecc_corrected=grown["ecc_corrected"],
            ecc_uncorrected=grown["ecc_uncorrected"],
            rows_remapped=grown["rows_remapped"],
            rows_pending=history.last.rows_pending,
            xids=grown["xids"] or 0,
            pcie_replays=grown["pcie_replays"],
            limited=history.limited_share(),
        )
        return gpu_score(trend)

    def of_node(self, report: NodeReport) -> Score:
        trend = _node_trend(self._totals.get(report.node))
        gpus = [self.of_gpu(report.node, each) for each in report.devices if each.type is DeviceType.GPU]
        return node_score(trend, gpus)


def _room(histories: dict[str, T], node: str, new: T) -> T:
    if node not in histories and len(histories) >= _MAX_NODES:
        del histories[next(iter(histories))]
    return histories.setdefault(node, new)


def _node_trend(reports: Sequence[tuple[float, TotalsReport]] | None) -> NodeTrend:
    """Return the differences between the runner's first and last kept reports."""
    if not reports:
        return NodeTrend()
    before = {each.function: each for each in reports[0][1].functions}
    starts = failed_starts = failing = attempts = retries = retrying = 0
    for now in reports[-1][1].functions:
        old = before.get(now.function, FunctionTotals(now.function))
        if now.attempts < old.attempts or now.starts < old.starts:  # the runner had dropped its counters
            old = FunctionTotals(now.function)
        failed, retried = now.failed_starts - old.failed_starts, now.retries - old.retries
        starts, failed_starts, failing = (
            starts + now.starts - old.starts,
            failed_starts + failed,
            failing + (failed > 0),
        )
        attempts, retries, retrying = (
            attempts + now.attempts - old.attempts,
            retries + retried,
            retrying + (retried > 0),
        )
    return NodeTrend(starts, failed_starts, failing, attempts, retries, retrying)


def _counters(each: DeviceMetrics) -> tuple[int | None, ...]:
    remapped = [value for value in (each.rows_remapped_corrected, each.rows_remapped_uncorrected) if value is not None]
    return (
        each.ecc_corrected,
        each.ecc_uncorrected,
        sum(remapped) if remapped else None,
        each.pcie_replays,
        sum(each.xids.values()),
    )
