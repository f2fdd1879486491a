"""Settlement of ended attempts: send the reply, store the record, settle the delivery. In that order.

    a caller waits     send ResultReply to the reply subject, or on the fast path that the call came by; acknowledge
    submitted          store a large result, then the CallRecord by compare-and-set (the first end wins), then the dead
                       letter of a failed call; acknowledge
    retry              publish a message with the next attempt's number, update the CallRecord; acknowledge

While the bus is away, replies are kept (unacknowledged_replies.py) and records retried. If NATS refuses a write, for
example of a retry whose queue is full, the ack deadline of the delivery is extended meanwhile. Otherwise it would be
redelivered after ack_wait, here or on another node, and the same attempt would run again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec

from gpufn_core.domain.invocation import Outcome, OutcomeKind, state_after
from gpufn_core.domain.retry_policy import Settlement
from gpufn_core.errors import BusUnavailable, GpufnError, InvalidInput, PayloadTooLarge, ResultNotEncodable
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import pack
from gpufn_core.protocol.limits import MAX_ATTEMPT_RECORDS, RECORD_BYTES, inline_bytes
from gpufn_core.protocol.messages import InvocationMessage, ResultReply, unpack_invocation
from gpufn_core.protocol.records import AttemptRecord, BodyReference, CallRecord
from gpufn_platform.bus import jetstream
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import object_store
from gpufn_platform.process.clock import Clock
from gpufn_platform.process.tasks import Tasks
from gpufn_platform.queue import wakeups
from gpufn_platform.queue.delivery import Delivery
from gpufn_platform.queue.records import call_records, checkpoints, dead_letters
from gpufn_runtime.runner.attempts.start_log import StartLog
from gpufn_runtime.runner.attempts.unacknowledged_replies import UnacknowledgedReplies
from gpufn_runtime.runner.core.actions import Settle
from gpufn_runtime.runner.core.attempt import Attempt
from gpufn_runtime.runner.core.start_numbers import next_start
from gpufn_runtime.runner.core.step import TOUCH_EVERY_S
from gpufn_runtime.runner.core.views import DeliveryView
from gpufn_runtime.runner.dispatch.fast_path import DirectDelivery, too_large
from gpufn_runtime.runner.dispatch.large_bodies import NodeBodies
from gpufn_runtime.runner.totals import Totals
from gpufn_runtime.runner.workers.shared_bodies import NodeSharedBodies

log = logging.getLogger(__name__)

_RETRY = Settlement.RETRY  # each call needs it, and Python looks up a member of an enum slowly
_RETRY_BUS_S = 0.2
_MAX_MESSAGE_CHARS = 200
_WAKEUP_WITHIN_S = 60.0
_WAKEUP_DELAY_S = 0.02  # NATS delivers a delayed message a few milliseconds after its time
_BLOB_EXTRA_S = 600.0  # a blob must outlive its record, which is stored later


class Settler:
    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        shared_bodies: NodeSharedBodies,
        bodies: NodeBodies,
        start_log: StartLog,
        *,
        totals: Totals,
    ) -> None:
        self._bus = bus
        self._clock = clock
        self._shared_bodies = shared_bodies
        self._bodies = bodies
        self._start_log = start_log
        self._totals = totals
        self.replies = UnacknowledgedReplies(bus)
        self._tasks = Tasks("settle")
        self._touched_at: dict[DeliveryView, float] = {}  # deliveries being settled; monotonic
        self.dropped_outcomes = 0  # number of ends that lost against an earlier end of the same call
        self.unsettled: dict[str, Attempt] = {}  # by id: ended attempts of submitted calls, record not yet stored

    def settle(self, end: Settle) -> None:
        """Settle an attempt, once, after its slot is free or poisoned."""
        attempt, is_submitted = end.attempt, end.attempt.is_submitted
        if is_submitted:
            self.unsettled[attempt.message.id] = attempt
        if end.settlement is _RETRY:
            self._totals.add_retry(attempt.message.function)
            self._retry(attempt, end.outcome, self._clock.time())
        elif is_submitted:
            record = _record_of(end, self._clock.time(), self._start_log.node)
            self._start(attempt.delivery, self._end_attempt(attempt, record, end.body, end.runner_file))
        elif end.runner_file:
            self._start(attempt.delivery, self._send_large_result(end))
        else:
            self._reply(attempt.delivery, attempt.message, _reply_of(end), end.body)
            self._ack(attempt.delivery)
            if _may_have_checkpoint(attempt):
                self._tasks.start(self._forget_checkpoint(attempt))

    async def _send_large_result(self, end: Settle) -> None:
        """Send a large result to a caller on another host: in the reply, or stored in the object store."""
        attempt, message, reply, body = end.attempt, end.attempt.message, _reply_of(end), b""
        path = self._shared_bodies.kept_path(end.runner_file)
        try:
            if path.stat().st_size <= self._inline_bytes:
                body = path.read_bytes()
            else:
                reply = msgspec.structs.replace(reply, reference=await self._store_result(path, message))
        except (GpufnError, OSError) as error:  # the worker may have tampered with the file
            info = ResultNotEncodable(f"the result cannot be sent: {error}").info()
            reply = msgspec.structs.replace(reply, kind=OutcomeKind.RAISED, error=info, content_type="")
        finally:
            path.unlink(missing_ok=True)
        self._reply(attempt.delivery, message, reply, body)
        self._ack(attempt.delivery)
        if _may_have_checkpoint(attempt):
            await self._forget_checkpoint(attempt)

    async def _store_result(self, path: Path, message: InvocationMessage) -> BodyReference:
        """Store the result. While the bus is away, retry until the caller's deadline."""
        while True:
            try:
                return await self._bodies.store_result(path)
            except BusUnavailable as error:
                if self._clock.time() >= message.deadline:
                    raise
                log.warning("cannot store the result of %s yet: %s", message.id, error)
                await asyncio.sleep(_RETRY_BUS_S)

    @property
    def _inline_bytes(self) -> int:
        return inline_bytes(int(self._bus.server_info["max_payload"]))

    async def _end_attempt(self, attempt: Attempt, record: CallRecord, body: bytes, runner_file: str) -> None:
        await self._end(attempt.delivery, record, body, runner_file, arguments=attempt.message.reference)
        # Not earlier: until its end is stored the call may be redelivered, and continues from its checkpoint.
        if _may_have_checkpoint(attempt):
            await self._forget_checkpoint(attempt)
        await self._start_log.forget(attempt)

    async def _forget_checkpoint(self, attempt: Attempt) -> None:
        """Delete the call's checkpoint, because there is no next attempt. If the bus is away, the checkpoint
        expires."""
        if seq := attempt.run.checkpoint_seq:
            with contextlib.suppress(GpufnError):
                await checkpoints.forget(self._bus, seq)
        else:
            await self._drop_checkpoint(attempt.message.id)

    async def _drop_checkpoint(self, invocation: str) -> None:
        """Like `_forget_checkpoint`, for a checkpoint whose position is unknown."""
        with contextlib.suppress(GpufnError):
            await checkpoints.drop(self._bus, invocation)

    def refuse(self, delivery: DeliveryView, message: InvocationMessage, outcome: Outcome, keep_s: float) -> None:
        """End an invocation that never reached a worker."""
        now = self._clock.time()
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
        if _was_started(delivery, message):
            self._tasks.start(self._drop_checkpoint(message.id))

    async def _end_refused(self, delivery: DeliveryView, message: InvocationMessage, record: CallRecord) -> None:
        """Store the end, including an interrupted attempt if there is a note of it."""
        if delivery.delivered > 1:
            with contextlib.suppress(GpufnError):
                note = await self._start_log.read(message.id, delivery.seq)
                if note is not None:
                    attempts = next_start(message, note, 0, self._clock.time())[0].attempts
                    record = msgspec.structs.replace(record, attempt=note.attempt, attempts=attempts)
        await self._end(delivery, record, arguments=message.reference)
        if _was_started(delivery, message):
            await self._start_log.drop(message.id)

    def confirm(self, delivery: DeliveryView, record: CallRecord) -> None:
        """Complete the settlement of a call that has ended: its settler may have died before completing it."""
        self._start(delivery, self._store_dead_letter_and_ack(delivery, record))
        self._tasks.start(self._drop_checkpoint(record.id))
        self._tasks.start(self._start_log.drop(record.id))

    def drop(self, delivery: DeliveryView) -> None:
        """Acknowledge a delivery whose next attempt is already queued: its settler may have died before the ack."""
        self._ack(delivery)

    def _reply(self, delivery: DeliveryView, message: InvocationMessage, reply: ResultReply, body: bytes) -> None:
        if isinstance(delivery, DirectDelivery):
            delivery.reply(reply, body)
            return
        try:
            self.replies.send(message.reply, pack(reply, body))
        except PayloadTooLarge as error:
            self.replies.send(message.reply, pack(too_large(reply, error)))

    def _ack(self, delivery: DeliveryView) -> None:
        try:
            delivery.ack()
        except BusUnavailable:
            log.info("cannot acknowledge %r: the bus is away", delivery)

    def _retry(self, attempt: Attempt, outcome: Outcome, now: float) -> None:
        message, retries = attempt.message, attempt.worker.revision.spec.retries
        assert retries is not None
        retried = message.retries_used + 1
        not_before = now + retries.delay_before(retried + 1)
        next_message = msgspec.structs.replace(
            message, attempt=message.attempt + 1, retried=retried, not_before=not_before
        )
        if attempt.is_submitted:
            attempts, gpu_s = _attempts(attempt, outcome, now, self._start_log.node), message.gpu_s + attempt.gpu_s
            next_message = msgspec.structs.replace(next_message, attempts=attempts, gpu_s=gpu_s)
        _, body = unpack_invocation(attempt.delivery.payload)
        self._start(attempt.delivery, self._retry_attempt(attempt, next_message, body))

    async def _retry_attempt(self, attempt: Attempt, next_message: InvocationMessage, body: bytes) -> None:
        await self._requeue(attempt.delivery, next_message, body)
        await self._start_log.forget(attempt)

    async def _requeue(self, delivery: DeliveryView, message: InvocationMessage, body: bytes) -> None:
        """Publish the next attempt before this one is acknowledged. The message id makes a repeated publish a
        duplicate. It includes the queue position: an earlier call with the same id may have had such a retry minutes
        ago."""
        payload = pack(message, body)
        msg_id = f"{message.id}@{_queue_seq(delivery)}.{message.retries_used + 1}"
        while True:
            try:
                stored = await self._bus.publish_stored(delivery.subject, payload, msg_id=msg_id)
                if message.reply:  # the caller needs the position to remove the message, or to look for it
                    self._bus.publish(message.reply, jetstream.pub_ack(stored))
                else:
                    await call_records.retry(self._bus, message, body, stored.seq)
                    self.unsettled.pop(message.id, None)
                break
            except GpufnError as error:
                log.warning("cannot queue the retry of %s yet: %s", message.id, error)
                await asyncio.sleep(_RETRY_BUS_S)
        self._ack(delivery)
        self._wake_up_when_due(message)

    def _wake_up_when_due(self, message: InvocationMessage) -> None:
        """Send a wakeup when a retry is due. Runners poll within a second anyway, but a short retry should not wait."""
        delay_s = max(0.0, message.not_before - self._clock.time())
        if delay_s <= _WAKEUP_WITHIN_S:
            asyncio.get_running_loop().call_later(
                delay_s + _WAKEUP_DELAY_S,
                wakeups.send_wakeup,
                self._bus,
                message.function,
                message.queue,
                message.revision,
            )

    async def _end(
        self,
        delivery: DeliveryView,
        record: CallRecord,
        body: bytes = b"",
        runner_file: str = "",
        *,
        arguments: BodyReference | None = None,
    ) -> None:
        unstored = runner_file
        while True:
            try:
                if unstored:
                    record, body = await self._store_large_result(record, unstored)
                    unstored = ""
                if not await call_records.end(self._bus, record, body):
                    self.dropped_outcomes += 1
                    stored_record = await call_records.record_of(self._bus, record.id)
                    record = record if stored_record is None else stored_record[0]
                break
            except (PayloadTooLarge, InvalidInput, OSError) as error:  # the worker may have tampered with the file
                info = ResultNotEncodable(f"the result cannot be stored: {error}").info()
                state = state_after(OutcomeKind.RAISED)
                record = msgspec.structs.replace(record, state=state, error=info, content_type="")
                body, unstored = b"", ""
            except GpufnError as error:
                log.warning("cannot store the end of %s yet: %s", record.id, error)
                await asyncio.sleep(_RETRY_BUS_S)
        self.unsettled.pop(record.id, None)
        if runner_file:
            self._shared_bodies.kept_path(runner_file).unlink(missing_ok=True)
        await self._store_dead_letter_and_ack(delivery, record)
        if not record.state.leaves_dead_letter:
            self._bodies.remove(subjects.ARGUMENT_FILES, arguments)

    async def _store_large_result(self, record: CallRecord, runner_file: str) -> tuple[CallRecord, bytes]:
        """Store a large result. Returns the record that refers to it, or the result itself if it fits in the record."""
        path = self._shared_bodies.kept_path(runner_file)
        size = path.stat().st_size
        if size <= min(RECORD_BYTES, self._inline_bytes):
            return msgspec.structs.replace(record, size=size), path.read_bytes()
        ttl_s = record.keep_s + _BLOB_EXTRA_S
        digest, size = await object_store.keep_file(
            self._bus, subjects.RESULT_FILES, path, owner=record.id, ttl_s=ttl_s
        )
        return msgspec.structs.replace(record, blob=digest, size=size), b""

    async def _store_dead_letter_and_ack(self, delivery: DeliveryView, record: CallRecord) -> None:
        while record.state.leaves_dead_letter:
            try:
                await dead_letters.store(self._bus, record, *unpack_invocation(delivery.payload))
                break
            except GpufnError as error:
                log.warning("cannot store the dead letter of %s yet: %s", record.id, error)
                await asyncio.sleep(_RETRY_BUS_S)
        self._ack(delivery)

    def _start(self, delivery: DeliveryView, settlement: Coroutine[Any, Any, None]) -> None:
        self._touched_at[delivery] = self._clock.monotonic()

        async def settle() -> None:
            try:
                await settlement
            finally:
                self._touched_at.pop(delivery, None)

        self._tasks.start(settle())

    def tick(self, now: float) -> None:
        """Extend the leases of deliveries that take long to settle. Otherwise they would be redelivered. Called each
        second; `now` is monotonic."""
        self.replies.tick()
        for delivery, touched_at in self._touched_at.items():
            if now - touched_at >= TOUCH_EVERY_S:
                self._touched_at[delivery] = now
                with contextlib.suppress(GpufnError):  # the bus is away
                    delivery.touch()

    async def finish(self) -> None:
        """Wait until all ended calls are stored."""
        await self._start_log.finish()
        await self._tasks.done()
        await self._bodies.finish()


