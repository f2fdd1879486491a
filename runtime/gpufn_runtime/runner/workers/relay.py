"""Relay for messages of running calls: stream items, progress, log lines and nested calls."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from gpufn_core.errors import GpufnError, ProtocolMismatch
from gpufn_core.protocol import frames, subjects
from gpufn_core.protocol.codec import encode, pack
from gpufn_core.protocol.limits import LIVE_BYTES, LIVE_OVERHEAD_BYTES, PROGRESS_CHARS
from gpufn_core.protocol.messages import InputCredit, ItemReply, Progress
from gpufn_platform.bus.connection import Bus
from gpufn_runtime.runner.core.attempt import Attempt
from gpufn_runtime.runner.workers.nested_calls import NestedCalls
from gpufn_runtime.runner.workers.output import Output
from gpufn_runtime.runner.workers.worker_link import WorkerLink

log = logging.getLogger(__name__)

_MAX_OPEN_CALLS = 1024  # open nested calls of one worker


@dataclass(eq=False, repr=False)
class Relay:
    """Forwards messages of running calls. `inbox` is the subject where stream readers acknowledge items. `cancel` ends
    an attempt whose items cannot be delivered. `traced` takes the end of a trace."""

    bus: Bus
    _: KW_ONLY
    output: Output
    nested: NestedCalls
    inbox: str
    cancel: Callable[[Attempt], None]
    traced: Callable[[WorkerLink, frames.Traced, bytes], None]

    def handle(self, link: WorkerLink, frame: frames.WorkerFrame, body: bytes) -> None:
        """Handle a frame. Raises ProtocolMismatch."""
        self._HANDLERS[type(frame)](self, link, frame, body)

    def _on_item(self, link: WorkerLink, item: frames.Item, body: bytes) -> None:
        attempt = link.attempts.get(item.attempt)
        if attempt is None:
            raise ProtocolMismatch("an item of an attempt that does not run here")
        run = attempt.run
        if run.items >= run.granted or not run.unread.has_room:
            raise ProtocolMismatch("an item without credit")
        reply = ItemReply(attempt.message.id, run.items, item.content_type, self.inbox)
        run.items += 1
        run.unread.add(len(body))
        try:
            self.bus.publish(attempt.message.reply, pack(reply, body))
        except GpufnError as error:
            log.info("the stream %s is broken off: %s", attempt.message.id, error)
            self.cancel(attempt)

    def _on_input_taken(self, link: WorkerLink, taken: frames.InputTaken, _: bytes) -> None:
        """Pass on the items that an attempt has received. The next report includes a lost one."""
        if (attempt := link.attempts.get(taken.attempt)) is not None:
            credit = InputCredit(attempt.message.id, taken.taken, taken.waits, self.inbox)
            with contextlib.suppress(GpufnError):
                self.bus.publish(attempt.message.reply, pack(credit))

    def _on_live_item(self, link: WorkerLink, item: frames.LiveItem, body: bytes) -> None:
        """Publish an item for followers. It is ignored if the attempt has already been given up. Raises
        ProtocolMismatch for more than a worker may send."""
        attempt = link.attempts.get(item.attempt)
        if attempt is None:
            return
        run = attempt.run
        run.live_bytes += LIVE_OVERHEAD_BYTES + len(body)
        if not attempt.message.is_live or run.live_bytes > LIVE_BYTES:
            raise ProtocolMismatch("previews of items that were not requested, or too many")
        reply = ItemReply(attempt.message.id, item.number, item.content_type, "")
        with contextlib.suppress(GpufnError):  # the result has it
            self.bus.publish(subjects.live_items(attempt.message.id), pack(reply, body))

    def _on_log(self, link: WorkerLink, line: frames.Log, text: bytes) -> None:
        attempt = link.attempts.get(line.attempt)
        self.output.publish(link, attempt.message if attempt else None, line.stream, text)

    def _on_progress(self, link: WorkerLink, reported: frames.Progress, _: bytes) -> None:
        """Handle progress. It is ignored if the attempt has already been given up."""
        if (attempt := link.attempts.get(reported.attempt)) is not None:
            fraction = min(max(reported.fraction, 0.0), 1.0) if reported.fraction == reported.fraction else 0.0
            attempt.run.progress = progress = Progress(fraction, reported.message[:PROGRESS_CHARS])
            with contextlib.suppress(GpufnError):  # the next report includes it
                self.bus.publish(subjects.progress(attempt.message.id), encode(progress))

    def _on_call(self, link: WorkerLink, call: frames.Call, body: bytes) -> None:
        if call.call in link.open_calls or len(link.open_calls) >= _MAX_OPEN_CALLS:
            raise ProtocolMismatch(f"more than {_MAX_OPEN_CALLS} calls at a time, or a call opened twice")
        link.open_calls.add(call.call)
        parent = link.attempts.get(call.parent)
        if parent is not None and link.seat is not None:
            link.seat.done(parent)
        self.nested.open(link, call, body, parent)

    _HANDLERS: ClassVar[dict[type, Callable[..., None]]] = {
        frames.Item: _on_item,
        frames.LiveItem: _on_live_item,
        frames.InputTaken: _on_input_taken,
        frames.Log: _on_log,
        frames.Progress: _on_progress,
        frames.Call: _on_call,
        frames.Traced: lambda self, link, traced, body: self.traced(link, traced, body),
        frames.CloseCall: lambda self, link, close, _: self.nested.close(link, close.call),
        frames.CallCredit: lambda self, link, credit, _: self.nested.credit(link, credit.call, credit.items),
    }
