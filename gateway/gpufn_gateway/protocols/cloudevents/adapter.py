"""The path `/cloudevents/{function}`, which takes events and responds with events."""

from __future__ import annotations

import hashlib
import time
from typing import ClassVar, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gpufn_core.domain.invocation import InvocationState
from gpufn_core.encoding import media
from gpufn_core.protocol.records import CallRecord
from gpufn_core.spec.function_spec import MethodSpec
from gpufn_gateway.http import negotiation
from gpufn_gateway.http.responses import GPUFN_FORMAT, USER_CONTENT
from gpufn_gateway.protocols.adapter import Adapter
from gpufn_gateway.protocols.cloudevents import events
from gpufn_gateway.protocols.platform import CallOptions
from gpufn_gateway.protocols.raw_bodies import arguments_of
from gpufn_gateway.routes.requests import route
from gpufn_gateway.webhooks.payload import Payload

_PREFIX: Final = "/cloudevents/"
_FORM: Final = "cloudevents"
_WHOLE: Final = "event"  # the parameter that receives the whole event


def sent_event(record: CallRecord, result: bytes) -> Payload:
    """Return the event for a call that has ended. A result above the size of a record is omitted."""
    type_, content_type, data = events.RESULT_TYPE, record.content_type, result
    if record.state is not InvocationState.SUCCEEDED:
        error = {} if record.error is None else {"code": record.error.code, "message": record.error.message}
        type_, content_type, data = "dev.gpufn.error", media.JSON, msgspec.json.encode({"state": record.state, **error})
    elif record.blob:
        content_type, data = "", b""
    event = events.result(
        record.function, record.id, record.ended_at or 0.0, content_type, data, type_=type_, is_structured=True
    )
    headers, body = events.encode(event)
    return Payload(body, headers)


class CloudEvents(Adapter):
    """Errors are problem details, as in the gpufn API: the specification has no form for them."""

    errors = GPUFN_FORMAT
    webhooks: ClassVar = {_FORM: sent_event}

    def owns(self, path: str) -> bool:
        return path.startswith(_PREFIX)

    def routes(self) -> list[Route]:
        return [route("POST", f"{_PREFIX}{{fn:name}}", self.receive)]

    async def receive(self, request: Request) -> Response:
        """Call the function and respond with its result as an event, in the mode of the request. With `?sink=URL`, the
        call is submitted, and the event is sent there when it has ended."""
        event = events.parse(dict(request.headers), await self.platform.body(request))
        target = self.platform.resolve(request.path_params["fn"], request)
        arguments = _arguments(target.method, event)
        sink = request.query_params.get("sink")
        if sink is not None:
            options = CallOptions(webhook=sink, webhook_form=_FORM, key=_identity(event))
            record = await self.platform.submit(target.path, arguments, request, options)
            return Response(status_code=202, headers={"x-gpufn-invocation": record.id})
        outcome = await self.platform.invoke(target.path, arguments, request)
        call = next((value.decode() for name, value in outcome.headers if name == b"x-gpufn-invocation"), "")
        result = events.result(
            target.path,
            call,
            time.time(),
            negotiation.clean(outcome.content_type),
            outcome.body,
            type_=events.RESULT_TYPE,
            is_structured=event.is_structured,
        )
        headers, body = events.encode(result)
        return Response(body, headers={name.decode(): value.decode() for name, value in USER_CONTENT} | headers)


def _arguments(method: MethodSpec, event: events.Event) -> bytes:
    """Return the whole event for a function whose only parameter is `event`, else its data."""
    if list(method.parameters.get("properties", {})) == [_WHOLE]:
        return msgspec.json.encode({_WHOLE: events.as_object(event)})
    return arguments_of(method, event.content_type, event.data)


def _identity(event: events.Event) -> str:
    """Return an idempotency key: events with the same source and id are the same event."""
    text = f"{event.attributes['source']}\n{event.attributes['id']}"
    return hashlib.sha256(text.encode()).hexdigest()
