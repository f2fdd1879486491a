"""Calls that the user's code makes of other functions, and what it says of its own: over the worker's socket.

The runner makes them for us, so a worker needs no address and no credentials. Blocking, from any thread; the SDK's
`.aio` wraps it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from gpufn.call.context import Context
from gpufn_core.domain.invocation import InvocationState
from gpufn_core.encoding import media
from gpufn_core.errors import InvalidInput
from gpufn_core.protocol.frames import STREAM_WINDOW, Answer, Progress, Verb
from gpufn_core.protocol.limits import PROGRESS_CHARS
from gpufn_core.spec.priority import Priority
from gpufn_runtime.worker.context import current_attempt
from gpufn_runtime.worker.execute.attempts import Attempt
from gpufn_runtime.worker.link import Link
from gpufn_runtime.worker.platform_calls.pending_requests import Conversations, raise_unless_succeeded


class NestedCalls:
    """The `gpufn.call.transport.Transport` of a worker."""

    def __init__(self, link: Link, conversations: Conversations, *, may_pickle: bool = False) -> None:
        self._may_pickle = may_pickle  # the function's own option: of its checkpoints
        self._link = link
        self._conversations = conversations

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
        return self._conversations.ask(
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
        with self._conversations.open(
            Verb.STREAM, function, body,
            method=method, content_type=content_type, accept=media.NATIVE, timeout_s=timeout_s, priority=priority,
        ) as conversation:  # fmt: skip
            for number in itertools.count(1):
                frame, data = conversation.next()
                if isinstance(frame, Answer):
                    raise_unless_succeeded(frame)
                    return
                yield frame.content_type, data
                if number % (STREAM_WINDOW // 2) == 0:
                    conversation.credit(STREAM_WINDOW // 2)

    def submit(
        self,
        function: str,
        method: str,
        content_type: str,
        body: bytes,
        *,
        timeout_s: float | None = None,
        priority: Priority | None = None,
    ) -> str:
        answer = self._conversations.ask(
            Verb.SUBMIT, function, body,
            method=method, content_type=content_type, accept=media.NATIVE, timeout_s=timeout_s, priority=priority,
        )  # fmt: skip
        return answer[1].decode()

    def status(self, invocation: str) -> InvocationState:
        return InvocationState(self._conversations.ask(Verb.STATUS, invocation)[1].decode())

    def result(self, invocation: str, *, timeout_s: float | None = None) -> tuple[str, bytes]:
        return self._conversations.ask(Verb.RESULT, invocation, timeout_s=timeout_s)

    def cancel(self, invocation: str) -> bool:
        return self._conversations.ask(Verb.CANCEL, invocation)[1] == b"true"

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
                run.invocation,
                run.number,
                run.deadline or None,
                _OwnCall(self._link, self._conversations, attempt),
                trace=run.trace or None,
                may_pickle=self._may_pickle,
            )
        return attempt.context


class _OwnCall:
    """What a call says of itself: the `gpufn.call.context.Channel` of one attempt."""

    def __init__(self, link: Link, conversations: Conversations, attempt: Attempt) -> None:
        self._link = link
        self._conversations = conversations
        self._attempt = attempt

    def progress(self, fraction: float, message: str) -> None:
        text = message[:PROGRESS_CHARS].encode("utf-8", "backslashreplace").decode()
        progress = Progress(self._attempt.run.attempt, fraction, text)
        self._link.send(progress, link=self._attempt.link)

    def keep(self, content_type: str, body: bytes) -> None:
        self._conversations.ask(Verb.CHECKPOINT, "", body, attempt=self._attempt, content_type=content_type)

    def kept(self) -> tuple[str, bytes] | None:
        content_type, body = self._conversations.ask(Verb.RESTORE, "", attempt=self._attempt)
        return (content_type, body) if content_type else None
