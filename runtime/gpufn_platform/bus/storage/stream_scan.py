"""What a stream has stored, the newest first: it is looked at stretch by stretch, and each stretch once."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Final

from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import ordered_reader, streams
from gpufn_platform.bus.storage.ordered_reader import StoredMessage

_LONGEST: Final = 100_000  # who had not enough of eight times as many before may have enough of these


async def newest(bus: Bus, stream: str, subject: str, *, last: int) -> list[StoredMessage]:
    """The newest `last` messages of `subject`, oldest first."""
    if last <= 0 or (message := await streams.last_message(bus, stream, subject)) is None:
        return []
    found: list[StoredMessage] = []
    async with contextlib.aclosing(stretches(bus, stream, subject, about=last, newest_seq=message.seq)) as parts:
        async for part in parts:
            found = part + found
            if len(found) >= last:
                break
    return found[-last:]


async def stretches(
    bus: Bus, stream: str, subject: str, *, about: int, newest_seq: int | None = None, headers_only: bool = False
) -> AsyncGenerator[list[StoredMessage], None]:
    """The messages of `subject`, the newest part first, each part oldest first: of a stretch of the stream that has
    `about` so many if every fourth message is of the subject, then of longer and longer ones. What is stored meanwhile
    is in the first.

    `newest_seq`: of the subject, if it is known. `headers_only`: without their payloads.
    """
    state = (await bus.js(f"STREAM.INFO.{stream}"))["state"]
    oldest, start, length = max(1, int(state["first_seq"])), newest_seq or int(state["last_seq"]), 4 * about
    before: int | None = None
    while before is None or before > oldest:
        start = max(oldest, start - length)
        yield await ordered_reader.collect(
            bus, stream, subject, since_seq=start, before_seq=before, headers_only=headers_only
        )
        before, length = start, min(8 * length, _LONGEST)
