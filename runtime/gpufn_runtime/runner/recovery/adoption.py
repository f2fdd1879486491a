"""Adoption of calls that a worker still runs, or has ended, for a previous runner.

A worker that reconnects names its unfinished attempts, each with the reply subject of its delivery. The runner verifies
the names: the delivery must be from a queue of the worker's own revision, and the call must still be there. NATS learns
that the call is running before it redelivers it; from then on it is an attempt like any other. Calls that another
runner has, and calls that were cancelled or have ended, are refused: the worker must stop them.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass

from gpufn_core.domain.revision import Revision
from gpufn_core.errors import GpufnError
from gpufn_core.protocol.frames import Unfinished
from gpufn_core.protocol.messages import InvocationMessage
from gpufn_core.protocol.records import StartNote
from gpufn_core.spec.priority import QUEUES, QueueKind
from gpufn_platform.bus.connection import Bus, Message
from gpufn_platform.bus.nats_protocol import ack_tokens
from gpufn_platform.bus.storage import streams
from gpufn_platform.process.tasks import Tasks
from gpufn_platform.queue import queue_position, queued_calls
from gpufn_platform.queue.delivery import Delivery, Ledger
from gpufn_platform.queue.records import call_records
from gpufn_runtime.runner.attempts.start_log import StartLog
from gpufn_runtime.runner.core import events
from gpufn_runtime.runner.workers.worker_link import WorkerLink

log = logging.getLogger(__name__)

_TIMEOUT_S = 5.0  # after that, NATS has redelivered the call
# The long form has a domain and an account before the stream, and may end with a token.
_SETTLED_AT = re.compile(
    r"\$JS\.ACK\.(?P<long>[\w-]{1,64}\.\w{1,64}\.)?([\w-]+)\.([\w-]+)(?:\.[0-9]{1,19}){5}(?(long)(?:\.\w{1,64})?)",
    re.ASCII,
)


@dataclass(eq=False, repr=False)
class Adoption:
    """`ledgers` belong to the revision's queues. `dispatch(event)` feeds the state machine, which adopts or refuses."""

    bus: Bus
    revision: Revision
    ledgers: Mapping[QueueKind, Ledger]
    _: KW_ONLY
    start_log: StartLog
    dispatch: Callable[[events.Event], None]

    def __post_init__(self) -> None:
        self._tasks = Tasks(f"adoption of calls of {self.revision}")

    def begin(self, link: WorkerLink, unfinished: tuple[Unfinished, ...]) -> None:
        """Adopt or refuse the attempts; then resume reading from the worker."""
        self._tasks.start(self._adopt_all(link, unfinished))

    async def _adopt_all(self, link: WorkerLink, unfinished: tuple[Unfinished, ...]) -> None:
        await asyncio.gather(*(self._adopt(link, item) for item in unfinished))
        link.resume_reading()

    async def _adopt(self, link: WorkerLink, unfinished: Unfinished) -> None:
        match = None
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                match = await self._find(unfinished)
        except (GpufnError, TimeoutError) as error:
            log.warning("cannot adopt %s of a previous runner: %s", unfinished.invocation, error)
        if match is None or self.ledgers[match[1].queue].knows(match[0]):
            self.dispatch(events.UnfinishedFound(link, unfinished))
        else:
            delivery, message, note = match
            self.dispatch(events.UnfinishedFound(link, unfinished, delivery, message, note, delivery.counted))

    async def _find(self, unfinished: Unfinished) -> tuple[Delivery, InvocationMessage, StartNote | None] | None:
        """Return the delivery if it is valid and no other runner has it, its message, and the call's last start
        note."""
        if (place := queue_position_of(self.revision, unfinished.delivery)) is None:
            return None
        stream, kind, seq = place
        stored = await streams.message_at(self.bus, stream, seq)
        if stored is None:
            return None
        message, _ = queued_calls.unpack(stored.payload, seq)
        if (message.id, message.queue) != (unfinished.invocation, kind):
            return None
        if await call_records.locate(self.bus, message.id) is not None:
            return None
        message_copy = Message(stored.subject, unfinished.delivery, stored.payload, stored.headers)
        note = None if message.reply else await self.start_log.read(message.id, seq)
        return Delivery(self.bus, message_copy, self.ledgers[kind]), message, note


def queue_position_of(revision: Revision, settled_at: str) -> tuple[str, QueueKind, int] | None:
    """Return the stream, queue and position of a delivery that is settled at `settled_at`. The worker reports the
    subject and may have made it up: nothing may be published to a subject outside its revision. None if it is
    invalid."""
    if (subject_match := _SETTLED_AT.fullmatch(settled_at)) is None:
        return None
    for kind in QUEUES:
        queue = queue_position.address(*revision.key, kind)
        if subject_match.groups()[1:] == (queue.stream, queue.consumer):
            return queue.stream, kind, ack_tokens(settled_at)[1]
    return None
