"""Export of spans in a thread, with a bounded queue: a collector that hangs costs spans, and no call waits for it."""

from __future__ import annotations

import collections
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Final

from gpufn_core.protocol.spans import Span

log = logging.getLogger(__name__)

MAX_QUEUED: Final = 8192  # spans
BATCH: Final = 512
_DELAY_S: Final = 0.5  # time in which spans are collected for a request
_END_S: Final = 2.0  # at the end of the gateway, for the spans that are left

# Returns "", or why the spans were not taken. The second function interrupts it.
Send = Callable[[Sequence[Span]], str]


class Exporter:
    """`send` blocks; `interrupt` makes it return. The counts are of spans."""

    def __init__(self, send: Send, interrupt: Callable[[], None]) -> None:
        self._send = send
        self._interrupt = interrupt
        self._queue: collections.deque[Span] = collections.deque()
        self._changed = threading.Condition()
        self._is_ending = False
        self._is_over = False  # nothing is sent any longer
        self._is_failing = False
        self.exported = 0
        self.failed = 0  # refused by the collector, or not sent in time
        self.dropped = 0  # the queue was full
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def add(self, spans: Sequence[Span]) -> None:
        with self._changed:
            room = MAX_QUEUED - len(self._queue)
            self.dropped += max(0, len(spans) - room)
            self._queue.extend(spans[: max(0, room)])
            self._changed.notify()

    def close(self, wait_s: float = _END_S) -> None:
        """Send what is left, for a moment. Blocks."""
        with self._changed:
            self._is_ending = True
            self._changed.notify()
        self._thread.join(wait_s)
        with self._changed:
            self._is_over = True
            self._queue.clear()
        self._interrupt()

    def _run(self) -> None:
        while (batch := self._next()) is not None:
            try:
                problem = self._send(batch)
            except Exception as error:  # of the library: no span is worth the thread
                log.exception("an export of spans failed")
                problem = type(error).__name__
            if self._is_over:
                return
            if problem:
                self.failed += len(batch)
            else:
                self.exported += len(batch)
            if bool(problem) is not self._is_failing:
                self._is_failing = bool(problem)
                if problem:
                    log.warning("the collector of traces does not take spans, which are dropped: %s", problem)
                else:
                    log.info("the collector of traces takes spans again")

    def _next(self) -> list[Span] | None:
        """Wait for spans. Return None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._is_ending)
            self._changed.wait_for(lambda: len(self._queue) >= BATCH or self._is_ending, _DELAY_S)
            batch = [self._queue.popleft() for _ in range(min(BATCH, len(self._queue)))]
        return batch or None
