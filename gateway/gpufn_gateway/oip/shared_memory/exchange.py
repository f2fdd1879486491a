"""The shared memory of one inference request: its inputs are read from regions, and its outputs written to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from gpufn_gateway.auth.access import Access
from gpufn_gateway.calls.call_bodies import CallBodies, CallBody
from gpufn_gateway.http.body_reader import Scope, Send
from gpufn_gateway.oip.shared_memory import requests
from gpufn_gateway.oip.shared_memory.regions import Regions, Slice
from gpufn_gateway.oip.shared_memory.requests import Range, RequestBody
from gpufn_gateway.oip.shared_memory.responses import ResponseSend

_NO_OUTPUTS: Final[Mapping[str, Slice]] = {}


class InferenceBody(NamedTuple):
    """The body of a request. `head_bytes` is the length of its head, or None if all of it is JSON."""

    body: CallBody
    head_bytes: int | None


class Exchange:
    def __init__(self, regions: Regions, access: Access, bodies: CallBodies, scope: Scope) -> None:
        self._regions = regions
        self._access = access
        self._bodies = bodies
        self._scope = scope
        self._owner = ""
        self._outputs = _NO_OUTPUTS

    async def with_inputs(self, received: InferenceBody) -> InferenceBody:
        """Return the request with the inputs of regions in its body. The given body is discarded, if it is replaced or
        an error is raised. Raises InvalidInput, DataNotFound, Forbidden, and the exceptions of a body that is read."""
        body = received.body
        try:
            view = memoryview(self._bodies.view(body))
            if not await requests.names_regions(view[: received.head_bytes]):
                return received
            self._regions.check_client(self._scope.get("client"))
            self._owner = self._access.sender_of(self._access.authenticate(dict(self._scope["headers"])))
            head = bytes(view[: received.head_bytes])
            request = requests.rewrite(head, Range(len(head), len(view)), self._regions, self._owner)
            if request is None:
                return received
            self._outputs = request.outputs
            length = {b"content-length": b"%d" % request.size}
            source = RequestBody(request, view, self._regions)
            replaced = await self._bodies.receive_body(length, source, may_share=True)
        except BaseException:
            self._bodies.discard(body)
            raise
        self._bodies.discard(body)
        return InferenceBody(replaced, len(request.head))

    def sending(self, send: Send) -> Send:
        """Return `send` for the response: it writes the requested outputs to their regions."""
        return ResponseSend(send, self._outputs, self._regions, self._owner) if self._outputs else send
