"""The fields of a point: the data about a subject in a span of time, and how two spans add up. Pure.

A point maps numbers of fields to integers, or to counts by a key. Gauges are stored as sums over the seconds of their
span, so that adding two points needs no weights: five workers for ten seconds are 50.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

Point = dict[int, Any]  # field → int, or dict of counts
Points = dict[str, Point]  # by subject


class Field(enum.IntEnum):
    """The numbers are stored: never reuse one."""

    SECONDS = 0  # that were recorded, of overview, nodes and GPUs
    # Sums.
    CALLS = 1  # attempts that ended, as the runners count them
    FAILED = 2
    RUN_MS = 3
    GPU_MS = 4  # GPU time charged to calls
    STARTS = 5  # workers that became ready
    START_FAILURES = 6
    # Sums over seconds.
    READY = 7
    STARTING = 8  # including resumed workers
    DRAINING = 9
    PARKED = 10  # including workers that are being parked
    QUEUED = 11
    RUNNING = 12
    WANTED = 13
    GPU_HELD_MS = 14  # GPUs that workers hold, whether calls run or not
    CPU_HELD_MS = 15
    MEMORY_MIB = 16
    GPU_MEMORY_MIB = 17
    GPU_BUSY_MS = 18  # as measured
    WORKERS = 19  # of a node or a GPU
    UTILISATION_PERMILLE = 20
    TEMPERATURE_C = 21
    POWER_W = 22
    MEASURED = 23  # seconds with metrics of the GPU
    GPUS = 24
    CORES = 25
    # Maxima.
    QUEUED_MAX = 40
    MEMORY_MAX_MIB = 41  # of one worker
    GPU_MEMORY_MAX_MIB = 42
    TEMPERATURE_MAX_C = 43
    # Counts by a key.
    ERRORS = 50  # by code, of calls that a client waited for
    REFUSALS = 51
    LATENCY = 52  # by bucket
    QUEUE_TIME = 53  # by bucket
    START_PHASE_MS = 54  # by phase
    WAITING = 55  # seconds in which calls waited, by reason
    BATCHES = 56  # gathered calls, by the size of their batch: a power of two
    # Neither: the only revision with calls. See `revisions`.
    REVISION = 60


_FIRST_MAXIMUM: Final = int(Field.QUEUED_MAX)
_FIRST_COUNTS: Final = int(Field.ERRORS)
MAX_CODES: Final = 40  # keys of a field with counts by code, per point; further ones count as "other"
_DISTRIBUTIONS: Final = (int(Field.LATENCY), int(Field.QUEUE_TIME))
_CODED: Final = frozenset({Field.ERRORS, Field.REFUSALS, Field.START_PHASE_MS, Field.WAITING})


def add(point: Point, field: int, amount: int) -> None:
    if amount:
        point[field] = point.get(field, 0) + amount


def add_count(point: Point, field: int, key: Any, amount: int = 1) -> None:
    counts = point.setdefault(field, {})
    if key not in counts and field in _CODED and len(counts) >= MAX_CODES:
        key = "other"
    counts[key] = counts.get(key, 0) + amount


def raise_to(point: Point, field: int, amount: int) -> None:
    if amount > point.get(field, 0):
        point[field] = amount


def merge(into: Point, other: Mapping[int, Any]) -> None:
    """Add the point of another span, or of another subject, to `into`."""
    for field, value in other.items():
        if field >= _FIRST_COUNTS:
            for key, amount in value.items():
                add_count(into, field, key, amount)
        elif field >= _FIRST_MAXIMUM:
            raise_to(into, field, value)
        else:
            into[field] = into.get(field, 0) + value


def merged(points: Iterable[Mapping[int, Any]]) -> Point:
    total: Point = {}
    for point in points:
        merge(total, point)
    return total


def merge_points(into: Points, other: Mapping[str, Mapping[int, Any]]) -> None:
    for subject, point in other.items():
        merge(into.setdefault(subject, {}), point)


def pack(point: Mapping[int, Any]) -> dict[int, Any]:
    """Return the point as it is stored: its distributions take a byte per bucket.

    >>> pack({1: 4, 52: {54: 3, 56: 1}})
    {1: 4, 52: b'6\\x03\\x00\\x01'}
    """
    packed = dict(point)
    for field in _DISTRIBUTIONS:
        if counts := packed.get(field):
            first = min(counts)
            numbers = [counts.get(bucket, 0) for bucket in range(first, max(counts) + 1)]
            packed[field] = bytes([first, *_varints(numbers)])
    return packed


def unpack(packed: Mapping[int, Any]) -> Point:
    """
    >>> unpack({1: 4, 52: b"6\\x03\\x00\\x80\\x01"})
    {1: 4, 52: {54: 3, 56: 128}}
    """
    point = dict(packed)
    for field in _DISTRIBUTIONS:
        if isinstance(data := point.get(field), bytes) and data:
            counts: dict[int, int] = {}
            bucket, number, shift = data[0], 0, 0
            for byte in data[1:]:
                number |= (byte & 127) << shift
                shift += 7
                if byte < 128:
                    if number:
                        counts[bucket] = number
                    bucket, number, shift = bucket + 1, 0, 0
            point[field] = counts
    return point


def _varints(numbers: Iterable[int]) -> Iterator[int]:
    for number in numbers:
        rest = number
        while rest > 127:
            yield rest & 127 | 128
            rest >>= 7
        yield rest