def _reply_of(end: Settle) -> ResultReply:
    attempt, message, run = end.attempt, end.attempt.message, end.attempt.run
    return ResultReply(
        invocation=message.id,
        kind=end.outcome.kind,
        error=end.outcome.error,
        content_type=end.content_type,
        revision=message.revision,
        attempt=message.attempt,
        queue_s=max(0.0, run.started_at - message.submitted_at),
        run_s=end.run_s,
        worker=attempt.worker.id,
        cold_start=attempt.worker.cold_start if run.is_cold else None,
        items=run.items,
        shared_body=end.shared_body,
        gpu_s=end.gpu_s,
        gather_s=end.gather_s,
    )


def _record_of(end: Settle, now: float, node: str) -> CallRecord:
    attempt, message, run = end.attempt, end.attempt.message, end.attempt.run
    ended = _record(attempt.delivery, message, end.outcome, now, attempt.worker.revision.spec.retention_s)
    return msgspec.structs.replace(
        ended,
        attempts=_attempts(attempt, end.outcome, now, node),
        started_at=run.started_at,
        content_type=end.content_type,
        size=len(end.body),
        queue_s=max(0.0, run.started_at - message.submitted_at),
        run_s=end.run_s,
        gather_s=end.gather_s,
        gpu_s=ended.gpu_s + end.gpu_s,
        worker=attempt.worker.id,
        cold_start=attempt.worker.cold_start if run.is_cold else None,
    )


