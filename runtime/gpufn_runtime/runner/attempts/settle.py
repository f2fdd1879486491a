"""The end of an Attempt: tell who waits, keep what is asked for later, settle the Delivery. In that order.

    somebody waits     ResultReply to its reply subject, or by the lane that the call came by, ack
    submitted          a large result is stored beside it, the CallRecord by compare-and-set (the first end wins), then
                       for one that failed the dead letter, ack
    worth a retry      a new message with the next attempt's number, the CallRecord that says so, ack

While the bus is away, replies are kept (replies.py) and records are tried again. Where the bus does not take them, as a
retry whose queue is full, the delivery is touched meanwhile: it would come back after ack_wait, here or at another
node, and the same attempt would run again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec

from gpufn_core.domain.invocation import Outcome, OutcomeKind, Settlement, settlement_for, state_after
from gpufn_core.errors import BusUnavailable, GpufnError, InvalidInput, PayloadTooLarge, ResultNotEncodable
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import pack
from gpufn_core.protocol.limits import KEPT_ATTEMPTS, RECORD_BYTES, inline_bytes
from gpufn_core.protocol.messages import InvocationMessage, ResultReply, unpack_invocation
from gpufn_core.protocol.records import AttemptRecord, BodyReference, CallRecord
from gpufn_platform.bus import jetstream
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import object_store
from gpufn_platform.process.clock import Clock
from gpufn_platform.process.tasks import Tasks
from gpufn_platform.queue import call_records, checkpoints, dead_letters, wakeups
from gpufn_platform.queue.delivery import Delivery
from gpufn_runtime.runner.attempts.attempt import Attempt
from gpufn_runtime.runner.attempts.replies import Replies
from gpufn_runtime.runner.attempts.start_log import Starts
from gpufn_runtime.runner.attempts.start_numbers import next_start
from gpufn_runtime.runner.dispatch.fast_path import DirectDelivery, too_large
from gpufn_runtime.runner.dispatch.large_bodies import NodeBodies
from gpufn_runtime.runner.dispatch.pull_credits import TOUCH_EVERY_S
from gpufn_runtime.runner.workers.shared_bodies import NodeParcels

log = logging.getLogger(__name__)

_RETRY_BUS_S = 0.2
_KEPT_MESSAGE_CHARS = 200
_RUNG_FOR_S = 60.0
_DUE_S = 0.02  # a server that was told to hold it back until then gives it out a few milliseconds later
_BLOB_LONGER_S = 600.0  # than its record, which is stored after it


class Settler:
    def __init__(self, bus: Bus, clock: Clock, parcels: NodeParcels, bodies: NodeBodies, starts: Starts) -> None:
        self._bus = bus
        self._clock = clock
        self._parcels = parcels
        self._bodies = bodies
        self._starts = starts
        self._replies = Replies(bus)
        self._tasks = Tasks("settle")
        self._touched_at: dict[Delivery | DirectDelivery, float] = {}  # of those being settled; monotonic
        self.dropped_outcomes = 0  # ends that came second
        self.unsettled: dict[str, Attempt] = {}  # by id: of submitted calls, ended, and their records do not say so

    def settle(
        self,
        attempt: Attempt,
        outcome: Outcome,
        content_type: str = "",
        body: bytes = b"",
        *,
        parcel: str = "",
        kept: str = "",
        run_s: float = 0.0,
        gather_s: float = 0.0,
        now: float,
    ) -> None:
        """Once per attempt, after its slot is free or poisoned. A large result is `parcel`, in the caller's folder, or
        `kept`, in our own: of a submitted call, or for a caller on another host."""
        message = attempt.message
        if attempt.is_submitted:
            self.unsettled[message.id] = attempt
        left_s = message.deadline - now if message.deadline else math.inf
        settlement = settlement_for(outcome, attempt.link.revision.spec.retries, message.retries_used, left_s=left_s)
        if settlement is Settlement.RETRY and not attempt.run.items:
            self._retry(attempt, outcome, now)
        elif attempt.is_submitted:
            record = _record_of(attempt, outcome, now, run_s=run_s, gather_s=gather_s, node=self._starts.node)
            record = msgspec.structs.replace(record, content_type=content_type, size=len(body))
            self._start(attempt.delivery, self._end_attempt(attempt, record, body, kept))
        else:
            reply = _reply_of(attempt, outcome, content_type, parcel, run_s=run_s, gather_s=gather_s)
            if kept:
                self._start(attempt.delivery, self._send_kept(attempt, reply, kept))
                return
            self._reply(attempt.delivery, message, reply, body)
            self._ack(attempt.delivery)
            if attempt.run.checkpoint_seq or _was_tried(attempt.delivery, message):
                self._tasks.start(self._forget_checkpoint(message.id, attempt.run.checkpoint_seq))

    async def _send_kept(self, attempt: Attempt, reply: ResultReply, kept: str) -> None:
        """A large result for a caller on another host: in the reply, or stored beside it."""
        message, path, body = attempt.message, self._parcels.kept(kept), b""
        try:
            if path.stat().st_size <= self._inline_bytes:
                body = path.read_bytes()
            else:
                reply = msgspec.structs.replace(reply, reference=await self._store_result(path, message))
        except (GpufnError, OSError) as error:  # whatever a worker does to its file meanwhile
            info = ResultNotEncodable(f"the result cannot be sent: {error}").info()
            reply = msgspec.structs.replace(reply, kind=OutcomeKind.RAISED, error=info, content_type="")
        finally:
            path.unlink(missing_ok=True)
        self._reply(attempt.delivery, message, reply, body)
        self._ack(attempt.delivery)
        if attempt.run.checkpoint_seq or _was_tried(attempt.delivery, message):
            await self._forget_checkpoint(message.id, attempt.run.checkpoint_seq)

    async def _store_result(self, path: Path, message: InvocationMessage) -> BodyReference:
        """While the bus is away it is tried again, until the caller does not wait any more."""
        while True:
            try:
                return await self._bodies.store_result(path)
            except BusUnavailable as error:
                if self._clock.time() >= message.deadline:
                    raise
                log.warning("the result of %s waits: %s", message.id, error)
                await asyncio.sleep(_RETRY_BUS_S)

    @property
    def _inline_bytes(self) -> int:
        return inline_bytes(int(self._bus.server_info["max_payload"]))

    async def _end_attempt(self, attempt: Attempt, record: CallRecord, body: bytes, kept: str) -> None:
        await self._end(attempt.delivery, record, body, kept, arguments=attempt.message.reference)
        # Not sooner: until its end is kept the call may come again, and goes on from there.
        if attempt.run.checkpoint_seq or _was_tried(attempt.delivery, attempt.message):
            await self._forget_checkpoint(record.id, attempt.run.checkpoint_seq)
        await self._starts.forget(attempt)

    async def _forget_checkpoint(self, invocation: str, seq: int = 0) -> None:
        """There is no next attempt. It is at `seq`, if this one knows of any. One that stays, because the bus is away,
        goes with its time."""
        with contextlib.suppress(GpufnError):
            if seq:
                await checkpoints.forget(self._bus, seq)
            else:
                await checkpoints.drop(self._bus, invocation)

    def refuse(
        self,
        delivery: Delivery | DirectDelivery,
        message: InvocationMessage,
        outcome: Outcome,
        now: float,
        keep_s: float,
    ) -> None:
        """End an invocation that never got to a worker."""
        if message.reply:
            reply = ResultReply(
                message.id, outcome.kind, outcome.error, "", message.revision, message.attempt,
                max(0.0, now - message.submitted_at), 0.0,
            )  # fmt: skip
            self._reply(delivery, message, reply, b"")
            self._ack(delivery)
        else:
            record = _record(delivery, message, outcome, now, keep_s)
            self._start(delivery, self._end_refused(delivery, message, record))
        if _was_tried(delivery, message):
            self._tasks.start(self._forget_checkpoint(message.id))

    async def _end_refused(
        self, delivery: Delivery | DirectDelivery, message: InvocationMessage, record: CallRecord
    ) -> None:
        """With the attempt that was interrupted, if there is a note of one."""
        if delivery.delivered > 1:
            with contextlib.suppress(GpufnError):
                note = await self._starts.read(message.id, delivery.seq)
                if note is not None:
                    before = next_start(message, note, 0, self._clock.time())[0].attempts
                    record = msgspec.structs.replace(record, attempt=note.attempt, attempts=before)
        await self._end(delivery, record, arguments=message.reference)
        if _was_tried(delivery, message):
            await self._starts.drop(message.id)

    def confirm(self, delivery: Delivery | DirectDelivery, record: CallRecord) -> None:
        """It has ended already: whoever ended it may have died before the rest was done."""
        self._start(delivery, self._bury_and_ack(delivery, record))
        self._tasks.start(self._forget_checkpoint(record.id))
        self._tasks.start(self._starts.drop(record.id))

    def drop(self, delivery: Delivery | DirectDelivery) -> None:
        """Its next attempt is queued already: whoever queued it may have died before this one was acked."""
        self._ack(delivery)

    def _reply(
        self, delivery: Delivery | DirectDelivery, message: InvocationMessage, reply: ResultReply, body: bytes
    ) -> None:
        if isinstance(delivery, DirectDelivery):
            delivery.reply(reply, body)
            return
        try:
            self._replies.send(message.reply, pack(reply, body))
        except PayloadTooLarge as error:
            self._replies.send(message.reply, pack(too_large(reply, error)))

    def _ack(self, delivery: Delivery | DirectDelivery) -> None:
        try:
            delivery.ack()
        except BusUnavailable:
            log.info("%r could not be settled: the bus is away", delivery)

    def _retry(self, attempt: Attempt, outcome: Outcome, now: float) -> None:
        message, retries = attempt.message, attempt.link.revision.spec.retries
        assert retries is not None
        retried = message.retries_used + 1
        not_before = now + retries.delay_before(retried + 1)
        again = msgspec.structs.replace(message, attempt=message.attempt + 1, retried=retried, not_before=not_before)
        if attempt.is_submitted:
            attempts, gpu_s = _attempts(attempt, outcome, now, self._starts.node), message.gpu_s + attempt.gpu_s
            again = msgspec.structs.replace(again, attempts=attempts, gpu_s=gpu_s)
        _, body = unpack_invocation(attempt.delivery.payload)
        self._start(attempt.delivery, self._retry_attempt(attempt, again, body))

    async def _retry_attempt(self, attempt: Attempt, again: InvocationMessage, body: bytes) -> None:
        await self._requeue(attempt.delivery, again, body)
        await self._starts.forget(attempt)

    async def _requeue(self, delivery: Delivery | DirectDelivery, message: InvocationMessage, body: bytes) -> None:
        """The next attempt is stored before this one is acked; its id makes a second try of ours the same message. A
        call that had this one's id before may have had such an attempt minutes ago, in another place."""
        payload = pack(message, body)
        msg_id = f"{message.id}@{_place(delivery)}.{message.retries_used + 1}"
        while True:
            try:
                stored = await self._bus.publish_stored(delivery.subject, payload, msg_id=msg_id)
                if message.reply:  # who waits takes it out of the queue when he leaves, and looks for it there
                    self._bus.publish(message.reply, jetstream.pub_ack(stored))
                else:
                    await call_records.retry(self._bus, message, body, stored.seq)
                    self.unsettled.pop(message.id, None)
                break
            except GpufnError as error:
                log.warning("the retry of %s waits: %s", message.id, error)
                await asyncio.sleep(_RETRY_BUS_S)
        self._ack(delivery)
        self._ring_when_due(message)

    def _ring_when_due(self, message: InvocationMessage) -> None:
        """Runners would look for it within a second: that is long for one that waits for less than a minute."""
        in_s = max(0.0, message.not_before - self._clock.time())
        if in_s <= _RUNG_FOR_S:
            later = asyncio.get_running_loop().call_later
            later(in_s + _DUE_S, wakeups.ring, self._bus, message.function, message.queue)

    async def _end(
        self,
        delivery: Delivery | DirectDelivery,
        record: CallRecord,
        body: bytes = b"",
        kept: str = "",
        *,
        arguments: BodyReference | None = None,
    ) -> None:
        left = kept
        while True:
            try:
                if left:
                    record, body = await self._keep(record, left)
                    left = ""
                if not await call_records.end(self._bus, record, body):
                    self.dropped_outcomes += 1
                    found = await call_records.record_of(self._bus, record.id)
                    record = record if found is None else found[0]
                break
            except (PayloadTooLarge, InvalidInput, OSError) as error:  # whatever a worker does to its file meanwhile
                info = ResultNotEncodable(f"the result cannot be kept: {error}").info()
                state = state_after(OutcomeKind.RAISED)
                record, body, left = msgspec.structs.replace(record, state=state, error=info, content_type=""), b"", ""
            except GpufnError as error:
                log.warning("the end of %s waits: %s", record.id, error)
                await asyncio.sleep(_RETRY_BUS_S)
        self.unsettled.pop(record.id, None)
        if kept:
            self._parcels.kept(kept).unlink(missing_ok=True)
        await self._bury_and_ack(delivery, record)
        if not record.state.leaves_dead_letter:
            self._bodies.remove_arguments(arguments)

    async def _keep(self, record: CallRecord, kept: str) -> tuple[CallRecord, bytes]:
        """A large result: the record that names it, once it is stored; or one that fits into the record."""
        path = self._parcels.kept(kept)
        size = path.stat().st_size
        if size <= min(RECORD_BYTES, self._inline_bytes):
            return msgspec.structs.replace(record, size=size), path.read_bytes()
        ttl_s = record.keep_s + _BLOB_LONGER_S
        digest, size = await object_store.keep_file(
            self._bus, subjects.RESULT_FILES, path, owner=record.id, ttl_s=ttl_s
        )
        return msgspec.structs.replace(record, blob=digest, size=size), b""

    async def _bury_and_ack(self, delivery: Delivery | DirectDelivery, record: CallRecord) -> None:
        while record.state.leaves_dead_letter:
            try:
                await dead_letters.bury(self._bus, record, *unpack_invocation(delivery.payload))
                break
            except GpufnError as error:
                log.warning("the dead letter of %s waits: %s", record.id, error)
                await asyncio.sleep(_RETRY_BUS_S)
        self._ack(delivery)

    def _start(self, delivery: Delivery | DirectDelivery, settling: Coroutine[Any, Any, None]) -> None:
        self._touched_at[delivery] = self._clock.monotonic()

        async def settle() -> None:
            try:
                await settling
            finally:
                self._touched_at.pop(delivery, None)

        self._tasks.start(settle())

    def tick(self, now: float) -> None:
        """Each second: what takes long to settle is touched, or the queue would have it run again elsewhere. `now` is
        monotonic."""
        self._replies.tick()
        for delivery, touched_at in self._touched_at.items():
            if now - touched_at >= TOUCH_EVERY_S:
                self._touched_at[delivery] = now
                with contextlib.suppress(GpufnError):  # the bus is away
                    delivery.touch()

    def tell_again(self, invocation: str) -> None:
        """Somebody waits for this call, and cannot find it: if it has ended here, its end did not reach him."""
        self._replies.repeat(invocation)

    async def finish(self) -> None:
        """Wait until everything that ended is kept."""
        await self._starts.finish()
        await self._tasks.done()
        await self._bodies.finish()


