"""Summary of a trace of torch's profiler: the kernels, or without a GPU the operators, with the longest durations.
Pure."""

from __future__ import annotations

import zlib
from collections import defaultdict
from typing import Final, NamedTuple

import msgspec

MAX_BYTES: Final = 256 << 20  # decompressed: a worker may send whatever it wants
_KINDS: Final = ("kernel", "cpu_op")


class _Event(msgspec.Struct, frozen=True, gc=False):
    """`dur` is in microseconds."""

    name: str = ""
    cat: str = ""
    dur: float = 0.0


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
    unzip = zlib.decompressobj(wbits=31)
    try:
        text = unzip.decompress(compressed, MAX_BYTES)
        if not unzip.eof:
            return None
        events = msgspec.json.decode(text, type=_Trace).events
    except (zlib.error, msgspec.MsgspecError, UnicodeDecodeError):
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
