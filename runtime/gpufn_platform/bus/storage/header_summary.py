"""A stored header once more, as a header of its message: small enough to list thousands without their bodies."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import Callable
from typing import TypeVar

import msgspec

from gpufn_core.errors import ErrorInfo
from gpufn_core.protocol.codec import encode
from gpufn_core.protocol.records import CallRecord, DeadLetter
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import stream_scan
from gpufn_platform.bus.storage.ordered_reader import StoredMessage

_SUMMARY = "Gpufn-Record"
MOST_LOOKED_AT = 100_000
_MOST_BYTES = 32 << 10  # a server takes headers of 64 KiB, and base64 makes 43 of these
_CHARS = 1000
_READ_AT_ONCE = 500

R = TypeVar("R", CallRecord, DeadLetter)
S = TypeVar("S", bound=msgspec.Struct)


def summary(stored: R) -> dict[str, str]:
    """Without the `error`'s traceback; of many words the first ones."""
    error = stored.error
    if error is not None and error.traceback is not None:
        stored = msgspec.structs.replace(stored, error=msgspec.structs.replace(error, traceback=None))
    packed = encode(stored)
    if len(packed) > _MOST_BYTES:
        packed = encode(_in_few_words(stored))
    return {_SUMMARY: base64.b64encode(packed).decode()}


def _in_few_words(stored: R) -> R:
    error = stored.error
    if error is not None:
        error = ErrorInfo(error.code[:_CHARS], error.message[:_CHARS], error.retryable)
    # Each, for a worker may say anything of what it submits; and what no server takes would be tried for ever.
    texts = {name: text[:_CHARS] for name, text in msgspec.structs.asdict(stored).items() if type(text) is str}
    return msgspec.structs.replace(stored, **texts, error=error, attempts=())


def summary_of(kind: type[S]) -> Callable[[StoredMessage], S | None]:
    """Reads the summary of a `kind`; None when there is none."""
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
) -> list[S]:
    """What `read` finds in the headers of the last messages and `matches`, newest first; those before the last 100,000
    are not looked at, and those that were stored before `since`, in unix seconds, need not be."""
    found: list[S] = []
    left = MOST_LOOKED_AT
    async with contextlib.aclosing(
        stream_scan.stretches(bus, stream, subject, about=limit, headers_only=True)
    ) as stretches:
        async for stretch in stretches:
            messages, newer, found = stretch[-left:], found, []
            for start in range(0, len(messages), _READ_AT_ONCE):
                part = messages[start : start + _READ_AT_ONCE]
                found += (each for message in part if (each := read(message)) is not None and matches(each))
                await asyncio.sleep(0)  # whoever asks has more to do than this
            found += newer
            left -= len(messages)
            is_past = bool(messages) and messages[0].time < since
            if is_past or len(found) >= limit or left <= 0:
                break
    return found[-limit:][::-1]
