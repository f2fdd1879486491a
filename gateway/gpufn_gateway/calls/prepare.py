"""What every call goes through before it is queued, whichever way its result is wanted.

1. who asks (`Access`)   2. what it names (`Registry`), and whether the key's limits allow it now (`KeyUses`)
3. what its headers ask of it (`asked`)   4. whether anybody could serve it (`admission`)
5. its body, within limits   6. whether it fits the signature   7. a doorbell when no worker is ready (`Doorbell`)
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import msgspec

from gpufn_core.domain.circuit_errors import start_failure
from gpufn_core.encoding import media
from gpufn_core.errors import (
    GpufnError,
    InvalidInput,
    InvocationExpired,
    QueueFull,
    UnsupportedMediaType,
    pickles_refused,
)
from gpufn_core.protocol.messages import ResultReply
from gpufn_core.protocol.records import BodyReference
from gpufn_core.protocol.reports import FunctionStatus
from gpufn_core.spec.function_spec import FunctionSpec
from gpufn_core.spec.priority import Priority
from gpufn_gateway.arguments import query as query_arguments
from gpufn_gateway.arguments.form import Form
from gpufn_gateway.auth.access import HI, PICKLE, Access, Principal
from gpufn_gateway.auth.quota_sync import KeyUses
from gpufn_gateway.calls import admission
from gpufn_gateway.calls.call_bodies import CallBodies, CallBody
from gpufn_gateway.calls.call_headers import asked
from gpufn_gateway.calls.shared_bodies import GatewayParcels, Parcel
from gpufn_gateway.calls.stored_bodies import References
from gpufn_gateway.calls.wakeup import Doorbell, Publisher
from gpufn_gateway.functions.registry import Registry, Target
from gpufn_gateway.http import negotiation
from gpufn_gateway.http.body_reader import Receive
from gpufn_gateway.problems import Headers, Limited
from gpufn_gateway.telemetry import Telemetry
from gpufn_platform.process.clock import Clock
from gpufn_platform.queue import large_bodies as bodies
from gpufn_platform.queue.call_request import CallRequest
from gpufn_platform.queue.pending import PendingCall, PendingStream
from gpufn_platform.shared_bodies.bodies import ParcelReader

P = TypeVar("P", bound=PendingCall)

_FORM_PIECE_BYTES: Final = 64 << 10


class Queue(Protocol):
    """The part of `gpufn_platform.queue.caller.Caller` that the gateway uses."""

    @property
    def pending(self) -> int: ...

    def invoke(self, request: CallRequest) -> PendingCall: ...

    def open_stream(self, request: CallRequest) -> PendingStream: ...

    def fail(self, function: str, revision: int | None, error: GpufnError) -> None: ...

    def tick(self, now: float) -> None: ...


class Arguments(NamedTuple):
    """A call's body as it is queued, and the encoding of the result that is wanted."""

    content_type: str
    accept: str
    body: CallBody


# The call's name as it was given, what it names, the request's headers, and its body to come.
ReadArguments = Callable[[str, Target, dict[bytes, bytes], Receive], Awaitable[Arguments]]


class PreparedCall(msgspec.Struct, frozen=True):
    """A call that may be queued. `timeout_s` is what the client asked for, if it did."""

    principal: Principal
    target: Target
    content_type: str
    accept: str
    body: bytes
    parcel: Parcel | None  # the body, when it is large
    now: float
    timeout_s: float | None
    trace: str
    priority: Priority
    by_reference: bool = False  # `body`, or `parcel`, is too large for a message and is to be stored beside it
    reference: BodyReference | None = None  # where it was stored

    @property
    def deadline(self) -> float:
        """For a call that somebody waits for."""
        return self.now + (self.target.budget_s if self.timeout_s is None else self.timeout_s)

    @property
    def submit_deadline(self) -> float:
        """For one that nobody waits for: none unless the client says so. A queue_timeout ends what waits for its first
        attempt, and would end later ones."""
        return 0.0 if self.timeout_s is None else self.now + self.timeout_s

    def request(self, deadline: float) -> CallRequest:
        """What is queued."""
        target = self.target
        return CallRequest(
            target.revision,
            target.method.name,
            self.content_type,
            self.body,
            self.accept,
            deadline,
            trace=self.trace,
            parcel="" if self.parcel is None else self.parcel.name,
            priority=self.priority,
            owner=self.principal.owner,
            reference=self.reference,
        )


