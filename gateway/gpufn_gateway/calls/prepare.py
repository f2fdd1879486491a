"""Prepare a call: the steps before it is queued, for all kinds of calls.

1. authenticate (`Access`)   2. resolve the function (`Registry`) and check the key's limits (`QuotaSync`)
3. parse the call's headers (`call_headers`)   4. check that it can be served (`admission`)
5. receive the body, within limits, and check the arguments against the signature (`arguments`)
6. wake up the controller if no worker is ready (`ColdStartWakeup`)
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import msgspec

from gpufn_core.domain.circuit_errors import start_failure
from gpufn_core.encoding import media
from gpufn_core.errors import (
    FunctionNotFound,
    GpufnError,
    InvocationExpired,
    QueueFull,
    UnsupportedMediaType,
    pickles_refused,
)
from gpufn_core.protocol.messages import ResultReply
from gpufn_core.protocol.records import BodyReference
from gpufn_core.protocol.reports import FunctionStatus
from gpufn_core.spec.function_spec import FunctionSpec
from gpufn_core.spec.naming.variant_names import names_variant
from gpufn_core.spec.priority import Priority
from gpufn_gateway.auth.access import Access, Principal
from gpufn_gateway.auth.quota_sync import QuotaSync
from gpufn_gateway.auth.scopes import HI, PICKLE
from gpufn_gateway.calls import admission
from gpufn_gateway.calls.arguments import ReadArguments, read_arguments
from gpufn_gateway.calls.call_bodies import CallBodies, CallBody
from gpufn_gateway.calls.call_headers import parse_call_options
from gpufn_gateway.calls.mirrors import Mirrors
from gpufn_gateway.calls.prepared_call import PreparedCall, Queue
from gpufn_gateway.calls.shared_bodies import GatewaySharedBodies
from gpufn_gateway.calls.stored_bodies import StoredBodies
from gpufn_gateway.calls.wakeup import ColdStartWakeup, Publisher
from gpufn_gateway.functions.registry import Registry
from gpufn_gateway.functions.target import Target
from gpufn_gateway.functions.variants import Variants
from gpufn_gateway.http import sender
from gpufn_gateway.http.body_reader import Receive
from gpufn_gateway.metrics.telemetry import Telemetry
from gpufn_gateway.problems import Headers, KeyLimitExceeded
from gpufn_gateway.traces.tracing import Tracing
from gpufn_platform.process.clock import Clock
from gpufn_platform.queue import large_bodies as bodies
from gpufn_platform.queue.call_request import CallRequest
from gpufn_platform.queue.pending import PendingCall, PendingStream
from gpufn_platform.shared_bodies.bodies import SharedBodyReader
from gpufn_platform.web.pending_session import PendingSession

P = TypeVar("P", bound=PendingCall)

_NO_BODY: Final = CallBody(b"")


@dataclass(kw_only=True, eq=False)
class Calls:
    """Prepares, starts and discards calls."""

    bus: Publisher
    queue: Queue
    registry: Registry
    access: Access
    telemetry: Telemetry
    bodies: CallBodies
    clock: Clock
    quotas: QuotaSync
    variants: Variants
    shared_bodies: GatewaySharedBodies | None = None
    stored_bodies: StoredBodies | None = None
    tracing: Tracing | None = None
    check_budget: Callable[[str], None] = lambda function: None  # raises KeyLimitExceeded

    def __post_init__(self) -> None:
        self._wakeup = ColdStartWakeup(self.bus, self.registry, self.clock)
        self._mirrors = Mirrors(
            bus=self.bus,
            queue=self.queue,
            wakeup=self._wakeup,
            clock=self.clock,
            discard_result=self._discard_copy,
        )
        self.registry.on_status = self._on_status
        self.registry.on_key_deleted.append(self.quotas.forget)

    async def prepare(
        self,
        name: str,
        headers: dict[bytes, bytes],
        receive: Receive,
        *,
        waiting: bool = True,
        read: ReadArguments | None = None,
        may_share: bool = False,
        is_queued: bool = False,
        query: bytes = b"",
        principal: Principal | None = None,
        target: Target | None = None,
        key: str = "",
        revision: str = "",
    ) -> PreparedCall:
        """Run steps 1 to 5. The caller must `discard` the call in the end.

        `waiting`: a client waits for the result, so the call is rejected if the function cannot serve it now.
        `may_share`: a large body may become a shared body. `is_queued`: the call will be submitted. `store_body_for`
        then stores a body that is too large for its message; for other calls it is stored here. `read` replaces step 5
        for another protocol. `query` has the arguments beside a raw body. `principal` replaces step 1, and
        `target` the search for the function.
        `key` and `revision` choose the revision of a split function (`Target.of`).
        """
        if principal is None:
            principal = self.access.authenticate(headers)
        sender.current.set(self.access.sender_of(principal))
        is_variant = False
        try:
            target = target or self.registry.resolve(name, principal)
        except FunctionNotFound:
            if not names_variant(name):
                raise
            target, is_variant = await self.variants.provide(name, principal), True
        target = target if target.split is None else target.of(key, headers, revision)
        principal.require_invoke(target.name)
        try:
            self.check_budget(target.name)
            self.quotas.admit(principal)
            if target.team is not None:
                self.quotas.admit(target.team)
            received_at = self.clock.time()
            options = parse_call_options(headers, received_at)
            check_priority(options.priority, target.revision.spec, principal)
            if waiting:
                status = self.registry.statuses.get(target.name)
                refusal = admission.refusal(target.function, target.revision, status, options.remaining_s(received_at))
                if refusal is not None:
                    raise self._for_principal(refusal, principal, target, options.remaining_s(received_at))
            if read is None:
                arguments = await read_arguments(
                    self.bodies,
                    target,
                    headers,
                    receive,
                    may_share=may_share,
                    is_queued=is_queued,
                    query=query,
                    name=name,
                )
            else:
                arguments = await read(name, target, headers, receive)
            if arguments.content_type == media.PICKLED:
                self._check_pickles(arguments.body, target, principal)
            if is_variant:
                target = await self._hold_variant(arguments.body, name, principal)
            now = self.clock.time()
            call = PreparedCall(
                principal,
                target,
                arguments.content_type,
                arguments.accept,
                arguments.body,
                now,
                options.remaining_s(now),
                options.trace if self.tracing is None else self.tracing.begin(options.trace),
                options.priority or target.revision.spec.priority,
            )
            if call.body.exceeds_message and not is_queued:
                return await self._store_body_temporarily(call)
            return call
        except GpufnError as error:
            self.telemetry.of(target.name).count_refusal(error.code)
            raise

    async def _hold_variant(self, body: CallBody, name: str, principal: Principal) -> Target:
        """Return the target again: the lease of a variant may have ended during a long upload."""
        try:
            return await self.variants.provide(name, principal)
        except GpufnError:
            self.bodies.discard(body)
            raise

    def _check_pickles(self, body: CallBody, target: Target, principal: Principal) -> None:
        try:
            check_pickles(target, principal)
        except GpufnError:
            self.bodies.discard(body)
            raise

    def start(self, call: PreparedCall) -> PendingCall:
        """Queue a call that a client waits for. Raises BusUnavailable, KeyLimitExceeded."""
        pending = self._start(call, self.queue.invoke)
        if call.target.split is not None:
            self._mirrors.begin(call, pending)
        return pending

    def start_stream(self, call: PreparedCall) -> PendingStream:
        """Queue a call whose items are streamed. Raises BusUnavailable, KeyLimitExceeded."""
        return self._start(call, self.queue.open_stream)

    def start_session(self, call: PreparedCall) -> PendingSession:
        """Queue a web session. Raises BusUnavailable, KeyLimitExceeded."""
        return self._start(call, self.queue.open_session)

    def _start(self, call: PreparedCall, queue: Callable[[CallRequest], P]) -> P:
        try:
            on_end = self.quotas.begin(call.principal)
        except GpufnError as error:
            self.telemetry.of(call.target.name).count_refusal(error.code)
            raise
        try:
            pending = queue(call.request(call.deadline))
        except GpufnError:
            if on_end is not None:
                on_end(None)
            raise
        if on_end is not None:
            pending.future.add_done_callback(on_end)
        self._wakeup.wake_if_cold(call.target)
        return pending

    def result(self, reply: ResultReply, body: bytes) -> bytes | SharedBodyReader:
        """Return the result's bytes, or a reader that the caller must close. Raises ArtifactUnavailable."""
        if not reply.shared_body or self.shared_bodies is None:
            return body
        return self.shared_bodies.open_result(reply.shared_body)

    def stored_result(self, reply: ResultReply) -> AsyncGenerator[bytes, None] | None:
        """Return the parts of a result that was too large for the reply, else None. Raises ArtifactUnavailable."""
        if reply.reference is None or self.stored_bodies is None:
            return None
        return self.stored_bodies.result(reply.reference)

    def discard_result(self, reply: ResultReply) -> None:
        """Remove a stored result that the client has received."""
        if reply.reference is not None and self.stored_bodies is not None:
            self.stored_bodies.remove_result(reply.reference)

    def _discard_copy(self, reply: ResultReply) -> None:
        """Remove a large result without a receiver."""
        self.discard_result(reply)
        if reply.shared_body and self.shared_bodies is not None:
            self.shared_bodies.remove(reply.shared_body)

    async def store_body_for(self, call: PreparedCall, invocation: str) -> PreparedCall:
        """Store the body for `invocation` if it is too large for a message. The code that ends the call removes it.

        Raises CapacityError if the store is full, BusUnavailable.
        """
        if not call.body.exceeds_message or self.stored_bodies is None:
            return call
        reference = await self.stored_bodies.store(call.body, owner=invocation)
        return msgspec.structs.replace(call, reference=reference, body=_NO_BODY)

    async def _store_body_temporarily(self, call: PreparedCall) -> PreparedCall:
        """Like `store_body_for`, but the stored body expires, in case this gateway dies before it discards the call."""
        if self.stored_bodies is None:
            return call
        ttl_s = call.deadline - call.now + bodies.EXPIRES_LATER_S
        try:
            reference = await self.stored_bodies.store(call.body, owner=bodies.expiring_owner(), ttl_s=ttl_s)
        finally:
            self.discard(call)
        return msgspec.structs.replace(call, reference=reference, body=_NO_BODY)

    async def store_large_items(
        self, items: Sequence[bytes | memoryview], owner_of: Callable[[int], str], inline_bytes: int
    ) -> dict[int, BodyReference]:
        """Store a map's items above `inline_bytes`; return their references by index.

        Raises the exceptions of `store_body_for`.
        """
        references_by_index: dict[int, BodyReference] = {}
        for index, item in enumerate(items):
            if len(item) > inline_bytes and self.stored_bodies is not None:
                references_by_index[index] = await self.stored_bodies.store_bytes(item, owner=owner_of(index))
        return references_by_index

    def discard(self, call: PreparedCall) -> None:
        """Release the large body of a call that has ended or was stored."""
        self.bodies.discard(call.body)
        if call.reference is not None and self.stored_bodies is not None:
            self.stored_bodies.remove(call.reference)

    @contextlib.asynccontextmanager
    async def queueing(self, principal: Principal, target: Target, calls: int = 1) -> AsyncIterator[None]:
        """Context in which submitted calls are stored. Raises KeyLimitExceeded."""
        status = self.registry.statuses.get(target.name)
        retry_after_s = admission.retry_after_s(target.revision, status)
        async with contextlib.AsyncExitStack() as stack:
            for holder in (principal, target.team):
                if holder is not None:
                    await stack.enter_async_context(self.quotas.queueing(holder, retry_after_s, calls))
            yield

    @contextlib.asynccontextmanager
    async def admitting(
        self, principal: Principal, target: Target, priority: Priority | None, *, is_counted: bool = True
    ) -> AsyncIterator[None]:
        """Context in which a call of a schedule or of a dead letter is stored.

        `is_counted` is False for the further calls of a request that makes several. Raises Forbidden, KeyLimitExceeded,
        QueueFull.
        """
        check_priority(priority, target.revision.spec, principal)
        try:
            self.check_budget(target.name)
            if is_counted:
                self.quotas.admit(principal)
            if target.team is not None:
                self.quotas.admit(target.team)
            async with self.queueing(principal, target):
                yield
        except QueueFull:
            raise self.queue_full(target) from None
        except KeyLimitExceeded as error:
            self.telemetry.of(target.name).count_refusal(error.code)
            raise

    def limits(self, call: PreparedCall) -> Headers:
        """Return the RateLimit headers of the call's key."""
        return self.quotas.headers(call.principal)

    def queue_full(self, target: Target) -> GpufnError:
        return admission.queue_full(target.revision, self.registry.statuses.get(target.name))

    def explain(self, call: PreparedCall, error: GpufnError) -> GpufnError:
        """Add details about the function to `error` of a queued call: why it waited, when to retry."""
        target = call.target
        if isinstance(error, QueueFull):
            return self.queue_full(target)
        if isinstance(error, InvocationExpired):
            return admission.explain_expiry(target.name, error, self.registry.status_for(call.principal, target.name))
        return error

    def _for_principal(
        self, refusal: GpufnError, principal: Principal, target: Target, timeout_s: float | None
    ) -> GpufnError:
        """Return a refusal that names no function that the principal may not see."""
        status = self.registry.status_for(principal, target.name)
        return admission.refusal(target.function, target.revision, status, timeout_s) or refusal

    def _on_status(self, status: FunctionStatus) -> None:
        """Fail the waiting calls of a function whose circuit is open: its workers cannot start."""
        failure = start_failure(status.serving, status)
        if failure is not None:
            self.queue.fail(status.function, status.serving, failure)


def cancel_unless_ended(pending: PendingCall) -> None:
    """Cancel a call unless it has ended.

    A cancelled future does not count as ended: cancelling a task also cancels the future that it awaits.
    """
    if not pending.future.done() or pending.future.cancelled():
        pending.cancel()


def check_priority(priority: Priority | None, spec: FunctionSpec, principal: Principal) -> None:
    """Raises Forbidden if the key may not use priority `hi` and it is not the function's own priority."""
    if priority is Priority.HI is not spec.priority:
        principal.require(HI)


def check_pickles(target: Target, principal: Principal) -> None:
    """Check that pickled arguments, which run code in the worker, are allowed.

    Raises UnsupportedMediaType, Forbidden.
    """
    if not target.revision.spec.pickle:
        raise UnsupportedMediaType(pickles_refused(target.name))
    principal.require(PICKLE)
