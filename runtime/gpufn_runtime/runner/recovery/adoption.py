"""What workers of one Revision still run, or have ended, for a runner that is gone: this one adopts it.

A worker that comes back names its unfinished attempts, each with the subject where its delivery is settled. That is
believed as far as it can be looked up: it must be of a queue of the worker's own revision, and the call must be there.
The queue learns that somebody has it before it gives it out once more, and from then on it is an attempt as any other.
What another runner has by now is refused, and what was cancelled or has ended: the worker is told to stop it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import Callable, Mapping

from gpufn_core.domain.invocation import StartReason
from gpufn_core.domain.revision import Revision
from gpufn_core.errors import GpufnError
from gpufn_core.protocol.frames import Unfinished
from gpufn_core.protocol.messages import InvocationMessage
from gpufn_core.protocol.records import StartNote
from gpufn_core.spec.priority import QUEUES, QueueKind
from gpufn_platform.bus.connection import Bus, Message
from gpufn_platform.bus.nats_protocol import ack_tokens
from gpufn_platform.bus.storage import streams
from gpufn_platform.process.clock import Clock
from gpufn_platform.process.tasks import Tasks
from gpufn_platform.queue import call_records, queue_position, queued_calls
from gpufn_platform.queue.delivery import Delivery, Ledger
from gpufn_runtime.runner.attempts import start_numbers
from gpufn_runtime.runner.attempts.attempt import Attempt, Run, may_run_s
from gpufn_runtime.runner.attempts.start_log import Starts
from gpufn_runtime.runner.workers.worker_link import WorkerLink

log = logging.getLogger(__name__)

_WITHIN_S = 5.0  # later the queue has given it out once more
# The long form has a domain and an account before the stream, and may have a token behind.
_SETTLED_AT = re.compile(
    r"\$JS\.ACK\.(?P<long>[\w-]{1,64}\.\w{1,64}\.)?([\w-]+)\.([\w-]+)(?:\.[0-9]{1,19}){5}(?(long)(?:\.\w{1,64})?)",
    re.ASCII,
)


class Adoption:
    """`ledgers` are those of the revision's queues; `go_on(attempt)` is told of each that is adopted."""

    def __init__(
        self,
        bus: Bus,
        revision: Revision,
        ledgers: Mapping[QueueKind, Ledger],
        *,
        clock: Clock,
        starts: Starts,
        go_on: Callable[[Attempt], None],
    ) -> None:
        self._bus = bus
        self._revision = revision
        self._ledgers = ledgers
        self._clock = clock
        self._starts = starts
        self._go_on = go_on
        self._methods = {method.name: method for method in revision.spec.methods}
        self._tasks = Tasks(f"adoption of calls of {revision}")

    def begin(self, link: WorkerLink, unfinished: tuple[Unfinished, ...]) -> None:
        """Adopt them, or refuse them; then the worker is heard on."""
        self._tasks.start(self._adopt_all(link, unfinished))

    async def _adopt_all(self, link: WorkerLink, unfinished: tuple[Unfinished, ...]) -> None:
        await asyncio.gather(*(self._adopt(link, each) for each in unfinished))
        link.hear_on()

    async def _adopt(self, link: WorkerLink, unfinished: Unfinished) -> None:
        found = None
        try:
            async with asyncio.timeout(_WITHIN_S):
                found = await self._find(unfinished)
        except (GpufnError, TimeoutError) as error:
            log.warning("%s of a runner that is gone cannot be adopted: %s", unfinished.invocation, error)
        if not link.state.live:
            return
        if found is None or self._ledgers[found[1].queue].knows(found[0]):
            link.refuse(unfinished.attempt)
            return
        delivery, message, note = found
        self._ledgers[message.queue].hold(delivery)
        message, reason = start_numbers.adopted(message, note, unfinished.number, delivery.counted)
        delivery.delivered += 1  # by the worker, to us
        attempt = self._attempt(link, unfinished, delivery, message, reason)
        link.adopt(attempt)
        self._go_on(attempt)

    async def _find(self, unfinished: Unfinished) -> tuple[Delivery, InvocationMessage, StartNote | None] | None:
        """Its delivery, if it is one of ours and nobody else has it; and the note of its call's last start."""
        if (place := place_of(self._revision, unfinished.delivery)) is None:
            return None
        stream, kind, seq = place
        stored = await streams.message_at(self._bus, stream, seq)
        if stored is None:
            return None
        message, _ = queued_calls.unpack(stored.payload, seq)
        if (message.id, message.queue) != (unfinished.invocation, kind) or message.method not in self._methods:
            return None
        if await call_records.where(self._bus, message.id) is not None:
            return None
        handed_over = Message(stored.subject, unfinished.delivery, stored.payload, stored.headers)
        note = None if message.reply else await self._starts.read(message.id, seq)
        return Delivery(self._bus, handed_over, self._ledgers[kind]), message, note

    def _attempt(
        self,
        link: WorkerLink,
        unfinished: Unfinished,
        delivery: Delivery,
        message: InvocationMessage,
        reason: StartReason,
    ) -> Attempt:
        """It has until the earlier runner would have ended it; its GPU is charged from now on."""
        now, wall = self._clock.monotonic(), self._clock.time()
        ran_s = min(max(0.0, unfinished.ran_s), max(0.0, wall - message.submitted_at))
        run = Run(
            started_at=wall - ran_s,
            began=now - ran_s,
            must_end_at=now - ran_s + may_run_s(message, self._revision.spec.timeout_s, wall - ran_s),
            is_cold=False,
            busy_from=link.busy.begin(now),
        )
        method, never = self._methods[message.method], -math.inf
        return Attempt(
            unfinished.attempt, delivery, message, method, link, "", touched_at=never, reason=reason, phase=run
        )


def place_of(revision: Revision, settled_at: str) -> tuple[str, QueueKind, int] | None:
    """Which of the revision's queues a delivery came from that is settled there: its stream, and the place in it. A
    worker has named it, and may have made it up; to what is none of its revision's nothing must be said."""
    if (matched := _SETTLED_AT.fullmatch(settled_at)) is None:
        return None
    for kind in QUEUES:
        queue = queue_position.address(*revision.key, kind)
        if matched.groups()[1:] == (queue.stream, queue.consumer):
            return queue.stream, kind, ack_tokens(settled_at)[1]
    return None
