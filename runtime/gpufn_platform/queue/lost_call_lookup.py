"""Find out where pending calls are, when there is reason to doubt it.

- After a reconnect: the sync queue is in the server's memory and may be lost, so which runners still have older calls?
- Periodically for a call that only a runner has: no queue would redeliver it.
- For a call that has waited for its function's queue_timeout: runners end the calls that they receive, but while all
  slots are busy they receive none.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Mapping

from gpufn_core.domain.invocation import queue_timeout_error
from gpufn_core.errors import BusUnavailable, GpufnError
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import encode
from gpufn_core.protocol.messages import InvocationMessage, LocateCall, unpack_invocation
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import streams
from gpufn_platform.process.clock import Clock
from gpufn_platform.process.tasks import Tasks
from gpufn_platform.queue import queue_position
from gpufn_platform.queue.pending import PendingCall
from gpufn_platform.queue.records.call_records import locate

log = logging.getLogger(__name__)

# A runner reconnects within a second and knows its running calls.
_LOST_AFTER_S = 2.0
_LOST_RETRY_S = 0.25
_RECHECK_S = 2.0
_MAX_LOOKUPS = 64


class LostCallLookup:
    """`pending` are a Caller's calls, by id; `abandon(call)` takes a call back from wherever it is."""

    def __init__(
        self, bus: Bus, clock: Clock, pending: Mapping[str, PendingCall], abandon: Callable[[PendingCall], None]
    ) -> None:
        self._bus = bus
        self._clock = clock
        self._pending = pending
        self._abandon = abandon
        self._lookups = asyncio.Semaphore(_MAX_LOOKUPS)
        self._rescue: asyncio.Task[None] | None = None
        self._tasks = Tasks("calls past their queue timeout")

    # --- calls past their queue timeout -------------------------------------------------------------------------------

    def end_unless_begun(self, calls: Iterable[PendingCall], error: GpufnError | None = None) -> None:
        """End the calls that still wait for their first attempt, with `error` or as expired. Calls that have started
        are not checked again."""
        for call in calls:
            call.start_deadline = math.inf
            self._tasks.start(self._end_unless_begun(call, error))

    async def _end_unless_begun(self, call: PendingCall, error: GpufnError | None) -> None:
        try:
            async with self._lookups:
                is_waiting = await self._is_waiting(call)
        except GpufnError:  # cannot be determined now
            call.start_deadline = self._clock.monotonic() + _RECHECK_S
            return
        if is_waiting and call.id in self._pending:
            self._abandon(call)
            waited_s = self._clock.monotonic() - call.since
            call.fail(error or queue_timeout_error(waited_s))

    async def _is_waiting(self, call: PendingCall) -> bool:
        """Return whether the call waits for its first attempt: it is queued, about to be published again, or in the
        fast path's backlog, and no runner has started it."""
        if call.offered is not None:
            return await locate(self._bus, call.id, within_s=queue_position.RUNNER_SILENCE_S) is None
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
            self._rescue.cancel()  # it was looking for these calls, or older ones, on the previous connection
        # No queue has a call that the server did not store: the Caller publishes it again.
        queued = [call for call in self._pending.values() if call.offered is None and not call.is_refused]
        for call in queued:  # a recreated queue counts from one again
            call.previous_seq, call.queue_seq = call.queue_seq or call.previous_seq, 0
        if queued:
            deadline = self._clock.monotonic() + _LOST_AFTER_S
            rescue = self._fail_lost(queued, deadline)
            self._rescue = asyncio.get_running_loop().create_task(rescue, name="calls after a reconnect")

    async def _fail_lost(self, calls: list[PendingCall], deadline: float) -> None:
        """End the calls that are neither in a queue nor at a runner."""
        has_logged = False

        async def look_for(call: PendingCall, deadline: float) -> None:
            nonlocal has_logged
            while call.id in self._pending:
                is_held, began_at = False, self._clock.monotonic()
                try:
                    async with self._lookups:
                        if await self._queued(call) is not None:
                            # It may have ended, but neither the bus nor this process may know: its runner must check.
                            self._bus.publish(subjects.WHEREABOUTS, encode(LocateCall(call.id)))
                            return
                        is_held = await locate(self._bus, call.id) is not None
                except GpufnError as error:  # unknown for now: the stream may be about to be recreated
                    if not has_logged:
                        has_logged = True
                        log.warning("cannot look for calls yet after a reconnect: %s", error)
                    deadline = self._clock.monotonic() + _LOST_AFTER_S
                if is_held:
                    deadline = self._clock.monotonic() + _RECHECK_S + _LOST_AFTER_S
                elif began_at > deadline:  # checked by the start time, because we may have been suspended meanwhile
                    call.fail(BusUnavailable("the message bus restarted and this call was lost; it may have run"))
                await asyncio.sleep(_RECHECK_S if is_held else _LOST_RETRY_S)

        await asyncio.gather(*(look_for(call, deadline) for call in calls))

    async def _queued(self, call: PendingCall) -> InvocationMessage | None:
        """Return the call's message if it is still queued, and update `queue_seq`."""
        if not (seq := call.queue_seq or call.previous_seq):
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