def _reply_of(
    attempt: Attempt, outcome: Outcome, content_type: str, parcel: str, *, run_s: float, gather_s: float
) -> ResultReply:
    message, run = attempt.message, attempt.run
    return ResultReply(
        invocation=message.id,
        kind=outcome.kind,
        error=outcome.error,
        content_type=content_type,
        revision=message.revision,
        attempt=message.attempt,
        queue_s=max(0.0, run.started_at - message.submitted_at),
        run_s=run_s,
        worker=attempt.link.worker,
        cold_start=attempt.link.cold_start if run.is_cold else None,
        items=run.items,
        parcel=parcel,
        gpu_s=attempt.gpu_s,
        gather_s=gather_s,
    )


def _record_of(
    attempt: Attempt, outcome: Outcome, now: float, *, run_s: float, gather_s: float, node: str
) -> CallRecord:
    message, run = attempt.message, attempt.run
    ended = _record(attempt.delivery, message, outcome, now, attempt.link.revision.spec.retention_s)
    return msgspec.structs.replace(
        ended,
        attempts=_attempts(attempt, outcome, now, node),
        started_at=run.started_at,
        queue_s=max(0.0, run.started_at - message.submitted_at),
        run_s=run_s,
        gather_s=gather_s,
        gpu_s=ended.gpu_s + attempt.gpu_s,
        worker=attempt.link.worker,
        cold_start=attempt.link.cold_start if run.is_cold else None,
    )


