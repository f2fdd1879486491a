"""What threads of this worker ask its runner, each with the answers that it waits for: over the worker's socket."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

from gpufn.call.cancellable_wait import woken_by
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
from gpufn_core.protocol.limits import PARCEL_BYTES
from gpufn_platform.shared_bodies.bodies import LEAST_BYTES, Parcels
from gpufn_runtime.worker.context import current_attempt
from gpufn_runtime.worker.execute.attempts import Attempt
from gpufn_runtime.worker.link import Link

_FORKED = (
    "a process that the function has forked cannot ask the platform for anything: call other functions where the "
    "function itself runs, or in threads"
)
_LOST = "the node's runner restarted while this call was under way: whether it ran is not known"


class Conversations:
    """Those that are open. Safe from all threads."""

    def __init__(self, link: Link, parcels: Parcels) -> None:
        self._link = link
        self._parcels = parcels
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._open: dict[int, Conversation] = {}

    # --- for the user's threads -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def open(
        self, verb: Verb, target: str, body: bytes = b"", *, attempt: Attempt | None = None, **fields: Any
    ) -> Iterator[Conversation]:
        """`attempt` is the one that asks, when it is not the one that runs in this thread."""
        asks = attempt or current_attempt.get()
        conversation = Conversation(next(self._numbers), self._link, asks, self._parcels)
        with self._lock:
            self._open[conversation.number] = conversation
        try:
            conversation.ask(verb, target, body, fields)
            yield conversation
        finally:
            with self._lock:
                del self._open[conversation.number]
            conversation.close()

    def ask(
        self, verb: Verb, target: str, body: bytes = b"", *, attempt: Attempt | None = None, **fields: Any
    ) -> tuple[str, bytes]:
        """The answer's content type and body; `attempt` as in `open`."""
        with self.open(verb, target, body, attempt=attempt, **fields) as conversation:
            while True:
                frame, data = conversation.next()
                if isinstance(frame, Answer):
                    if verb is Verb.RESULT and frame.kind is OutcomeKind.EXPIRED and frame.error is None:
                        raise TimeoutError(f"invocation {target} has not ended yet")
                    raise_unless_succeeded(frame)
                    return frame.content_type, conversation.body(frame, data)

    # --- for the reader thread --------------------------------------------------------------------------------------

    def deliver(self, frame: Answer | AnswerItem, body: bytes) -> None:
        conversation = self._open.get(frame.call)
        if conversation is not None:
            conversation.deliver(frame, body)
        elif isinstance(frame, Answer) and frame.parcel:  # nobody wants it any more
            self._parcels.remove(frame.parcel)

    def unanswered(self) -> list[Conversation]:
        """Those that are to be lost, when the connection is gone on which they were asked."""
        with self._lock:
            return list(self._open.values())


class Conversation:
    """One Call and its answers, for an attempt if it is known whose. `link` is the number of the connection that it was
    asked on."""

    def __init__(self, number: int, link: Link, attempt: Attempt | None, parcels: Parcels) -> None:
        self.number = number
        self.attempt = attempt
        self.link = link.number
        self._link = link
        self._parcels = parcels
        self._queue: SimpleQueue[tuple[Answer | AnswerItem | None, bytes]] = SimpleQueue()
        self._ended = False
        self._is_left = False

    def ask(self, verb: Verb, target: str, body: bytes, fields: dict[str, Any]) -> None:
        if self._link.is_parents:
            self._ended = True
            raise InvalidInput(_FORKED)
        if len(body) > PARCEL_BYTES:
            self._ended = True
            raise PayloadTooLarge(
                f"the arguments of {target} take {len(body):,} bytes, more than the {PARCEL_BYTES:,} of one call: pass "
                "a path or an address that the other side can read, or split it over several calls"
            )
        self._link.wait_for_peer()
        self.link = self._link.number
        parent = self.attempt.run.attempt if self.attempt is not None and self.attempt.link == self.link else 0
        if len(body) >= LEAST_BYTES:
            fields, body = fields | {"parcel": self._parcels.write([body])}, b""
        self._link.send(Call(self.number, verb, target, parent=parent, **fields), body, link=self.link)
        if self._link.number != self.link:
            self.lose()

    def next(self) -> tuple[Answer | AnswerItem, bytes]:
        with woken_by(self._leave):
            frame, data = self._queue.get()
        if self._is_left:
            raise InvocationCancelled  # and `close` cancels it
        if frame is None:
            self._ended = True
            raise PlatformError(_LOST)
        self._ended = isinstance(frame, Answer)
        return frame, data

    def body(self, answer: Answer, data: bytes) -> bytes:
        """The result. A large one is read and not mapped: another worker wrote it, and may cut its file short. Raises
        ArtifactUnavailable."""
        if not answer.parcel:
            return data
        with self._parcels.reader(answer.parcel) as reader:
            return b"".join(reader.parts())

    def credit(self, items: int) -> None:
        self._link.send(CallCredit(self.number, items), link=self.link)

    def deliver(self, frame: Answer | AnswerItem, body: bytes) -> None:
        self._queue.put((frame, body))

    def lose(self) -> None:
        """No answer comes any more."""
        self._queue.put((None, b""))

    def _leave(self) -> None:
        self._is_left = True
        self.lose()

    def close(self) -> None:
        """Nobody waits for the rest."""
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
