"""Which records of RESULTS may match a search: a few bytes per record, so that a search reads only those. Pure.

A stream never changes the message at a sequence: it only removes it. So what the index has about a record stays true,
and the record itself is read before it is listed. Texts are hashed, so a few other records are read too.

The index knows the sequences from `low` to `high`. Others are read as without an index.
"""

from __future__ import annotations

import contextlib
import zlib
from array import array
from collections.abc import Collection, Iterable, Iterator
from typing import Final, NamedTuple

import msgspec

from gpufn_core.domain.invocation import InvocationState

_BLOCK: Final = 4096  # sequences
_MAX_BLOCKS: Final = 400
MAX_RECORDS: Final = _MAX_BLOCKS * _BLOCK  # seven bytes each: 11 MiB
_LOOK_BLOCKS: Final = 16  # searched without a pause: 1 ms, or 20 if one of two filters matches most records
# A read of one record costs as much as reading that many neighbours.
_NEIGHBOURS: Final = 64
_MAX_SPANS: Final = 8
_MAX_SPANNED: Final = 3000  # sequences

_NONE: Final = 0  # no record, or one that searches leave out
_WAITING: Final = 1
_CODES: Final = {state: _WAITING + 1 + place for place, state in enumerate(InvocationState) if state.ended}


class CallFacts(msgspec.Struct, frozen=True, gc=False):
    """The fields of a CallRecord that searches compare. Decoding skips the others."""

    function: str
    state: InvocationState
    submitted_at: float
    ended_at: float | None = None
    owner: str = ""
    parent: str = ""


class Wanted(NamedTuple):
    """The filter of a search; None: any. `until`: changed last at this time or earlier."""

    state: InvocationState | None = None
    function: str | None = None
    owner: str | None = None
    parent: str | None = None
    until: float | None = None


class _Block:
    __slots__ = ("earliest", "functions", "owners", "parents", "states")

    def __init__(self) -> None:
        self.states = array("B", bytes(_BLOCK))
        self.functions, self.owners, self.parents = (array("H", bytes(2 * _BLOCK)) for _ in range(3))
        self.earliest = float("inf")  # no record changed last before


class CallIndex:
    def __init__(self) -> None:
        self.low = self.high = 0
        self.generation = 0  # counts the streams: what was read from an earlier one must not be added
        self._created = ""  # when the stream was created: another stream has other records
        self._blocks: dict[int, _Block] = {}

    @property
    def is_full(self) -> bool:
        """True if older records would only replace others."""
        return len(self._blocks) >= _MAX_BLOCKS and self.low % _BLOCK == 0

    def begin(self, created: str, next_seq: int) -> None:
        """Forget everything if the stream is another one, or an older copy of it. An empty index begins at `next_seq`,
        the sequence of the next message."""
        if created != self._created or next_seq < self.high:
            self._created, self._blocks = created, {}
            self.generation += 1
            self.low = self.high = next_seq

    def add(self, start: int, stop: int, records: Iterable[tuple[int, CallFacts]]) -> None:
        """Add all records from `start` to `stop` (exclusive), unless there is a gap between them and the index."""
        if start > self.high or stop < self.low or start >= stop:
            return
        for seq, facts in records:
            number, place = divmod(seq, _BLOCK)
            if (block := self._blocks.get(number)) is None:
                block = self._blocks[number] = _Block()
            block.states[place] = _CODES.get(facts.state, _WAITING)
            block.functions[place] = _hashed(facts.function)
            block.owners[place] = _hashed(facts.owner)
            block.parents[place] = _hashed(facts.parent)
            block.earliest = min(block.earliest, facts.ended_at or facts.submitted_at)
        self.low, self.high = min(self.low, start), max(self.high, stop)
        self._drop_oldest()

    def _drop_oldest(self) -> None:
        while len(self._blocks) > _MAX_BLOCKS:
            oldest = min(self._blocks)
            del self._blocks[oldest]
            self.low = max(self.low, (oldest + 1) * _BLOCK)

    def forget_before(self, oldest_seq: int) -> None:
        """Drop the blocks of records that the stream no longer has."""
        for number in [number for number in self._blocks if (number + 1) * _BLOCK <= oldest_seq]:
            del self._blocks[number]
        self.low, self.high = max(self.low, oldest_seq), max(self.high, oldest_seq)

    def keep(self, span: range, found: Collection[int]) -> None:
        """Forget the records of `span` except those that were `found`: the stream no longer has the others."""
        for seq in span:
            if seq not in found and (block := self._blocks.get(seq // _BLOCK)) is not None:
                block.states[seq % _BLOCK] = _NONE

    def spans(self, wanted: Wanted, before: int, most: int) -> tuple[int, list[range]]:
        """Return where the search continues, and the ranges from there to `before` that have all records that may
        match, newest first. `before` is within the index. About `most` records, and no more than is read at once."""
        ranges: list[range] = []
        found = spanned = 0
        start, stop = before, max(self.low, (before // _BLOCK - _LOOK_BLOCKS) * _BLOCK)
        while start > stop:
            number = (start - 1) // _BLOCK
            base = number * _BLOCK
            first = max(base, self.low)
            for place in reversed(self._places(number, wanted, first - base, start - base)):
                seq = base + place
                is_near = bool(ranges) and ranges[-1].start - seq <= _NEIGHBOURS
                if found == most or spanned >= _MAX_SPANNED or (len(ranges) == _MAX_SPANS and not is_near):
                    return ranges[-1].start, ranges
                newest = ranges.pop() if is_near else range(seq, seq + 1)
                ranges.append(range(seq, newest.stop))
                spanned += newest.start - seq or 1
                found += 1
            start = first
        return start, ranges

    def _places(self, number: int, wanted: Wanted, start: int, stop: int) -> list[int]:
        """Return the places in a block of the records that may match, in order."""
        block = self._blocks.get(number)
        if block is None or (wanted.until is not None and block.earliest > wanted.until):
            return []
        columns: list[tuple[array[int], int]] = []
        if wanted.parent is not None:
            columns.append((block.parents, _hashed(wanted.parent)))
        if wanted.function is not None:
            columns.append((block.functions, _hashed(wanted.function)))
        if wanted.owner is not None:
            columns.append((block.owners, _hashed(wanted.owner)))
        if wanted.state is not None:
            # Few calls do not succeed: then this is the first column to look at.
            is_frequent = wanted.state is InvocationState.SUCCEEDED
            columns.insert(len(columns) if is_frequent else 0, (block.states, _CODES.get(wanted.state, _WAITING)))
        if not columns:
            return [place for place in range(start, stop) if block.states[place] != _NONE]
        first, value = columns[0]
        places = list(_find(first, value, start, stop))
        for column, value in columns[1:]:
            places = [place for place in places if column[place] == value]
        return [place for place in places if block.states[place] != _NONE]


def _find(column: array[int], value: int, start: int, stop: int) -> Iterator[int]:
    with contextlib.suppress(ValueError):  # no further one
        while start < stop:
            place = column.index(value, start, stop)
            yield place
            start = place + 1


def _hashed(text: str) -> int:
    return zlib.crc32(text.encode()) & 0xFFFF
