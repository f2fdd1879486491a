"""Read a stream backwards from the newest message, in ranges of growing length; each range is read once."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Final

from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import ordered_reader, streams
from gpufn_platform.bus.storage.ordered_reader import StoredMessage

_MAX_RANGE: Final = 100_000  # sequences; each range is up to eight times as long as the one before
_MAX_MESSAGES: Final = 8_000  # of a range, if its messages are as dense as those of the range before


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
) -> AsyncGenerator[tuple[int, list[StoredMessage], bool], None]:
    """Yield the messages of `subject` in ranges of the stream, newest range first, each range oldest first, with the
    first sequence of the range, and whether it is the last one.

    The first range has about `about` messages if every fourth message is of the subject; later ranges are longer, but
    have some thousand messages at most. Messages stored meanwhile are in the first range.

    `newest_seq`: the subject's last sequence, if known. `before_seq`: only messages before it. `headers_only`: without
    payloads.
    """
    state = (await bus.js(f"STREAM.INFO.{stream}"))["state"]
    oldest, start, length = max(1, int(state["first_seq"])), newest_seq or int(state["last_seq"]), 4 * about
    before = before_seq
    if before is not None:
        start = before
    while before is None or before > oldest:
        start = max(oldest, start - length)
        messages = await ordered_reader.collect(
            bus, stream, subject, since_seq=start, before_seq=before, headers_only=headers_only
        )
        yield start, messages, start <= oldest
        dense = _MAX_MESSAGES * length // max(1, len(messages))
        before, length = start, max(1, min(8 * length, dense, _MAX_RANGE))