def _record(
    delivery: Delivery | DirectDelivery, message: InvocationMessage, outcome: Outcome, now: float, keep_s: float
) -> CallRecord:
    record = call_records.ended(message, outcome, now)
    queue_s = max(0.0, now - message.submitted_at)
    return msgspec.structs.replace(record, queue_seq=_place(delivery), queue_s=queue_s, run_s=0.0, keep_s=keep_s)


def _was_tried(delivery: Delivery | DirectDelivery, message: InvocationMessage) -> bool:
    """Before now, by another attempt or by a runner that died: so it may have left a checkpoint."""
    return message.attempt > 1 or delivery.delivered > 1


def _place(delivery: Delivery | DirectDelivery) -> int:
    """In its queue; 0 of one that came past it."""
    return delivery.seq if isinstance(delivery, Delivery) else 0


def _attempts(attempt: Attempt, outcome: Outcome, now: float, node: str) -> tuple[AttemptRecord, ...]:
    """Those before, as many as are kept, and this one."""
    error = outcome.error
    this = AttemptRecord(
        number=attempt.message.attempt,
        outcome=outcome.kind,
        ended_at=now,
        started_at=attempt.run.started_at,
        worker=attempt.link.worker,
        gpu_s=attempt.gpu_s,
        code="" if error is None else error.code[:_KEPT_MESSAGE_CHARS],
        message="" if error is None else error.summary[:_KEPT_MESSAGE_CHARS],
        node=node,
        reason=attempt.reason,
    )
    return (*attempt.message.attempts, this)[-KEPT_ATTEMPTS:]
