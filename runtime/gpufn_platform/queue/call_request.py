"""A request to call a function: either to wait for the result (`caller`), or to submit it (`call_records`)."""

from __future__ import annotations

from typing import Any, NamedTuple

from gpufn_core.domain.revision import Revision
from gpufn_core.protocol import subjects
from gpufn_core.protocol.messages import InvocationMessage
from gpufn_core.protocol.records import BodyReference, Webhook
from gpufn_core.spec.priority import Priority


class CallRequest(NamedTuple):
    """`deadline` is in unix seconds, 0 for none; `parent` the calling invocation; `trace` a traceparent.

    `shared_body` is a file name in the caller's folder (`gpufn_platform.shared_bodies.bodies`), if a caller waits and
    `body` is empty. `reference` locates a body that is too large for a message. `owner` is the id of the API key.
    `is_live`: the items of a submitted generator call are published as they come.
    """

    revision: Revision
    method: str
    content_type: str
    body: bytes
    accept: str
    deadline: float
    parent: str = ""
    trace: str = ""
    shared_body: str = ""
    priority: Priority | None = None  # None: the function's
    owner: str = subjects.PLATFORM
    reference: BodyReference | None = None
    is_live: bool = False

    def message(self, invocation: str, now: float, **fields: Any) -> InvocationMessage:
        """Return the call's message. `fields` are the fields that only submitted or only awaited calls have."""
        return InvocationMessage(
            id=invocation,
            function=self.revision.function,
            revision=self.revision.number,
            method=self.method,
            content_type=self.content_type,
            accept=self.accept,
            submitted_at=now,
            deadline=self.deadline,
            parent=self.parent,
            trace=self.trace,
            priority=self.revision.spec.priority if self.priority is None else self.priority,
            owner=self.owner,
            reference=self.reference,
            is_live=self.is_live,
            **fields,
        )

    def submission(self, invocation: str, now: float, webhook: Webhook | None, digest: str = "") -> InvocationMessage:
        """Return the message of a submitted call. Its end is reported to `webhook`, default: the function's."""
        spec = self.revision.spec
        if webhook is None and spec.webhook:
            webhook = Webhook(spec.webhook)
        return self.message(invocation, now, reply="", digest=digest, webhook=webhook, keep_s=spec.retention_s)