class Calls:
    def __init__(
        self,
        *,
        bus: Publisher,
        queue: Queue,
        registry: Registry,
        access: Access,
        telemetry: Telemetry,
        bodies: CallBodies,
        clock: Clock,
        uses: KeyUses,
        parcels: GatewayParcels | None = None,
        references: References | None = None,
    ) -> None:
        self.queue = queue
        self.uses = uses
        self._parcels = parcels
        self._references = references
        self.clock = clock
        self.telemetry = telemetry
        self.access = access
        self.registry = registry
        self._doorbell = Doorbell(bus, registry, clock)
        self._bodies = bodies
        registry.on_status = self._on_status
        registry.on_key_deleted = uses.forget

    async def prepare(
        self,
        name: str,
        headers: dict[bytes, bytes],
        receive: Receive,
        *,
        waits: bool = True,
        read: ReadArguments | None = None,
        may_be_parcel: bool = False,
        is_queued: bool = False,
        query: bytes = b"",
    ) -> PreparedCall:
        """Steps 1 to 6. `waits`: somebody waits for the result, so a function that cannot serve now refuses.

        `may_be_parcel`: a large body may become a parcel. `is_queued`: the call is going to be submitted, and a body
        that is too large for its message is stored then (`stored_for`); of other calls it is stored here. In the end
        `discard` the call. `read` takes the place of steps 5 and 6 for a protocol of its own. `query` has the arguments
        beside a raw body.
        """
        principal = self.access.authenticate(headers)
        target = self.registry.resolve(name)
        principal.need_invoke(target.name)
        try:
            self.uses.admit(principal)
            asked_at = self.clock.time()
            asks = asked(headers, asked_at)
            check_class(asks.priority, target.revision.spec, principal)
            if waits:
                status = self.registry.statuses.get(target.name)
                refused = admission.refusal(target.function, target.revision, status, asks.left_s(asked_at))
                if refused is not None:
                    raise refused
            if read is None:
                arguments = await self._read(
                    name, target, headers, receive, may_be_parcel=may_be_parcel, is_queued=is_queued, query=query
                )
            else:
                arguments = await read(name, target, headers, receive)
            if arguments.content_type == media.PICKLED:
                check_pickles(target, principal)
            now = self.clock.time()
            call = PreparedCall(
                principal,
                target,
                arguments.content_type,
                arguments.accept,
                arguments.body.data,
                arguments.body.parcel,
                now,
                asks.left_s(now),
                asks.trace,
                asks.priority or target.revision.spec.priority,
                arguments.body.by_reference,
            )
            if call.by_reference and not is_queued:
                return await self._stored_while_waited_for(call)
            return call
        except GpufnError as error:
            self.telemetry.of(target.name).refused(error.code)
            raise

    async def _read(
        self,
        name: str,
        target: Target,
        headers: dict[bytes, bytes],
        receive: Receive,
        *,
        may_be_parcel: bool,
        is_queued: bool,
        query: bytes,
    ) -> Arguments:
        """Keyword arguments, a form with them, or the bytes of the one parameter that takes bytes."""
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise UnsupportedMediaType("A body is sent as it is, without Content-Encoding.")
        content_type = negotiation.of_body(headers.get(b"content-type"))
        if content_type is media.JSON:
            data = await self._bodies.read(headers, receive, may_be_parcel=may_be_parcel, is_queued=is_queued) or b"{}"
            target.signature.check(data)
            body = self._bodies.wrap(data, function=target.name, may_be_parcel=may_be_parcel, is_queued=is_queued)
            return Arguments(content_type, negotiation.wanted(headers.get(b"accept")), body)
        raw_parameter = target.method.raw_parameter
        is_raw = not negotiation.is_arguments(content_type)
        if is_raw and raw_parameter is None:
            raise UnsupportedMediaType(
                f"{name} takes its arguments as {media.JSON} or {media.MSGPACK}, not as {content_type}."
            )
        is_form = is_raw and negotiation.is_multipart(content_type)
        if is_form or (is_raw and query):
            if is_form:
                form = _form(content_type)
                whole = await self._bodies.read(headers, receive, may_be_parcel=may_be_parcel, is_queued=is_queued)
                await _write(form, whole)
                arguments = form.arguments(target.signature)
            else:
                assert raw_parameter is not None
                arguments = query_arguments.arguments(query, target.signature, raw_parameter)
                arguments[raw_parameter] = await self._bodies.read(
                    headers, receive, may_be_parcel=may_be_parcel, is_queued=is_queued
                )
            content_type = media.MSGPACK
            body = self._bodies.wrap(
                _packed(arguments), function=target.name, may_be_parcel=may_be_parcel, is_queued=is_queued
            )
        else:
            body = await self._bodies.take(
                headers, receive, function=target.name, may_be_parcel=may_be_parcel, is_queued=is_queued
            )
        return Arguments(content_type, negotiation.wanted(headers.get(b"accept")), body)

    def start(self, call: PreparedCall) -> PendingCall:
        """Queue it for a result. Raises BusUnavailable, Limited."""
        return self._start(call, self.queue.invoke)

    def start_stream(self, call: PreparedCall) -> PendingStream:
        return self._start(call, self.queue.open_stream)

    def _start(self, call: PreparedCall, queue: Callable[[CallRequest], P]) -> P:
        try:
            at_end = self.uses.begin(call.principal)
        except GpufnError as error:
            self.telemetry.of(call.target.name).refused(error.code)
            raise
        try:
            pending = queue(call.request(call.deadline))
        except GpufnError:
            if at_end is not None:
                at_end(None)
            raise
        if at_end is not None:
            pending.future.add_done_callback(at_end)
        self._doorbell.ring_if_cold(call.target)
        return pending

    def result(self, reply: ResultReply, body: bytes) -> bytes | ParcelReader:
        """The result's bytes, or the parcel that they are in, to be closed. Raises ArtifactUnavailable."""
        if not reply.parcel or self._parcels is None:
            return body
        return self._parcels.take(reply.parcel)

    def stored_result(self, reply: ResultReply) -> AsyncGenerator[bytes, None] | None:
        """The parts of a result that was too large for the reply; None of any other. Raises ArtifactUnavailable."""
        if reply.reference is None or self._references is None:
            return None
        return self._references.result(reply.reference)

    def discard_result(self, reply: ResultReply) -> None:
        """The client has it."""
        if reply.reference is not None and self._references is not None:
            self._references.remove_result(reply.reference)

    async def stored_for(self, call: PreparedCall, invocation: str) -> PreparedCall:
        """The same, with its body stored, when it is too large for a message, for `invocation`. Whoever ends that
        removes it. Raises CapacityError when the store is full, BusUnavailable."""
        if not call.by_reference or self._references is None:
            return call
        reference = await self._references.store(CallBody(call.body, call.parcel), owner=invocation)
        return msgspec.structs.replace(call, reference=reference, body=b"", parcel=None)

    async def _stored_while_waited_for(self, call: PreparedCall) -> PreparedCall:
        """As `stored_for`. The body expires, should nobody be there to discard the call."""
        if self._references is None:
            return call
        ttl_s = call.deadline - call.now + bodies.EXPIRES_LATER_S
        try:
            body = CallBody(call.body, call.parcel)
            reference = await self._references.store(body, owner=bodies.waited_owner(), ttl_s=ttl_s)
        finally:
            self.discard(call)
        return msgspec.structs.replace(call, reference=reference, body=b"", parcel=None)

    async def stored_items(
        self, items: Sequence[bytes | memoryview], owners: Callable[[int], str], most_bytes: int
    ) -> dict[int, BodyReference]:
        """Those of a map's items that have more than `most_bytes`, by their place. Raises as `stored_for`."""
        stored: dict[int, BodyReference] = {}
        for place, item in enumerate(items):
            if len(item) > most_bytes and self._references is not None:
                stored[place] = await self._references.store_bytes(item, owner=owners(place))
        return stored

    def discard(self, call: PreparedCall) -> None:
        """It has ended, or was stored: its large body is not needed here any more."""
        if call.parcel is not None and self._parcels is not None:
            self._parcels.discard(call.parcel)
        if call.reference is not None and self._references is not None:
            self._references.remove(call.reference)

    def queueing(self, call: PreparedCall, calls: int = 1) -> AbstractAsyncContextManager[None]:
        """Submitted calls are stored inside. Raises Limited."""
        return self._queueing(call.principal, call.target, calls)

    def _queueing(self, principal: Principal, target: Target, calls: int = 1) -> AbstractAsyncContextManager[None]:
        status = self.registry.status(target.name)
        return self.uses.queueing(principal, admission.retry_after_s(target.revision, status), calls)

    @contextlib.asynccontextmanager
    async def making(
        self, principal: Principal, target: Target, priority: Priority | None, *, is_counted: bool = True
    ) -> AsyncIterator[None]:
        """A call that is not a request's own, as a schedule's or a dead letter's, is stored inside. Not `is_counted` is
        one of many that one request makes. Raises Forbidden, Limited, QueueFull."""
        check_class(priority, target.revision.spec, principal)
        try:
            if is_counted:
                self.uses.admit(principal)
            async with self._queueing(principal, target):
                yield
        except QueueFull:
            raise self.queue_full(target) from None
        except Limited as error:
            self.telemetry.of(target.name).refused(error.code)
            raise

    def limits(self, call: PreparedCall) -> Headers:
        """What the answer tells of its key's limits."""
        return self.uses.headers(call.principal)

    def queue_full(self, target: Target) -> GpufnError:
        return admission.queue_full(target.revision, self.registry.status(target.name))

    def explained(self, target: Target, error: GpufnError) -> GpufnError:
        """`error` of a call that was queued, with what is known of its function: why it waited, when to come again."""
        if isinstance(error, QueueFull):
            return self.queue_full(target)
        if isinstance(error, InvocationExpired):
            return admission.expired(target.name, error, self.registry.status(target.name))
        return error

    def _on_status(self, status: FunctionStatus) -> None:
        """An open circuit ends the calls that wait for workers which will not come."""
        failure = start_failure(status.serving, status)
        if failure is not None:
            self.queue.fail(status.function, status.serving, failure)


