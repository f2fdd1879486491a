"""The series that a query can name: how each is computed from a point. Pure.

A value is about one step: a count, a mean over its recorded seconds, a maximum, or a quantile. A step in which nothing
was recorded has no values (None); a quantile without calls is None too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from gpufn_gateway.history.durations import quantile_s, upper_bound_s
from gpufn_gateway.history.fields import Field

Value = float | dict[str, float] | None
_MIB: Final = 1 << 20
_LIVE: Final = (Field.READY, Field.STARTING, Field.DRAINING)


class Series(NamedTuple):
    """`compute(point, seconds)`: the value of a point with so many recorded seconds, which are more than 0."""

    unit: str
    meaning: str
    compute: Callable[[Mapping[int, Any], int], Value]


def _sum(field: Field, scale: float = 1.0) -> Callable[[Mapping[int, Any], int], Value]:
    return lambda point, seconds: _round(point.get(field, 0) * scale)


def _mean(field: Field, scale: float = 1.0) -> Callable[[Mapping[int, Any], int], Value]:
    return lambda point, seconds: _round(point.get(field, 0) * scale / seconds)


def _measured(field: Field, scale: float = 1.0) -> Callable[[Mapping[int, Any], int], Value]:
    """Mean over the seconds in which the GPUs reported metrics."""

    def compute(point: Mapping[int, Any], seconds: int) -> Value:
        measured = point.get(Field.MEASURED, 0)
        return _round(point.get(field, 0) * scale / measured) if measured else None

    return compute


def _if_measured(field: Field, scale: float = 1.0) -> Callable[[Mapping[int, Any], int], Value]:
    def compute(point: Mapping[int, Any], seconds: int) -> Value:
        return _round(point.get(field, 0) * scale) if point.get(Field.MEASURED) else None

    return compute


def _mean_if_measured(field: Field) -> Callable[[Mapping[int, Any], int], Value]:
    return lambda point, seconds: _round(point.get(field, 0) / seconds) if point.get(Field.MEASURED) else None


def _counts(field: Field, scale: float = 1.0) -> Callable[[Mapping[int, Any], int], Value]:
    return lambda point, seconds: {str(key): _round(count * scale) for key, count in point.get(field, {}).items()}


def _total(field: Field) -> Callable[[Mapping[int, Any], int], Value]:
    return lambda point, seconds: float(sum(point.get(field, {}).values()))


def _quantile(field: Field, share: float) -> Callable[[Mapping[int, Any], int], Value]:
    return lambda point, seconds: quantile_s(point.get(field, {}), share)


def _histogram(field: Field) -> Callable[[Mapping[int, Any], int], Value]:
    return lambda point, seconds: {
        f"{upper_bound_s(bucket):.3g}": count for bucket, count in sorted(point.get(field, {}).items())
    }


def _live(point: Mapping[int, Any], seconds: int) -> Value:
    return _round(sum(point.get(field, 0) for field in _LIVE) / seconds)


def _worker_s(point: Mapping[int, Any], seconds: int) -> Value:
    return float(sum(point.get(field, 0) for field in _LIVE))


def _round(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.6g}")


_CALLS: Final[Mapping[str, Series]] = {
    "calls": Series("calls", "attempts that ended, of any call", _sum(Field.CALLS)),
    "failed": Series("calls", "attempts that ended without a result", _sum(Field.FAILED)),
    "run_s": Series("s", "run time of the attempts", _sum(Field.RUN_MS, 1e-3)),
    "gpu_s": Series("GPU s", "GPU time charged to the attempts", _sum(Field.GPU_MS, 1e-3)),
    "errors": Series("calls", "calls that a client waited for and that failed", _total(Field.ERRORS)),
    "errors_by_code": Series("calls", "these, by code", _counts(Field.ERRORS)),
    "refusals": Series("requests", "requests rejected before they became calls", _total(Field.REFUSALS)),
    "refusals_by_code": Series("requests", "these, by code", _counts(Field.REFUSALS)),
    "p50": Series("s", "median latency of calls that a client waited for", _quantile(Field.LATENCY, 0.5)),
    "p90": Series("s", "90th percentile", _quantile(Field.LATENCY, 0.9)),
    "p95": Series("s", "95th percentile", _quantile(Field.LATENCY, 0.95)),
    "p99": Series("s", "99th percentile", _quantile(Field.LATENCY, 0.99)),
    "latency": Series("calls", "histogram of the latency, by upper bound in seconds", _histogram(Field.LATENCY)),
    "queue_p50": Series("s", "median time until the attempt starts", _quantile(Field.QUEUE_TIME, 0.5)),
    "queue_p99": Series("s", "99th percentile", _quantile(Field.QUEUE_TIME, 0.99)),
    "starts": Series("starts", "workers that became ready: cold starts and resumes", _sum(Field.STARTS)),
    "start_failures": Series("starts", "workers that did not start", _sum(Field.START_FAILURES)),
    "batch_sizes": Series(
        "calls", "calls that were gathered, by size of their batch (at most)", _counts(Field.BATCHES)
    ),
    "start_phases": Series("s", "time of the starts, by phase", _counts(Field.START_PHASE_MS, 1e-3)),
}
_WORKERS: Final[Mapping[str, Series]] = {
    "workers": Series("workers", "mean number of live workers", _live),
    "ready": Series("workers", "mean number of ready workers", _mean(Field.READY)),
    "starting": Series("workers", "mean number of starting or resuming workers", _mean(Field.STARTING)),
    "draining": Series("workers", "mean number of draining workers", _mean(Field.DRAINING)),
    "parked": Series("workers", "mean number of parked workers", _mean(Field.PARKED)),
    "wanted": Series("workers", "mean number of wanted workers", _mean(Field.WANTED)),
    "worker_s": Series("s", "time of all live workers together", _worker_s),
    "queued": Series("calls", "mean number of queued calls", _mean(Field.QUEUED)),
    "queued_max": Series("calls", "largest number of queued calls of a function", _sum(Field.QUEUED_MAX)),
    "running": Series("calls", "mean number of running calls", _mean(Field.RUNNING)),
    "waiting": Series("s", "time in which calls waited, by reason", _counts(Field.WAITING)),
    "gpu_held_s": Series("GPU s", "GPU time that workers held, busy or not", _sum(Field.GPU_HELD_MS, 1e-3)),
    "gpu_busy_s": Series("GPU s", "GPU time that workers kept GPUs busy, as measured", _sum(Field.GPU_BUSY_MS, 1e-3)),
    "cpu_held_s": Series("core s", "CPU time that workers reserved", _sum(Field.CPU_HELD_MS, 1e-3)),
    "memory": Series("bytes", "mean memory of all workers", _mean(Field.MEMORY_MIB, _MIB)),
    "memory_max": Series("bytes", "largest memory of a worker", _sum(Field.MEMORY_MAX_MIB, _MIB)),
    "gpu_memory": Series("bytes", "mean GPU memory of all workers", _mean(Field.GPU_MEMORY_MIB, _MIB)),
    "gpu_memory_max": Series("bytes", "largest GPU memory of a worker", _sum(Field.GPU_MEMORY_MAX_MIB, _MIB)),
}
_POWER: Final[Mapping[str, Series]] = {
    "utilisation": Series("share", "share of time in which a kernel ran", _measured(Field.UTILISATION_PERMILLE, 1e-3)),
    "power": Series("W", "mean power of the GPUs together", _mean_if_measured(Field.POWER_W)),
    "energy": Series("J", "energy of the GPUs", _if_measured(Field.POWER_W)),
}
_NODE: Final[Mapping[str, Series]] = {
    **{name: _CALLS[name] for name in ("calls", "failed", "run_s", "gpu_s")},
    **{name: _WORKERS[name] for name in ("gpu_held_s", "gpu_busy_s", "cpu_held_s", "memory", "gpu_memory")},
    **_POWER,
    "workers": Series("workers", "mean number of worker processes", _mean(Field.WORKERS)),
    "gpus": Series("GPUs", "mean number of GPUs", _mean(Field.GPUS)),
    "cores": Series("cores", "mean number of CPU cores", _mean(Field.CORES)),
}
_GPU: Final[Mapping[str, Series]] = {
    **_POWER,
    "workers": _NODE["workers"],
    "memory": Series("bytes", "mean memory in use", _measured(Field.GPU_MEMORY_MIB, _MIB)),
    "memory_max": Series("bytes", "largest memory in use", _if_measured(Field.GPU_MEMORY_MAX_MIB, _MIB)),
    "temperature": Series("°C", "mean temperature", _measured(Field.TEMPERATURE_C)),
    "temperature_max": Series("°C", "highest temperature", _if_measured(Field.TEMPERATURE_MAX_C)),
}
# By kind of subject.
SERIES: Final[Mapping[str, Mapping[str, Series]]] = {
    "function": {**_CALLS, **_WORKERS},
    "overview": {**_CALLS, **_WORKERS, **_POWER, "gpus": _NODE["gpus"], "cores": _NODE["cores"]},
    "node": _NODE,
    "gpu": _GPU,
}
DEFAULTS: Final[Mapping[str, tuple[str, ...]]] = {
    "function": ("calls", "failed", "p50", "p99", "workers", "queued"),
    "overview": ("calls", "failed", "p50", "p99", "workers", "queued"),
    "node": ("workers", "memory", "utilisation", "power"),
    "gpu": ("workers", "memory", "utilisation", "temperature", "power"),
}
