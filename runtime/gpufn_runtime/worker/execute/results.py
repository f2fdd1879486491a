"""End Attempts: encode and send their Result, and the items before it."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gpufn_core.domain.invocation import OutcomeKind
from gpufn_core.encoding import values
from gpufn_core.errors import BusUnavailable, CapacityError, DeviceFailed, ErrorInfo, GpufnError, ResultNotEncodable
from gpufn_core.protocol import frames
from gpufn_core.protocol.frames import Item, LiveItem, Result
from gpufn_core.protocol.limits import INLINE_BYTES, LARGE_BODY_BYTES, LIVE_BYTES, LIVE_OVERHEAD_BYTES
from gpufn_platform.shared_bodies.bodies import MIN_SHARED_BYTES, SharedBodies
from gpufn_runtime.worker.execute.attempts import Attempt, Attempts
from gpufn_runtime.worker.execute.error_report import Rejected, bounded, describe, unchanged
from gpufn_runtime.worker.link import Link
from gpufn_runtime.worker.platform_calls.output import Output

if TYPE_CHECKING:
    from gpufn_runtime.worker.gpu.device_errors import DeviceFault

_LONGEST_CHAIN = 8
_SUCCEEDED = OutcomeKind.SUCCEEDED  # each call needs it, and Python looks up a member of an enum slowly


End = tuple[OutcomeKind, ErrorInfo | None]


class Results:
    """Sends Results. `started` is the `time.perf_counter` value when the attempt began. `fault_of` classifies an
    exception as a GPU fault; `on_fault` is called if a fault makes this process unusable. `redact` masks secrets.
    `join` waits for the end of the other ranks of a gang and returns the end of them all."""

    def __init__(
        self,
        link: Link,
        attempts: Attempts,
        output: Output,
        bundle_dir: str,
        shared_bodies: SharedBodies,
        *,
        may_pickle: bool = False,
    ) -> None:
        self._may_pickle = may_pickle
        self._link = link
        self._attempts = attempts
        self._output = output
        self._bundle_dir = bundle_dir
        self._shared_bodies = shared_bodies
        self.fault_of: Callable[[BaseException], DeviceFault | None] = lambda error: None
        self.redact: Callable[[str], str] = unchanged
        self.on_fault: Callable[[DeviceFault], None] = lambda fault: None
        self.join: Callable[[Attempt, End], End] = lambda attempt, end: end

    def returned(self, attempt: Attempt, value: Any, started: float, *, charged_s: float | None = None) -> None:
        try:
            takes_shared_body = attempt.run.takes_shared_body
            limit = LARGE_BODY_BYTES if takes_shared_body else INLINE_BYTES
            content_type, parts = values.encode_parts(
                value, attempt.run.accept, limit_bytes=limit, may_pickle=self._may_pickle
            )
            is_shared_body = takes_shared_body and sum(map(len, parts)) >= MIN_SHARED_BYTES
            shared_body = self._shared_bodies.write(parts) if is_shared_body else ""
            body = b"" if is_shared_body else b"".join(parts)
        except CapacityError as error:
            self.raised(attempt, ResultNotEncodable(error.message), started, charged_s=charged_s)
            return
        except BaseException as error:  # ResultNotEncodable, or raised by the value's code: a property, a __reduce__
            self.raised(attempt, error, started, charged_s=charged_s)
            return
        self._end(
            attempt, _SUCCEEDED, started,
            content_type=content_type, body=body, shared_body=shared_body, charged_s=charged_s,
        )  # fmt: skip

    def exhausted(self, attempt: Attempt, started: float) -> None:
        """Send the end of a stream whose items are sent."""
        self._end(attempt, _SUCCEEDED, started)

    def item(self, attempt: Attempt, value: Any) -> None:
        """Send one item of a stream. Raises ResultNotEncodable."""
        content_type, body = values.encode_result(value, attempt.run.accept, what="item", may_pickle=self._may_pickle)
        attempt.items += 1
        attempt.unread.add(len(body))
        self._link.send(Item(attempt.run.attempt, content_type), body, link=attempt.link)

    def live_item(self, attempt: Attempt, number: int, value: Any) -> None:
        """Send a preview of item `number`, up to a limit: previews have no credits, and the result has all items."""
        if attempt.live_bytes > LIVE_BYTES:
            return
        try:
            content_type, body = values.encode_result(value, attempt.run.accept, what="item", may_pickle=False)
        except Exception:  # also of the value's code; the end of the call reports it
            attempt.live_bytes = LIVE_BYTES + 1
            return
        attempt.live_bytes += LIVE_OVERHEAD_BYTES + len(body)
        if attempt.live_bytes <= LIVE_BYTES:
            self._link.send(LiveItem(attempt.run.attempt, number, content_type), body, link=attempt.link)

    def raised(self, attempt: Attempt, error: BaseException, started: float, *, charged_s: float | None = None) -> None:
        if isinstance(error, Rejected):
            self.rejected(attempt, error.reason, started)
            return
        if isinstance(error, MemoryError):
            _clear_frames(error)
        fault = self.fault_of(error)
        if fault is not None and fault.replaces:
            self.on_fault(fault)  # before the slot is free, so that no further call is sent here
        if fault is not None and fault.is_lost:
            failed = DeviceFailed(fault.describe()).info()
            self._end(attempt, OutcomeKind.LOST, started, failed, charged_s=charged_s)
            return
        if isinstance(error, BusUnavailable):  # from a nested call: the platform failed, not the function
            self._end(attempt, OutcomeKind.LOST, started, bounded(error.info(), self.redact), charged_s=charged_s)
            return
        if isinstance(error, ResultNotEncodable) and not error.traceback:
            info = bounded(error.info(), self.redact)
        else:
            info = describe(error, self._bundle_dir, redact=self.redact)
        self._end(attempt, OutcomeKind.RAISED, started, info, charged_s=charged_s)

    def rejected(self, attempt: Attempt, error: GpufnError, started: float) -> None:
        self._end(attempt, OutcomeKind.REJECTED, started, bounded(error.info(), self.redact))

    def cancelled(self, attempt: Attempt, started: float) -> None:
        self._end(attempt, OutcomeKind.CANCELLED, started)

    def cancelled_in_queue(self, attempt: Attempt) -> None:
        """Send the Result of an attempt that `Attempts.cancel` has ended."""
        self._link.send(Result(attempt.run.attempt, OutcomeKind.CANCELLED, None, "", 0.0), link=attempt.link)
        self._attempts.check_idle()

    def _end(
        self,
        attempt: Attempt,
        kind: OutcomeKind,
        started: float,
        error: ErrorInfo | None = None,
        *,
        content_type: str = "",
        body: bytes = b"",
        shared_body: str = "",
        charged_s: float | None = None,
    ) -> None:
        self._output.end(attempt)
        joined, error = self.join(attempt, (kind, error))
        if joined is not kind:
            if shared_body:
                self._shared_bodies.remove(shared_body)
            kind, content_type, body, shared_body = joined, "", b"", ""
        run_s = time.perf_counter() - started
        self._send(attempt, Result(attempt.run.attempt, kind, error, content_type, run_s, shared_body, charged_s), body)

    def interrupt(self, attempt: Attempt, end: End) -> None:
        """End an attempt whose code may still run."""
        kind, error = end
        self._send(attempt, Result(attempt.run.attempt, kind, error, "", time.monotonic() - attempt.received_at))

    def _send(self, attempt: Attempt, frame: Result, body: bytes = b"") -> None:
        result = frames.encode(frame, body)
        if self._attempts.end(attempt, result):
            if not self._link.send_packed(result, link=attempt.link):
                self._attempts.keep(attempt, result)
        elif frame.shared_body and not attempt.result:
            self._shared_bodies.remove(frame.shared_body)
        self._attempts.check_idle()


def _clear_frames(error: BaseException) -> None:
    """Clear the local variables in the frames of a MemoryError, so that there is memory to report it. This function
    allocates nothing."""
    exception: BaseException | None = error
    remaining = _LONGEST_CHAIN
    while exception is not None and remaining:
        traceback.clear_frames(exception.__traceback__)
        exception = exception.__context__
        remaining -= 1
