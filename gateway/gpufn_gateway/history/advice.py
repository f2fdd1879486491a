"""Advice about the options of a function, from its spec and its history. Pure.

Each advice names an option, the figures behind it and the value to set. Without enough calls there is none.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from gpufn_core.domain.devices.device import Share
from gpufn_core.spec.function_spec import FunctionSpec
from gpufn_core.spec.resources import Resources
from gpufn_core.spec.units import format_bytes
from gpufn_gateway.history import query
from gpufn_gateway.history.blocks import HOUR, MINUTE
from gpufn_gateway.history.query import Read, Span
from gpufn_gateway.history.series import Value

DAYS: Final = 30
_DAY_S: Final = 86_400
_TOTALS: Final = ("calls", "memory_max", "gpu_memory_max", "gpu_held_s", "gpu_s", "batch_sizes")
_FEW_CALLS: Final = 100
_ROOM: Final = 1.3  # times the largest recorded use
_LOW: Final = 0.5  # share of the request
_HIGH: Final = 0.9
_RARE: Final = 0.001  # share of the calls
_STEP_BYTES: Final = 64 << 20
_TIMEOUTS_S: Final = (60, 120, 300, 600, 1800, 3600)


class RecordedUse(msgspec.Struct, frozen=True, kw_only=True):
    """Recorded figures of a function. `calls_by_minute` and `busy_by_minute` (seconds of run time) are of the last
    two days, the others of the last thirty. `batches` counts gathered calls by the size of their batch, which is a
    power of two."""

    calls: float = 0.0
    memory_max: float = 0.0
    gpu_memory_max: float = 0.0
    gpu_held_s: float = 0.0
    gpu_used_s: float = 0.0
    batches: dict[int, float] = {}
    calls_by_minute: tuple[float, ...] = ()
    busy_by_minute: tuple[float, ...] = ()


class Advice(msgspec.Struct, frozen=True):
    """`value` is the proposed value of `option`; "" if the figures only inform. `scale` is the body of a request that
    sets it at once, without a deploy; empty if it needs one."""

    option: str
    finding: str
    value: str = ""
    scale: dict[str, int] = {}


class Replayed(msgspec.Struct, frozen=True):
    """The arrivals of two days with an `idle_timeout`: cold starts, and seconds of the worker."""

    idle_timeout_s: float
    cold_starts: int
    worker_s: float
    is_current: bool = False


def recorded_use(read: Read, subject: str, now: float) -> RecordedUse:
    """Return the history of a function."""
    end = int(now) // HOUR * HOUR + HOUR
    days = _values(read, subject, _TOTALS, Span(end - DAYS * _DAY_S, end, HOUR, HOUR))
    end = int(now) // MINUTE * MINUTE
    minutes = _values(read, subject, ("calls", "run_s"), Span(end - 2 * _DAY_S, end, MINUTE, MINUTE))
    batches: dict[int, float] = {}
    for counts in days["batch_sizes"]:
        for size, calls in counts.items() if isinstance(counts, dict) else ():
            batches[int(size)] = batches.get(int(size), 0.0) + calls
    totals = {name: [_number(value) for value in values] for name, values in days.items()}
    return RecordedUse(
        calls=sum(totals["calls"]),
        memory_max=max(totals["memory_max"], default=0.0),
        gpu_memory_max=max(totals["gpu_memory_max"], default=0.0),
        gpu_held_s=sum(totals["gpu_held_s"]),
        gpu_used_s=sum(totals["gpu_s"]),
        batches=batches,
        calls_by_minute=tuple(map(_number, minutes["calls"])),
        busy_by_minute=tuple(map(_number, minutes["run_s"])),
    )


def _values(read: Read, subject: str, series: Sequence[str], span: Span) -> dict[str, list[Value]]:
    (found,) = query.answer([subject], series, span, read).results
    return {each.name: each.values for each in found.series}


def _number(value: Value) -> float:
    """Return the value of a step; 0 if nothing was recorded."""
    return value if isinstance(value, (int, float)) else 0.0


def advise(spec: FunctionSpec, use: RecordedUse, min_workers: int | None) -> list[Advice]:
    """Return advice for a spec. `min_workers` is the number that is set in place of the declared one."""
    if use.calls < _FEW_CALLS:
        return []
    lowest = spec.scaling.min_workers if min_workers is None else min_workers
    found = [
        _of_bytes("memory", spec.resources.memory_bytes, use.memory_max),
        _of_bytes("vram", spec.resources.vram_bytes, use.gpu_memory_max),
        _of_gpu(spec.resources, use),
        _of_min_workers(lowest, spec.concurrency, use),
        _of_idle_timeout(replay(use.calls_by_minute, spec.scaling.idle_timeout_s)),
        _of_batch(0 if spec.largest_batch is None else spec.largest_batch.max_size, use.batches),
    ]
    return [each for each in found if each is not None]


def _of_bytes(option: str, asked: int | None, used: float) -> Advice | None:
    if not asked or not used:
        return None
    finding = f"its largest worker used {format_bytes(round(used))} of {format_bytes(asked)}"
    if _LOW * asked <= used <= _HIGH * asked:
        return None
    wanted = _with_room(used)
    return Advice(option, finding, _mebibytes(wanted)) if wanted != asked else None


def _of_gpu(resources: Resources, use: RecordedUse) -> Advice | None:
    if not resources.gpu or not use.gpu_held_s:
        return None
    share = use.gpu_used_s / use.gpu_held_s
    finding = f"its workers held GPUs for {use.gpu_held_s:,.0f} s and used {share:.0%} of it"
    is_alone = resources.share is Share.EXCLUSIVE and resources.gpu_count == 1
    if share >= _LOW or not is_alone or not use.gpu_memory_max:
        return Advice("gpu", finding)
    return Advice("share", finding, f"'mps', vram='{_mebibytes(_with_room(use.gpu_memory_max))}'")


def _with_room(used: float) -> int:
    return math.ceil(used * _ROOM / _STEP_BYTES) * _STEP_BYTES


def _mebibytes(count: int) -> str:
    """Format a number of bytes as options accept it."""
    return f"{count >> 20}Mi"


def _of_min_workers(lowest: int, slots: int, use: RecordedUse) -> Advice | None:
    if not lowest or not use.busy_by_minute:
        return None
    busiest = max(use.busy_by_minute) / MINUTE / slots
    needed = math.ceil(busiest)
    if needed >= lowest:
        return None
    finding = f"the busiest minute of two days kept {busiest:.2f} of {lowest} workers busy"
    return Advice("min_workers", finding, str(needed), {"min_workers": needed})


def _of_batch(largest: int, batches: Mapping[int, float]) -> Advice | None:
    """Advise a smaller batch if none fills. Sizes are known as powers of two: 8 means 5 to 8 calls.

    >>> _of_batch(32, {1: 900.0, 2: 90.0, 4: 10.0}).value, _of_batch(32, {1: 990.0, 32: 10.0})
    ('Batch(max_size=4)', None)
    """
    gathered = sum(batches.values())
    if largest < 2 or gathered < _FEW_CALLS:
        return None
    usual = max((size for size, calls in batches.items() if calls > _RARE * gathered), default=1)
    if 2 * usual > largest:
        return None
    alone = batches.get(1, 0.0) / gathered
    finding = f"its batches had up to {usual} of {largest} calls, and {alone:.0%} of the calls ran alone"
    return Advice("batch", finding, "None" if usual == 1 else f"Batch(max_size={usual})")


def _of_idle_timeout(curve: Sequence[Replayed]) -> Advice | None:
    """Advise the shortest timeout that causes no more cold starts than the present timeout."""
    current = next((each for each in curve if each.is_current), None)
    if current is None:
        return None
    best = next(each for each in curve if each.cold_starts <= current.cold_starts)
    if best.idle_timeout_s >= current.idle_timeout_s:
        return None
    saved = current.worker_s - best.worker_s
    finding = f"{best.cold_starts} cold starts in two days with either, and {saved:,.0f} s less of a worker"
    return Advice("idle_timeout", finding, f"{best.idle_timeout_s:g}")


def replay(calls_by_minute: Sequence[float], current_s: float) -> list[Replayed]:
    """Replay the arrivals with several timeouts of at least a minute, the shortest first. Arrivals are known by the
    minute, so a shorter timeout cannot be judged. One worker serves all calls of a minute.

    >>> [(each.idle_timeout_s, each.cold_starts, each.worker_s) for each in replay([3, 0, 0, 1, 0], 120)[:3]]
    [(60.0, 2, 120.0), (120.0, 2, 240.0), (300.0, 1, 480.0)]
    """
    minutes = [number for number, calls in enumerate(calls_by_minute) if calls]
    if not minutes:
        return []
    gaps = [(later - earlier) * MINUTE for earlier, later in itertools.pairwise(minutes)]
    timeouts = sorted({float(each) for each in _TIMEOUTS_S} | ({current_s} if current_s >= MINUTE else set()))
    return [
        Replayed(
            timeout_s,
            1 + sum(gap > timeout_s for gap in gaps),
            timeout_s + sum(min(gap, timeout_s) for gap in gaps),
            timeout_s == current_s,
        )
        for timeout_s in timeouts
    ]
