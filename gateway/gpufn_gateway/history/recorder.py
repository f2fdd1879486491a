"""Publishes the history if this gateway leads, and keeps this gateway's copy of the stream.

This is not on the path of a call: a full disk or an unreachable bus stops the history, which resumes later.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar

from gpufn_core.errors import Conflict, HistoryUnavailable, PlatformError, RateLimited
from gpufn_core.protocol import subjects
from gpufn_gateway.history.blocks import HOUR, MINUTE, SECONDS_10, Event, encode_blocks, encode_event, subject_of
from gpufn_gateway.history.collector import OVERVIEW, with_overview
from gpufn_gateway.history.fields import Field
from gpufn_gateway.history.index import MAX_EVENTS, Index, is_damage
from gpufn_gateway.history.revisions import collapse
from gpufn_gateway.history.sampler import Sampler, Slot
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import streams
from gpufn_platform.process.clock import Clock

log = logging.getLogger(__name__)

T = TypeVar("T")

KEPT_MESSAGES: Final = {SECONDS_10: 720, MINUTE: 2_880, HOUR: 720}  # two hours, two days, thirty days
MAX_STREAM_BYTES: Final = 14 << 20
_ROLL_UP_AFTER_S: Final = 20.0
_FLUSH_S: Final = 2.0
_RECENT_SLOTS: Final = 30
_PRUNE_S: Final = 600.0
_BATCH: Final = 64
_BATCH_BYTES: Final = 4 << 20
_MAX_QUERIES: Final = 16


class Recorder:
    """`leads` returns whether this gateway's controller leads. `folder` has the files of the copies."""

    def __init__(self, bus: Bus, sampler: Sampler, clock: Clock, *, name: str, folder: Path) -> None:
        self._bus = bus
        self._sampler = sampler
        self._clock = clock
        self._name = name
        self.leads: Callable[[], bool] = lambda: False
        self._folder = folder
        self._index = Index(folder)
        self._thread = ThreadPoolExecutor(1, "history")
        self._is_open = False
        self._queries = 0
        self._was_leading = False
        self._problem = ""
        self._pruned_at = -_PRUNE_S

    async def run(self) -> None:
        """Record until cancelled."""
        self._sampler.listen()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._sampler.run())
                tasks.create_task(self._store_loop())
        finally:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_FLUSH_S):
                    await self.flush()
            await self.close()

    async def flush(self) -> None:
        """Publish the seconds since the last slot, if this gateway leads: it stops, and no other gateway has its
        calls."""
        self._sampler.end_now()
        await self.store()

    async def close(self) -> None:
        await self._in_thread(self._index.close)
        self._thread.shutdown()

    async def _store_loop(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            await self.store()

    async def store(self) -> None:
        """Read the stream, and write to it if this gateway leads. Log a problem once, and its end once."""
        try:
            await self._store()
        except (PlatformError, sqlite3.Error, OSError) as error:
            problem = str(error) or type(error).__name__
            if not isinstance(error, PlatformError):
                problem = f"its copy in {self._folder} cannot be written: {problem}"
            if not self._problem:
                log.warning("the history is not recorded: %s", problem)
            self._problem = problem
            if is_damage(error):
                self._is_open = False
                await self._in_thread(lambda: self._index.move_aside(problem))
        except Exception:
            log.exception("recording the history failed; the next second retries")
        else:
            if self._problem:
                log.info("the history is recorded again")
            self._problem = ""

    async def _store(self) -> None:
        failure: Exception | None = None
        try:
            await self._read_stream()
        except (sqlite3.Error, OSError) as error:
            failure = error  # this gateway's disk: the stream may still be written
        if self.leads():
            self._was_leading = True
            await self._publish(is_readable=failure is None)
        else:
            self._was_leading = False
            self._sampler.forget_old()
        if failure is not None:
            raise failure
        if self._clock.monotonic() - self._pruned_at >= _PRUNE_S:
            self._pruned_at = self._clock.monotonic()
            await self._prune()

    async def _read_stream(self) -> None:
        if not self._is_open:
            info = await self._bus.js(f"STREAM.INFO.{subjects.HISTORY}")
            await self._in_thread(lambda: self._index.open(str(info["created"])))
            self._is_open = True
        while True:
            seq = await self._in_thread(lambda: self._index.seq)
            messages = await streams.batch_from(
                self._bus, subjects.HISTORY, subjects.HISTORY_FILTER, seq + 1, most=_BATCH, max_bytes=_BATCH_BYTES
            )
            if not messages:
                return
            await self._in_thread(lambda: self._index.apply(messages))  # noqa: B023

    async def _publish(self, *, is_readable: bool) -> None:
        has_published = False
        while self._sampler.ended and self._sampler.ended[0].closes_at <= self._clock.monotonic():
            slot = self._sampler.ended[0]
            await self._publish_slot(slot, is_readable=is_readable)
            if self._sampler.ended and self._sampler.ended[0] is slot:
                self._sampler.ended.popleft()
            has_published = True
        while self._sampler.events:
            event = self._sampler.events[0]
            await self._bus.publish_stored(subjects.HISTORY_EVENTS, encode_event(event), msg_id=event.identity)
            if self._sampler.events and self._sampler.events[0] is event:
                self._sampler.events.popleft()
            has_published = True
        if not is_readable or not has_published:
            return
        await self._read_stream()
        before = self._clock.time() - _ROLL_UP_AFTER_S
        for resolution, number in await self._in_thread(lambda: self._index.unpublished(before)):
            points = await self._in_thread(lambda: collapse(self._index.points_at(resolution, number)))  # noqa: B023
            for payload in encode_blocks(resolution, number, self._name, points):
                await self._bus.publish_stored(subject_of(resolution), payload)
            await self._read_stream()

    async def _publish_slot(self, slot: Slot, *, is_readable: bool) -> None:
        expected = None
        if is_readable:
            await self._read_stream()
            has_it, expected = await self._in_thread(lambda: self._is_stored(slot))
            if has_it:
                return
        points = with_overview(slot.points, slot.seconds)
        for part, payload in enumerate(encode_blocks(SECONDS_10, slot.number, self._name, points)):
            msg_id = f"{self._name}-{slot.number}-{slot.closes_at}-{part}"
            try:
                stored = await self._bus.publish_stored(
                    subject_of(SECONDS_10), payload, msg_id=msg_id, expected_last=expected
                )
            except Conflict:
                log.info("another gateway has published the history of these ten seconds")
                return
            expected = None if expected is None else stored.seq

    def _is_stored(self, slot: Slot) -> tuple[bool, int]:
        """Return whether another leader has stored this slot, and the sequence of the last one. A gateway
        that stopped in a slot has stored a part of it: the rest is added."""
        last, by, seq = self._index.last_added()
        if by == self._name or not 0 <= last - slot.number <= _RECENT_SLOTS:  # our clock was set back
            return False, seq
        overview = self._index.points_at(SECONDS_10, slot.number).get(OVERVIEW, {})
        return overview.get(Field.SECONDS, 0) + slot.seconds > SECONDS_10, seq

    async def _prune(self) -> None:
        now = self._clock.time()
        await self._in_thread(lambda: self._index.prune(now))
        if not self._was_leading:
            return
        for resolution, kept in KEPT_MESSAGES.items():
            await streams.purge(self._bus, subjects.HISTORY, subject_of(resolution), keep=kept)
        await streams.purge(self._bus, subjects.HISTORY, subjects.HISTORY_EVENTS, keep=MAX_EVENTS)
        info = await self._bus.js(f"STREAM.INFO.{subjects.HISTORY}")
        if int(info["state"]["bytes"]) > MAX_STREAM_BYTES:  # the finest first
            for resolution in (SECONDS_10, MINUTE):
                await streams.purge(
                    self._bus, subjects.HISTORY, subject_of(resolution), keep=KEPT_MESSAGES[resolution] // 2
                )

    def mark(self, event: Event) -> None:
        """Put an event on the time line, if this gateway leads."""
        self._sampler.events.append(event)

    # --- read ---

    async def query(self, read: Callable[[Index], T]) -> T:
        """Return the result of `read` on the copy. Raises RateLimited, HistoryUnavailable."""
        if self._queries >= _MAX_QUERIES:
            raise RateLimited("the gateway answers other queries of the history: try again", retry_after_s=1.0)
        if not self._is_open:
            raise HistoryUnavailable("the history is not loaded yet: try again in a few seconds")
        self._queries += 1
        try:
            return await self._in_thread(lambda: read(self._index))
        except sqlite3.Error as error:
            raise HistoryUnavailable(f"the history cannot be read now: {error}") from error
        finally:
            self._queries -= 1

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
