"""Read records of RESULTS into a CallIndex: those that a search reads, and others in the background."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from gpufn_core.protocol import subjects
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import ordered_reader, stream_scan
from gpufn_platform.bus.storage.header_summary import summary_of
from gpufn_platform.bus.storage.ordered_reader import StoredMessage
from gpufn_platform.queue.records.call_index import CallFacts, CallIndex, Wanted

_AT_ONCE = 1000  # sequences: 25 ms of CPU time, shared with the bus
_DECODE_AT_ONCE = 500
_is_call = stream_scan.matcher(subjects.result("*", "*"))  # no item of a map

_facts = summary_of(CallFacts)


class SearchView:
    """An index as one search uses it: a `stream_scan.Index`."""

    def __init__(self, index: CallIndex, wanted: Wanted) -> None:
        self._index = index
        self._wanted = wanted
        self._generation = 0

    @property
    def low(self) -> int:
        return self._index.low

    @property
    def high(self) -> int:
        return self._index.high

    def begin(self, created: str, next_seq: int) -> None:
        self._index.begin(created, next_seq)
        self._generation = self._index.generation

    def spans(self, before: int, most: int) -> tuple[int, list[range]]:
        return self._index.spans(self._wanted, before, most)

    def keep(self, span: range, found: Collection[int]) -> None:
        if self._generation == self._index.generation:
            self._index.keep(span, found)

    async def add(self, start: int, stop: int, messages: list[StoredMessage]) -> None:
        await _add(self._index, self._generation, start, stop, messages)


async def fill(bus: Bus, index: CallIndex, *, at_once: int = _AT_ONCE) -> bool:
    """Add a range: what ended since the last time, else older records. Return whether there are more. Raises
    BusUnavailable, JetStreamError."""
    info = await bus.js(f"STREAM.INFO.{subjects.RESULTS}")
    oldest, end = max(1, int(info["state"]["first_seq"])), int(info["state"]["last_seq"]) + 1
    index.begin(info["created"], end)
    index.forget_before(oldest)
    generation = index.generation
    if index.high < end:
        start = index.high
        stop = min(end, start + at_once)
    elif index.low > oldest and not index.is_full:
        stop = index.low
        start = max(oldest, stop - at_once)
    else:
        return False
    messages = await ordered_reader.collect(
        bus, subjects.RESULTS, ">", since_seq=start, before_seq=stop, headers_only=True
    )
    await _add(index, generation, start, stop, messages)
    return True


async def _add(index: CallIndex, generation: int, start: int, stop: int, messages: list[StoredMessage]) -> None:
    if start > index.high or stop < index.low:
        return  # far from the index
    added: list[tuple[int, CallFacts]] = []
    for begin in range(0, len(messages), _DECODE_AT_ONCE):
        for message in messages[begin : begin + _DECODE_AT_ONCE]:
            if message.seq < stop and _is_call(message.subject) and (facts := _facts(message)) is not None:
                added.append((message.seq, facts))
        await asyncio.sleep(0)  # let other tasks run
    if generation == index.generation:
        index.add(start, stop, added)
