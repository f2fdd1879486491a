"""Record summaries in message headers, small enough to list thousands of records without their bodies."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import math
from collections.abc import Callable
from typing import TypeVar

import msgspec

from gpufn_core.errors import ErrorInfo
from gpufn_core.protocol.codec import encode
from gpufn_core.protocol.records import CallRecord, DeadLetter
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import stream_scan, streams
from gpufn_platform.bus.storage.ordered_reader import StoredMessage

_SUMMARY = "Gpufn-Record"
SCAN_LIMIT = 100_000
_MAX_BYTES = 32 << 10  # a server accepts headers of 64 KiB, and base64 turns 32 KiB into 43
_MAX_CHARS = 1000
_READ_AT_ONCE = 500

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
        return None if text is None else decode(base64.b64decode(text))

    return read


async def newest(
    bus: Bus,
    stream: str,
    subject: str,
    read: Callable[[StoredMessage], S | None],
    *,
    limit: int,
    matches: Callable[[S], bool] = lambda _: True,
    since: float = 0.0,
    until: float = math.inf,
) -> list[S]:
    """Return the newest `limit` records that `read` decodes from message headers and that satisfy `matches`, newest
    first. Looks at 100,000 messages at most, and may skip those stored before `since` or after `until` (unix
    seconds)."""
    records: list[S] = []
    remaining = SCAN_LIMIT
    end = None if until == math.inf else await streams.first_sequence_at(bus, stream, until)
    scan = stream_scan.scan_ranges(bus, stream, subject, about=limit, before_seq=end, headers_only=True)
    async with contextlib.aclosing(scan) as ranges:
        async for range_messages in ranges:
            messages, newer, records = range_messages[-remaining:], records, []
            for start in range(0, len(messages), _READ_AT_ONCE):
                chunk = messages[start : start + _READ_AT_ONCE]
                records += (record for message in chunk if (record := read(message)) is not None and matches(record))
                await asyncio.sleep(0)  # let other tasks run
            records += newer
            remaining -= len(messages)
            is_past = bool(messages) and messages[0].time < since
            if is_past or len(records) >= limit or remaining <= 0:
                break
    return records[-limit:][::-1]
