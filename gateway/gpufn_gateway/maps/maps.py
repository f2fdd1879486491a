"""Maps: accept chunks of items, follow their outcomes, cancel the items that have not ended."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import msgspec

from gpufn_core.domain.invocation import InvocationState
from gpufn_core.encoding import media
from gpufn_core.errors import Conflict, InvalidInput, InvocationCancelled, MapNotFound, QueueFull
from gpufn_core.ids import is_client_id, is_invocation_id, item_id, item_of
from gpufn_core.protocol import subjects
from gpufn_core.protocol.records import CallRecord, MapEntry, unpack_record
from gpufn_gateway.auth.access import Principal
from gpufn_gateway.calls.arguments import Arguments
from gpufn_gateway.calls.call_bodies import CallBodies
from gpufn_gateway.calls.prepare import Calls
from gpufn_gateway.calls.prepared_call import PreparedCall
from gpufn_gateway.functions.target import Target
from gpufn_gateway.http import negotiation
from gpufn_gateway.http.body_reader import Receive
from gpufn_gateway.maps import chunks, map_views
from gpufn_gateway.maps.failed_items import FailedItems
from gpufn_gateway.maps.map_closer import has_ended
from gpufn_gateway.maps.outcomes import Cursor, Outcomes
from gpufn_gateway.problems import Headers, KeyLimitExceeded
from gpufn_gateway.submitted import call_views
from gpufn_gateway.submitted.submit import WEBHOOK
from gpufn_gateway.traces.call_spans import Called
from gpufn_gateway.webhooks.address_policy import AddressPolicy, webhook_of
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import streams
from gpufn_platform.bus.storage.async_reader import Follower
from gpufn_platform.queue import map_log, queue_position, queued_calls
from gpufn_platform.queue.map_log import Items, Logged
from gpufn_platform.queue.records import call_records

_MAX_CACHED: Final = 1024
_BATCHES_AT_ONCE: Final = 16  # a stream allows 50 batches, from all gateways together
_CANCELS_AT_ONCE: Final = 64  # each message is read with its arguments
_SEARCH_S: Final = 0.4
_RECHECK_S: Final = 1.0  # recheck whether a map was closed: its log entry is published before it is stored


class ChunkOutOfOrder(Conflict):
    """The items do not follow the items of this map that were accepted before."""

    retryable = False


class Maps:
    def __init__(self, bus: Bus, calls: Calls, bodies: CallBodies, addresses: AddressPolicy) -> None:
        self._bus = bus
        self._calls = calls
        self._bodies = bodies
        self._addresses = addresses
        self._failures = FailedItems(bus, calls.clock)
        self._newest: dict[str, Logged] = {}  # by map, as stored here; other gateways may have stored newer ones
        self._batches = asyncio.Semaphore(_BATCHES_AT_ONCE)

    async def accept(
        self, name: str, map_id: str, first: int, headers: dict[bytes, bytes], receive: Receive, *, is_last: bool
    ) -> tuple[dict[str, Any], Headers]:
        """Store the items from number `first` on; `is_last` closes the map. A repeated chunk is accepted only once.

        Raises ChunkOutOfOrder, InvocationCancelled, QueueFull, KeyLimitExceeded.
        """
        if not is_client_id(map_id):
            raise InvalidInput("a map id must be a ULID: 26 characters of 0-9 and a-z, the first 0 to 7", field="id")

        async def read(_: str, target: Target, headers: dict[bytes, bytes], receive: Receive) -> Arguments:
            encoding = chunks.encoding_of(headers.get(b"content-type"))
            body = await self._bodies.receive_chunk(headers, receive)
            try:
                if encoding == media.JSON:
                    chunks.check(chunks.split(encoding, self._bodies.view(body)), target.signature, first)
            except BaseException:
                self._bodies.discard(body)
                raise
            return Arguments(encoding, negotiation.result_encoding(headers.get(b"accept")), body)

        call = await self._calls.prepare(name, headers, receive, waiting=False, read=read, key=map_id)
        if self._calls.tracing is not None:
            call = msgspec.structs.replace(call, trace=self._calls.tracing.begin_map(call.trace, map_id))
        try:
            return await self._accept(call, map_id, first, headers, is_last=is_last)
        finally:
            self._calls.discard(call)

    async def _accept(
        self, call: PreparedCall, map_id: str, first: int, headers: dict[bytes, bytes], *, is_last: bool
    ) -> tuple[dict[str, Any], Headers]:
        bodies = chunks.split(call.content_type, self._bodies.view(call.body))
        inline_bytes = self._bodies.max_queued_bytes
        chunks.check_sizes(
            bodies, first, inline_bytes, max_total_bytes=self._bodies.limit_bytes, max_item_bytes=self._bodies.max_bytes
        )
        items = Items(
            bodies,
            call.content_type,
            call.accept,
            call.submit_deadline,
            call.trace,
            webhook_of(headers.get(WEBHOOK), call.principal.owner, self._addresses),
            call.priority,
            call.principal.owner,
        )
        newest = self._newest.get(map_id)
        if newest is None or newest.entry.accepted != first:
            newest = await map_log.last(self._bus, map_id)
        while True:
            if newest is not None and _is_repeat(newest.entry, call.target, first, items, is_last):
                break
            _check_order(None if newest is None else newest.entry, call.target, first)
            try:
                async with self._calls.queueing(call.principal, call.target, len(items.bodies)), self._batches:
                    if not items.references:
                        references = await self._calls.store_large_items(
                            bodies, lambda index: item_id(map_id, first + index), inline_bytes
                        )
                        items = items._replace(references=references)
                    target = map_log.Target(call.target.revision, call.target.method.name)
                    newest = await map_log.append(
                        self._bus, newest, map_id, target, items, now=call.now, closes=is_last
                    )
                self._trace(call, newest.entry)
                break
            except QueueFull:
                raise self._calls.queue_full(call.target) from None
            except KeyLimitExceeded as error:
                self._calls.telemetry.of(call.target.name).count_refusal(error.code)
                raise
            except Conflict:
                newest = await map_log.last(self._bus, map_id)
        self._remember(newest)
        return map_views.accepted_view(newest.entry), self._calls.limits(call)

    def _trace(self, call: PreparedCall, chunk: MapEntry) -> None:
        if self._calls.tracing is not None:
            called = Called(chunk.id, chunk.function, chunk.revision, chunk.method, call.trace, call.now)
            self._calls.tracing.mapped(called, chunk.first, chunk.accepted - chunk.first)

    async def status(self, map_id: str, principal: Principal) -> dict[str, Any]:
        entry = (await self._read(map_id, principal, allow_read_scope=True)).entry
        ended = await map_log.count_ended(self._bus, entry)
        return map_views.status(entry, ended, await self._failed(entry, ended))

    async def recent(self, function: str, limit: int, is_listed: Callable[[str], bool]) -> list[dict[str, Any]]:
        """List the maps of a function (``*`` for all listed ones), newest first."""
        entries = await map_log.recent(self._bus, function, limit, is_listed)
        counts = await asyncio.gather(*(map_log.count_ended(self._bus, entry) for entry in entries))
        failed = await self._failures.by_map(function) if entries else Counter()
        return [map_views.status(entry, ended, failed[entry.id]) for entry, ended in zip(entries, counts, strict=True)]

    async def _failed(self, entry: MapEntry, ended: int) -> int:
        if not (ended or entry.is_ended):  # the records of an ended map may have expired
            return 0
        return (await self._failures.by_map(entry.function))[entry.id]

    async def items(
        self, map_id: str, principal: Principal, limit: int, state: InvocationState | None, before_seq: int | None
    ) -> tuple[list[dict[str, Any]], int | None]:
        """Return the items that changed last in `state`, the last first, and where older ones are. After half a second
        a search answers with what it has found. Items that no runner has taken yet have no record."""
        entry = (await self._read(map_id, principal, allow_read_scope=True)).entry
        over_at = self._calls.clock.monotonic() + _SEARCH_S
        page = await call_records.search_items(
            self._bus,
            entry.function,
            map_id,
            limit,
            lambda record: state in (None, record.state),
            before_seq=before_seq,
            is_over=lambda: self._calls.clock.monotonic() >= over_at,
        )
        return [call_views.status(record) for _, record in page.records], page.before_seq

    async def outcomes(
        self, map_id: str, principal: Principal, after: Cursor, encoding: Outcomes
    ) -> AsyncIterator[bytes]:
        """Yield the outcomes of the items after `after`, each once, as they arrive.

        The iterator ends when the map is closed and all items have ended.
        """
        return self._outcomes(await self._read(map_id, principal), after, encoding)

    async def _outcomes(self, newest: Logged, after: Cursor, encoding: Outcomes) -> AsyncIterator[bytes]:
        function, map_id, ended = newest.entry.function, newest.entry.id, after.ended
        results = subjects.map_results(function, map_id)
        async with contextlib.AsyncExitStack() as stack:
            follower = await stack.enter_async_context(Follower(self._bus, subjects.RESULTS, results, after.seq + 1))
            log = self._bus.subscribe(subjects.map_log(function, map_id), lambda _: follower.wake())
            stack.callback(log.unsubscribe)
            while not await self._is_complete(newest, ended, follower):
                lines = []
                for message in await follower.next_batch(_RECHECK_S):
                    record, body = unpack_record(message.payload)
                    if record.state.ended:
                        ended += 1
                        cursor = Cursor(message.seq, ended)
                        lines.append(encoding.outcome(subjects.item_index(message.subject), cursor, record, body))
                if lines:
                    yield b"".join(lines)
                if ended >= newest.entry.accepted or not lines:  # records may have expired, and the map have ended
                    newest = await map_log.last(self._bus, map_id) or newest

    async def _is_complete(self, newest: Logged, ended: int, follower: Follower) -> bool:
        """True if a reader whose cursor counts `ended` outcomes has received all of them."""
        entry = newest.entry
        if entry.is_ended:
            return ended >= entry.accepted or await follower.is_drained()  # missing records have expired
        if ended < entry.accepted or not (entry.is_closed or entry.is_cancelled):
            return False
        if await has_ended(self._bus, newest):  # the client may have sent the cursor of another map
            await map_log.end(self._bus, newest)
        return True

    async def cancel(self, map_id: str, principal: Principal) -> tuple[dict[str, Any], bool]:
        """Cancel a map. Return its status, and False if all items had already ended.

        Repeating the request completes a cancellation that was interrupted.
        """
        newest = await self._read(map_id, principal)
        while not (newest.entry.is_cancelled or newest.entry.is_ended):
            try:
                newest = await map_log.cancel(self._bus, newest)
            except Conflict:
                newest = await self._read(map_id, principal)
        self._newest.pop(map_id, None)
        cancelled = 0
        if not newest.entry.is_ended:
            cancelled = await self._cancel_items(newest.entry)
            await map_log.end(self._bus, newest)
            newest = await self._read(map_id, principal)
        return await self.status(map_id, principal), cancelled > 0

    async def _cancel_items(self, entry: MapEntry) -> int:
        """Cancel the items, last first, since runners take them from the other end. Return how many.

        An item that is in no queue has ended (its record may have expired), or waits for a retry.
        """
        results = subjects.map_results(entry.function, entry.id)
        recorded = await streams.messages_per_subject(self._bus, subjects.RESULTS, results)
        recorded_indexes = {subjects.item_index(subject) for subject in recorded}
        log = await map_log.entries(self._bus, entry)
        places = (seq for index, seq in map_log.item_sequences(log) if index not in recorded_indexes)
        cancelled = 0
        while group := list(itertools.islice(places, _CANCELS_AT_ONCE)):
            calls = await asyncio.gather(*(queued_calls.at(self._bus, seq) for seq in group))
            cancelled += await self._cancel_all([call for call in calls if call is not None])
        if log[0].entry.first:
            cancelled += await self._cancel_older_items(log[0])
        await call_records.publish_cancel(self._bus, entry.id)
        if not entry.is_tried_once:
            waiting = await call_records.retrying_items(self._bus, entry.function, entry.id)
            cancelled += await self._cancel_all(waiting)
        return cancelled

    async def _cancel_older_items(self, oldest: Logged) -> int:
        """Cancel items from before `oldest`, whose log entries have expired. Few of them are still queued."""
        end, entry = oldest
        cancelled, seq, all_queues = 0, 1, subjects.async_queues(entry.function)
        while seq < end and (batch := await queue_position.queued(self._bus, subjects.ASYNC, all_queues, seq)):
            calls = [queued_calls.record(message, place) for place, message in batch if place < end]
            own_calls = [call for call in calls if (item := item_of(call.id)) is not None and item[0] == entry.id]
            cancelled += await self._cancel_all(own_calls)
            seq = batch[-1][0] + 1
        return cancelled

    async def _cancel_all(self, waiting: list[CallRecord]) -> int:
        now = self._calls.clock.time()
        return sum(await asyncio.gather(*(call_records.cancel(self._bus, record, now) for record in waiting)))

    async def _read(self, map_id: str, principal: Principal, *, allow_read_scope: bool = False) -> Logged:
        newest = await map_log.last(self._bus, map_id) if is_invocation_id(map_id) else None
        if newest is None:
            raise MapNotFound
        function = newest.entry.function
        principal.require_visible(function, MapNotFound())
        (principal.require_invoke_or_read if allow_read_scope else principal.require_invoke)(function)
        return newest

    def _remember(self, newest: Logged) -> None:
        self._newest.pop(newest.entry.id, None)
        self._newest[newest.entry.id] = newest
        if len(self._newest) > _MAX_CACHED:
            del self._newest[next(iter(self._newest))]


def _is_repeat(entry: MapEntry, target: Target, first: int, items: Items, is_last: bool) -> bool:
    """True if this chunk was accepted before and the client repeats it."""
    is_same_place = (entry.first, entry.accepted) == (first, first + len(items.bodies))
    is_same_function = (entry.function, entry.method) == (target.name, target.method.name)
    return is_same_place and is_same_function and entry.is_closed is is_last and entry.digest == items.digest


def _check_order(entry: MapEntry | None, target: Target, first: int) -> None:
    """Raises ChunkOutOfOrder or InvocationCancelled unless the items from `first` on may be appended."""
    if entry is None:
        if first:
            raise ChunkOutOfOrder("No items of this map were accepted yet: send its items from number 0 on.")
        return
    if (entry.function, entry.method) != (target.name, target.method.name):
        raise ChunkOutOfOrder(f"Map {entry.id} belongs to another function or method: choose another id.")
    if entry.is_cancelled:
        raise InvocationCancelled(f"Map {entry.id} was cancelled.")
    if entry.is_closed:
        raise ChunkOutOfOrder(f"Map {entry.id} was closed after {entry.accepted:,} items: choose another id.")
    if entry.accepted != first:
        raise ChunkOutOfOrder(
            f"{entry.accepted:,} items of this map were accepted: continue with number {entry.accepted}."
        )
