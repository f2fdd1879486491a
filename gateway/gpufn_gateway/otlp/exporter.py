"""Export in a thread, with a bounded queue: a collector that hangs costs spans or lines, and delays no call."""

from __future__ import annotations

import collections
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

log = logging.getLogger(__name__)

MAX_QUEUED: Final = 8192
MAX_QUEUED_BYTES: Final = 16 << 20
BATCH: Final = 512
BATCH_BYTES: Final = 4 << 20  # collectors refuse requests of more than 20 MiB
_DELAY_S: Final = 0.5  # time in which items are collected for a request
_END_S: Final = 2.0  # at the end of the gateway, for the remaining items

T = TypeVar("T")


def _no_bytes(_: object) -> int:
    return 0


class Exporter(Generic[T]):
    """Exports items, which are `what`: "spans". `send` blocks and returns "", or why they were not taken; `interrupt`
    makes it return. `bytes_of` is the size of an item, for items that may be large. The counts are of items."""

    def __init__(
        self,
        what: str,
        send: Callable[[Sequence[T]], str],
        interrupt: Callable[[], None],
        bytes_of: Callable[[T], int] = _no_bytes,
    ) -> None:
        self._what = what
        self._send = send
        self._interrupt = interrupt
        self._bytes_of = bytes_of
        self._queue: collections.deque[T] = collections.deque()
        self._queued_bytes = 0
        self._changed = threading.Condition()
        self._is_ending = False
        self._is_over = False  # nothing is sent any longer
        self._is_failing = False
        self.exported = 0
        self.failed = 0  # refused by the collector, or not sent in time
        self.dropped = 0  # the queue was full
        self._thread = threading.Thread(target=self._run, name=f"export of {what}", daemon=True)
        self._thread.start()

    def add(self, items: Sequence[T]) -> None:
        with self._changed:
            for item in items:
                size = self._bytes_of(item)
                if len(self._queue) >= MAX_QUEUED or self._queued_bytes + size > MAX_QUEUED_BYTES:
                    self.dropped += 1
                else:
                    self._queue.append(item)
                    self._queued_bytes += size
            self._changed.notify()

    def counts(self) -> dict[str, int]:
        """Return the counts of items by outcome, as in the metrics."""
        return {"exported": self.exported, "refused": self.failed, "dropped": self.dropped}

    def close(self, wait_s: float = _END_S) -> None:
        """Send the remaining items, within a short time. Blocks."""
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
            except Exception as error:  # an error of the library must not end the thread
                log.exception("an export of %s failed", self._what)
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
                    log.warning("the collector does not take %s, which are dropped: %s", self._what, problem)
                else:
                    log.info("the collector takes %s again", self._what)

    def _next(self) -> list[T] | None:
        """Wait for items. Return None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._is_ending)
            self._changed.wait_for(
                lambda: len(self._queue) >= BATCH or self._queued_bytes >= BATCH_BYTES or self._is_ending, _DELAY_S
            )
            batch: list[T] = []
            batch_bytes = 0
            while self._queue and len(batch) < BATCH and (not batch or batch_bytes < BATCH_BYTES):
                batch.append(self._queue.popleft())
                batch_bytes += self._bytes_of(batch[-1])
            self._queued_bytes -= batch_bytes
        return batch or None
