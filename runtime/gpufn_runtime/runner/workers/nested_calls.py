"""Requests of functions to the platform, from inside their workers: nested calls, their status and results, and
checkpoints.

A worker has no other connection. Each Call frame becomes an invocation (or a lookup) on the worker's behalf, and the
answer is sent over the same socket. When a worker dies, its open calls are cancelled; likewise when an attempt must
end. A nested call never gets more time than the attempt that makes it.

While the bus is away, requests wait until their deadline and then fail with BusUnavailable, which is retryable. A call
that NATS has lost is made again. It may already have run, as after the death of its runner.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple, TypeVar, cast

from gpufn_core.domain import trace_context
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
    RequestError,
    UnsupportedMediaType,
    pickles_refused,
)
from gpufn_core.ids import is_call_or_item_id, new_invocation_id
from gpufn_core.protocol import frames, subjects
from gpufn_core.protocol.frames import Verb
from gpufn_core.protocol.limits import LONGEST_TIMEOUT_S, MESSAGE_BYTES, RECORD_BYTES, inline_bytes
from gpufn_core.protocol.messages import ResultReply
from gpufn_core.protocol.records import BodyReference, CallRecord
from gpufn_core.protocol.streams.stream_window import UnreadItems
from gpufn_core.spec.naming.names import home_of
from gpufn_core.spec.priority import Priority
from gpufn_platform.bus.connection import Bus
from gpufn_platform.process.clock import Clock
from gpufn_platform.queue import large_bodies as bodies
from gpufn_platform.queue import wakeups
from gpufn_platform.queue.call_request import CallRequest
from gpufn_platform.queue.caller import Caller
from gpufn_platform.queue.records import call_records
from gpufn_runtime.runner.circuits import Circuits
from gpufn_runtime.runner.core.attempt import Attempt
from gpufn_runtime.runner.directory import Directory
from gpufn_runtime.runner.dispatch.large_bodies import NodeBodies
from gpufn_runtime.runner.workers.call_checkpoints import CallCheckpoints
from gpufn_runtime.runner.workers.data_requests import DataRequests
from gpufn_runtime.runner.workers.shared_bodies import NodeSharedBodies
from gpufn_runtime.runner.workers.team_queues import TeamQueues
from gpufn_runtime.runner.workers.worker_link import WorkerLink

log = logging.getLogger(__name__)

T = TypeVar("T")

_RETRY_BUS_S = 0.2
_RESERVED_S = 1.0  # left to the waiting function, so that it fails because of the bus and not because of its timeout
_KIND_OF_STATE = {
    InvocationState.SUCCEEDED: OutcomeKind.SUCCEEDED,
    InvocationState.FAILED: OutcomeKind.RAISED,
    InvocationState.CANCELLED: OutcomeKind.CANCELLED,
    InvocationState.TIMED_OUT: OutcomeKind.TIMED_OUT,
    InvocationState.EXPIRED: OutcomeKind.EXPIRED,
}


class _Answer(NamedTuple):
    """Outcome and result. `shared_body` is the name of a large result in the folder of the requesting worker."""

    kind: OutcomeKind
    error: ErrorInfo | None = None
    content_type: str = ""
    body: bytes = b""
    shared_body: str = ""


class _Window:
    """The items of a stream that were sent to a function but not read yet."""

    def __init__(self) -> None:
        self._unread = UnreadItems()
        self._sent = self._read = 0
        self._changed = asyncio.Event()

    async def room_for(self, size: int) -> None:
        """Wait until an item may be sent, and count it."""
        while not self._unread.has_room:
            self._changed.clear()
            await self._changed.wait()
        self._unread.add(size)
        self._sent += 1

    def credit(self, items: int) -> None:
        self._read = min(self._read + max(0, items), self._sent)  # a worker may claim to have read more
        self._unread.read_until(self._read)
        self._changed.set()


_Arguments = tuple[bytes, BodyReference | None]  # in memory, or in the object store
_CANCELLED = _Answer(OutcomeKind.CANCELLED)


@dataclass(eq=False, repr=False)
class NestedCalls:
    bus: Bus
    caller: Caller
    directory: Directory
    circuits: Circuits
    clock: Clock
    _: KW_ONLY
    shared_bodies: NodeSharedBodies
    bodies: NodeBodies
    data: DataRequests

    def __post_init__(self) -> None:
        self._tasks: dict[tuple[str, int], asyncio.Task[_Answer]] = {}
        self._windows: dict[tuple[str, int], _Window] = {}  # one per open stream
        self._checkpoints = CallCheckpoints(self.bus, self.shared_bodies, self.clock)
        self._team_queues = TeamQueues(self.bus, self.directory, self.clock)

    def open(self, link: WorkerLink, call: frames.Call, body: bytes, parent: Attempt | None) -> None:
        if parent is not None and parent.run.ending is not None:
            link.open_calls.discard(call.call)
            self.shared_bodies.drop(link.id, call.shared_body)
            link.send(frames.Answer(call.call, OutcomeKind.CANCELLED, None, ""))
            return
        is_own = parent is not None and self._is_own(call, parent)
        if parent is not None:
            parent.run.calls.add(call.call)
            parent.run.own_calls += is_own
        task = asyncio.get_running_loop().create_task(self._serve(link, call, body, parent), name="nested call")
        self._tasks[link.id, call.call] = task
        # Not in the task: a task that is cancelled before its first step does not run.
        task.add_done_callback(functools.partial(self._send_answer, link, call, parent, is_own))

    def credit(self, link: WorkerLink, call: int, items: int) -> None:
        """Allow more items of a stream: the function has read `items`."""
        window = self._windows.get((link.id, call))
        if window is not None:
            window.credit(items)

    def close(self, link: WorkerLink, call: int) -> None:
        """Cancel a request: the function does not want the rest."""
        if (task := self._tasks.get((link.id, call))) is not None:
            task.cancel()

    def close_of(self, parent: Attempt) -> None:
        """Cancel all requests of an attempt that is to end. Otherwise a function that waits could not end."""
        for call in parent.run.calls:
            self.close(cast("WorkerLink", parent.worker), call)

    def close_all(self, link: WorkerLink) -> None:
        for call in link.open_calls:
            self.close(link, call)
        self.data.forget(link.id)

    def _send_answer(
        self,
        link: WorkerLink,
        call: frames.Call,
        parent: Attempt | None,
        is_own: bool,
        task: asyncio.Task[_Answer],
    ) -> None:
        self._tasks.pop((link.id, call.call), None)
        link.open_calls.discard(call.call)
        if parent is not None:
            parent.run.calls.discard(call.call)
            parent.run.own_calls -= is_own
        answer = _CANCELLED if task.cancelled() else task.result()
        if task.cancelled():
            self.shared_bodies.drop(link.id, call.shared_body)
        try:
            link.send(
                frames.Answer(call.call, answer.kind, answer.error, answer.content_type, answer.shared_body),
                answer.body,
            )
        except PayloadTooLarge as error:  # without an answer, the function would wait forever
            link.send(frames.Answer(call.call, OutcomeKind.REJECTED, error.info(), ""))

    async def _serve(self, link: WorkerLink, call: frames.Call, body: bytes, parent: Attempt | None) -> _Answer:
        try:
            return await self._execute(link, call, body, parent)
        except GpufnError as error:
            return _Answer(OutcomeKind.REJECTED, error.info())
        except TimeoutError:
            return _Answer(OutcomeKind.EXPIRED)
        except Exception:
            log.exception("a call from worker %s failed", link.id)
            return _Answer(OutcomeKind.REJECTED, PlatformError().info())

    async def _execute(self, link: WorkerLink, call: frames.Call, body: bytes, parent: Attempt | None) -> _Answer:
        match call.verb:
            case Verb.CALL:
                return await self._call(link, call, body, parent)
            case Verb.STREAM:
                return await self._stream(link, call, body, parent)
            case Verb.SUBMIT:
                return await self._submit(link, call, body, parent)
            case Verb.STATUS | Verb.RESULT | Verb.CANCEL:
                return await self._retry_while_bus_away(
                    self._useful_until(call, parent), lambda: self._look_up(link, call)
                )
            case Verb.CHECKPOINT | Verb.RESTORE:
                return await self._checkpoint(link, call, body, parent)
            case Verb.DATA:
                return await self._data(link, call, body, parent)
        raise InvalidInput(f"{call.verb!r} is not a request that a function can make")

    async def _call(self, link: WorkerLink, call: frames.Call, body: bytes, parent: Attempt | None) -> _Answer:
        request = await self._waited_request(link, call, body, parent)

        async def once() -> tuple[ResultReply, bytes]:
            self.circuits.check(request.revision)
            self._wake_up_runners(request.revision)
            pending = self.caller.invoke(request)
            try:
                reply, result = await pending.future
            except asyncio.CancelledError:
                pending.cancel()
                raise
            return reply, result

        try:
            reply, result = await self._retry_while_bus_away(request.deadline, once)
            shared_body = await self._retry_while_bus_away(request.deadline, lambda: self._result_for(link, reply))
        finally:
            self.bodies.remove(subjects.ARGUMENT_FILES, request.reference)
        return _Answer(reply.kind, reply.error, reply.content_type, result, shared_body)

    async def _stream(self, link: WorkerLink, call: frames.Call, body: bytes, parent: Attempt | None) -> _Answer:
        request = await self._waited_request(link, call, body, parent)
        items = 0

        async def once() -> _Answer:
            nonlocal items
            self.circuits.check(request.revision)
            self._wake_up_runners(request.revision)
            pending = self.caller.open_stream(request)
            window = self._windows[link.id, call.call] = _Window()
            try:
                async for item, data in pending.items():
                    await window.room_for(len(data))
                    items += 1
                    link.send(frames.AnswerItem(call.call, item.content_type), data)
                end: ResultReply = (await pending.future)[0]
            finally:
                if not pending.future.done():
                    pending.cancel()
                del self._windows[link.id, call.call]
            return _Answer(end.kind, end.error, end.content_type)

        try:
            return await self._retry_while_bus_away(request.deadline, once, may_repeat=lambda: not items)
        finally:
            self.bodies.remove(subjects.ARGUMENT_FILES, request.reference)

    async def _submit(self, link: WorkerLink, call: frames.Call, body: bytes, parent: Attempt | None) -> _Answer:
        revision = await self._called(link, call, parent)
        useful_until = self._useful_until(call, parent)
        while not self.bus.connected:  # after sending, the outcome may be unknown; a second try could run twice
            await self._wait_for_bus(useful_until, BusUnavailable())
        await self._retry_while_bus_away(useful_until, lambda: self._team_queues.admit(revision.function))
        now, priority = self.clock.time(), _requested_priority(revision, link, call, parent)
        deadline = 0.0 if call.timeout_s is None else now + _bounded(call.timeout_s)
        invocation = new_invocation_id() if call.shared_body else None
        arguments = await self._arguments(
            link, call, body, max_bytes=RECORD_BYTES, owner=invocation or "", deadline=useful_until
        )
        request = _request(revision, call, arguments, parent, deadline=deadline, priority=priority)
        if request.reference is None:
            invocation = None  # the id is completed by the position in the queue
        record = await call_records.submit(self.bus, request, now=now, invocation=invocation)
        return _Answer(OutcomeKind.SUCCEEDED, None, "text/plain", record.id.encode())

    async def _waited_request(
        self, link: WorkerLink, call: frames.Call, body: bytes, parent: Attempt | None
    ) -> CallRequest:
        """Return the request of a call that the function waits for."""
        revision = await self._called(link, call, parent)
        deadline = self._deadline(revision, call, parent)
        ttl_s = max(0.0, deadline - self.clock.time()) + bodies.EXPIRES_LATER_S
        owner = bodies.expiring_owner()
        arguments = await self._arguments(
            link, call, body, max_bytes=MESSAGE_BYTES, owner=owner, deadline=deadline, ttl_s=ttl_s
        )
        priority = _requested_priority(revision, link, call, parent)
        if priority is None:  # a call that waits for this one must not wait among calls of a lower class
            priority = revision.spec.priority
            if parent is not None and parent.message.priority.is_above(priority):
                priority = parent.message.priority
        deadline = self._deadline(revision, call, parent)  # storing the arguments took time
        return _request(revision, call, arguments, parent, deadline=deadline, priority=priority)

    async def _arguments(
        self,
        link: WorkerLink,
        call: frames.Call,
        body: bytes,
        *,
        max_bytes: int,
        owner: str,
        deadline: float,
        ttl_s: float | None = None,
    ) -> _Arguments:
        """Return the arguments, or store them for `owner` if they exceed `max_bytes`. Raises InvalidInput,
        CapacityError, BusUnavailable."""
        if not call.shared_body:
            return body, None
        path = self.shared_bodies.kept_path(self.shared_bodies.accept(link.id, call.shared_body))
        try:
            if path.stat().st_size <= min(max_bytes, inline_bytes(int(self.bus.server_info["max_payload"]))):
                return path.read_bytes(), None
            stored = await self._retry_while_bus_away(
                deadline, lambda: self.bodies.store_arguments(path, owner=owner, ttl_s=ttl_s)
            )
            return b"", stored
        except OSError as error:
            raise InvalidInput(f"the arguments cannot be read: {error.strerror}") from error
        finally:
            path.unlink(missing_ok=True)

    async def _result_for(self, link: WorkerLink, reply: ResultReply) -> str:
        """Return the name of a large result in the requesting worker's folder, or "" if the result is in the reply.
        Raises ArtifactUnavailable, CapacityError, BusUnavailable."""
        if reply.shared_body:
            return self.shared_bodies.hand_over_result(reply.shared_body, link.id)
        if reply.reference is None:
            return ""
        shared_body = await self.bodies.fetch(subjects.RESULT_FILES, reply.reference, link.id)
        self.bodies.remove(subjects.RESULT_FILES, reply.reference)
        return shared_body

    async def _look_up(self, link: WorkerLink, call: frames.Call) -> _Answer:
        if not is_call_or_item_id(call.target):  # it becomes part of a subject, where * would match all calls
            raise InvocationNotFound(f"{call.target[:40]!r} is not an invocation's id")
        stored = await call_records.read(self.bus, call.target)
        # Some ids can be computed, such as the ids of scheduled runs.
        if stored is None or not self.directory.may_call(link.revision.function, stored[0].function):
            raise InvocationNotFound(f"there is no invocation {call.target}")
        record, body = stored
        if call.verb == Verb.RESULT:
            if not record.state.ended:
                record, body = await self._wait_for_end(call.target, call.timeout_s)
            if not record.state.ended:
                raise TimeoutError
            shared_body = ""
            if record.blob:
                reference = BodyReference(record.id, record.blob, record.size)
                shared_body = await self.bodies.fetch(subjects.RESULT_FILES, reference, link.id)
            return _Answer(_KIND_OF_STATE[record.state], record.error, record.content_type, body, shared_body)
        if call.verb == Verb.CANCEL:
            was_running = await call_records.cancel(self.bus, record, self.clock.time())
            return _Answer(OutcomeKind.SUCCEEDED, None, media.JSON, b"true" if was_running else b"false")
        return _Answer(OutcomeKind.SUCCEEDED, None, "text/plain", (await self._state(record)).encode())

    async def _wait_for_end(self, invocation: str, timeout_s: float | None) -> tuple[CallRecord, bytes]:
        """Like `call_records.wait`, but survives a short outage of the bus, because the call may run for hours. The
        wait is cancelled when the waiting call ends."""
        deadline = self.clock.monotonic() + (LONGEST_TIMEOUT_S if timeout_s is None else _bounded(timeout_s))
        while True:
            try:
                return await call_records.wait(self.bus, invocation, deadline - self.clock.monotonic())
            except BusUnavailable as error:
                if self.clock.monotonic() >= deadline:
                    raise
                log.info("cannot check whether %s has ended; retrying: %s", invocation, error)
                await asyncio.sleep(_RETRY_BUS_S)

    async def _checkpoint(self, link: WorkerLink, call: frames.Call, body: bytes, parent: Attempt | None) -> _Answer:
        if parent is None:
            raise InvalidInput("only a running call has a checkpoint")
        if call.verb == Verb.CHECKPOINT:
            await self._checkpoints.store(link.id, call, body, parent)
            return _Answer(OutcomeKind.SUCCEEDED)
        last = await self._retry_while_bus_away(
            self._useful_until(call, parent), lambda: self._checkpoints.last(parent)
        )
        return _Answer(OutcomeKind.SUCCEEDED, None, *last)

    async def _data(self, link: WorkerLink, call: frames.Call, body: bytes, parent: Attempt | None) -> _Answer:
        request = body
        if call.shared_body:
            path = self.shared_bodies.kept_path(self.shared_bodies.accept(link.id, call.shared_body))
            try:
                request = await asyncio.to_thread(path.read_bytes)
            finally:
                path.unlink(missing_ok=True)
        reply = await self._retry_while_bus_away(
            self._useful_until(call, parent),
            lambda: self.data.execute(link.id, link.revision.function, link.revision.spec, request),
        )
        return _Answer(OutcomeKind.SUCCEEDED, None, *reply)

    async def _state(self, record: CallRecord) -> str:
        if record.state.ended or await call_records.locate(self.bus, record.id) is None:
            return record.state.value
        return InvocationState.RUNNING.value

    def _deadline(self, revision: Revision, call: frames.Call, parent: Attempt | None) -> float:
        spec = revision.spec
        max_s = (spec.queue_timeout_s or spec.startup_timeout_s) + spec.timeout_s
        wait_s = max_s if call.timeout_s is None else _bounded(call.timeout_s)
        if parent is not None:
            wait_s = min(wait_s, parent.run.must_end_at - self.clock.monotonic())
        return self.clock.time() + wait_s

    async def _called(self, link: WorkerLink, call: frames.Call, parent: Attempt | None) -> Revision:
        """Return the revision to call: the same revision for all calls that one call makes to a function.

        Raises Forbidden for a pickle from another app. A function has no API key whose scope could allow it, and the
        pickle would run code beside the secrets of the called function."""
        caller = link.revision.function
        key = (new_invocation_id() if parent is None else parent.message.id).encode()
        revision = await self._retry_while_bus_away(
            self._useful_until(call, parent), lambda: self.directory.called(call.target, caller, key)
        )
        if call.content_type == media.PICKLED and home_of(revision.function) != home_of(caller):
            raise Forbidden(
                f"A pickle runs code where it is read, so {revision.function} takes pickles of functions only from its "
                "own app: pass values that need no pickle."
            )
        return revision

    def _is_own(self, call: frames.Call, parent: Attempt) -> bool:
        """Return whether the call is to the function that waits for it."""
        function = parent.message.function
        if call.verb not in (Verb.CALL, Verb.STREAM):
            return False
        try:
            return self.directory.find(call.target, function) == function
        except RequestError:  # the call fails
            return False

    async def _retry_while_bus_away(
        self, deadline: float, once: Callable[[], Awaitable[T]], *, may_repeat: Callable[[], bool] = lambda: True
    ) -> T:
        """Call `once()`, again while the bus is away, until `deadline` in unix seconds. Raises BusUnavailable."""
        while True:
            try:
                return await once()
            except BusUnavailable as error:
                if not may_repeat():
                    raise
                await self._wait_for_bus(deadline, error)

    async def _wait_for_bus(self, deadline: float, error: BusUnavailable) -> None:
        if self.clock.time() + _RESERVED_S >= deadline:
            raise BusUnavailable("The message bus did not answer in the time that this call had.") from error
        await asyncio.sleep(_RETRY_BUS_S)

    def _useful_until(self, call: frames.Call, parent: Attempt | None) -> float:
        """Return when the request becomes useless, in unix seconds."""
        wait_s = LONGEST_TIMEOUT_S if call.timeout_s is None or call.verb == Verb.SUBMIT else _bounded(call.timeout_s)
        if parent is not None:
            wait_s = min(wait_s, parent.run.must_end_at - self.clock.monotonic())
        return self.clock.time() + wait_s

    def _wake_up_runners(self, revision: Revision) -> None:
        """Send a wakeup. The runner does not know how many workers there are elsewhere; a wakeup is cheap."""
        self.bus.publish(subjects.wakeup(revision.function), wakeups.payload(revision.number))


def _bounded(timeout_s: float) -> float:
    """Limit a timeout, because a worker may send any value."""
    return timeout_s if timeout_s <= LONGEST_TIMEOUT_S else LONGEST_TIMEOUT_S  # this order also replaces NaN


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
        revision, call.method, call.content_type, arguments[0], call.accept, deadline,
        priority=priority, reference=arguments[1],
    )  # fmt: skip
    if parent is None:
        return request
    caller_message = parent.message
    trace = trace_context.of_nested_call(caller_message.id, caller_message.attempt, caller_message.trace)
    return request._replace(parent=caller_message.id, trace=trace, owner=caller_message.owner)


def _requested_priority(
    revision: Revision, link: WorkerLink, call: frames.Call, parent: Attempt | None
) -> Priority | None:
    """Return the requested class. Raises Forbidden for class hi: a function has no API key that could allow it."""
    may_be_hi = [revision.spec.priority, link.revision.spec.priority]
    may_be_hi += [] if parent is None else [parent.message.priority]
    if call.priority is Priority.HI and Priority.HI not in may_be_hi:
        raise Forbidden("Only a call of class hi, or a function of that class, may make a call of class hi.")
    return call.priority
