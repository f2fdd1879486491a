"""The state changes of one submitted call as server-sent events, from any gateway.

1. subscribe to the call's record, start and progress   2. read its status   3. send a state that is newer than the last
one that the client received   4. repeat at each message, until the call has ended

`event: state` carries the status and an `id:`. A client that reconnects sends that id as `Last-Event-ID` and gets the
current state, if it is newer, and all later ones. `event: progress` has no id: the next status contains the progress.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec

from gpufn_core.errors import GpufnError
from gpufn_core.protocol import subjects
from gpufn_gateway import problems
from gpufn_gateway.submitted.call_views import event_number
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage.change_wait import ChangeSignal


async def follow(
    bus: Bus, invocation: str, last_seen: int, read_status: Callable[[], Awaitable[dict[str, Any]]]
) -> AsyncIterator[bytes]:
    """Yield events with a number above `last_seen`; `read_status` reads the status."""
    progress = None
    sources = (subjects.any_result(invocation), subjects.call_started(invocation), subjects.progress(invocation))
    async with ChangeSignal(bus, *sources) as changes:
        while True:
            try:
                status = await read_status()
            except GpufnError as error:
                yield b"event: error\ndata: %b\n\n" % problems.problem_of(error).body()
                return
            number = event_number(status["state"], status["attempt"])
            if number > last_seen:
                last_seen, progress = number, status["progress"]
                yield b"event: state\nid: %d\ndata: %b\n\n" % (number, msgspec.json.encode(status))
            elif status["progress"] not in (None, progress):  # None: the runner has not reported yet
                progress = status["progress"]
                yield b"event: progress\ndata: %b\n\n" % msgspec.json.encode(progress)
            if status["state"].ended:
                return
            await changes.next()
