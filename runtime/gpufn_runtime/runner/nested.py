"""What functions ask of the platform from inside their workers: calls of other functions, what became of them, and
checkpoints of the calls that they run.

A worker has no other way out: each Call frame becomes an invocation (or a look at one) on the worker's behalf, and
its answer goes back over the same socket. A worker that dies takes its open calls with it, and so does an attempt that
is told to end; it gives none of them more time than it has itself.
"""

from __future__ import annotations

import asyncio
import functools
import logging

from gpufn import media
from gpufn.bus import checkpoints, records
from gpufn.bus.call_request import CallRequest
from gpufn.bus.calls import Caller
from gpufn.bus.connection import Bus
from gpufn.clock import Clock
from gpufn.errors import (
    BusUnavailable,
    ErrorInfo,
    Forbidden,
    GpufnError,
    InvalidInput,
    InvocationNotFound,
    PayloadTooLarge,
    PlatformError,
    UnsupportedMediaType,
    pickles_refused,
)
from gpufn.ids import names_invocation
from gpufn.invocation import InvocationState, OutcomeKind
from gpufn.priority import Priority
from gpufn.protocol import frames, subjects
from gpufn.protocol.frames import Verb
from gpufn.protocol.limits import CHECKPOINT_BYTES, LONGEST_TIMEOUT_S, MESSAGE_BYTES
from gpufn.protocol.messages import ResultReply
from gpufn.protocol.records import CallRecord, Checkpoint
from gpufn.revision import Revision
from gpufn_runtime.runner.attempt import Attempt
from gpufn_runtime.runner.circuits import Circuits
from gpufn_runtime.runner.directory import Directory
from gpufn_runtime.runner.worker_link import WorkerLink

log = logging.getLogger(__name__)

_RETRY_BUS_S = 0.2
_KIND_OF_STATE = {
    InvocationState.SUCCEEDED: OutcomeKind.SUCCEEDED,
    InvocationState.FAILED: OutcomeKind.RAISED,
    InvocationState.CANCELLED: OutcomeKind.CANCELLED,
    InvocationState.TIMED_OUT: OutcomeKind.TIMED_OUT,
    InvocationState.EXPIRED: OutcomeKind.EXPIRED,
}


_Answer = tuple[OutcomeKind, ErrorInfo | None, str, bytes]  # how it ended, the result's content type, the result
_CANCELLED: _Answer = (OutcomeKind.CANCELLED, None, "", b"")


