"""Pending requests of this worker's threads to its runner and their responses, over the worker's socket."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

from gpufn.call.cancellable_wait import wake_on_cancel
from gpufn_core.domain.invocation import OutcomeKind
from gpufn_core.errors import (
    InvalidInput,
    InvocationCancelled,
    InvocationExpired,
    PayloadTooLarge,
    PlatformError,
    error_from,
)
from gpufn_core.protocol.frames import Answer, AnswerItem, Call, CallCredit, CloseCall, Verb
from gpufn_core.protocol.limits import LARGE_BODY_BYTES
from gpufn_platform.shared_bodies.bodies import MIN_SHARED_BYTES, SharedBodies
from gpufn_runtime.worker.context import current_attempt
from gpufn_runtime.worker.execute.attempts import Attempt
from gpufn_runtime.worker.link import Link

_FORKED = (
    "a process forked by the function cannot send requests to the platform: call other functions in the function's own "
    "process, or in threads"
)
_LOST = "the node's runner restarted during this call: it may or may not have run"


class PendingRequests:
    """Open requests. Thread-safe."""

    def __init__(self, link: Link, shared_bodies: SharedBodies) -> None:
        self._link = link
        self._shared_bodies = shared_bodies
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._open: dict[int, PendingRequest] = {}

    # --- for user threads ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def open(
        self, verb: Verb, target: str, body: bytes = b"", *, attempt: Attempt | None = None, **fields: Any
    ) -> Iterator[PendingRequest]:
        """Open a request. `attempt`: the requesting attempt, default: the current one of this thread."""
        requester = attempt or current_attempt.get()
        request = PendingRequest(next(self._numbers), self._link, requester, self._shared_bodies)
        with self._lock:
            self._open[request.number] = request
        try:
            request.send(verb, target, body, fields)
            yield request
        finally:
            with self._lock:
                del self._open[request.number]
            request.close()

    def request(
        self, verb: Verb, target: str, body: bytes = b"", *, attempt: Attempt | None = None, **fields: Any
    ) -> tuple[str, bytes]:
        """Send a request and wait; returns the response's content type and body. `attempt` as in `open`."""
        with self.open(verb, target, body, attempt=attempt, **fields) as request:
            while True:
                frame, data = request.next()
                if isinstance(frame, Answer):
                    if verb is Verb.RESULT and frame.kind is OutcomeKind.EXPIRED and frame.error is None:
                        raise TimeoutError(f"invocation {target} has not ended yet")
                    raise_unless_succeeded(frame)
                    return frame.content_type, request.body(frame, data)

    # --- for the reader thread ----------------------------------------------------------------------------------------

    def deliver(self, frame: Answer | AnswerItem, body: bytes) -> None:
        request = self._open.get(frame.call)
        if request is not None:
            request.deliver(frame, body)
        elif isinstance(frame, Answer) and frame.shared_body:  # the request was closed
            self._shared_bodies.remove(frame.shared_body)

    def unanswered(self) -> list[PendingRequest]:
        """Return the open requests. When their connection is lost, the caller marks them as lost."""
        with self._lock:
            return list(self._open.values())


class PendingRequest:
    """One Call frame and its responses. `attempt`: the requesting attempt, if known. `link`: number of the connection
    that it was sent on."""

    def __init__(self, number: int, link: Link, attempt: Attempt | None, shared_bodies: SharedBodies) -> None:
        self.number = number
        self.attempt = attempt
        self.link = link.number
        self._link = link
        self._shared_bodies = shared_bodies
        self._queue: SimpleQueue[tuple[Answer | AnswerItem | None, bytes]] = SimpleQueue()
        self._ended = False
        self._is_cancelled = False

    def send(self, verb: Verb, target: str, body: bytes, fields: dict[str, Any]) -> None:
        if self._link.is_forked_child:
            self._ended = True
            raise InvalidInput(_FORKED)
        if len(body) > LARGE_BODY_BYTES:
            self._ended = True
            raise PayloadTooLarge(
                f"the arguments of {target} take {len(body):,} bytes, more than the {LARGE_BODY_BYTES:,} of one call: "
                "pass a path or an address that the callee can read, or split it into several calls"
            )
        self._link.has_peer.wait()
        self.link = self._link.number
        parent = self.attempt.run.attempt if self.attempt is not None and self.attempt.link == self.link else 0
        if len(body) >= MIN_SHARED_BYTES:
            fields, body = fields | {"shared_body": self._shared_bodies.write([body])}, b""
        self._link.send(Call(self.number, verb, target, parent=parent, **fields), body, link=self.link)
        if self._link.number != self.link:
            self.lose()

    def next(self) -> tuple[Answer | AnswerItem, bytes]:
        with wake_on_cancel(self._cancel):
            frame, data = self._queue.get()
        if self._is_cancelled:
            raise InvocationCancelled  # and `close` cancels the call
        if frame is None:
            self._ended = True
            raise PlatformError(_LOST)
        self._ended = isinstance(frame, Answer)
        return frame, data

    def body(self, answer: Answer, data: bytes) -> bytes:
        """Return the result. A large result is read and not mapped: another worker wrote the file and may truncate it.
        Raises ArtifactUnavailable."""
        if not answer.shared_body:
            return data
        with self._shared_bodies.reader(answer.shared_body) as reader:
            return b"".join(reader.parts())

    def credit(self, items: int) -> None:
        self._link.send(CallCredit(self.number, items), link=self.link)

    def deliver(self, frame: Answer | AnswerItem, body: bytes) -> None:
        self._queue.put((frame, body))

    def lose(self) -> None:
        """Report that no response will arrive any more."""
        self._queue.put((None, b""))

    def _cancel(self) -> None:
        self._is_cancelled = True
        self.lose()

    def close(self) -> None:
        """Close the request; cancels the call if it has not ended."""
        if not self._ended:
            self._link.send(CloseCall(self.number), link=self.link)


def raise_unless_succeeded(answer: Answer) -> None:
    if answer.kind is OutcomeKind.SUCCEEDED:
        return
    if answer.error is not None:
        raise error_from(answer.error)
    if answer.kind is OutcomeKind.CANCELLED:
        raise InvocationCancelled
    if answer.kind is OutcomeKind.EXPIRED:
        raise InvocationExpired
    raise PlatformError(f"the call ended as {answer.kind}")
