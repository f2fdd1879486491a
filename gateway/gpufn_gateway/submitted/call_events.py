"""The life of one submitted call as server-sent events, from any gateway.

1. listen for its record, its start and its progress   2. look at its status   3. tell a state that is newer than what
the client has seen   4. at each sign: again, until it has ended

`event: state` carries the status and an `id:`, which a client that comes again sends as `Last-Event-ID`: it gets the
state as it is then, if it has not seen that, and what follows. `event: progress` has no id: the next status has it too.
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
from gpufn_platform.bus.storage.change_wait import Signs


async def follow(
    bus: Bus, invocation: str, seen: int, look: Callable[[], Awaitable[dict[str, Any]]]
) -> AsyncIterator[bytes]:
    """Events after number `seen`; `look` gets the status."""
    progress = None
    about = (subjects.any_result(invocation), subjects.call_started(invocation), subjects.progress(invocation))
    async with Signs(bus, *about) as signs:
        while True:
            try:
                status = await look()
            except GpufnError as error:
                yield b"event: error\ndata: %b\n\n" % problems.problem_of(error).body()
                return
            number = event_number(status["state"], status["attempt"])
            if number > seen:
                seen, progress = number, status["progress"]
                yield b"event: state\nid: %d\ndata: %b\n\n" % (number, msgspec.json.encode(status))
            elif status["progress"] not in (None, progress):  # None: its runner is slow to say
                progress = status["progress"]
                yield b"event: progress\ndata: %b\n\n" % msgspec.json.encode(progress)
            if status["state"].ended:
                return
            await signs.next()
