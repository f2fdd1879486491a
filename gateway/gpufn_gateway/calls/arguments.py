"""The arguments of a call in its request: JSON or msgpack, a form, or the raw bytes of one parameter."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple

import msgspec

from gpufn_core.encoding import media
from gpufn_core.errors import InvalidInput, UnsupportedMediaType
from gpufn_gateway.arguments import query as query_arguments
from gpufn_gateway.arguments.form import Form
from gpufn_gateway.calls.call_bodies import CallBodies, CallBody
from gpufn_gateway.functions.target import Target
from gpufn_gateway.http import negotiation
from gpufn_gateway.http.body_reader import Receive

_FORM_CHUNK_BYTES: Final = 64 << 10


class Arguments(NamedTuple):
    """A call's body as it is queued, and the requested encoding of the result."""

    content_type: str
    accept: str
    body: CallBody


# Arguments: the function name in the request, its target, the request's headers, and the ASGI receive for the body.
ReadArguments = Callable[[str, Target, dict[bytes, bytes], Receive], Awaitable[Arguments]]


async def read_arguments(
    bodies: CallBodies,
    target: Target,
    headers: dict[bytes, bytes],
    receive: Receive,
    *,
    may_share: bool,
    is_queued: bool,
    query: bytes,
    name: str,
) -> Arguments:
    """Receive the arguments, and check those in JSON. `name` is the function's name in the request.

    Raises UnsupportedMediaType, InvalidInput, and the errors of `CallBodies`.
    """
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise UnsupportedMediaType("Send the body unencoded, without Content-Encoding.")
    content_type = negotiation.body_kind(headers.get(b"content-type"))
    if content_type is media.JSON:
        data = await bodies.read(headers, receive, may_share=may_share, is_queued=is_queued) or b"{}"
        target.signature.check(data)
        body = bodies.wrap(data, may_share=may_share, is_queued=is_queued)
    elif negotiation.is_arguments(content_type):
        body = await bodies.receive_body(headers, receive, may_share=may_share, is_queued=is_queued)
    else:
        raw_parameter = target.method.raw_parameter
        if raw_parameter is None:
            raise UnsupportedMediaType(
                f"{name} takes its arguments as {media.JSON} or {media.MSGPACK}, not as {content_type}."
            )
        if negotiation.is_multipart(content_type):
            form = _new_form(content_type)
            await _write_form(form, await bodies.read(headers, receive, may_share=may_share, is_queued=is_queued))
            named = form.arguments(target.signature)
        elif query:
            named = query_arguments.arguments(query, target.signature, raw_parameter)
            named[raw_parameter] = await bodies.read(headers, receive, may_share=may_share, is_queued=is_queued)
        else:
            body = await bodies.receive_body(headers, receive, may_share=may_share, is_queued=is_queued)
            return Arguments(content_type, negotiation.result_encoding(headers.get(b"accept")), body)
        content_type = media.MSGPACK
        body = bodies.wrap(_pack(named), may_share=may_share, is_queued=is_queued)
    return Arguments(content_type, negotiation.result_encoding(headers.get(b"accept")), body)


def _new_form(content_type: str) -> Form:
    """Create a form parser. Raises UnsupportedMediaType, InvalidInput."""
    if media.media_type(content_type) != media.FORM:
        raise UnsupportedMediaType(
            f"The only multipart type that is supported is {media.FORM}. To send one file: "
            "curl --data-binary @FILE -H 'Content-Type: application/octet-stream'."
        )
    return Form(content_type)


async def _write_form(form: Form, body: bytes) -> None:
    """Parse a form in pieces, so that the event loop is not blocked: a body of 40 MiB takes 60 ms."""
    for start in range(0, len(body), _FORM_CHUNK_BYTES):
        if start:
            await asyncio.sleep(0)
        form.write(body[start : start + _FORM_CHUNK_BYTES])


def _pack(arguments: dict[str, Any]) -> bytes:
    """Encode as msgpack. Raises InvalidInput."""
    try:
        return msgspec.msgpack.encode(arguments)
    except OverflowError:
        raise InvalidInput("an integer in the arguments has more than 64 bits") from None
