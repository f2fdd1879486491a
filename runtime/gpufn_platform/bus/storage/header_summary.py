"""Record summaries in message headers, small enough to list thousands of records without their bodies."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import msgspec

from gpufn_core.errors import ErrorInfo
from gpufn_core.protocol.codec import encode
from gpufn_core.protocol.records import CallRecord, DeadLetter
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import stream_scan
from gpufn_platform.bus.storage.ordered_reader import StoredMessage

_SUMMARY = "Gpufn-Record"
SCAN_LIMIT = 100_000
_MAX_BYTES = 32 << 10  # a server accepts headers of 64 KiB, and base64 turns 32 KiB into 43
_MAX_CHARS = 1000
_READ_AT_ONCE = 500
_RARE = 500  # a search for rare messages begins with a range of four times as many

R = TypeVar("R", CallRecord, DeadLetter)
S = TypeVar("S", bound=msgspec.Struct)


def summary(stored: R) -> dict[str, str]:
    """Headers with a copy of the record, without the error's traceback and with long texts truncated."""
    error = stored.error
    if error is not None and error.traceback is not None:
        stored = msgspec.structs.replace(stored, error=msgspec.structs.replace(error, traceback=None))
    packed = encode(stored)
    if len(packed) > _MAX_BYTES:
        packed = encode(_truncated(stored))
    return {_SUMMARY: base64.b64encode(packed).decode()}


def _truncated(stored: R) -> R:
    error = stored.error
    if error is not None:
        error = ErrorInfo(error.code[:_MAX_CHARS], error.message[:_MAX_CHARS], error.retryable)
        # Truncate every text: a worker may submit texts of any length, and a record that no server accepts would be
        # retried forever.
    texts = {name: text[:_MAX_CHARS] for name, text in msgspec.structs.asdict(stored).items() if type(text) is str}
    return msgspec.structs.replace(stored, **texts, error=error, attempts=())


def summary_of(kind: type[S]) -> Callable[[StoredMessage], S | None]:
    """Return a function that decodes the summary of a `kind` from a message; None if the message has none."""
    decode = msgspec.msgpack.Decoder(kind).decode

    def read(message: StoredMessage) -> S | None:
        text = message.headers.get(_SUMMARY)
        return None if text is None else decode(binascii.a2b_base64(text))

    return read


class RecordPage(NamedTuple, Generic[S]):
    """Records with their sequences, newest first. Older ones are before `before_seq`; None: there are none."""

    records: list[tuple[int, S]]
    before_seq: int | None


async def newest(
    bus: Bus,
    stream: str,
    subject: str,
    read: Callable[[StoredMessage], S | None],
    *,
    limit: int,
    matches: Callable[[S], bool] = lambda _: True,
    since: float = 0.0,
) -> list[S]:
    """Return the newest `limit` records, as `search` finds them."""
    page = await search(bus, stream, subject, read, limit=limit, matches=matches, since=since)
    return [record for _, record in page.records]


async def search(
    bus: Bus,
    stream: str,
    subject: str,
    read: Callable[[StoredMessage], S | None],
    *,
    limit: int,
    matches: Callable[[S], bool] = lambda _: True,
    since: float = 0.0,
    before_seq: int | None = None,
    is_over: Callable[[], bool] = lambda: False,
    is_rare: bool = False,
    is_common: bool = False,
    index: stream_scan.Index | None = None,
) -> RecordPage[S]:
    """Return the newest `limit` records that `read` decodes from message headers and that satisfy `matches`, from
    before `before_seq`.

    Looks at about 100,000 messages at most, and stops after the range at whose end `is_over()`. `is_rare`: few messages
    match, so the first range is long. `is_common` and `index` are as in `scan_ranges`. May skip messages stored before
    `since` (unix seconds)."""
    records: list[tuple[int, S]] = []
    following: int | None = None
    remaining = SCAN_LIMIT
    about = max(limit, _RARE) if is_rare else limit
    scan = stream_scan.scan_ranges(
        bus, stream, subject, about=about, before_seq=before_seq, headers_only=True, is_common=is_common, index=index
    )
    async with contextlib.aclosing(scan) as ranges:
        async for since_seq, messages, is_last in ranges:
            newer, records = records, []
            for start in range(0, len(messages), _READ_AT_ONCE):
                for message in messages[start : start + _READ_AT_ONCE]:
                    if (record := read(message)) is not None and matches(record):
                        records.append((message.seq, record))
                await asyncio.sleep(0)  # let other tasks run
            records += newer
            remaining -= len(messages)
            following = None if is_last or (messages and messages[0].time < since) else since_seq
            if following is None or len(records) >= limit or remaining <= 0 or is_over():
                break
    if len(records) > limit:
        following = records[-limit][0]
    return RecordPage(records[-limit:][::-1], following)
