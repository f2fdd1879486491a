"""A WebSocket to a web application.

Both directions have windows, so that a client or an application that floods waits for its reader. An error before the
application accepts is an HTTP response; later it is a close code with a reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from gpufn_core.errors import FunctionRaised, GpufnError, PlatformStopping
from gpufn_core.protocol.codec import pack
from gpufn_core.protocol.streams import web_session
from gpufn_core.protocol.streams.web_session import (
    Accept,
    BodyPart,
    Close,
    Disconnect,
    Down,
    MessagePart,
    ResponseStart,
)
from gpufn_gateway import problems
from gpufn_gateway.calls.prepare import Calls
from gpufn_gateway.http.body_reader import Receive, Scope, Send
from gpufn_gateway.problems import Headers, Problem
from gpufn_gateway.web import session
from gpufn_gateway.web.headers import NOT_STORED, to_client
from gpufn_gateway.web.match import Match
from gpufn_gateway.web.visitor import visitor_in
from gpufn_platform.web.pending_session import PendingSession

_LONGEST_REASON: Final = 123  # bytes, in a close frame


async def serve_socket(
    calls: Calls, match: Match, scope: Scope, receive: Receive, send: Send, *, check: Callable[[], None]
) -> None:
    """`check` raises Unauthorized if the client may no longer use the function: the next message in either direction is
    the last one. Raises GpufnError before the session has begun."""
    await receive()  # websocket.connect
    call = await session.prepare(
        calls, match, scope, receive, b"", has_more=False, visitor=visitor_in(scope["headers"])
    )
    async with session.running(calls, call) as pending:
        socket = _Socket(send, match.address.root)
        problem: Problem | None
        try:
            async with session.alongside(pending, _follow_client(pending, socket, receive, check)):
                async for payload in pending.payloads():
                    check()
                    await socket.take(*web_session.unpack_down(payload))
            problem = await session.failure(calls, call, pending)
        except GpufnError as error:
            problem = problems.problem_of(error)
        await socket.end(problem)


async def refuse(error: GpufnError, send: Send) -> None:
    """Refuse a WebSocket with the HTTP response of an error."""
    await _send_refusal(problems.problem_of(error), send)


async def _send_refusal(problem: Problem, send: Send) -> None:
    headers: Headers = [*problem.headers(), *NOT_STORED]
    await send({"type": "websocket.http.response.start", "status": problem.status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": problem.body()})


async def _follow_client(pending: PendingSession, socket: _Socket, receive: Receive, check: Callable[[], None]) -> None:
    """Pass the client's messages on until it disconnects."""
    while (message := await receive())["type"] == "websocket.receive":
        check()
        text = message.get("text")
        data = message["bytes"] if text is None else text.encode()
        for part, is_followed in web_session.parts_of(data):
            await pending.send(pack(MessagePart(text is not None, is_followed), part))
        await asyncio.sleep(0)  # a client with a thousand short messages takes turns with the others
    socket.is_unread = True
    if pending.has_begun:
        reason = str(message.get("reason") or "")
        pending.send_now(pack(Disconnect(message.get("code") or web_session.ABNORMAL_CLOSE, reason)))
    else:
        pending.cancel()


class _Socket:
    """`root` is the path of the application. `is_unread`: the client has disconnected."""

    def __init__(self, send: Send, root: str) -> None:
        self._send = send
        self._root = root
        self._is_accepted = False
        self._is_refused = False
        self._message: list[bytes] = []
        self._message_bytes = 0
        self.is_closed = False
        self.is_unread = False

    async def take(self, event: Down, data: bytes) -> None:
        """Pass an event on. Raises FunctionRaised for an event that is not allowed here."""
        if isinstance(event, MessagePart) and self._is_accepted and not self.is_closed:
            await self._take_message(event, data)
        elif isinstance(event, Close) and not self.is_closed:
            await self._close(event.code, event.reason)
        elif isinstance(event, Accept) and not self._is_accepted and not self.is_closed:
            self._is_accepted = True
            headers = to_client(event.headers, self._root, is_socket=True)
            await self._pass_on({"type": "websocket.accept", "subprotocol": event.subprotocol, "headers": headers})
        elif isinstance(event, ResponseStart) and not self._is_accepted and not self._is_refused:
            self._is_refused = True
            headers = to_client(event.headers, self._root)
            await self._pass_on({"type": "websocket.http.response.start", "status": event.status, "headers": headers})
            await self._take_refusal(data, more=event.more)
        elif isinstance(event, BodyPart) and self._is_refused and not self.is_closed:
            await self._take_refusal(data, more=event.more)
        else:
            raise FunctionRaised("The application sent an event that its WebSocket does not allow now.")

    async def _take_message(self, event: MessagePart, data: bytes) -> None:
        self._message.append(data)
        self._message_bytes += len(data)
        if self._message_bytes > web_session.MAX_MESSAGE_BYTES:
            raise FunctionRaised("The application sent a message that is too large.")
        if not event.more:
            message = data if len(self._message) == 1 else b"".join(self._message)
            self._message, self._message_bytes = [], 0
            sent = {"text": message.decode(errors="replace")} if event.is_text else {"bytes": message}
            await self._pass_on({"type": "websocket.send", **sent})

    async def _take_refusal(self, data: bytes, *, more: bool) -> None:
        self.is_closed = not more
        await self._pass_on({"type": "websocket.http.response.body", "body": data, "more_body": more})

    async def end(self, problem: Problem | None) -> None:
        """Close the WebSocket after the end of its session, unless the application has."""
        if self.is_closed or self.is_unread:
            return
        if not self._is_accepted:
            if problem is None:
                problem = problems.problem_of(FunctionRaised("The application returned without a response."))
            await _send_refusal(problem, self._send)
        elif problem is None:
            await self._close(web_session.NORMAL_CLOSE, "")
        else:
            is_stopping = problem.code == PlatformStopping.code
            code = web_session.SERVICE_RESTART if is_stopping else web_session.INTERNAL_ERROR
            await self._close(code, f"{problem.code}: {problem.info.message}")

    async def _close(self, code: int, reason: str) -> None:
        self.is_closed = True
        shortened = reason.encode()[:_LONGEST_REASON].decode(errors="ignore")
        await self._pass_on({"type": "websocket.close", "code": code, "reason": shortened})

    async def _pass_on(self, event: dict[str, Any]) -> None:
        if not self.is_unread:
            await self._send(event)