def _form(content_type: str) -> Form:
    """Raises UnsupportedMediaType, InvalidInput."""
    if media.media_type(content_type) != media.FORM:
        raise UnsupportedMediaType(
            f"Of multipart bodies only {media.FORM} is read. To send a file alone: "
            "curl --data-binary @FILE -H 'Content-Type: application/octet-stream'."
        )
    return Form(content_type)


async def _write(form: Form, body: bytes) -> None:
    """In pieces, so that other requests go on meanwhile: a body of 40 MiB takes 60 ms to parse."""
    for start in range(0, len(body), _FORM_PIECE_BYTES):
        if start:
            await asyncio.sleep(0)
        form.write(body[start : start + _FORM_PIECE_BYTES])


def _packed(arguments: dict[str, Any]) -> bytes:
    """Raises InvalidInput."""
    try:
        return msgspec.msgpack.encode(arguments)
    except OverflowError:
        raise InvalidInput("a whole number among the arguments has more than 64 bits") from None


def leave(pending: PendingCall) -> None:
    """Cancel it unless it has ended. A task that is cancelled cancels the future that it awaits: that is no end."""
    if not pending.future.done() or pending.future.cancelled():
        pending.cancel()


def check_class(asked: Priority | None, spec: FunctionSpec, principal: Principal) -> None:
    """Raises Forbidden: calls of `hi` are for keys that may, or of functions of that class."""
    if asked is Priority.HI is not spec.priority:
        principal.need(HI)


def check_pickles(target: Target, principal: Principal) -> None:
    """Of a call with pickled arguments, which run code in the worker. Raises UnsupportedMediaType, Forbidden."""
    if not target.revision.spec.pickle:
        raise UnsupportedMediaType(pickles_refused(target.name))
    principal.need(PICKLE)
