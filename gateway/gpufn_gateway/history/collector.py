"""Points of the current ten seconds, from the reports of the platform. Pure.

Every gateway collects, so that a new leader has the last slots too. The reports are the same at every gateway; only the
calls that clients wait for (`CallStats.recent`) are the gateway's own, and gateways exchange them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gpufn_core.domain.devices.device import DeviceType
from gpufn_core.domain.devices.device_metrics import DeviceMetrics
from gpufn_core.domain.revision import RevisionKey
from gpufn_core.protocol.reports import (
    FunctionStatus,
    NodeReport,
    ProcessReport,
    RevisionTraffic,
    RunnerReport,
    WorkerEvent,
    WorkerEventKind,
)
from gpufn_gateway.history.fields import Field, Point, Points, add, add_count, merge, merge_points, raise_to
from gpufn_gateway.history.revisions import collapse

OVERVIEW = "overview"
_MAX_SUBJECTS = 8_000  # in one slot; further functions count in the overview only
_MIB = 1 << 20
_FROM_NODES = (Field.GPUS, Field.CORES, Field.POWER_W, Field.UTILISATION_PERMILLE, Field.MEASURED)


def function_subject(name: str) -> str:
    return f"function:{name}"


def revision_subject(name: str, revision: int) -> str:
    return f"function:{name}@{revision}"


class Collector:
    def __init__(self) -> None:
        self._points: Points = {}
        self._traffic: dict[str, dict[str, dict[RevisionKey, RevisionTraffic]]] = {}  # by node and runner

    def take(self) -> Points:
        """Return the points since the last call."""
        points, self._points = self._points, {}
        return points

    def _of(self, subject: str) -> Point:
        return self._points.setdefault(subject, {})

    # --- samples, each second ---

    def sample(
        self,
        statuses: Iterable[FunctionStatus],
        nodes: Iterable[NodeReport],
        metrics_of: Callable[[str], Iterable[DeviceMetrics]],
        seconds: int,
    ) -> None:
        """Add the present state of the reports, for the last `seconds`."""
        for status in statuses:
            self._sample_status(status, seconds)
        for node in nodes:
            self._sample_node(node, {each.uuid: each for each in metrics_of(node.node)}, seconds)

    def _sample_status(self, status: FunctionStatus, seconds: int) -> None:
        workers = status.workers
        amounts = (
            (Field.READY, workers.ready),
            (Field.STARTING, workers.starting + workers.resuming),
            (Field.DRAINING, workers.draining),
            (Field.PARKED, workers.parked + workers.parking),
            (Field.QUEUED, status.queued or 0),
            (Field.RUNNING, status.running or 0),
            (Field.WANTED, status.wanted),
        )
        if not any(amount for _, amount in amounts):
            return
        point = self._of(function_subject(status.function))
        for field, amount in amounts:
            add(point, field, amount * seconds)
        raise_to(point, Field.QUEUED_MAX, status.queued or 0)
        if status.waiting is not None:
            add_count(point, Field.WAITING, status.waiting.reason.value, seconds)

    def _sample_node(self, node: NodeReport, metrics: Mapping[str, DeviceMetrics], seconds: int) -> None:
        of_node = self._of(f"node:{node.node}")
        add(of_node, Field.SECONDS, seconds)
        for process in node.processes:
            self._sample_process(process, of_node, seconds)
        parents = {device.parent for device in node.devices}
        for device in node.devices:
            if device.type is DeviceType.CPU:
                add(of_node, Field.CORES, round(device.cores) * seconds)
                continue
            point = self._of(f"gpu:{device.uuid}")
            add(point, Field.SECONDS, seconds)
            holders = sum(each.share is not None and device.uuid in each.share.gpus for each in node.processes)
            add(point, Field.WORKERS, holders * seconds)
            if device.uuid not in parents:
                add(of_node, Field.GPUS, seconds)
            if (measured := metrics.get(device.uuid)) is not None:
                _sample_gpu(point, measured, seconds)
                for field in (Field.POWER_W, Field.UTILISATION_PERMILLE, Field.MEASURED):
                    add(of_node, field, _gpu_amounts(measured).get(field, 0) * seconds)

    def _sample_process(self, process: ProcessReport, of_node: Point, seconds: int) -> None:
        point = self._of(function_subject(process.function))
        memory = process.resident_bytes // _MIB
        on_gpus = sum(process.gpu_bytes.values()) // _MIB
        amounts = {Field.MEMORY_MIB: memory, Field.GPU_MEMORY_MIB: on_gpus}
        if process.gpus_busy is not None:
            amounts[Field.GPU_BUSY_MS] = round(process.gpus_busy * 1000)
        if process.share is not None and process.parked is None:
            amounts[Field.GPU_HELD_MS] = round(process.share.gpus_charged * 1000)
            amounts[Field.CPU_HELD_MS] = round(process.share.cores * 1000)
        for field, amount in amounts.items():
            add(point, field, amount * seconds)
            add(of_node, field, amount * seconds)
        add(of_node, Field.WORKERS, seconds)
        raise_to(point, Field.MEMORY_MAX_MIB, memory)
        raise_to(point, Field.GPU_MEMORY_MAX_MIB, on_gpus)

    # --- events and counters ---

    def on_runner_report(self, report: RunnerReport) -> None:
        """Count the attempts since the last report of this runner. The first one of a runner only sets the start."""
        runners = self._traffic.setdefault(report.node, {})
        previous = runners.pop(report.runner, None)
        runners[report.runner] = current = {(each.function, each.revision): each for each in report.traffic}
        for runner in list(runners)[:-2]:
            del runners[runner]
        if previous is None:
            return
        for (function, revision), now in current.items():
            before = previous.get((function, revision))
            if before is None or now.ended < before.ended:  # its counter was reset
                before = RevisionTraffic(function, revision)
            if now.ended == before.ended:
                continue
            for subject in (function_subject(function), revision_subject(function, revision), f"node:{report.node}"):
                point = self._of(subject)
                add(point, Field.CALLS, now.ended - before.ended)
                add(point, Field.FAILED, now.failed - before.failed)
                add(point, Field.RUN_MS, round((now.run_seconds - before.run_seconds) * 1000))
                add(point, Field.GPU_MS, round((now.gpu_seconds - before.gpu_seconds) * 1000))
                for size, calls in now.batches.items():
                    if (added := calls - before.batches.get(size, 0)) > 0:
                        add_count(point, Field.BATCHES, size, added)

    def on_worker_event(self, event: WorkerEvent) -> None:
        if event.kind not in (WorkerEventKind.READY, WorkerEventKind.START_FAILED):
            return
        for subject in (function_subject(event.function), revision_subject(event.function, event.revision)):
            point = self._of(subject)
            if event.kind is WorkerEventKind.START_FAILED:
                add(point, Field.START_FAILURES, 1)
                continue
            add(point, Field.STARTS, 1)
            for phase, seconds in event.cold_start.phases.items() if event.cold_start is not None else ():
                add_count(point, Field.START_PHASE_MS, phase, round(seconds * 1000))

    def add(self, points: Mapping[str, Mapping[int, Any]]) -> None:
        """Add the points of the calls that the clients of a gateway waited for."""
        merge_points(self._points, points)


def with_overview(points: Points, seconds: int) -> Points:
    """Return the points of a slot in which `seconds` were recorded, with the overview of all of them."""
    overview: Point = {Field.SECONDS: seconds}
    for subject, point in points.items():
        if subject.startswith("function:") and "@" not in subject:
            merge(overview, point)
        elif subject.startswith("node:"):
            for field in _FROM_NODES:
                add(overview, field, point.get(field, 0))
    if len(points) > _MAX_SUBJECTS:
        busiest = sorted(points, key=lambda each: points[each].get(Field.CALLS, 0), reverse=True)
        points = {each: points[each] for each in busiest[:_MAX_SUBJECTS]}
    return {**collapse(points), OVERVIEW: overview}


def _gpu_amounts(metrics: DeviceMetrics) -> dict[Field, int]:
    amounts = {Field.MEASURED: 1}
    if metrics.power_w is not None:
        amounts[Field.POWER_W] = round(metrics.power_w)
    if metrics.utilisation is not None:
        amounts[Field.UTILISATION_PERMILLE] = round(metrics.utilisation * 1000)
    if metrics.temperature_c is not None:
        amounts[Field.TEMPERATURE_C] = metrics.temperature_c
    if metrics.memory_used_bytes is not None:
        amounts[Field.GPU_MEMORY_MIB] = metrics.memory_used_bytes // _MIB
    return amounts


def _sample_gpu(point: Point, metrics: DeviceMetrics, seconds: int) -> None:
    amounts = _gpu_amounts(metrics)
    for field, amount in amounts.items():
        add(point, field, amount * seconds)
    raise_to(point, Field.TEMPERATURE_MAX_C, amounts.get(Field.TEMPERATURE_C, 0))
    raise_to(point, Field.GPU_MEMORY_MAX_MIB, amounts.get(Field.GPU_MEMORY_MIB, 0))
