"""A call that is ready to be queued, and its queue."""

from __future__ import annotations

from typing import Protocol

import msgspec

from gpufn_core.errors import GpufnError
from gpufn_core.protocol.records import BodyReference
from gpufn_core.spec.priority import Priority
from gpufn_gateway.auth.access import Principal
from gpufn_gateway.calls.call_bodies import CallBody
from gpufn_gateway.functions.target import Target
from gpufn_platform.queue.call_request import CallRequest
from gpufn_platform.queue.pending import PendingCall, PendingStream
from gpufn_platform.web.pending_session import PendingSession


class Queue(Protocol):
    """The part of `gpufn_platform.queue.caller.Caller` that the gateway uses."""

    def invoke(self, request: CallRequest) -> PendingCall: ...

    def open_stream(self, request: CallRequest) -> PendingStream: ...

    def open_session(self, request: CallRequest) -> PendingSession: ...

    def fail(self, function: str, revision: int | None, error: GpufnError) -> None: ...


class PreparedCall(msgspec.Struct, frozen=True):
    """A call that is ready to be queued. `timeout_s` is the client's timeout, if it sent one."""

    principal: Principal
    target: Target
    content_type: str
    accept: str
    body: CallBody
    now: float
    timeout_s: float | None
    trace: str
    priority: Priority
    reference: BodyReference | None = None  # the stored body

    @property
    def deadline(self) -> float:
        """The deadline of a call that a client waits for."""
        return self.now + (self.target.budget_s if self.timeout_s is None else self.timeout_s)

    @property
    def submit_deadline(self) -> float:
        """The deadline of a submitted call: none (0.0) unless the client sets one.

        The function's queue_timeout covers only the wait for the first attempt; as a deadline it would end later
        attempts as well.
        """
        return 0.0 if self.timeout_s is None else self.now + self.timeout_s

    def request(self, deadline: float) -> CallRequest:
        """Build the request to queue."""
        target = self.target
        return CallRequest(
            target.revision,
            target.method.name,
            self.content_type,
            self.body.data,
            self.accept,
            deadline,
            trace=self.trace,
            shared_body="" if self.body.shared is None else self.body.shared.name,
            priority=self.priority,
            owner=self.principal.owner,
            reference=self.reference,
        )
