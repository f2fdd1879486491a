"""The audit log on the bus: an append-only stream whose records form a hash chain.

Several gateways append. Each record is stored only if it follows the last stored record, which the server checks. After
a lost race the record gets the next number and the hash of the winner. A gateway appends one record at a time, in
order.

The stream refuses deletion and purges. The server removes records older than its `max_age`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Final

import msgspec

from gpufn_core.domain.audit import START, AuditRecord
from gpufn_core.errors import AuditLogUnavailable, Conflict, PlatformError
from gpufn_core.protocol import subjects
from gpufn_gateway.audit.refusals import Refusals, Refused
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import streams
from gpufn_platform.process.clock import Clock

log = logging.getLogger(__name__)

WAIT_S: Final = 5.0  # that a response waits for its record
_RETRY_S: Final = 0.5
_MAX_WAITING: Final = 10_000  # records; beyond it, administrative requests are refused

_decode = msgspec.json.Decoder(AuditRecord).decode


class AuditLog:
    def __init__(self, bus: Bus, clock: Clock) -> None:
        self._bus = bus
        self._clock = clock
        self._waiting: deque[tuple[dict[str, Any], asyncio.Future[AuditRecord]]] = deque()
        self._has_waiting = asyncio.Event()
        self._last: AuditRecord | None = None
        self._is_failing = False
        self.failures = 0  # writes that failed
        self._refusals = Refusals()

    @property
    def waiting(self) -> int:
        """The number of records that are not stored yet."""
        return len(self._waiting)

    def check_writable(self) -> None:
        """Raises AuditLogUnavailable if records cannot be stored now: an action without a record must not happen."""
        if self._is_failing or not self._bus.connected or len(self._waiting) >= _MAX_WAITING:
            raise AuditLogUnavailable

    async def append(self, **fields: Any) -> None:
        """Append a record. Return when it is stored; after `WAIT_S`, return and keep trying."""
        future = self._enqueue(fields)
        try:
            async with asyncio.timeout(WAIT_S):
                await asyncio.shield(future)
        except TimeoutError:
            log.error("an audit record is not stored yet: %s", msgspec.json.encode(fields).decode())

    def refuse(self, refused: Refused, request_id: str) -> None:
        """Record a refused request without waiting for it."""
        if self._refusals.add(refused, self._clock.monotonic()) and len(self._waiting) < _MAX_WAITING:
            self._enqueue(msgspec.structs.asdict(refused) | {"request_id": request_id})

    def _enqueue(self, fields: dict[str, Any]) -> asyncio.Future[AuditRecord]:
        future: asyncio.Future[AuditRecord] = asyncio.get_running_loop().create_future()
        details = dict(fields.get("details", {}))  # a later change by the caller would change the record's hash
        self._waiting.append(({"at": self._clock.time(), **fields, "details": details}, future))
        self._has_waiting.set()
        return future

    async def run(self) -> None:
        """Store the records in order, until cancelled."""
        while True:
            try:
                async with asyncio.timeout(1.0):
                    await self._has_waiting.wait()
            except TimeoutError:
                pass
            for refused, count in self._refusals.ended(self._clock.monotonic()):
                self._enqueue(msgspec.structs.asdict(refused) | {"count": count})
            while self._waiting:
                fields, future = self._waiting[0]
                try:
                    record = await self._store(fields)
                except PlatformError as error:
                    if not self._is_failing:
                        log.warning("the audit log cannot be written; retrying: %s", error)
                    self._is_failing = True
                    self.failures += 1
                    await asyncio.sleep(_RETRY_S)
                    continue
                self._is_failing = False
                self._waiting.popleft()
                if not future.done():
                    future.set_result(record)
            self._has_waiting.clear()

    async def _store(self, fields: dict[str, Any]) -> AuditRecord:
        while True:
            last = self._last or await self.last()
            seq, previous = (1, START) if last is None else (last.seq + 1, last.hash)
            record = AuditRecord(seq=seq, previous=previous, **fields)
            # If the outcome of an attempt is unknown, the id keeps the retry from storing the record twice.
            msg_id = f"audit-{record.hash}"
            try:
                stored = await self._bus.publish_stored(
                    subjects.AUDIT_FILTER, record.canonical(), msg_id=msg_id, expected_last=seq - 1
                )
            except Conflict:  # another gateway appended a record
                self._last = None
                continue
            except PlatformError:
                self._last = None
                raise
            if stored.seq != seq:
                log.error("audit record %d is stored at %d: the stream was changed", seq, stored.seq)
            self._last = record
            return record

    async def last(self) -> AuditRecord | None:
        """Return the last record, or None if there is none."""
        message = await streams.last_message(self._bus, subjects.AUDIT, subjects.AUDIT_FILTER)
        return None if message is None else _decode(message.payload)

    async def records(self, after: int, most: int) -> AsyncIterator[bytes]:
        """Yield up to `most` stored records after the number `after`, as stored."""
        seq = after + 1
        while most > 0:
            messages = await streams.batch_from(
                self._bus, subjects.AUDIT, subjects.AUDIT_FILTER, seq, most=most, max_bytes=1 << 20
            )
            if not messages:
                return
            for message in messages:
                yield message.payload
            most -= len(messages)
            seq = messages[-1].seq + 1
