"""Advice about the options of a function, from its spec and its history. Pure.

Each advice names an option, the figures behind it and the value to set. Without enough calls there is none.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import msgspec

from gpufn_core.spec.units import format_bytes

MINUTE_S = 60
_FEW_CALLS = 100
_ROOM = 1.3  # times the largest use that was seen
_LOW, _HIGH = 0.5, 0.9  # of what was asked for
_STEP_BYTES = 64 << 20
_TIMEOUTS_S = (60, 120, 300, 600, 1800, 3600)


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What the history has of a function. `calls_by_minute` and `busy_by_minute` (seconds of run time) are of the last
    two days, the others of the last thirty."""

    calls: float = 0.0
    memory_max: float = 0.0
    gpu_memory_max: float = 0.0
    gpu_held_s: float = 0.0
    gpu_used_s: float = 0.0
    calls_by_minute: tuple[float, ...] = ()
    busy_by_minute: tuple[float, ...] = ()


class Advice(msgspec.Struct, frozen=True):
    """`value` is what to set `option` to; "" if the figures only inform."""

    option: str
    finding: str
    value: str = ""


class Replayed(msgspec.Struct, frozen=True):
    """The arrivals of two days with an `idle_timeout`: cold starts, and seconds of the worker."""

    idle_timeout_s: float
    cold_starts: int
    worker_s: float
    is_current: bool = False


def advise(spec: dict[str, Any], seen: Seen, min_workers: int | None) -> list[Advice]:
    """Return advice for a spec as `gpufn describe --json` shows it. `min_workers` is the one that is in force."""
    if seen.calls < _FEW_CALLS:
        return []
    resources, scaling = spec["resources"], spec["scaling"]
    found = [
        _of_bytes("memory", resources["memory_bytes"], seen.memory_max),
        _of_bytes("vram", resources["vram_bytes"], seen.gpu_memory_max),
        _of_gpu(resources, seen),
        _of_min_workers(scaling["min_workers"] if min_workers is None else min_workers, spec, seen),
        _of_idle_timeout(replay(seen.calls_by_minute, scaling["idle_timeout_s"])),
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


def _of_gpu(resources: dict[str, Any], seen: Seen) -> Advice | None:
    if not resources["gpu"] or not seen.gpu_held_s:
        return None
    share = seen.gpu_used_s / seen.gpu_held_s
    finding = f"its workers held GPUs for {seen.gpu_held_s:,.0f} s and used {share:.0%} of it"
    if share >= _LOW or resources["share"] != "exclusive" or resources["gpu_count"] > 1 or not seen.gpu_memory_max:
        return Advice("gpu", finding)
    return Advice("share", finding, f"'mps', vram='{_mebibytes(_with_room(seen.gpu_memory_max))}'")


def _with_room(used: float) -> int:
    return math.ceil(used * _ROOM / _STEP_BYTES) * _STEP_BYTES


def _mebibytes(count: int) -> str:
    """Return a number of bytes as options take it."""
    return f"{count >> 20}Mi"


def _of_min_workers(lowest: int, spec: dict[str, Any], seen: Seen) -> Advice | None:
    if not lowest or not seen.busy_by_minute:
        return None
    slots = max(1, int(spec.get("concurrency") or 1))
    busiest = max(seen.busy_by_minute) / MINUTE_S / slots
    needed = math.ceil(busiest)
    if needed >= lowest:
        return None
    return Advice(
        "min_workers", f"the busiest minute of two days kept {busiest:.2f} of {lowest} workers busy", str(needed)
    )


def _of_idle_timeout(curve: Sequence[Replayed]) -> Advice | None:
    """Advise the shortest timeout with no more cold starts than the present one."""
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
    gaps = [(later - earlier) * MINUTE_S for earlier, later in itertools.pairwise(minutes)]
    timeouts = sorted({float(each) for each in _TIMEOUTS_S} | ({current_s} if current_s >= MINUTE_S else set()))
    return [
        Replayed(
            timeout_s,
            1 + sum(gap > timeout_s for gap in gaps),
            timeout_s + sum(min(gap, timeout_s) for gap in gaps),
            timeout_s == current_s,
        )
        for timeout_s in timeouts
    ]
