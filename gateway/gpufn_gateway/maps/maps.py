"""Maps: their chunks are accepted, their outcomes followed, and what has not ended is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from typing import Any, Final

from gpufn_core.encoding import media
from gpufn_core.errors import Conflict, InvalidInput, InvocationCancelled, MapNotFound, QueueFull
from gpufn_core.ids import is_invocation_id, item_id, item_of
from gpufn_core.protocol import subjects
from gpufn_core.protocol.records import CallRecord, MapEntry, unpack_record
from gpufn_gateway.auth.access import READ, Principal
from gpufn_gateway.calls.call_bodies import CallBodies, CallBody
from gpufn_gateway.calls.prepare import Arguments, Calls, PreparedCall
from gpufn_gateway.functions.registry import Target
from gpufn_gateway.http import negotiation
from gpufn_gateway.http.body_reader import Receive
from gpufn_gateway.maps import chunks, map_views
from gpufn_gateway.maps.map_closer import has_ended
from gpufn_gateway.maps.outcomes import Cursor, Outcomes
from gpufn_gateway.problems import Headers, Limited
from gpufn_gateway.submitted.submit import WEBHOOK
from gpufn_gateway.webhooks.address_policy import Addresses, webhook_of
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import streams
from gpufn_platform.bus.storage.async_reader import Follower
from gpufn_platform.queue import call_records, map_log, queue_position, queued_calls
from gpufn_platform.queue.map_log import Items, Logged

_MOST_KNOWN: Final = 1024
_BATCHES_AT_ONCE: Final = 16  # a stream takes 50, of all gateways together
_CANCELS_AT_ONCE: Final = 64  # each is read with its arguments
_LOOK_AGAIN_S: Final = 1.0  # whether a map was closed: its entry comes to us before it is stored


class OutOfStep(Conflict):
    """The items do not follow those that were accepted of this map."""

    retryable = False


class Maps:
    def __init__(self, bus: Bus, calls: Calls, bodies: CallBodies, addresses: Addresses) -> None:
        self._bus = bus
        self._calls = calls
        self._bodies = bodies
        self._addresses = addresses
        self._known: dict[str, Logged] = {}  # the newest entries that this gateway stored; another may have a newer one
        self._batches = asyncio.Semaphore(_BATCHES_AT_ONCE)

    async def accept(
        self, name: str, map_id: str, first: int, headers: dict[bytes, bytes], receive: Receive, *, closes: bool
    ) -> tuple[dict[str, Any], Headers]:
        """Store items `first` and those that follow; `closes`: they are the last. A chunk that comes again is the same
        one. Raises OutOfStep, InvocationCancelled, QueueFull, Limited."""
        if not is_invocation_id(map_id):
            raise InvalidInput("a map's id is a ULID: 26 characters of 0-9 and a-z", field="id")

        async def read(_: str, target: Target, headers: dict[bytes, bytes], receive: Receive) -> Arguments:
            encoding = chunks.encoding_of(headers.get(b"content-type"))
            body = await self._bodies.take_chunk(headers, receive, function=target.name)
            try:
                if encoding == media.JSON:
                    chunks.check(chunks.split(encoding, self._bodies.view(body)), target.signature, first)
            except BaseException:
                self._bodies.discard(body)
                raise
            return Arguments(encoding, negotiation.wanted(headers.get(b"accept")), body)

        call = await self._calls.prepare(name, headers, receive, waits=False, read=read)
        try:
            return await self._accept(call, map_id, first, headers, closes=closes)
        finally:
            self._calls.discard(call)

    async def _accept(
        self, call: PreparedCall, map_id: str, first: int, headers: dict[bytes, bytes], *, closes: bool
    ) -> tuple[dict[str, Any], Headers]:
        bodies = chunks.split(call.content_type, self._bodies.view(CallBody(call.body, call.parcel)))
        most_bytes = self._bodies.queued_bytes
        chunks.check_sizes(
            bodies, first, most_bytes, together=self._bodies.limit_bytes, each=self._bodies.largest_bytes
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
        known = self._known.get(map_id)
        if known is None or known.entry.accepted != first:
            known = await map_log.last(self._bus, map_id)
        while True:
            if known is not None and _repeats(known.entry, call.target, first, items, closes):
                break
            _check(None if known is None else known.entry, call.target, first)
            try:
                async with self._calls.queueing(call, len(items.bodies)), self._batches:
                    if not items.references:
                        stored = await self._calls.stored_items(
                            bodies, lambda place: item_id(map_id, first + place), most_bytes
                        )
                        items = items._replace(references=stored)
                    target = map_log.Target(call.target.revision, call.target.method.name)
                    known = await map_log.append(self._bus, known, map_id, target, items, now=call.now, closes=closes)
                break
            except QueueFull:
                raise self._calls.queue_full(call.target) from None
            except Limited as error:
                self._calls.telemetry.of(call.target.name).refused(error.code)
                raise
            except Conflict:
                known = await map_log.last(self._bus, map_id)
        self._remember(known)
        return map_views.accepted(known.entry), self._calls.limits(call)

    async def status(self, map_id: str, principal: Principal) -> dict[str, Any]:
        entry = (await self._read(map_id, principal, may_read=True)).entry
        return map_views.status(entry, await map_log.count_ended(self._bus, entry))

    async def recent(self, function: str, limit: int) -> list[dict[str, Any]]:
        """The maps of a function (``*``: of all), newest first."""
        found = await map_log.recent(self._bus, function, limit)
        counts = await asyncio.gather(*(map_log.count_ended(self._bus, entry) for entry in found))
        return [map_views.status(entry, ended) for entry, ended in zip(found, counts, strict=True)]

    async def outcomes(
        self, map_id: str, principal: Principal, after: Cursor, encoding: Outcomes
    ) -> AsyncIterator[bytes]:
        """The ends of its items behind `after`, each once, as they come. It ends when the map is closed and all have
        ended."""
        return self._outcomes(await self._read(map_id, principal), after, encoding)

    async def _outcomes(self, known: Logged, after: Cursor, encoding: Outcomes) -> AsyncIterator[bytes]:
        function, map_id, ended = known.entry.function, known.entry.id, after.ended
        results = subjects.map_results(function, map_id)
        async with contextlib.AsyncExitStack() as stack:
            ends = Follower(self._bus, subjects.RESULTS, results, after.seq + 1)
            follower = await stack.enter_async_context(ends)
            log = self._bus.subscribe(subjects.map_log(function, map_id), lambda _: follower.wake())
            stack.callback(log.unsubscribe)
            while not await self._is_over(known, ended, follower):
                written = []
                for message in await follower.some(_LOOK_AGAIN_S):
                    record, body = unpack_record(message.payload)
                    if record.state.ended:
                        ended += 1
                        at = Cursor(message.seq, ended)
                        written.append(encoding.outcome(subjects.item_index(message.subject), at, record, body))
                if written:
                    yield b"".join(written)
                if ended >= known.entry.accepted or not written:  # some may be forgotten, and the map noted as ended
                    known = await map_log.last(self._bus, map_id) or known

    async def _is_over(self, known: Logged, ended: int, follower: Follower) -> bool:
        """Whether a reader of `ended` ends has all, by his own word."""
        entry = known.entry
        if entry.is_ended:
            return ended >= entry.accepted or await follower.is_drained()  # what is missing was forgotten
        if ended < entry.accepted or not (entry.is_closed or entry.is_cancelled):
            return False
        if await has_ended(self._bus, known):  # his cursor may have been another map's
            await map_log.end(self._bus, known)
        return True

    async def cancel(self, map_id: str, principal: Principal) -> tuple[dict[str, Any], bool]:
        """Its status then; False when all had ended already. Asked for again, it does what is left to do."""
        known = await self._read(map_id, principal)
        while not (known.entry.is_cancelled or known.entry.is_ended):
            try:
                known = await map_log.cancel(self._bus, known)
            except Conflict:
                known = await self._read(map_id, principal)
        self._known.pop(map_id, None)
        cancelled = 0
        if not known.entry.is_ended:
            cancelled = await self._cancel_items(known.entry)
            await map_log.end(self._bus, known)
            known = await self._read(map_id, principal)
        return map_views.status(known.entry, await map_log.count_ended(self._bus, known.entry)), cancelled > 0

    async def _cancel_items(self, entry: MapEntry) -> int:
        """The last first: runners take them from the other end. Returns how many. What is in no queue has ended, though
        its record may be forgotten; or it waits for another attempt."""
        results = subjects.map_results(entry.function, entry.id)
        recorded = await streams.messages_per_subject(self._bus, subjects.RESULTS, results)
        with_record = {subjects.item_index(subject) for subject in recorded}
        log = await map_log.entries(self._bus, entry)
        places = (seq for index, seq in map_log.places(log) if index not in with_record)
        cancelled = 0
        while group := list(itertools.islice(places, _CANCELS_AT_ONCE)):
            found = await asyncio.gather(*(queued_calls.at(self._bus, seq) for seq in group))
            cancelled += await self._cancel_all([call for call in found if call is not None])
        if log[0].entry.first:
            cancelled += await self._cancel_before(log[0])
        await call_records.tell_cancelled(self._bus, entry.id)
        if not entry.is_tried_once:
            waiting = await call_records.waiting_of_map(self._bus, entry.function, entry.id)
            cancelled += await self._cancel_all(waiting)
        return cancelled

    async def _cancel_before(self, known: Logged) -> int:
        """Items whose places are forgotten, those before `known`: in the queues of their function are few of them."""
        end, entry = known
        cancelled, seq, all_queues = 0, 1, subjects.async_queues(entry.function)
        while seq < end and (batch := await queue_position.queued(self._bus, subjects.ASYNC, all_queues, seq)):
            calls = [queued_calls.record(message, at) for at, message in batch if at < end]
            ours = [call for call in calls if (item := item_of(call.id)) is not None and item[0] == entry.id]
            cancelled += await self._cancel_all(ours)
            seq = batch[-1][0] + 1
        return cancelled

    async def _cancel_all(self, waiting: list[CallRecord]) -> int:
        now = self._calls.clock.time()
        return sum(await asyncio.gather(*(call_records.cancel(self._bus, record, now) for record in waiting)))

    async def _read(self, map_id: str, principal: Principal, *, may_read: bool = False) -> Logged:
        found = await map_log.last(self._bus, map_id) if is_invocation_id(map_id) else None
        if found is None:
            raise MapNotFound
        if not (may_read and principal.may(READ)):
            principal.need_invoke(found.entry.function)
        return found

    def _remember(self, newest: Logged) -> None:
        self._known.pop(newest.entry.id, None)
        self._known[newest.entry.id] = newest
        if len(self._known) > _MOST_KNOWN:
            del self._known[next(iter(self._known))]


def _repeats(entry: MapEntry, target: Target, first: int, items: Items, closes: bool) -> bool:
    """This chunk was accepted: its answer was lost."""
    is_same_place = (entry.first, entry.accepted) == (first, first + len(items.bodies))
    is_of_same = (entry.function, entry.method) == (target.name, target.method.name)
    return is_same_place and is_of_same and entry.is_closed is closes and entry.digest == items.digest


def _check(entry: MapEntry | None, target: Target, first: int) -> None:
    """Whether the items from `first` on may be appended."""
    if entry is None:
        if first:
            raise OutOfStep("Nothing was accepted of this map: send its items from number 0 on.")
        return
    if (entry.function, entry.method) != (target.name, target.method.name):
        raise OutOfStep(f"Map {entry.id} is of another function or method: choose another id.")
    if entry.is_cancelled:
        raise InvocationCancelled(f"Map {entry.id} was cancelled.")
    if entry.is_closed:
        raise OutOfStep(f"Map {entry.id} was closed behind {entry.accepted:,} items: choose another id.")
    if entry.accepted != first:
        raise OutOfStep(f"{entry.accepted:,} items were accepted of this map: go on with number {entry.accepted}.")
