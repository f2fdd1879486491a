"""What functions ask of the platform from inside their workers: calls of other functions, what became of them, and
checkpoints of the calls that they run.

A worker has no other way out: each Call frame becomes an invocation (or a look at one) on the worker's behalf, and
its answer goes back over the same socket. A worker that dies takes its open calls with it, and so does an attempt that
is told to end; it gives none of them more time than it has itself.

While the bus is away, what they ask for waits until their deadline and then fails with BusUnavailable, which is
retryable. A call that the bus lost is made again; it may have run, as after the death of its runner.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeVar

from gpufn_core.domain.invocation import InvocationState, OutcomeKind
from gpufn_core.domain.revision import Revision
from gpufn_core.encoding import media
from gpufn_core.errors import (
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
from gpufn_core.ids import names_invocation, new_invocation_id
from gpufn_core.protocol import frames, subjects
from gpufn_core.protocol.frames import Verb
from gpufn_core.protocol.limits import CHECKPOINT_BYTES, LONGEST_TIMEOUT_S, MESSAGE_BYTES, RECORD_BYTES, inline_bytes
from gpufn_core.protocol.messages import ResultReply
from gpufn_core.protocol.records import BodyReference, CallRecord, Checkpoint
from gpufn_core.spec.priority import Priority
from gpufn_platform.bus.connection import Bus
from gpufn_platform.process.clock import Clock
from gpufn_platform.queue import call_records, checkpoints
from gpufn_platform.queue import large_bodies as bodies
from gpufn_platform.queue.call_request import CallRequest
from gpufn_platform.queue.caller import Caller
from gpufn_runtime.runner.attempts.attempt import Attempt
from gpufn_runtime.runner.circuits import Circuits
from gpufn_runtime.runner.directory import Directory
from gpufn_runtime.runner.dispatch.large_bodies import NodeBodies
from gpufn_runtime.runner.workers.shared_bodies import NodeParcels
from gpufn_runtime.runner.workers.worker_link import WorkerLink

log = logging.getLogger(__name__)

T = TypeVar("T")

_RETRY_BUS_S = 0.2
_LAST_WORD_S = 1.0  # left to the function that waits: it fails for want of the bus, not for want of time
_KIND_OF_STATE = {
    InvocationState.SUCCEEDED: OutcomeKind.SUCCEEDED,
    InvocationState.FAILED: OutcomeKind.RAISED,
    InvocationState.CANCELLED: OutcomeKind.CANCELLED,
    InvocationState.TIMED_OUT: OutcomeKind.TIMED_OUT,
    InvocationState.EXPIRED: OutcomeKind.EXPIRED,
}


class _Answer(NamedTuple):
    """How it ended, and the result. `parcel` is the result's name in the folder of the worker that asks, when it is
    large."""

    kind: OutcomeKind
    error: ErrorInfo | None = None
    content_type: str = ""
    body: bytes = b""
    parcel: str = ""


class _Arguments(NamedTuple):
    """In memory, or stored on the bus."""

    body: bytes
    reference: BodyReference | None = None


_CANCELLED = _Answer(OutcomeKind.CANCELLED)


class NestedCalls:
    def __init__(
        self,
        bus: Bus,
        caller: Caller,
        directory: Directory,
        circuits: Circuits,
        clock: Clock,
        *,
        parcels: NodeParcels,
        bodies: NodeBodies,
    ) -> None:
        self._bus = bus
        self._caller = caller
        self._directory = directory
        self._circuits = circuits
        self._clock = clock
        self._parcels = parcels
        self._bodies = bodies
        self._tasks: dict[tuple[str, int], asyncio.Task[_Answer]] = {}
        self._windows: dict[tuple[str, int], asyncio.Semaphore] = {}  # of open streams

    def open(self, link: WorkerLink, call: frames.Call, body: bytes, parent: Attempt | None) -> None:
        if parent is not None and parent.run.ending is not None:
            link.open_calls.discard(call.call)
            self._parcels.drop(link.worker, call.parcel)
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
        answer = _CANCELLED if task.cancelled() else task.result()
        if task.cancelled():
            self._parcels.drop(link.worker, call.parcel)
        try:
            link.send(
                frames.Answer(call.call, answer.kind, answer.error, answer.content_type, answer.parcel), answer.body
            )
        except PayloadTooLarge as failure:  # or the function would wait for it for ever
            link.send(frames.Answer(call.call, OutcomeKind.REJECTED, failure.info(), ""))

    async def _serve(self, link: WorkerLink, call: frames.Call, body: bytes, parent: Attempt | None) -> _Answer:
        try:
            return await self._do(link, call, body, parent)
        except GpufnError as failure:
            return _Answer(OutcomeKind.REJECTED, failure.info())
        except TimeoutError:
            return _Answer(OutcomeKind.EXPIRED)
        except Exception:
            log.exception("a call from worker %s failed", link.worker)
            return _Answer(OutcomeKind.REJECTED, PlatformError().info())

    async def _do(self, link: WorkerLink, call: frames.Call, body: bytes, parent: Attempt | None) -> _Answer:
        match call.verb:
            case Verb.CALL:
                return await self._call(link, call, body, parent)
            case Verb.STREAM:
                return await self._stream(link, call, body, parent)
            case Verb.SUBMIT:
                return await self._submit(link, call, body, parent)
            case Verb.STATUS | Verb.RESULT | Verb.CANCEL:
                return await self._patiently(self._until(call, parent), lambda: self._look(link, call))
            case Verb.CHECKPOINT if parent is not None:
                return await self._keep(link, call, body, parent)
            case Verb.RESTORE if parent is not None:
                return await self._patiently(self._until(call, parent), lambda: self._restore(parent))
            case Verb.CHECKPOINT | Verb.RESTORE:
                raise InvalidInput("only a call that runs has a checkpoint")
        raise InvalidInput(f"{call.verb!r} is nothing that a function can ask for")

    async def _call(self, link: WorkerLink, call: frames.Call, body: bytes, parent: Attempt | None) -> _Answer:
        revision = await self._serving(call, parent)
        arguments = await self._waited_for(revision, link, call, body, parent)
        request = self._request(revision, link, call, arguments, parent)

        async def once() -> tuple[ResultReply, bytes]:
            self._circuits.check(revision)
            self._ring(revision)
            pending = self._caller.invoke(request)
            try:
                reply, result = await pending.future
            except asyncio.CancelledError:
                pending.cancel()
                raise
            return reply, result

        try:
            reply, result = await self._patiently(request.deadline, once)
            parcel = await self._patiently(request.deadline, lambda: self._result_for(link, reply))
        finally:
            self._bodies.remove_arguments(arguments.reference)
        return _Answer(reply.kind, reply.error, reply.content_type, result, parcel)

    async def _stream(self, link: WorkerLink, call: frames.Call, body: bytes, parent: Attempt | None) -> _Answer:
        revision = await self._serving(call, parent)
        arguments = await self._waited_for(revision, link, call, body, parent)
        request = self._request(revision, link, call, arguments, parent)
        items = 0

        async def once() -> _Answer:
            nonlocal items
            self._circuits.check(revision)
            self._ring(revision)
            pending = self._caller.open_stream(request)
            window = self._windows[link.worker, call.call] = asyncio.Semaphore(frames.STREAM_WINDOW)
            try:
                async for item, data in pending.items():
                    await window.acquire()
                    items += 1
                    link.send(frames.AnswerItem(call.call, item.content_type), data)
                end: ResultReply = (await pending.future)[0]
            finally:
                if not pending.future.done():
                    pending.cancel()
                del self._windows[link.worker, call.call]
            return _Answer(end.kind, end.error, end.content_type)

        try:
            return await self._patiently(request.deadline, once, may_repeat=lambda: not items)
        finally:
            self._bodies.remove_arguments(arguments.reference)

    async def _submit(self, link: WorkerLink, call: frames.Call, body: bytes, parent: Attempt | None) -> _Answer:
        revision = await self._serving(call, parent)
        until = self._until(call, parent)
        while not self._bus.connected:  # once it was sent, its fate may be unknown: a second one could run beside it
            await self._wait_for_bus(until, BusUnavailable())
        now, priority = self._clock.time(), _asked(revision, link, call, parent)
        deadline = 0.0 if call.timeout_s is None else now + _bounded(call.timeout_s)
        invocation = new_invocation_id() if call.parcel else None
        arguments = await self._arguments(
            link, call, body, most_bytes=RECORD_BYTES, owner=invocation or "", until=until
        )
        request = _request(revision, call, arguments, parent, deadline=deadline, priority=priority)
        if arguments.reference is None:
            invocation = None  # the place in the queue completes it
        record = await call_records.submit(self._bus, request, now=now, invocation=invocation)
        return _Answer(OutcomeKind.SUCCEEDED, None, "text/plain", record.id.encode())

    async def _waited_for(
        self, revision: Revision, link: WorkerLink, call: frames.Call, body: bytes, parent: Attempt | None
    ) -> _Arguments:
        """The arguments of a call that the function waits for."""
        left_s = self._deadline(revision, call, parent) - self._clock.time()
        ttl_s = max(0.0, left_s) + bodies.EXPIRES_LATER_S
        return await self._arguments(
            link,
            call,
            body,
            most_bytes=MESSAGE_BYTES,
            owner=bodies.waited_owner(),
            until=self._clock.time() + left_s,
            ttl_s=ttl_s,
        )

    async def _arguments(
        self,
        link: WorkerLink,
        call: frames.Call,
        body: bytes,
        *,
        most_bytes: int,
        owner: str,
        until: float,
        ttl_s: float | None = None,
    ) -> _Arguments:
        """As the worker sent them, or, of more than `most_bytes`, stored for `owner`. Raises InvalidInput,
        CapacityError, BusUnavailable."""
        if not call.parcel:
            return _Arguments(body)
        path = self._parcels.kept(self._parcels.accept(link.worker, call.parcel))
        try:
            if path.stat().st_size <= min(most_bytes, inline_bytes(int(self._bus.server_info["max_payload"]))):
                return _Arguments(path.read_bytes())
            stored = await self._patiently(until, lambda: self._bodies.store_arguments(path, owner=owner, ttl_s=ttl_s))
            return _Arguments(b"", stored)
        except OSError as error:
            raise InvalidInput(f"the arguments cannot be read: {error.strerror}") from error
        finally:
            path.unlink(missing_ok=True)

    async def _result_for(self, link: WorkerLink, reply: ResultReply) -> str:
        """A large result of a call: its name in the folder of the worker that asks; empty when it is in the reply.
        Raises ArtifactUnavailable, CapacityError, BusUnavailable."""
        if reply.parcel:
            return self._parcels.give_result(reply.parcel, link.worker)
        if reply.reference is None:
            return ""
        parcel = await self._bodies.fetch_result(reply.reference, link.worker)
        self._bodies.remove_result(reply.reference)
        return parcel

    async def _look(self, link: WorkerLink, call: frames.Call) -> _Answer:
        if not names_invocation(call.target):  # it becomes a part of subjects, where * is everybody's
            raise InvocationNotFound(f"{call.target[:40]!r} is not an invocation's id")
        if call.verb == Verb.RESULT:
            record, body = await self._ended(call.target, call.timeout_s)
            if not record.state.ended:
                raise TimeoutError
            parcel = ""
            if record.blob:
                reference = BodyReference(record.id, record.blob, record.size)
                parcel = await self._bodies.fetch_result(reference, link.worker)
            return _Answer(_KIND_OF_STATE[record.state], record.error, record.content_type, body, parcel)
        found = await call_records.read(self._bus, call.target)
        if found is None:
            raise InvocationNotFound(f"there is no invocation {call.target}")
        record = found[0]
        if call.verb == Verb.CANCEL:
            was_running = await call_records.cancel(self._bus, record, self._clock.time())
            return _Answer(OutcomeKind.SUCCEEDED, None, media.JSON, b"true" if was_running else b"false")
        return _Answer(OutcomeKind.SUCCEEDED, None, "text/plain", (await self._state(record)).encode())

    async def _ended(self, invocation: str, timeout_s: float | None) -> tuple[CallRecord, bytes]:
        """As `records.wait`; who waits is ended with his own call. A bus that is away for a moment ends no wait for
        what runs for hours."""
        until = self._clock.monotonic() + (LONGEST_TIMEOUT_S if timeout_s is None else _bounded(timeout_s))
        while True:
            try:
                return await call_records.wait(self._bus, invocation, until - self._clock.monotonic())
            except BusUnavailable as error:
                if self._clock.monotonic() >= until:
                    raise
                log.info("whether %s has ended is asked again: %s", invocation, error)
                await asyncio.sleep(_RETRY_BUS_S)

    async def _keep(self, link: WorkerLink, call: frames.Call, body: bytes, parent: Attempt) -> _Answer:
        """Stored when this returns. A bus that is away for a moment ends no call that runs for hours."""
        if call.parcel:
            path = self._parcels.kept(self._parcels.accept(link.worker, call.parcel))
            try:
                size = path.stat().st_size
                body = path.read_bytes() if size <= CHECKPOINT_BYTES else b""
            finally:
                path.unlink(missing_ok=True)
            if size > CHECKPOINT_BYTES:
                raise _checkpoint_too_large(size)
        if len(body) > CHECKPOINT_BYTES:
            raise _checkpoint_too_large(len(body))
        kept = Checkpoint(call.content_type, parent.message.attempt, self._clock.time())
        while True:
            try:
                parent.run.checkpoint_seq = await checkpoints.keep(self._bus, parent.message.id, kept, body)
                return _Answer(OutcomeKind.SUCCEEDED)
            except BusUnavailable as error:
                log.info("a checkpoint of %s waits: %s", parent.message.id, error)
                await asyncio.sleep(_RETRY_BUS_S)

    async def _restore(self, parent: Attempt) -> _Answer:
        """No content type: there is none."""
        found = await checkpoints.last(self._bus, parent.message.id)
        if found is None:
            return _Answer(OutcomeKind.SUCCEEDED)
        parent.run.checkpoint_seq = found.seq
        return _Answer(OutcomeKind.SUCCEEDED, None, found.checkpoint.content_type, found.body)

    async def _state(self, record: CallRecord) -> str:
        if record.state.ended or await call_records.where(self._bus, record.id) is None:
            return record.state.value
        return InvocationState.RUNNING.value

    def _request(
        self, revision: Revision, link: WorkerLink, call: frames.Call, arguments: _Arguments, parent: Attempt | None
    ) -> CallRequest:
        priority = _asked(revision, link, call, parent)
        if priority is None:  # who waits for it in a call of a higher class must not wait with those of a lower
            priority = revision.spec.priority
            if parent is not None and parent.message.priority.is_above(priority):
                priority = parent.message.priority
        deadline = self._deadline(revision, call, parent)
        return _request(revision, call, arguments, parent, deadline=deadline, priority=priority)

    def _deadline(self, revision: Revision, call: frames.Call, parent: Attempt | None) -> float:
        spec = revision.spec
        own_s = (spec.queue_timeout_s or spec.startup_timeout_s) + spec.timeout_s
        wait_s = own_s if call.timeout_s is None else _bounded(call.timeout_s)
        if parent is not None:
            wait_s = min(wait_s, parent.run.must_end_at - self._clock.monotonic())
        return self._clock.time() + wait_s

    async def _serving(self, call: frames.Call, parent: Attempt | None) -> Revision:
        return await self._patiently(self._until(call, parent), lambda: self._directory.serving(call.target))

    async def _patiently(
        self, until: float, once: Callable[[], Awaitable[T]], *, may_repeat: Callable[[], bool] = lambda: True
    ) -> T:
        """`once()`, again while the bus is away, and not after `until`, in unix seconds. Raises BusUnavailable."""
        while True:
            try:
                return await once()
            except BusUnavailable as error:
                if not may_repeat():
                    raise
                await self._wait_for_bus(until, error)

    async def _wait_for_bus(self, until: float, error: BusUnavailable) -> None:
        if self._clock.time() + _LAST_WORD_S >= until:
            raise BusUnavailable("The message bus did not answer in the time that this call had.") from error
        await asyncio.sleep(_RETRY_BUS_S)

    def _until(self, call: frames.Call, parent: Attempt | None) -> float:
        """When what the function asks for is of no use any more, in unix seconds."""
        wait_s = LONGEST_TIMEOUT_S if call.timeout_s is None or call.verb == Verb.SUBMIT else _bounded(call.timeout_s)
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
    arguments: _Arguments,
    parent: Attempt | None,
    *,
    deadline: float,
    priority: Priority | None,
) -> CallRequest:
    if call.content_type == media.PICKLED and not revision.spec.pickle:
        raise UnsupportedMediaType(pickles_refused(revision.function))
    request = CallRequest(
        revision, call.method, call.content_type, arguments.body, call.accept, deadline,
        priority=priority, reference=arguments.reference,
    )  # fmt: skip
    if parent is None:
        return request
    asks = parent.message
    return request._replace(parent=asks.id, trace=asks.trace, owner=asks.owner)


def _checkpoint_too_large(size: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"a checkpoint of {size:,} bytes is more than the {CHECKPOINT_BYTES:,} allowed")


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
