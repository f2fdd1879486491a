"""What somebody asks for who calls a function: to wait for it (`calls`), or to have it done (`records`)."""

from __future__ import annotations

from typing import NamedTuple

from gpufn_core.domain.revision import Revision
from gpufn_core.protocol import subjects
from gpufn_core.protocol.records import BodyReference
from gpufn_core.spec.priority import Priority


class CallRequest(NamedTuple):
    """`deadline` is in unix seconds, 0 for none; `parent` the invocation that asks; `trace` a traceparent.

    `parcel` names the body in the caller's folder (`gpufn_platform.shared_bodies.bodies`), when somebody waits and `body` is not it.
    `reference` is where the body is when it is too large for a message. `owner` is the id of the API key that asks.
    """

    revision: Revision
    method: str
    content_type: str
    body: bytes
    accept: str
    deadline: float
    parent: str = ""
    trace: str = ""
    parcel: str = ""
    priority: Priority | None = None  # its class; None: the function's
    owner: str = subjects.PLATFORM
    reference: BodyReference | None = None

    @property
    def queued_as(self) -> Priority:
        """The class of the queue that it goes to."""
        return self.revision.spec.priority if self.priority is None else self.priority
