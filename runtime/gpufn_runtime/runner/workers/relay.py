"""Relay for messages of running calls: stream items, progress, log lines and nested calls."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

from gpufn_core.errors import GpufnError
from gpufn_core.protocol import frames, subjects
from gpufn_core.protocol.codec import encode, pack
from gpufn_core.protocol.messages import ItemReply, Progress
from gpufn_platform.bus.connection import Bus
from gpufn_runtime.runner.core.attempt import Attempt
from gpufn_runtime.runner.workers.nested_calls import NestedCalls
from gpufn_runtime.runner.workers.output import Output
from gpufn_runtime.runner.workers.worker_link import WorkerLink

log = logging.getLogger(__name__)


class Relay:
    """Forwards messages of running calls. `inbox` is the subject where stream readers acknowledge items. `cancel` ends
    an attempt whose items cannot be delivered."""

    def __init__(
        self, bus: Bus, *, output: Output, nested: NestedCalls, inbox: str, cancel: Callable[[Attempt], None]
    ) -> None:
        self._bus = bus
        self._output = output
        self._nested = nested
        self._inbox = inbox
        self._cancel = cancel

    def on_item(self, attempt: Attempt, item: frames.Item, body: bytes) -> None:
        run = attempt.run
        reply = ItemReply(attempt.message.id, run.items, item.content_type, self._inbox)
        run.items += 1
        try:
            self._bus.publish(attempt.message.reply, pack(reply, body))
        except GpufnError as error:
            log.info("the stream %s is broken off: %s", attempt.message.id, error)
            self._cancel(attempt)

    def on_log(self, link: WorkerLink, attempt: Attempt | None, stream: str, text: bytes) -> None:
        self._output.publish(link, attempt.message.id if attempt else "", stream, text)

    def on_progress(self, attempt: Attempt, fraction: float, message: str) -> None:
        attempt.run.progress = progress = Progress(fraction, message)
        with contextlib.suppress(GpufnError):  # the next report includes it
            self._bus.publish(subjects.progress(attempt.message.id), encode(progress))

    def on_call(self, link: WorkerLink, call: frames.Call, body: bytes) -> None:
        parent = link.attempts.get(call.parent)
        if parent is not None and link.seat is not None:
            link.seat.done(parent)
        self._nested.open(link, call, body, parent)

    def on_call_credit(self, link: WorkerLink, call: int, items: int) -> None:
        self._nested.credit(link, call, items)

    def on_close_call(self, link: WorkerLink, call: int) -> None:
        self._nested.close(link, call)
