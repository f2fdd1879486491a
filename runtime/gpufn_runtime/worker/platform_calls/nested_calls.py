"""Calls of user code to other functions, and its reports on its own call, over the worker's socket.

The runner makes the calls on our behalf, so a worker needs no address and no credentials. Methods block and are
thread-safe; the SDK's `.aio` wraps them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gpufn.call.context import Context
from gpufn.call.transport_protocol import EncodedCall
from gpufn_core.domain import trace_context
from gpufn_core.domain.invocation import InvocationState
from gpufn_core.encoding import media
from gpufn_core.errors import InvalidInput
from gpufn_core.protocol.frames import Answer, Progress, Verb
from gpufn_core.protocol.limits import PROGRESS_CHARS
from gpufn_core.protocol.streams.stream_window import ReadItems
from gpufn_runtime.worker.context import current_attempt
from gpufn_runtime.worker.execute.attempts import Attempt
from gpufn_runtime.worker.link import Link
from gpufn_runtime.worker.platform_calls.pending_requests import PendingRequests, raise_unless_succeeded


class NestedCalls:
    """The `gpufn.call.transport.Transport` of a worker."""

    def __init__(self, link: Link, requests: PendingRequests, *, may_pickle: bool = False) -> None:
        self._may_pickle = may_pickle  # the function's option, for its checkpoints
        self._link = link
        self._requests = requests

    def call(self, call: EncodedCall) -> tuple[str, bytes]:
        return self._requests.request(Verb.CALL, call.target.function, call.body, **_fields(call))

    def stream(self, call: EncodedCall) -> Iterator[tuple[str, bytes]]:
        with self._requests.open(Verb.STREAM, call.target.function, call.body, **_fields(call)) as request:
            read = ReadItems()
            while True:
                frame, data = request.next()
                if isinstance(frame, Answer):
                    raise_unless_succeeded(frame)
                    return
                yield frame.content_type, data
                if read.add(len(data)):
                    request.credit(read.count)
                    read.clear()

    def submit(self, call: EncodedCall) -> str:
        return self._requests.request(Verb.SUBMIT, call.target.function, call.body, **_fields(call))[1].decode()

    def status(self, invocation: str) -> InvocationState:
        return InvocationState(self._requests.request(Verb.STATUS, invocation)[1].decode())

    def result(self, invocation: str, *, timeout_s: float | None = None) -> tuple[str, bytes]:
        return self._requests.request(Verb.RESULT, invocation, timeout_s=timeout_s)

    def cancel(self, invocation: str) -> bool:
        return self._requests.request(Verb.CANCEL, invocation)[1] == b"true"

    def context(self) -> Context:
        """Return the Context of the current call. Raises InvalidInput if there is none, or more than one."""
        attempt = current_attempt.get()
        if attempt is None:
            raise InvalidInput(
                "gpufn.current() needs exactly one current call: there is none in a hook, in a batch of several calls, "
                "or in your own thread; pass the Context to the thread instead"
            )
        if attempt.context is None:
            run = attempt.run
            attempt.context = Context(
                run.invocation,
                run.number,
                run.deadline or None,
                _OwnCall(self._link, self._requests, attempt),
                trace=trace_context.seen_by_attempt(run.invocation, run.number, run.trace) or None,
                trace_state=trace_context.tracestate(run.trace) or None,
                may_pickle=self._may_pickle,
            )
        return attempt.context


def _fields(call: EncodedCall) -> dict[str, Any]:
    """Return the fields of the frame that requests a call."""
    _, method, priority = call.target
    fields = {"method": method, "priority": priority, "content_type": call.content_type, "timeout_s": call.timeout_s}
    return fields | {"accept": media.NATIVE}


class _OwnCall:
    """The `gpufn.call.context.Channel` of one attempt, for reports on its own call."""

    def __init__(self, link: Link, requests: PendingRequests, attempt: Attempt) -> None:
        self._link = link
        self._requests = requests
        self._attempt = attempt

    def progress(self, fraction: float, message: str) -> None:
        text = message[:PROGRESS_CHARS].encode("utf-8", "backslashreplace").decode()
        progress = Progress(self._attempt.run.attempt, fraction, text)
        self._link.send(progress, link=self._attempt.link)

    def save_checkpoint(self, content_type: str, body: bytes) -> None:
        self._requests.request(Verb.CHECKPOINT, "", body, attempt=self._attempt, content_type=content_type)

    def load_checkpoint(self) -> tuple[str, bytes] | None:
        content_type, body = self._requests.request(Verb.RESTORE, "", attempt=self._attempt)
        return (content_type, body) if content_type else None
