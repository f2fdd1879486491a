"""Where the calls are that somebody waits for, when there is reason to ask.

After a reconnect: the sync queue is in the server's memory and may be gone, so who still has the older ones? Of a call
that only a runner has, from time to time: no queue would hand it to another. And of one that has waited for as long as
its function's queue_timeout allows: runners end those that they are handed, but where all slots are busy none is.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Mapping

from gpufn_core.domain.invocation import waited_too_long
from gpufn_core.errors import BusUnavailable, GpufnError
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import encode
from gpufn_core.protocol.messages import InvocationMessage, WhereIs, unpack_invocation
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import streams
from gpufn_platform.process.clock import Clock
from gpufn_platform.process.tasks import Tasks
from gpufn_platform.queue import queue_position
from gpufn_platform.queue.call_records import where
from gpufn_platform.queue.pending import PendingCall

log = logging.getLogger(__name__)

# A runner reconnects within a second and knows what it runs.
_LOST_AFTER_S = 2.0
_LOST_RETRY_S = 0.25
_HELD_AGAIN_S = 2.0
_LOOKS_AT_A_TIME = 64


class Searches:
    """`pending` are a Caller's calls, by id; `abandon(call)` takes one back from wherever it is."""

    def __init__(
        self, bus: Bus, clock: Clock, pending: Mapping[str, PendingCall], abandon: Callable[[PendingCall], None]
    ) -> None:
        self._bus = bus
        self._clock = clock
        self._pending = pending
        self._abandon = abandon
        self._places = asyncio.Semaphore(_LOOKS_AT_A_TIME)
        self._rescue: asyncio.Task[None] | None = None
        self._tasks = Tasks("calls that wait for too long")

    # --- calls that wait for too long ---------------------------------------------------------------------------------

    def end_unless_begun(self, calls: Iterable[PendingCall], error: GpufnError | None = None) -> None:
        """End those that still wait for their first attempt, with `error` or as expired; the others are not asked about
        again."""
        for call in calls:
            call.starts_by = math.inf
            self._tasks.start(self._end_unless_begun(call, error))

    async def _end_unless_begun(self, call: PendingCall, error: GpufnError | None) -> None:
        try:
            async with self._places:
                waits = await self._waits(call)
        except GpufnError:  # nobody can tell now
            call.starts_by = self._clock.monotonic() + _HELD_AGAIN_S
            return
        if waits and call.id in self._pending:
            self._abandon(call)
            waited_s = self._clock.monotonic() - call.since
            call.fail(error or waited_too_long(waited_s))

    async def _waits(self, call: PendingCall) -> bool:
        """For its first attempt: it is in the queue, or about to be published again, or in line on the lane, and no
        runner has begun."""
        if call.offered is not None:
            return await where(self._bus, call.id, within_s=queue_position.SILENT_S) is None
        if call.is_refused:
            return True
        queued = await self._queued(call)
        if queued is None or queued.attempt > 1:
            return False
        queue = queue_position.address(call.function, call.revision, queued.queue)
        return not await queue_position.is_held(self._bus, queue, call.queue_seq, call.id)

    # --- after a reconnect --------------------------------------------------------------------------------------------

    def after_reconnect(self) -> None:
        if self._rescue is not None:
            self._rescue.cancel()  # it looked for these, or older ones, on the connection before
        # No queue has a call that the server did not store: the Caller publishes it again.
        queued = [call for call in self._pending.values() if call.offered is None and not call.is_refused]
        for call in queued:  # the queue may have been made again, and count anew
            call.was_at, call.queue_seq = call.queue_seq or call.was_at, 0
        if queued:
            give_up_at = self._clock.monotonic() + _LOST_AFTER_S
            rescue = self._fail_lost(queued, give_up_at)
            self._rescue = asyncio.get_running_loop().create_task(rescue, name="calls after a reconnect")

    async def _fail_lost(self, calls: list[PendingCall], give_up_at: float) -> None:
        """End the calls that neither a queue nor a runner has any more."""
        has_said_why = False

        async def look_for(call: PendingCall, give_up_at: float) -> None:
            nonlocal has_said_why
            while call.id in self._pending:
                is_held, began_at = False, self._clock.monotonic()
                try:
                    async with self._places:
                        if await self._queued(call) is not None:
                            # It may have ended: the bus has not heard that, and we have not.
                            self._bus.publish(subjects.WHEREABOUTS, encode(WhereIs(call.id)))
                            return
                        is_held = await where(self._bus, call.id) is not None
                except GpufnError as error:  # nobody knows yet: the stream may be about to be made again
                    if not has_said_why:
                        has_said_why = True
                        log.warning("calls cannot be looked for yet after a reconnect: %s", error)
                    give_up_at = self._clock.monotonic() + _LOST_AFTER_S
                if is_held:
                    give_up_at = self._clock.monotonic() + _HELD_AGAIN_S + _LOST_AFTER_S
                elif began_at > give_up_at:  # we may have been stopped during an earlier look
                    call.fail(BusUnavailable("the message bus restarted and this call was lost; it may have run"))
                await asyncio.sleep(_HELD_AGAIN_S if is_held else _LOST_RETRY_S)

        await asyncio.gather(*(look_for(call, give_up_at) for call in calls))

    async def _queued(self, call: PendingCall) -> InvocationMessage | None:
        """As it is in the queue now, if it is; then its place there is known."""
        if not (seq := call.queue_seq or call.was_at):
            return None
        queue = subjects.sync_queue(call.function, call.revision, call.priority)
        stored = await streams.next_message(self._bus, subjects.SYNC, queue, seq)
        if stored is None:
            return None
        invocation = unpack_invocation(stored.payload)[0]
        if invocation.id != call.id:
            return None
        call.queue_seq = stored.seq
        return invocation
