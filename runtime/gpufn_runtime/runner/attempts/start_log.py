"""Start notes of submitted calls, for a runner that starts a call again (`start_numbers`).

A first start is noted only after a while: most calls end sooner and need no write to the bus. Repeated starts, and
starts that this runner interrupts, are noted at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from gpufn_core.domain.invocation import StartReason
from gpufn_core.errors import GpufnError
from gpufn_core.protocol.records import StartNote
from gpufn_platform.bus.connection import Bus
from gpufn_platform.process.clock import Clock
from gpufn_platform.process.tasks import Tasks
from gpufn_platform.queue.delivery import Delivery
from gpufn_platform.queue.records import checkpoints, start_notes
from gpufn_runtime.runner.core.attempt import Attempt

log = logging.getLogger(__name__)

_MAX_MESSAGE_CHARS = 200


class StartLog:
    def __init__(self, bus: Bus, node: str, clock: Clock) -> None:
        self.node = node
        self._bus = bus
        self._clock = clock
        self._tasks = Tasks("notes of starts")
        self._notes: dict[Attempt, asyncio.Task[int]] = {}  # each stores a note and returns its position, or 0

    async def read(self, invocation: str, seq: int) -> StartNote | None:
        """Return the note of the last start of the message at `seq` in ASYNC. Raises BusUnavailable."""
        note = await start_notes.last(self._bus, invocation)
        return note if note is not None and note.seq == seq else None

    def note(self, attempt: Attempt) -> None:
        """Store a note that the attempt has begun."""
        storing = self._store(attempt.message.id, self._note(attempt))
        self._notes[attempt] = asyncio.get_running_loop().create_task(storing, name="note of a start")

    def hand_back(self, attempt: Attempt, reason: StartReason, message: str) -> None:
        """Return an interrupted attempt to its queue, to start under its next number. Its process must be dead."""
        if attempt.is_submitted:
            self._tasks.start(self._hand_back(attempt, reason, message))
        else:
            _nak(attempt)

    async def _hand_back(self, attempt: Attempt, reason: StartReason, message: str) -> None:
        if (storing := self._notes.pop(attempt, None)) is not None:
            await storing  # otherwise the older note could replace this one
        note = self._note(attempt, reason, message)
        await self._store(attempt.message.id, note)
        _nak(attempt)

    async def forget(self, attempt: Attempt) -> None:
        """Delete the note: the call has ended or its retry is queued. If the bus is away, the note expires."""
        storing = self._notes.pop(attempt, None)
        if storing is None:
            return
        seq = await storing
        with contextlib.suppress(GpufnError):
            if seq:
                await checkpoints.forget(self._bus, seq)

    async def drop(self, invocation: str) -> None:
        """Delete the note of a call that ended without an attempt here."""
        with contextlib.suppress(GpufnError):
            await start_notes.drop(self._bus, invocation)

    async def finish(self) -> None:
        """Wait until all handed-back calls are in their queues."""
        await self._tasks.done()

    async def _store(self, invocation: str, note: StartNote) -> int:
        try:
            return await start_notes.store(self._bus, invocation, note)
        except GpufnError as error:
            log.info("the start of %s is not noted: %s", invocation, error)
            return 0

    def _note(self, attempt: Attempt, interrupted: StartReason | None = None, message: str = "") -> StartNote:
        delivery, invocation = attempt.delivery, attempt.message
        assert isinstance(delivery, Delivery), "a submitted call comes from a queue"
        return StartNote(
            seq=delivery.seq,
            delivered=delivery.counted,
            attempt=invocation.attempt,
            reason=attempt.reason,
            node=self.node,
            worker=attempt.worker.id,
            started_at=attempt.run.started_at,
            attempts=invocation.attempts,
            interrupted=interrupted,
            ended_at=self._clock.time() if interrupted is not None else 0.0,
            message=message[:_MAX_MESSAGE_CHARS],
        )


def _nak(attempt: Attempt) -> None:
    with contextlib.suppress(GpufnError):  # without the bus, it is redelivered after ack_wait
        attempt.delivery.nak(has_begun=True)
