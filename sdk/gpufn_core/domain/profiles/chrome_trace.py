"""A trace of torch's profiler: its longest kernels, or without a GPU operators, and its flame graph. Pure."""

from __future__ import annotations

import zlib
from collections import defaultdict
from typing import Final, NamedTuple

import msgspec

from gpufn_core.domain.profiles.stacks import Stack

MAX_BYTES: Final = 256 << 20  # decompressed: a worker may send whatever it wants
_MAX_FRAMES: Final = 200  # deeper events count in the stack above: each stack is stored with all of its frames
_MAX_US: Final = 1e17  # torch counts from 1970 or later; sums of longer times may become infinite
_KINDS: Final = ("kernel", "cpu_op")
_ON_GPU: Final = {"kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation"}
_ON_CPU: Final = {"cpu_op", "user_annotation", "cuda_runtime", "cuda_driver"}


class _Event(msgspec.Struct, frozen=True, gc=False):
    """`ts` and `dur` are in microseconds. `pid` and `tid` are a thread, or a device and its stream."""

    name: str = ""
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0
    pid: int | str = 0
    tid: int | str = 0


class _Trace(msgspec.Struct, frozen=True):
    events: list[_Event] = msgspec.field(default_factory=list, name="traceEvents")


class Busiest(NamedTuple):
    """The events of a name. Operators contain the operators that they call, so their times overlap."""

    name: str
    events: int
    seconds: float


class Summary(NamedTuple):
    kind: str  # "kernel" or "cpu_op"
    events: list[Busiest]


def summary(compressed: bytes, most: int) -> Summary | None:
    """Return the longest events of a trace, compressed by gzip. None if it is too large, or no such trace."""
    events = _events(compressed)
    if events is None:
        return None
    kind = next((kind for kind in _KINDS if any(each.cat == kind for each in events)), _KINDS[-1])
    counts: defaultdict[str, int] = defaultdict(int)
    took_us: defaultdict[str, float] = defaultdict(float)
    for event in events:
        if event.cat == kind:
            counts[event.name] += 1
            took_us[event.name] += event.dur
    longest = sorted(took_us, key=lambda name: -took_us[name])[:most]
    return Summary(kind, [Busiest(name, counts[name], took_us[name] / 1e6) for name in longest])


def flame_graph(compressed: bytes) -> list[Stack] | None:
    """Return the events as stacks, in microseconds: below "GPU" the ranges of calls with their kernels and copies,
    below "CPU" those with their operators. None as for `summary`."""
    events = _events(compressed)
    if events is None:
        return None
    lanes: defaultdict[tuple[str, int | str, int | str], list[_Event]] = defaultdict(list)
    for event in events:
        if event.cat in _ON_GPU or event.cat in _ON_CPU:
            lanes["GPU" if event.cat in _ON_GPU else "CPU", event.pid, event.tid].append(event)
    own_us: defaultdict[tuple[str, ...], float] = defaultdict(float)
    for (root, _, _), lane in lanes.items():
        _add(own_us, root, lane)
    return [Stack(frames, round(took)) for frames, took in own_us.items() if round(took) > 0]


def _add(own_us: defaultdict[tuple[str, ...], float], root: str, lane: list[_Event]) -> None:
    """Add the events of a lane: each to the innermost one that contains it."""
    open_events: list[tuple[float, tuple[str, ...]]] = []  # with their ends, from the outermost one
    for event in sorted(lane, key=lambda each: (each.ts, -each.dur)):
        while open_events and open_events[-1][0] <= event.ts:
            open_events.pop()
        outer = open_events[-1][1] if open_events else (root,)
        frames = (*outer, event.name.replace(";", ",")) if len(outer) < _MAX_FRAMES else outer
        own_us[frames] += event.dur
        if open_events:
            own_us[outer] -= event.dur
        open_events.append((event.ts + event.dur, frames))


def _events(compressed: bytes) -> list[_Event] | None:
    unzip = zlib.decompressobj(wbits=31)
    try:
        text = unzip.decompress(compressed, MAX_BYTES)
        if not unzip.eof:
            return None
        events = msgspec.json.decode(text, type=_Trace).events
    except (zlib.error, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return [each for each in events if abs(each.ts) <= _MAX_US and 0 <= each.dur <= _MAX_US]
