"""Calls that the user's code makes of other functions, and what it says of its own: over the worker's socket.

The runner makes them for us, so a worker needs no address and no credentials. Blocking, from any thread; the SDK's
`.aio` wraps it.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

from gpufn import media
from gpufn._context import Context
from gpufn.errors import (
    InvalidInput,
    InvocationCancelled,
    InvocationExpired,
    PayloadTooLarge,
    PlatformError,
    error_from,
)
from gpufn.invocation import InvocationState, OutcomeKind
from gpufn.priority import Priority
from gpufn.protocol.frames import STREAM_WINDOW, Answer, AnswerItem, Call, CallCredit, CloseCall, Progress, Verb
from gpufn.protocol.limits import INLINE_BYTES, PROGRESS_CHARS
from gpufn_runtime.worker.attempts import Attempt
from gpufn_runtime.worker.context import current_attempt
from gpufn_runtime.worker.link import Link

_FORKED = (
    "a process that the function has forked cannot ask the platform for anything: call other functions where the "
    "function itself runs, or in threads"
)
_LOST = "the node's runner restarted while this call was under way: whether it ran is not known"


class NestedCalls:
    """The `gpufn._transport.Transport` of a worker."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._open: dict[int, _Conversation] = {}

    # --- for the user's threads -------------------------------------------------------------------------------------

    def call(
        self,
        function: str,
        method: str,
        content_type: str,
        body: bytes,
        *,
        timeout_s: float | None = None,
        priority: Priority | None = None,
    ) -> tuple[str, bytes]:
        return self._ask(
            Verb.CALL, function, body,
            method=method, content_type=content_type, accept=media.NATIVE, timeout_s=timeout_s, priority=priority,
        )  # fmt: skip

    def stream(
        self,
        function: str,
        method: str,
        content_type: str,
        body: bytes,
        *,
        timeout_s: float | None = None,
        priority: Priority | None = None,
    ) -> Iterator[tuple[str, bytes]]:
        with _Conversation(self) as conversation:
            conversation.open(
                Verb.STREAM, function, body,
                method=method, content_type=content_type, accept=media.NATIVE, timeout_s=timeout_s, priority=priority,
            )  # fmt: skip
            for number in itertools.count(1):
                frame, data = conversation.next()
                if isinstance(frame, Answer):
                    _raise_unless_succeeded(frame)
                    return
                yield frame.content_type, data
                if number % (STREAM_WINDOW // 2) == 0:
                    conversation.credit(STREAM_WINDOW // 2)

    def submit(
        self, function: str, method: str, content_type: str, body: bytes, *, priority: Priority | None = None
    ) -> str:
        answer = self._ask(
            Verb.SUBMIT, function, body,
            method=method, content_type=content_type, accept=media.NATIVE, priority=priority,
        )  # fmt: skip
        return answer[1].decode()

    def status(self, invocation: str) -> InvocationState:
        return InvocationState(self._ask(Verb.STATUS, invocation)[1].decode())

    def result(self, invocation: str, *, timeout_s: float | None = None) -> tuple[str, bytes]:
        return self._ask(Verb.RESULT, invocation, timeout_s=timeout_s)

    def cancel(self, invocation: str) -> bool:
        return self._ask(Verb.CANCEL, invocation)[1] == b"true"

    def context(self) -> Context:
        """Of the call that this code runs for. Raises InvalidInput where there is none, or more than one."""
        attempt = current_attempt.get()
        if attempt is None:
            raise InvalidInput(
                "gpufn.current() is for one call: there is none in a hook, in a batch of several calls, or in a thread "
                "of your own, which can be handed the Context"
            )
        if attempt.context is None:
            run = attempt.run
            attempt.context = Context(
                run.invocation, run.number, run.deadline or None, _OwnCall(self, attempt), trace=run.trace or None
            )
        return attempt.context

    def _ask(
        self, verb: Verb, target: str, body: bytes = b"", *, attempt: Attempt | None = None, **fields: Any
    ) -> tuple[str, bytes]:
        """`attempt` is the one that asks, when it is not the one that runs in this thread."""
        with _Conversation(self) as conversation:
            conversation.open(verb, target, body, attempt=attempt, **fields)
            while True:
                frame, data = conversation.next()
                if isinstance(frame, Answer):
                    if verb is Verb.RESULT and frame.kind is OutcomeKind.EXPIRED and frame.error is None:
                        raise TimeoutError(f"invocation {target} has not ended yet")
                    _raise_unless_succeeded(frame)
                    return frame.content_type, data

    # --- for the reader thread --------------------------------------------------------------------------------------

    def deliver(self, frame: Answer | AnswerItem, body: bytes) -> None:
        conversation = self._open.get(frame.call)
        if conversation is not None:  # else nobody wants it any more
            conversation.queue.put((frame, body))

    def abandon(self, link: int) -> None:
        """Connection `link` is gone, and every answer to what was asked on it. Also to be called when there is a new
        one: somebody may have asked while there was none."""
        with self._lock:
            waiting = [conversation for conversation in self._open.values() if conversation.link <= link]
        for conversation in waiting:
            conversation.queue.put((None, b""))


class _OwnCall:
    """What a call says of itself: the `gpufn._context.Channel` of one attempt."""

    def __init__(self, calls: NestedCalls, attempt: Attempt) -> None:
        self._calls = calls
        self._attempt = attempt

    def progress(self, fraction: float, message: str) -> None:
        text = message[:PROGRESS_CHARS].encode("utf-8", "backslashreplace").decode()
        progress = Progress(self._attempt.run.attempt, fraction, text)
        self._calls._link.send(progress, link=self._attempt.link)

    def keep(self, content_type: str, body: bytes) -> None:
        self._calls._ask(Verb.CHECKPOINT, "", body, attempt=self._attempt, content_type=content_type)

    def kept(self) -> tuple[str, bytes] | None:
        content_type, body = self._calls._ask(Verb.RESTORE, "", attempt=self._attempt)
        return (content_type, body) if content_type else None


class _Conversation:
    """One Call and its answers; closed on the way out when the answer is not there yet."""

    def __init__(self, calls: NestedCalls) -> None:
        self._calls = calls
        self._number = next(calls._numbers)
        self.queue: SimpleQueue[tuple[Answer | AnswerItem | None, bytes]] = SimpleQueue()
        self.link = calls._link.number
        self._ended = False

    def __enter__(self) -> _Conversation:
        with self._calls._lock:
            self._calls._open[self._number] = self
        return self

    def open(self, verb: Verb, target: str, body: bytes, *, attempt: Attempt | None = None, **fields: Any) -> None:
        attempt = attempt or current_attempt.get()
        self.link = self._calls._link.number
        if self._calls._link.is_parents:
            self._ended = True
            raise InvalidInput(_FORKED)
        if len(body) > INLINE_BYTES:
            self._ended = True
            raise PayloadTooLarge(
                f"the arguments of {target} take {len(body):,} bytes, more than the {INLINE_BYTES:,} of one call "
                "between functions: pass a path or an address that the other side can read, or split it over several "
                "calls"
            )
        parent = attempt.run.attempt if attempt is not None and attempt.link == self.link else 0
        frame = Call(self._number, verb, target, parent=parent, **fields)
        self._calls._link.send(frame, body, link=self.link)
        if self._calls._link.number != self.link:
            self.queue.put((None, b""))

    def credit(self, items: int) -> None:
        self._calls._link.send(CallCredit(self._number, items), link=self.link)

    def next(self) -> tuple[Answer | AnswerItem, bytes]:
        frame, data = self.queue.get()
        if frame is None:
            self._ended = True
            raise PlatformError(_LOST)
        self._ended = isinstance(frame, Answer)
        return frame, data

    def __exit__(self, *_: object) -> None:
        with self._calls._lock:
            del self._calls._open[self._number]
        if not self._ended:
            self._calls._link.send(CloseCall(self._number), link=self.link)


def _raise_unless_succeeded(answer: Answer) -> None:
    if answer.kind is OutcomeKind.SUCCEEDED:
        return
    if answer.error is not None:
        raise error_from(answer.error)
    if answer.kind is OutcomeKind.CANCELLED:
        raise InvocationCancelled
    if answer.kind is OutcomeKind.EXPIRED:
        raise InvocationExpired
    raise PlatformError(f"the call ended as {answer.kind}")
