"""The parts of live pages: rows of functions, workers, and GPUs. Pure."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Final

import msgspec

from gpufn_core.domain.devices.device import Device, DeviceShare, DeviceType
from gpufn_core.domain.devices.device_metrics import DeviceMetrics
from gpufn_core.domain.revision import Function, Revision
from gpufn_core.protocol.records import NodeDrain
from gpufn_core.protocol.reports import FunctionStatus, NodeReport, ProcessReport, RunnerReport, WorkerCounts
from gpufn_gateway.console.live.findings import Finding
from gpufn_gateway.console.live.rates import Rates
from gpufn_gateway.nodes.health_score import Score
from gpufn_gateway.nodes.health_trends import HealthTrends

View = dict[str, Any]
_GPU_METRICS: Final = (
    "utilisation",
    "memory_used_bytes",
    "temperature_c",
    "temperature_limit_c",
    "power_w",
    "power_limit_w",
)
_NO_WORKERS: Final = WorkerCounts()


def rates_view(rates: Rates) -> View:
    """Return rates with as many digits as a page shows, so that a delta has only changes that a person can see."""
    return {
        "calls_per_s": _rounded(rates.calls_per_s),
        "errors_per_s": _rounded(rates.errors_per_s),
        "error_share": _rounded(rates.error_share),
        "p50_s": _rounded(rates.p50_s),
        "p99_s": _rounded(rates.p99_s),
        "run_s": _rounded(rates.run_s),
        "gpus": _rounded(rates.gpus),
    }


def function_row(
    function: Function, revision: Revision | None, status: FunctionStatus, rates: Rates, findings: list[Finding]
) -> View:
    """Return a row of the list of functions."""
    spec = None if revision is None else revision.spec
    return {
        "serving": function.serving,
        "active": function.active,
        "split": split_view(function),
        "gpu": "" if spec is None else " or ".join(spec.resources.gpu),
        "models": 0 if spec is None else len(spec.models),
        "web": spec is not None and spec.web is not msgspec.UNSET,
        "workers": counts_view(status.workers),
        "wanted": status.wanted,
        "queued": status.queued,
        "running": status.running,
        "waiting": None if status.waiting is None else status.waiting.reason,
        "finding": None if not findings else {"severity": findings[0].severity, "title": findings[0].title},
        **rates_view(rates),
    }


def split_view(function: Function) -> View | None:
    """Return the weights of a split in percent, and the revision that gets copies."""
    split = function.traffic
    if split is None:
        return None
    weights = {str(number): weight for number, weight in split.weights.items()}
    return {"weights": weights, "mirror": None if split.mirror is None else split.mirror.revision}


def counts_view(counts: WorkerCounts) -> dict[str, int]:
    """Return the states in which there are workers."""
    return {state: count for state, count in msgspec.structs.asdict(counts).items() if count}


def sum_of(counts: Iterable[WorkerCounts]) -> WorkerCounts:
    """Add the workers of functions, most of which have none."""
    total = msgspec.structs.astuple(_NO_WORKERS)
    for each in counts:
        if each != _NO_WORKERS:
            total = tuple(map(operator.add, total, msgspec.structs.astuple(each)))
    return WorkerCounts(*total)


def workers_of(function: str, runners: Iterable[RunnerReport], nodes: Iterable[NodeReport]) -> dict[str, View]:
    """Return the workers of a function by their ids."""
    processes = {each.worker: (node, each) for node in nodes for each in node.processes if each.function == function}
    found: dict[str, View] = {}
    for runner in runners:
        for worker in runner.workers:
            if worker.function != function:
                continue
            node, process = processes.get(worker.worker, (None, None))
            found[worker.worker] = {
                "node": runner.node,
                "revision": worker.revision,
                "state": worker.state,
                "slots": worker.slots,
                "in_use": worker.in_use,
                "poisoned": worker.poisoned,
                "waits_on": worker.waits_on,
                "idle_since": worker.idle_since,
                "cold_start": None if worker.cold_start is None else worker.cold_start.phases,
                **_process_view(process, node),
            }
    return found


def _process_view(process: ProcessReport | None, node: NodeReport | None) -> View:
    if process is None or node is None:
        return {"pid": None, "started_at": None, "memory_bytes": None, "gpus": [], "gpu_bytes": None, "gpus_busy": None}
    kinds = {device.uuid: device.kind for device in node.devices}
    gpus = process.share.gpus if process.share is not None else ()
    return {
        "pid": process.pid,
        "started_at": process.started_at,
        "memory_bytes": _in_mib(process.resident_bytes),
        "gpus": [kinds.get(uuid, uuid) for uuid in gpus],
        "gpu_bytes": sum(process.gpu_bytes.values()) if process.gpu_bytes else None,
        "gpus_busy": _rounded(process.gpus_busy),
    }


def node_view(
    node: NodeReport, metrics: Iterable[DeviceMetrics], trends: HealthTrends, drain: NodeDrain | None = None
) -> View:
    """Return a node with its devices and its workers."""
    measured = {each.uuid: each for each in metrics}
    cores = sum(device.cores for device in node.devices)
    memory_bytes = sum(device.memory_bytes for device in node.devices if device.type is DeviceType.CPU)
    shares = [process.share for process in node.processes if process.share is not None]
    return {
        "address": node.address,
        "drained": None if drain is None else drain_view(drain),
        "score": _score_view(trends.of_node(node)),
        "platform": node.platform,
        "driver": node.facts.driver,
        "cuda": node.facts.cuda,
        "mps": node.facts.mps,
        "clock_skew_s": _rounded(node.clock_skew_s),
        "cores": cores,
        "cores_reserved": _rounded(sum(share.cores for share in shares)),
        "memory_bytes": memory_bytes,
        "memory_reserved_bytes": sum(share.memory_bytes for share in shares),
        "gpus": {
            device.uuid: gpu_view(device, measured.get(device.uuid), node, trends.of_gpu(node.node, device))
            for device in node.devices
            if device.type is DeviceType.GPU
        },
        "functions": dict(sorted(Counter(process.function for process in node.processes).items())),
        "trouble": {
            subject: text
            for subject, text in (
                ("containers", node.container_trouble),
                ("GPUs in containers", node.gpu_container_trouble),
                *node.isolation_trouble.items(),
            )
            if text
        },
    }


def drain_view(drain: NodeDrain) -> View:
    return {"since": drain.since, "by": drain.by}


def gpu_view(device: Device, metrics: DeviceMetrics | None, node: NodeReport, score: Score) -> View:
    """Return a GPU with the workers that hold it."""
    held = [process for process in node.processes if process.share is not None and device.uuid in process.share.gpus]
    measured: View = {name: None if metrics is None else getattr(metrics, name) for name in _GPU_METRICS}
    return {
        "kind": device.kind,
        "memory_bytes": device.memory_bytes,
        "health": device.health,
        "health_reason": device.health_reason,
        "score": _score_view(score),
        "parent": device.parent,
        "foreign_bytes": device.foreign_bytes,
        "workers": {process.worker: _share_view(process, process.share, device) for process in held if process.share},
        "mode": None if not held or held[0].share is None else held[0].share.mode,
        **measured,
    }


def _score_view(score: Score) -> View:
    return {"value": _rounded(score.value), "reasons": score.reasons, "drain": score.drain}


def _share_view(process: ProcessReport, share: DeviceShare, device: Device) -> View:
    """Return what a worker has of a GPU: its limits, and what it uses if that is known."""
    return {
        "function": process.function,
        "sm_percent": share.sm_percent,
        "vram_bytes": share.vram_bytes,
        "charged": _rounded(share.gpu_part),
        "memory_bytes": process.gpu_bytes.get(device.uuid),
        "busy": _rounded(process.gpus_busy) if len(share.gpus) == 1 else None,
        "parked": process.parked is not None,
    }


def gpus_view(devices: Iterable[tuple[Device, DeviceMetrics | None]]) -> View:
    """Return the use of all GPUs together. None: no GPU reports it."""
    pairs = [(device, metrics) for device, metrics in devices if device.type is DeviceType.GPU]
    used = list(_known(metrics and metrics.utilisation for _, metrics in pairs))
    held = list(_known(metrics and metrics.memory_used_bytes for _, metrics in pairs))
    return {
        "count": len(pairs),
        "busy": _rounded(sum(used) / len(used)) if used else None,
        "memory_used_bytes": sum(held) if held else None,
        "memory_bytes": sum(device.memory_bytes for device, _ in pairs),
    }


def _known(values: Iterable[Any]) -> Iterator[Any]:
    return (value for value in values if value is not None)


def _in_mib(count: int) -> int:
    return count >> 20 << 20


def _rounded(value: float | None) -> float | None:
    """Round to three digits.

    >>> _rounded(1234.5678), _rounded(0.00012345), _rounded(None)
    (1230.0, 0.000123, None)
    """
    return None if value is None else float(f"{value:.3g}")
