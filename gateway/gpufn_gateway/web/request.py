"""An HTTP request to a web application.

The response is passed on as it comes, at the pace of its client. A client that disconnects is reported to the
application, which may go on until its timeout; a request that has not begun is removed from its queue.
"""

from __future__ import annotations

from typing import Final

from gpufn_core.errors import FunctionRaised
from gpufn_core.protocol.codec import pack
from gpufn_core.protocol.streams import web_session
from gpufn_core.protocol.streams.web_session import (
    ABNORMAL_CLOSE,
    PART_BYTES,
    BodyPart,
    Disconnect,
    Down,
    ResponseStart,
)
from gpufn_gateway.calls.prepare import Calls
from gpufn_gateway.http.body_reader import ClientDisconnected, Receive, Scope, Send, iter_body, wait_for_disconnect
from gpufn_gateway.problems import CallFailed, Headers
from gpufn_gateway.web import session
from gpufn_gateway.web.headers import to_client
from gpufn_gateway.web.match import Match
from gpufn_gateway.web.visitor import new_visitor, set_cookie, visitor_in
from gpufn_platform.web.pending_session import PendingSession

_FIRST_STATUS: Final = 200  # the server sends the informational ones itself
_LAST_STATUS: Final = 599


async def serve_request(calls: Calls, match: Match, scope: Scope, receive: Receive, send: Send) -> None:
    """Raises GpufnError, before or after the response has started."""
    first, has_more = await _first_part(dict(scope["headers"]), receive)
    visitor, cookies = visitor_in(scope["headers"]), list[tuple[bytes, bytes]]()
    if match.target.split is not None and not visitor:
        visitor = new_visitor()
        cookies.append(set_cookie(visitor, match, scope["scheme"]))
    call = await session.prepare(calls, match, scope, receive, first, has_more=has_more, visitor=visitor)
    async with session.running(calls, call) as pending:
        response = _Response(send, match.address.root, [*cookies, (b"x-gpufn-invocation", pending.id.encode())])
        async with session.alongside(pending, _follow_client(pending, response, receive, has_body=has_more)):
            async for payload in pending.payloads():
                await response.take(*web_session.unpack_down(payload))
        problem = await session.failure(calls, call, pending)
        if response.is_complete or response.is_unread:
            return
        if problem is not None:
            raise CallFailed(problem, [])
        raise FunctionRaised("The application returned before its response was complete.")


async def _first_part(headers: dict[bytes, bytes], receive: Receive) -> tuple[bytes, bool]:
    """Return a small body, or b"" for a body that follows while the application runs. Raises ClientDisconnected."""
    length = int(headers.get(b"content-length", b"0"))
    if b"transfer-encoding" in headers or length > PART_BYTES:
        return b"", True
    return b"".join([part async for part in iter_body(receive)]) if length else b"", False


async def _follow_client(pending: PendingSession, response: _Response, receive: Receive, *, has_body: bool) -> None:
    """Pass the body on, then wait until the client disconnects."""
    try:
        if has_body:
            await _send_body(pending, receive)
        await wait_for_disconnect(receive)
    except ClientDisconnected:
        pass
    response.is_unread = True
    if pending.has_begun:
        pending.send_now(pack(Disconnect(ABNORMAL_CLOSE)))
    else:
        pending.cancel()


async def _send_body(pending: PendingSession, receive: Receive) -> None:
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise ClientDisconnected
        has_more = message.get("more_body", False)
        for part, is_followed in web_session.parts_of(message.get("body", b"")):
            if part or not has_more:
                await pending.send(pack(BodyPart(has_more or is_followed), part))
        if not has_more:
            return


class _Response:
    """`root` is the path of the application. `own_headers` are added to its fields. `is_unread`: the client has
    disconnected."""

    def __init__(self, send: Send, root: str, own_headers: Headers) -> None:
        self._send = send
        self._root = root
        self._own_headers = own_headers
        self._has_started = False
        self.is_complete = False
        self.is_unread = False

    async def take(self, event: Down, data: bytes) -> None:
        """Pass an event on. Raises FunctionRaised for a response that HTTP does not allow here."""
        if isinstance(event, ResponseStart) and not self._has_started:
            if not _FIRST_STATUS <= event.status <= _LAST_STATUS:
                raise FunctionRaised(f"The application sent the status {event.status}.")
            self._has_started = True
            headers = [*to_client(event.headers, self._root), *self._own_headers]
            await self._pass_on({"type": "http.response.start", "status": event.status, "headers": headers})
        elif not (isinstance(event, BodyPart) and self._has_started and not self.is_complete):
            raise FunctionRaised("The application sent a part of a response where none is allowed.")
        if data or not event.more:
            self.is_complete = not event.more
            await self._pass_on({"type": "http.response.body", "body": data, "more_body": event.more})

    async def _pass_on(self, event: dict[str, object]) -> None:
        if self.is_unread:
            return
        try:
            await self._send(event)
        except RuntimeError as error:  # an error of the server, for a body that contradicts its Content-Length
            raise FunctionRaised(f"The application's response is not valid: {error}") from None
