"""Read a stream backwards from the newest message, in ranges of growing length; each range is read once."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, Callable, Collection
from typing import Final, Protocol

from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import ordered_reader, streams
from gpufn_platform.bus.storage.ordered_reader import StoredMessage

_MAX_RANGE: Final = 100_000  # sequences; each range is up to eight times as long as the one before
_MAX_MESSAGES: Final = 2_000  # per range, if its messages are as dense as in the range before
_RANGE_S: Final = 0.1  # per range, if it is read as fast as the range before
_MIN_RANGE: Final = 100
_FIRST_RECORDS, _MAX_RECORDS = 64, 1_000  # that an index names at once


class Index(Protocol):
    """Names the messages that a search needs, of those from `low` to `high` (exclusive)."""

    @property
    def low(self) -> int: ...

    @property
    def high(self) -> int: ...

    def begin(self, created: str, next_seq: int) -> None:
        """Prepare for the stream that was created then, whose next message gets `next_seq`."""

    def spans(self, before: int, most: int) -> tuple[int, list[range]]:
        """Return where to continue, and the ranges between there and `before` that have all messages to read, newest
        first."""

    def keep(self, span: range, found: Collection[int]) -> None:
        """Forget the messages of `span` except those `found`: the others were removed."""

    async def add(self, start: int, stop: int, messages: list[StoredMessage]) -> None:
        """Learn all messages from `start` to `stop` (exclusive). There may be later ones among `messages`."""


async def newest(bus: Bus, stream: str, subject: str, *, last: int) -> list[StoredMessage]:
    """The newest `last` messages of `subject`, oldest first."""
    if last <= 0 or (message := await streams.last_message(bus, stream, subject)) is None:
        return []
    messages: list[StoredMessage] = []
    async with contextlib.aclosing(scan_ranges(bus, stream, subject, about=last, newest_seq=message.seq)) as ranges:
        async for _, messages_in_range, _ in ranges:
            messages = messages_in_range + messages
            if len(messages) >= last:
                break
    return messages[-last:]


async def scan_ranges(
    bus: Bus,
    stream: str,
    subject: str,
    *,
    about: int,
    newest_seq: int | None = None,
    before_seq: int | None = None,
    headers_only: bool = False,
    is_common: bool = False,
    index: Index | None = None,
) -> AsyncGenerator[tuple[int, list[StoredMessage], bool], None]:
    """Yield the messages of `subject` in ranges of the stream, with the first sequence of the range, and whether it is
    the last range. The newest range comes first; each range is ordered from old to new.

    The first range has about `about` messages if every fourth message is of the subject; later ranges are longer, but
    have some thousand messages at most. Messages stored meanwhile are in the first range.

    `newest_seq`: the subject's last sequence, if known. `before_seq`: only messages before it. `headers_only`: without
    payloads. `is_common`: most messages are of `subject`, so read all and leave out the others, as long as that is so.
    With a million subjects, a filter with wildcards takes the server a tenth of a second for each range. `index`: where
    it knows the messages, the ranges are those that it names, and a range may be empty. It learns what is read without
    a filter.
    """
    info = await bus.js(f"STREAM.INFO.{stream}")
    state, clock = info["state"], asyncio.get_running_loop().time
    oldest, start, length = max(1, int(state["first_seq"])), newest_seq or int(state["last_seq"]), 4 * about
    before = before_seq
    if before is not None:
        start = before
    next_seq = int(state["last_seq"]) + 1
    if index is not None:
        index.begin(info["created"], next_seq)
    records, is_of = _FIRST_RECORDS, matcher(subject)
    while before is None or before > oldest:
        if index is not None and before is not None and index.low < before <= index.high:
            before, spans = index.spans(before, records)
            await asyncio.sleep(0)  # let other tasks run: there may be nothing to read
            read = await _read_spans(bus, stream, spans, index, headers_only=headers_only)
            yield before, [each for each in read if is_of(each.subject)], before <= oldest
            start, records = before, min(4 * records, _MAX_RECORDS)
            continue
        start, since = max(oldest, start - length), clock()
        is_cut = False
        if index is not None and index.low < index.high and (before is None or index.high < before):
            is_cut, start = start < index.high, max(start, index.high)
        read = await ordered_reader.collect(
            bus, stream, ">" if is_common else subject, since_seq=start, before_seq=before, headers_only=headers_only
        )
        if index is not None and is_common:
            await index.add(start, next_seq if before is None else before, read)
        messages = [each for each in read if is_of(each.subject)] if is_common else read
        yield start, messages, start <= oldest
        is_common = is_common and 2 * len(messages) >= len(read)
        dense = _MAX_MESSAGES * length // max(1, len(read))
        in_time = int(length * _RANGE_S / max(clock() - since, 0.001))
        before = start
        if not is_cut:
            length = max(_MIN_RANGE, min(8 * length, dense, in_time, _MAX_RANGE))


async def _read_spans(
    bus: Bus, stream: str, newest_first: list[range], index: Index, *, headers_only: bool
) -> list[StoredMessage]:
    async def read(span: range) -> list[StoredMessage]:
        messages = await ordered_reader.collect(
            bus, stream, ">", since_seq=span.start, before_seq=span.stop, headers_only=headers_only
        )
        if len(messages) < len(span):
            index.keep(span, {message.seq for message in messages})
        return messages

    ranges = await asyncio.gather(*map(read, reversed(newest_first)))
    return [message for messages in ranges for message in messages]


def matcher(pattern: str) -> Callable[[str], object]:
    """Return a function that reports whether a subject matches `pattern`, which may have ``*``.

    >>> [bool(matcher("a.*.b")(subject)) for subject in ("a.x.b", "a.x.c", "a.b", "a.x.b.c")]
    [True, False, False, False]
    """
    parts = ("[^.]+" if part == "*" else re.escape(part) for part in pattern.split("."))
    return re.compile(r"\.".join(parts)).fullmatch
