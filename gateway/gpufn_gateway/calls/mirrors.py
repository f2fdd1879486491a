"""Copies of calls to the mirror of a split. Clients do not wait for a copy, and never see its result.

Only calls that a client waits for are copied: a plain invoke, or an inference, with a body that fits a message. A copy
has the lowest priority and no API key, so it counts against no limit of the client.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from gpufn_core.domain.invocation import OutcomeKind
from gpufn_core.domain.trace_context import is_traced
from gpufn_core.domain.traffic import WHOLE, Comparison, Difference, Mirror, MirroredCall
from gpufn_core.errors import ErrorInfo, GpufnError, InvocationCancelled
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import encode
from gpufn_core.protocol.messages import ResultReply
from gpufn_core.spec.priority import Priority
from gpufn_gateway.calls.output_comparison import OutputDifference, first_difference
from gpufn_gateway.calls.prepared_call import PreparedCall, Queue
from gpufn_gateway.calls.wakeup import ColdStartWakeup, Publisher
from gpufn_platform.process.clock import Clock
from gpufn_platform.process.tasks import Tasks
from gpufn_platform.queue.pending import PendingCall

_MAX_COPIES: Final = 64  # at a time, of one gateway
_THREAD_BYTES: Final = 64 << 10  # larger results are compared in a thread, so that the event loop is not blocked
_TEXT_CHARS: Final = 200

Ended = tuple[ResultReply, bytes] | GpufnError


@dataclass(kw_only=True, eq=False)
class Mirrors:
    bus: Publisher
    queue: Queue
    wakeup: ColdStartWakeup
    clock: Clock
    discard_result: Callable[[ResultReply], None]
    _tasks: Tasks = field(default_factory=lambda: Tasks("copies of calls"), init=False)
    _copies: int = field(default=0, init=False)

    def begin(self, call: PreparedCall, pending: PendingCall) -> None:
        """Start a copy of a call that was queued, if its split has a mirror. Never raises."""
        split = None if call.target.split is None else call.target.split.split
        if split is None or (mirror := split.mirror) is None or mirror.revision == call.target.number:
            return
        if random.random() * WHOLE >= mirror.percent:  # noqa: S311 - not for security
            return
        target = None if call.target.split is None else call.target.split.by_number.get(str(mirror.revision))
        is_inline = call.body.shared is None and call.reference is None
        if target is None or not is_inline or self._copies >= _MAX_COPIES:
            self._report(call, mirror, Comparison.SKIPPED)
            return
        request = call.request(call.deadline)._replace(
            revision=target.revision,
            priority=Priority.LOW,
            owner=subjects.PLATFORM,
            trace="" if is_traced(call.trace) else call.trace,  # no spans: its client does not see it
        )
        try:
            copy = self.queue.invoke(request)
        except GpufnError:
            self._report(call, mirror, Comparison.SKIPPED)
            return
        self.wakeup.wake_if_cold(target)
        self._copies += 1
        self._tasks.start(self._compare(call, mirror, pending, copy))

    async def _compare(self, call: PreparedCall, mirror: Mirror, pending: PendingCall, copy: PendingCall) -> None:
        try:
            await asyncio.wait((pending.future, copy.future))
            if pending.future.cancelled() or copy.future.cancelled():
                return
            answer, copied = _end_of(pending), _end_of(copy)
            if isinstance(copied, tuple):
                self.discard_result(copied[0])
            if isinstance(answer, InvocationCancelled):  # the client has disconnected
                return
            has_large = any(isinstance(each, tuple) and _is_large(each[0]) for each in (answer, copied))
            if has_large:
                self._report(call, mirror, Comparison.SKIPPED)
            else:
                await self._report_pair(call, mirror, pending.id, answer, copied)
        finally:
            self._copies -= 1
            copy.cancel()

    async def _report_pair(
        self, call: PreparedCall, mirror: Mirror, invocation: str, answer: Ended, copied: Ended
    ) -> None:
        error, copy_error = _error_of(answer), _error_of(copied)
        comparison, found = Comparison.EQUAL, None
        if isinstance(answer, tuple) and isinstance(copied, tuple) and error is None and copy_error is None:
            bodies = (answer[0].content_type, answer[1]), (copied[0].content_type, copied[1])
            if max(len(answer[1]), len(copied[1])) > _THREAD_BYTES:
                found = await asyncio.to_thread(first_difference, *bodies, mirror.tolerance)
            else:
                found = first_difference(*bodies, mirror.tolerance)
            comparison = Comparison.EQUAL if found is None else Comparison.DIFFERENT
        elif (error is None) is not (copy_error is None) or (error and copy_error and error.code != copy_error.code):
            comparison = Comparison.FAILED if error is None else Comparison.DIFFERENT
            found = OutputDifference("", _text_of(error), _text_of(copy_error))
        difference = None
        if found is not None:
            difference = Difference(
                at=self.clock.time(),
                invocation=invocation,
                comparison=comparison,
                path=found.path,
                answer=found.left,
                copy=found.right,
            )
        times = {"took_s": _run_s(answer), "copy_took_s": _run_s(copied)}
        self._report(call, mirror, comparison, difference=difference, **times)

    def _report(
        self,
        call: PreparedCall,
        mirror: Mirror,
        comparison: Comparison,
        *,
        took_s: float = 0.0,
        copy_took_s: float = 0.0,
        difference: Difference | None = None,
    ) -> None:
        assert call.target.split is not None
        mirrored = MirroredCall(
            function=call.target.name,
            split_at=call.target.split.split.set_at,
            revision=mirror.revision,
            comparison=comparison,
            took_s=took_s,
            copy_took_s=copy_took_s,
            difference=difference,
        )
        with contextlib.suppress(GpufnError):  # the bus is away
            self.bus.publish(subjects.mirrored_call(call.target.name), encode(mirrored))


def _end_of(pending: PendingCall) -> Ended:
    error = pending.future.exception()
    if error is None:
        return pending.future.result()
    if isinstance(error, GpufnError):
        return error
    raise error


def _is_large(reply: ResultReply) -> bool:
    return bool(reply.shared_body) or reply.reference is not None


def _error_of(ended: Ended) -> ErrorInfo | None:
    if isinstance(ended, GpufnError):
        return ended.info()
    reply, _ = ended
    if reply.kind is OutcomeKind.SUCCEEDED:
        return None
    return reply.error or ErrorInfo(code=reply.kind.value, message=reply.kind.value)


def _text_of(error: ErrorInfo | None) -> str:
    return "succeeded" if error is None else f"{error.code}: {error.summary}"[:_TEXT_CHARS]


def _run_s(ended: Ended) -> float:
    return ended[0].run_s if isinstance(ended, tuple) else 0.0