class NestedCalls:
    def __init__(self, bus: Bus, caller: Caller, directory: Directory, circuits: Circuits, clock: Clock) -> None:
        self._bus = bus
        self._caller = caller
        self._directory = directory
        self._circuits = circuits
        self._clock = clock
        self._tasks: dict[tuple[str, int], asyncio.Task[_Answer]] = {}
        self._windows: dict[tuple[str, int], asyncio.Semaphore] = {}  # of open streams

    def open(self, link: WorkerLink, call: frames.Call, body: bytes, parent: Attempt | None) -> None:
        if parent is not None and parent.run.ending is not None:
            link.open_calls.discard(call.call)
            link.send(frames.Answer(call.call, OutcomeKind.CANCELLED, None, ""))
            return
        if parent is not None:
            parent.run.calls.add(call.call)
            parent.run.own_calls += _is_own(call, parent)
        task = asyncio.get_running_loop().create_task(self._serve(link, call, body, parent), name="nested call")
        self._tasks[link.worker, call.call] = task
        # Not in the task: one that is cancelled before its first step runs nothing of itself.
        task.add_done_callback(functools.partial(self._answer, link, call, parent))

    def credit(self, link: WorkerLink, call: int, items: int) -> None:
        """The function has read so many items of a stream."""
        window = self._windows.get((link.worker, call))
        if window is not None:
            for _ in range(min(items, frames.STREAM_WINDOW)):
                window.release()

    def close(self, link: WorkerLink, call: int) -> None:
        """The function does not want the rest."""
        if (task := self._tasks.get((link.worker, call))) is not None:
            task.cancel()

    def close_of(self, parent: Attempt) -> None:
        """It is to end: a function that waits for an answer could not."""
        for call in parent.run.calls:
            self.close(parent.link, call)

    def close_all(self, link: WorkerLink) -> None:
        for call in link.open_calls:
            self.close(link, call)

    def _answer(self, link: WorkerLink, call: frames.Call, parent: Attempt | None, task: asyncio.Task[_Answer]) -> None:
        self._tasks.pop((link.worker, call.call), None)
        link.open_calls.discard(call.call)
        if parent is not None:
            parent.run.calls.discard(call.call)
            parent.run.own_calls -= _is_own(call, parent)
        kind, error, content_type, body = _CANCELLED if task.cancelled() else task.result()
        try:
            link.send(frames.Answer(call.call, kind, error, content_type), body)
        except PayloadTooLarge as failure:  # or the function would wait for it for ever
            link.send(frames.Answer(call.call, OutcomeKind.REJECTED, failure.info(), ""))

    async def _serve(self, link: WorkerLink, call: frames.Call, body: bytes, parent: Attempt | None) -> _Answer:
        try:
            return await self._do(link, call, body, parent)
        except GpufnError as failure:
            return OutcomeKind.REJECTED, failure.info(), "", b""
        except TimeoutError:
            return OutcomeKind.EXPIRED, None, "", b""
        except Exception:
            log.exception("a call from worker %s failed", link.worker)
            return OutcomeKind.REJECTED, PlatformError().info(), "", b""

    async def _do(self, link: WorkerLink, call: frames.Call, body: bytes, parent: Attempt | None) -> _Answer:
        match call.verb:
            case Verb.CALL:
                return await self._call(link, call, body, parent)
            case Verb.STREAM:
                return await self._stream(link, call, body, parent)
            case Verb.SUBMIT:
                return await self._submit(link, call, body, parent)
            case Verb.STATUS | Verb.RESULT | Verb.CANCEL:
                return await self._look(call)
            case Verb.CHECKPOINT if parent is not None:
                return await self._keep(call, body, parent)
            case Verb.RESTORE if parent is not None:
                return await self._restore(parent)
            case Verb.CHECKPOINT | Verb.RESTORE:
                raise InvalidInput("only a call that runs has a checkpoint")
        raise InvalidInput(f"{call.verb!r} is nothing that a function can ask for")

    async def _call(self, link: WorkerLink, call: frames.Call, body: bytes, parent: Attempt | None) -> _Answer:
        revision = await self._directory.serving(call.target)
        self._circuits.check(revision)
        self._ring(revision)
        pending = self._caller.invoke(self._request(revision, link, call, body, parent))
        try:
            reply, result = await pending.future
        except asyncio.CancelledError:
            pending.cancel()
            raise
        return reply.kind, reply.error, reply.content_type, result

    async def _stream(self, link: WorkerLink, call: frames.Call, body: bytes, parent: Attempt | None) -> _Answer:
        revision = await self._directory.serving(call.target)
        self._circuits.check(revision)
        self._ring(revision)
        pending = self._caller.open_stream(self._request(revision, link, call, body, parent))
        window = self._windows[link.worker, call.call] = asyncio.Semaphore(frames.STREAM_WINDOW)
        try:
            async for item, data in pending.items():
                await window.acquire()
                link.send(frames.AnswerItem(call.call, item.content_type), data)
            end: ResultReply = (await pending.future)[0]
        finally:
            if not pending.future.done():
                pending.cancel()
            del self._windows[link.worker, call.call]
        return end.kind, end.error, end.content_type, b""

    async def _submit(self, link: WorkerLink, call: frames.Call, body: bytes, parent: Attempt | None) -> _Answer:
        revision = await self._directory.serving(call.target)
        now, priority = self._clock.time(), _asked(revision, link, call, parent)
        deadline = 0.0 if call.timeout_s is None else now + _bounded(call.timeout_s)
        request = _request(revision, call, body, parent, deadline=deadline, priority=priority)
        record = await records.submit(self._bus, request, now=now)
        return OutcomeKind.SUCCEEDED, None, "text/plain", record.id.encode()

    async def _look(self, call: frames.Call) -> _Answer:
        if not names_invocation(call.target):  # it becomes a part of subjects, where * is everybody's
            raise InvocationNotFound(f"{call.target[:40]!r} is not an invocation's id")
        if call.verb == Verb.RESULT:
            record, body = await self._ended(call.target, call.timeout_s)
            if not record.state.ended:
                raise TimeoutError
            if record.blob:
                if record.size > MESSAGE_BYTES:
                    raise PayloadTooLarge(
                        f"the result of {record.id} has {record.size:,} bytes, and a function is given "
                        f"{MESSAGE_BYTES:,} at most; who calls from outside can fetch it"
                    )
                body = await records.blob(self._bus, record)
            return _KIND_OF_STATE[record.state], record.error, record.content_type, body
        found = await records.read(self._bus, call.target)
        if found is None:
            raise InvocationNotFound(f"there is no invocation {call.target}")
        record = found[0]
        if call.verb == Verb.CANCEL:
            was_running = await records.cancel(self._bus, record, self._clock.time())
            return OutcomeKind.SUCCEEDED, None, media.JSON, b"true" if was_running else b"false"
        return OutcomeKind.SUCCEEDED, None, "text/plain", (await self._state(record)).encode()

    async def _ended(self, invocation: str, timeout_s: float | None) -> tuple[CallRecord, bytes]:
        """As `records.wait`; who waits is ended with his own call. A bus that is away for a moment ends no wait for
        what runs for hours."""
        until = self._clock.monotonic() + (LONGEST_TIMEOUT_S if timeout_s is None else _bounded(timeout_s))
        while True:
            try:
                return await records.wait(self._bus, invocation, until - self._clock.monotonic())
            except BusUnavailable as error:
                if self._clock.monotonic() >= until:
                    raise
                log.info("whether %s has ended is asked again: %s", invocation, error)
                await asyncio.sleep(_RETRY_BUS_S)

    async def _keep(self, call: frames.Call, body: bytes, parent: Attempt) -> _Answer:
        """Stored when this returns. A bus that is away for a moment ends no call that runs for hours."""
        if len(body) > CHECKPOINT_BYTES:
            raise PayloadTooLarge(f"a checkpoint of {len(body):,} bytes is more than the {CHECKPOINT_BYTES:,} allowed")
        kept = Checkpoint(call.content_type, parent.message.attempt, self._clock.time())
        while True:
            try:
                parent.run.checkpoint_seq = await checkpoints.keep(self._bus, parent.message.id, kept, body)
                return OutcomeKind.SUCCEEDED, None, "", b""
            except BusUnavailable as error:
                log.info("a checkpoint of %s waits: %s", parent.message.id, error)
                await asyncio.sleep(_RETRY_BUS_S)

    async def _restore(self, parent: Attempt) -> _Answer:
        """No content type: there is none."""
        found = await checkpoints.last(self._bus, parent.message.id)
        if found is None:
            return OutcomeKind.SUCCEEDED, None, "", b""
        parent.run.checkpoint_seq = found.seq
        return OutcomeKind.SUCCEEDED, None, found.checkpoint.content_type, found.body

    async def _state(self, record: CallRecord) -> str:
        if record.state.ended or await records.where(self._bus, record.id) is None:
            return record.state.value
        return InvocationState.RUNNING.value

    def _request(
        self, revision: Revision, link: WorkerLink, call: frames.Call, body: bytes, parent: Attempt | None
    ) -> CallRequest:
        priority = _asked(revision, link, call, parent)
        if priority is None:  # who waits for it in a call of a higher class must not wait with those of a lower
            priority = revision.spec.priority
            if parent is not None and parent.message.priority.is_above(priority):
                priority = parent.message.priority
        deadline = self._deadline(revision, call, parent)
        return _request(revision, call, body, parent, deadline=deadline, priority=priority)

    def _deadline(self, revision: Revision, call: frames.Call, parent: Attempt | None) -> float:
        spec = revision.spec
        own_s = (spec.queue_timeout_s or spec.startup_timeout_s) + spec.timeout_s
        wait_s = own_s if call.timeout_s is None else _bounded(call.timeout_s)
        if parent is not None:
            wait_s = min(wait_s, parent.run.must_end_at - self._clock.monotonic())
        return self._clock.time() + wait_s

    def _ring(self, revision: Revision) -> None:
        """A runner does not know how many workers there are elsewhere; one more doorbell costs little."""
        self._bus.publish(subjects.doorbell(revision.function), b"")