def _record(
    delivery: DeliveryView, message: InvocationMessage, outcome: Outcome, now: float, keep_s: float
) -> CallRecord:
    record = call_records.ended(message, outcome, now)
    queue_s = max(0.0, now - message.submitted_at)
    return msgspec.structs.replace(record, queue_seq=_queue_seq(delivery), queue_s=queue_s, run_s=0.0, keep_s=keep_s)


def _may_have_checkpoint(attempt: Attempt) -> bool:
    return bool(attempt.run.checkpoint_seq) or _was_started(attempt.delivery, attempt.message)


def _was_started(delivery: DeliveryView, message: InvocationMessage) -> bool:
    """Return whether an earlier attempt, or one of a runner that died, may have left a checkpoint or a note."""
    return message.attempt > 1 or delivery.delivered > 1


def _queue_seq(delivery: DeliveryView) -> int:
    """Return the position in the queue, or 0 for a fast-path delivery."""
    return delivery.seq if isinstance(delivery, Delivery) else 0


def _attempts(attempt: Attempt, outcome: Outcome, now: float, node: str) -> tuple[AttemptRecord, ...]:
    """Return the records of the earlier attempts (as many as are kept) and of this one."""
    error = outcome.error
    attempt_record = AttemptRecord(
        number=attempt.message.attempt,
        outcome=outcome.kind,
        ended_at=now,
        started_at=attempt.run.started_at,
        worker=attempt.worker.id,
        gpu_s=attempt.gpu_s,
        code="" if error is None else error.code[:_MAX_MESSAGE_CHARS],
        message="" if error is None else error.summary[:_MAX_MESSAGE_CHARS],
        node=node,
        reason=attempt.reason,
    )
    return (*attempt.message.attempts, attempt_record)[-MAX_ATTEMPT_RECORDS:]
