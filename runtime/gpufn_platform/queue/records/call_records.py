"""Submitted invocations: the queue on disk, and the record of each invocation's end.

submit   store the invocation in ASYNC. An invocation with a given id is stored under that id (a repeat is the same
         message), then its CallRecord is created. A repeat is recognized by its digest: another call under the same id
         is refused. Other invocations have no record until their first attempt (`queued_calls`)
retry    the record lists the failed attempts, and where the next one is queued
end      create the record, or replace it by compare-and-set while it has not ended: the first end wins. The record
         expires after `keep_s`. The job of its webhook is stored first
search   read only headers, which have a summary of each record: a result may be megabytes
wait     read the record again at each sign of a change
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import operator
from collections.abc import AsyncGenerator, Callable
from typing import NamedTuple

import msgspec

from gpufn_core.domain.invocation import InvocationState, Outcome, state_after
from gpufn_core.errors import BusUnavailable, Conflict, IdempotencyMismatch, InvocationNotFound
from gpufn_core.ids import new_stem
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import encode, pack
from gpufn_core.protocol.messages import CallLocation, Cancel, InvocationMessage, LocateCall, unpack_invocation
from gpufn_core.protocol.records import BodyReference, CallRecord, Webhook, unpack_record
from gpufn_platform.bus.connection import Bus, Message, NoResponders
from gpufn_platform.bus.jetstream import Stored
from gpufn_platform.bus.storage import header_summary, object_store, stream_scan, streams
from gpufn_platform.bus.storage.change_wait import ChangeSignal
from gpufn_platform.bus.storage.header_summary import SCAN_LIMIT, newest, summary, summary_of
from gpufn_platform.queue import queued_calls, wakeups
from gpufn_platform.queue.call_request import CallRequest
from gpufn_platform.queue.records import checkpoints, dead_letters

log = logging.getLogger(__name__)

# The runner that has the call responds within a millisecond; the others do not respond.
_LOCATE_TIMEOUT_S = 0.1

_summary = summary_of(CallRecord)
_location = msgspec.msgpack.Decoder(CallLocation)


def ended(message: InvocationMessage, outcome: Outcome, now: float) -> CallRecord:
    """Return the record of a call that ended at `now`, from its message. A runner adds when and for how long it ran."""
    record, state = queued_calls.record(message, 0), state_after(outcome.kind)
    return msgspec.structs.replace(record, state=state, ended_at=now, error=outcome.error, not_before=0.0)


async def submit(
    bus: Bus,
    request: CallRequest,
    *,
    now: float,
    invocation: str | None = None,
    webhook: Webhook | None = None,
    sender: wakeups.WakeupSender | None = None,
) -> CallRecord:
    """Queue an invocation for later; `now` in unix seconds.

    Its end is reported to `webhook`, default: the function's. Pass a shared `sender` to submit many invocations.
    An id that is already known is the same invocation: its record is returned and nothing is queued. Without an id the
    call is new. Raises IdempotencyMismatch if the id is known for another function, method or body; QueueFull,
    BusUnavailable.
    """
    revision, body = request.revision, request.body
    digest = request_digest(revision.function, request.method, body, request.reference)
    if invocation is not None and (known := await read(bus, invocation)) is not None:
        return _check_digest(known[0], digest)
    message = request.submission(invocation or new_stem(), now, webhook, digest)
    if invocation is None:
        stored = await _store_new(bus, message, body)
    else:
        stored, message = await _store(bus, message, body)
    (sender or wakeups.WakeupSender(bus)).send_wakeup(revision.function, message.queue, revision.number)
    record = queued_calls.record(queued_calls.identified(message, stored.seq), stored.seq)
    return record if invocation is None else await _create(bus, record)


async def _create(bus: Bus, record: CallRecord) -> CallRecord:
    try:
        await _store_record(bus, record, expected_last=0)
    except Conflict:  # it has already ended, or another client submitted the same id concurrently
        known = await record_of(bus, record.id)
        return record if known is None else _check_digest(known[0], record.digest)
    return record


def request_digest(function: str, method: str, body: bytes, reference: BodyReference | None = None) -> str:
    """Return the digest that identifies a call: submissions under one id must have the same one."""
    digest = hashlib.sha256(f"{function}\0{method}\0".encode())
    digest.update(body if reference is None else reference.digest.encode())
    return digest.hexdigest()


async def _store_new(bus: Bus, message: InvocationMessage, body: bytes) -> Stored:
    """Store without a message id, which the server would keep in memory; so after an unknown outcome do not retry."""
    queue = subjects.async_queue(message.function, message.revision, message.priority, message.owner)
    try:
        return await bus.publish_stored(queue, pack(message, body))
    except BusUnavailable as error:
        hint = "the call may have been accepted; with an Idempotency-Key it could be sent again safely"
        raise type(error)(f"{error.message.rstrip('.')}: {hint}") from error


async def _store(bus: Bus, message: InvocationMessage, body: bytes) -> tuple[Stored, InvocationMessage]:
    """Store the call under its id; returns where, and the stored message: the first one submitted under that id."""
    queue = subjects.async_queue(message.function, message.revision, message.priority, message.owner)
    payload, msg_id = pack(message, body), message.id
    while True:
        stored = await bus.publish_stored(queue, payload, msg_id=msg_id)
        if not stored.duplicate:
            return stored, message
        existing = await streams.message_at(bus, subjects.ASYNC, stored.seq)
        if existing is not None:
            first, _ = unpack_invocation(existing.payload)
            if first.digest != message.digest:
                raise IdempotencyMismatch
            return stored, first
        if await read(bus, message.id) is not None:
            return stored, message
        # The call ended and its retention is over, but the stream still remembers the id: this is a new call.
        msg_id = f"{message.id}@{stored.seq}"


def _check_digest(known: CallRecord, digest: str) -> CallRecord:
    if known.digest and known.digest != digest:
        raise IdempotencyMismatch
    return known


async def record_of(bus: Bus, invocation: str) -> tuple[CallRecord, bytes] | None:
    """Like `read`, but also None for a queued call that has no record yet."""
    message = await streams.last_message(bus, subjects.RESULTS, subjects.any_result(invocation))
    return None if message is None else unpack_record(message.payload)


async def read(bus: Bus, invocation: str) -> tuple[CallRecord, bytes] | None:
    """Return the record of a submitted invocation and its result, which is empty unless it succeeded."""
    return await record_of(bus, invocation) or await read_without_record(bus, invocation)


async def read_without_record(bus: Bus, invocation: str) -> tuple[CallRecord, bytes] | None:
    """Like `read`, for an invocation that had no record just now."""
    if (queued := await queued_calls.find(bus, invocation)) is not None:
        return queued, b""
    return await record_of(bus, invocation)  # it may have ended between the two reads


async def retry(bus: Bus, message: InvocationMessage, body: bytes, queue_seq: int) -> None:
    """Record that the invocation waits for its next attempt, `message`, which is stored in ASYNC at `queue_seq`.

    If the invocation has ended meanwhile, it is removed from the queue and its dead letter is stored: the process that
    ended it may have died before that.
    """
    record = queued_calls.record(message, queue_seq)
    while True:
        last = await streams.last_message(bus, subjects.RESULTS, subjects.result(message.function, message.id))
        if last is not None and (known := unpack_record(last.payload)[0]).state.ended:
            await dead_letters.store(bus, known, message, body)
            await streams.delete_message(bus, subjects.ASYNC, queue_seq)
            return
        try:
            await _store_record(bus, record, expected_last=last.seq if last else 0)
        except Conflict:
            continue
        return


def blob_parts(bus: Bus, record: CallRecord) -> AsyncGenerator[bytes, None]:
    """Iterate over a result that is too large to be stored with its record. Raises ArtifactUnavailable."""
    return object_store.read(bus, subjects.RESULT_FILES, record.blob, owner=record.id)


async def end(bus: Bus, record: CallRecord, body: bytes = b"") -> bool:
    """Store how an invocation ended. Returns False, and changes nothing, if it had already ended."""
    return await _end(bus, record, body) is not None


async def _end(bus: Bus, record: CallRecord, body: bytes = b"") -> CallRecord | None:
    """Return the record as stored, or None if the invocation had already ended."""
    # Without a record, a lookup costs more than a Conflict. But a webhook job must not be stored for a refused end.
    is_first = queued_calls.may_lack_record(record) and record.webhook is None
    while True:
        last = None
        if not is_first:
            last = await streams.last_message(bus, subjects.RESULTS, subjects.result(record.function, record.id))
        is_first = False
        if last is not None:
            known, _ = unpack_record(last.payload)
            if known.state.ended:
                return None
            record = msgspec.structs.replace(
                record,
                submitted_at=known.submitted_at,
                queue_seq=known.queue_seq,
                digest=known.digest,
                keep_s=known.keep_s,
                attempts=record.attempts or known.attempts,
            )
        if record.webhook is not None:  # before the end itself: a crash in between must not lose the webhook
            job, msg_id = subjects.webhook(record.function), f"{record.id}.{record.ended_at}"
            await bus.publish_stored(job, record.id.encode(), msg_id=msg_id)
        try:
            await _store_record(bus, record, body, expected_last=last.seq if last else 0, ttl_s=record.keep_s)
        except Conflict:
            continue
        return record


async def _store_record(
    bus: Bus, record: CallRecord, body: bytes = b"", *, expected_last: int, ttl_s: float | None = None
) -> None:
    subject, headers = subjects.result(record.function, record.id), summary(record)
    await bus.publish_stored(subject, pack(record, body), expected_last=expected_last, ttl_s=ttl_s, headers=headers)


async def wait(bus: Bus, invocation: str, timeout_s: float) -> tuple[CallRecord, bytes]:
    """Return the record once it has ended, or as it is after `timeout_s`. Raises InvocationNotFound."""
    async with ChangeSignal(bus, subjects.any_result(invocation)) as changes:
        try:
            async with asyncio.timeout(timeout_s):
                while (result := await read(bus, invocation)) is not None and not result[0].state.ended:
                    await changes.next()
        except TimeoutError:
            result = await read(bus, invocation)
    if result is None:
        raise InvocationNotFound(f"there is no invocation {invocation}")
    return result


class CallCursor(NamedTuple):
    """Where a search continues: before these sequences of RESULTS and of ASYNC. 0: there are no older ones."""

    results: int
    queued: int


class CallPage(NamedTuple):
    """Records of calls that changed last, newest submission first. Older ones are before `before`, if there are any."""

    records: list[CallRecord]
    before: CallCursor | None


async def recent(
    bus: Bus,
    function: str,
    limit: int,
    matches: Callable[[CallRecord], bool] = lambda _: True,
    *,
    since: float = 0.0,
    until: float = math.inf,
    ended_only: bool = False,
) -> list[CallRecord]:
    """Return the first page of `search`."""
    page = await search(bus, function, limit, matches, since=since, until=until, ended_only=ended_only)
    return page.records


async def search(
    bus: Bus,
    function: str,
    limit: int,
    matches: Callable[[CallRecord], bool] = lambda _: True,
    *,
    since: float = 0.0,
    until: float = math.inf,
    ended_only: bool = False,
    before: CallCursor | None = None,
    budget: Callable[[], Callable[[], bool]] = lambda: lambda: False,
    is_rare: bool = False,
    index: stream_scan.Index | None = None,
) -> CallPage:
    """Return the submitted invocations of a function (``*``: of all) that match and changed last, before `before`;
    errors without traceback.

    Only those submitted at `since` (unix seconds) or later, and that changed last at `until` or earlier. `ended_only`:
    skip the queues, because `matches` accepts only ended calls. A search that finds few stops when the `budget` of
    either stream is over, or after 100,000 records: then its page has fewer than `limit`, and `before` leads on.
    `is_rare`: few calls match. `index`: knows which ones may."""
    seen: set[str] = set()

    def is_match(record: CallRecord) -> bool:
        return record.submitted_at >= since and _changed_at(record) <= until and matches(record)

    def is_recorded_match(record: CallRecord) -> bool:
        seen.add(record.id)
        return is_match(record)

    queued = queued_calls.QueuedPage([], None)
    if not ended_only and (before is None or before.queued):
        before_queued = None if before is None else before.queued
        queued = await queued_calls.search(
            bus, function, limit, is_match, since=since, before_seq=before_queued, is_over=budget()
        )
    recorded: header_summary.RecordPage[CallRecord] = header_summary.RecordPage([], None)
    if before is None or before.results:
        recorded = await header_summary.search(
            bus,
            subjects.RESULTS,
            subjects.result(function, "*"),
            _summary,
            limit=limit,
            matches=is_recorded_match,
            since=since - queued_calls.MAX_CLOCK_SKEW_S,
            before_seq=await _end_of_search(bus, before, until),
            is_over=budget(),
            is_rare=is_rare,
            is_common=function == "*",  # in addition to items of maps
            index=index,
        )
    waiting = [call for call in queued.calls if call.id not in seen]  # a call that has just ended is still in its queue
    if index is not None:  # not all of these records were read
        waiting = await _without_ended(bus, waiting)
    both = [(_changed_at(record), True, seq, record) for seq, record in recorded.records]
    both += [(_changed_at(call), False, call.queue_seq, call) for call in waiting]
    both.sort(key=operator.itemgetter(0), reverse=True)
    shown, left = both[:limit], both[limit:]
    following = CallCursor(
        _following([seq for _, is_recorded, seq, _ in left if is_recorded], recorded.before_seq),
        _following([seq for _, is_recorded, seq, _ in left if not is_recorded], queued.before_seq),
    )
    found = sorted((record for *_, record in shown), key=lambda record: record.submitted_at, reverse=True)
    return CallPage(found, following if any(following) else None)


async def _without_ended(bus: Bus, calls: list[CallRecord]) -> list[CallRecord]:
    places = (subjects.result(call.function, call.id) for call in calls)
    messages = await asyncio.gather(*(streams.last_message(bus, subjects.RESULTS, place) for place in places))
    records = [None if message is None else unpack_record(message.payload)[0] for message in messages]
    pairs = zip(calls, records, strict=True)
    return [call for call, record in pairs if record is None or not record.state.ended]


def _following(left_out: list[int], before_seq: int | None) -> int:
    """Return where a stream continues: with the newest message that was found and left out, or behind the search."""
    return max(left_out) + 1 if left_out else before_seq or 0


async def _end_of_search(bus: Bus, before: CallCursor | None, until: float) -> int | None:
    ends = [] if before is None else [before.results]
    if until != math.inf:
        latest = until + queued_calls.MAX_CLOCK_SKEW_S
        ends.append(await streams.first_sequence_at(bus, subjects.RESULTS, latest))
    return min(ends, default=None)


def _changed_at(record: CallRecord) -> float:
    return record.ended_at or (record.attempts[-1].ended_at if record.attempts else record.submitted_at)


async def search_items(
    bus: Bus,
    function: str,
    map_id: str,
    limit: int,
    matches: Callable[[CallRecord], bool],
    *,
    before_seq: int | None = None,
    is_over: Callable[[], bool] = lambda: False,
) -> header_summary.RecordPage[CallRecord]:
    """Return the items of a map that have a record and match, the most recently changed first."""
    results = subjects.map_results(function, map_id)
    return await header_summary.search(
        bus, subjects.RESULTS, results, _summary, limit=limit, matches=matches, before_seq=before_seq, is_over=is_over
    )


async def retrying_items(bus: Bus, function: str, map_id: str, *, limit: int = SCAN_LIMIT) -> list[CallRecord]:
    """Return the items of a map that failed and will be retried, from its last 100,000 records."""
    results = subjects.map_results(function, map_id)
    return await newest(
        bus, subjects.RESULTS, results, _summary, limit=limit, matches=lambda record: not record.state.ended
    )


async def locate(bus: Bus, invocation: str, *, within_s: float = _LOCATE_TIMEOUT_S) -> CallLocation | None:
    """Return which worker runs an invocation now. None if no runner responds in time: a runner may be busy."""
    try:
        response = await bus.request(subjects.WHEREABOUTS, encode(LocateCall(invocation)), timeout_s=within_s)
    except BusUnavailable as error:
        if bus.connected or isinstance(error, NoResponders):
            return None
        raise
    return _location.decode(response.payload)


async def running_calls(bus: Bus) -> dict[str, CallLocation]:
    """Return every submitted invocation that runs now, by id."""
    holders: dict[str, CallLocation] = {}

    def on_response(message: Message) -> None:
        if not message.status:
            holder = _location.decode(message.payload)
            holders[holder.invocation] = holder

    inbox = bus.new_inbox(for_processes=True)
    subscription = bus.subscribe(inbox, on_response)
    try:
        bus.publish(subjects.WHEREABOUTS, encode(LocateCall("")), reply=inbox)
        await asyncio.sleep(_LOCATE_TIMEOUT_S)
    finally:
        subscription.unsubscribe()
    return holders


async def cancel(bus: Bus, record: CallRecord, now: float) -> bool:
    """End a submitted invocation as cancelled. Returns False if it had already ended.

    A call that is already cancelled is still removed from its queue and cancelled at its runner: the process that
    cancelled it may have lost the bus before that. Raises BusUnavailable if the runner may not have received the
    cancellation.
    """
    cancelled = await _end(bus, msgspec.structs.replace(record, state=InvocationState.CANCELLED, ended_at=now))
    if cancelled is None and record.state is not InvocationState.CANCELLED:
        return False
    known = cancelled or record
    if known.attempts:
        await checkpoints.drop(bus, known.id)
    if known.queue_seq:
        await streams.delete_message(bus, subjects.ASYNC, known.queue_seq)
    await publish_cancel(bus, known.id)
    return cancelled is not None


async def publish_cancel(bus: Bus, invocation: str) -> None:
    """Cancel an invocation, or all items of a map, at their runners. Raises BusUnavailable if that may have failed."""
    bus.publish(subjects.CANCELS, encode(Cancel(invocation)))
    await bus.flush()