def _bounded(timeout_s: float) -> float:
    """A worker may say anything."""
    return timeout_s if timeout_s <= LONGEST_TIMEOUT_S else LONGEST_TIMEOUT_S  # also for what is no number


def _request(
    revision: Revision,
    call: frames.Call,
    body: bytes,
    parent: Attempt | None,
    *,
    deadline: float,
    priority: Priority | None,
) -> CallRequest:
    if call.content_type == media.PICKLED and not revision.spec.pickle:
        raise UnsupportedMediaType(pickles_refused(revision.function))
    request = CallRequest(revision, call.method, call.content_type, body, call.accept, deadline, priority=priority)
    if parent is None:
        return request
    asks = parent.message
    return request._replace(parent=asks.id, trace=asks.trace, owner=asks.owner)


def _is_own(call: frames.Call, parent: Attempt) -> bool:
    """It is of the function that waits for it."""
    return call.verb in (Verb.CALL, Verb.STREAM) and call.target == parent.message.function


def _asked(revision: Revision, link: WorkerLink, call: frames.Call, parent: Attempt | None) -> Priority | None:
    """The class that the function gives its call, if it does. Raises Forbidden: it has no key that would allow hi."""
    may_be_hi = [revision.spec.priority, link.revision.spec.priority]
    may_be_hi += [] if parent is None else [parent.message.priority]
    if call.priority is Priority.HI and Priority.HI not in may_be_hi:
        raise Forbidden("A call of class hi is made by a call of class hi only, or by a function of that class.")
    return call.priority
