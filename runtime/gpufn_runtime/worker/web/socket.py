"""Serve a WebSocket with an ASGI application."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

from gpufn_core.protocol.streams import web_session
from gpufn_core.protocol.streams.web_session import (
    Accept,
    BodyPart,
    Close,
    Disconnect,
    MessagePart,
    ResponseStart,
    WebRequest,
)
from gpufn_runtime.worker.web.request import ClientDisconnected
from gpufn_runtime.worker.web.scope import headers_of, scope_of
from gpufn_runtime.worker.web.session import Session


async def serve_socket(app: Any, session: Session[WebRequest], state: Mapping[str, Any]) -> None:
    """Raises the errors of the application, and RuntimeError if it breaks the rules of ASGI."""
    connection = _Connection(session)
    try:
        await app(scope_of(session.request, state), connection.receive, connection.send)
    except ClientDisconnected:
        return
    if connection.disconnect is None and not connection.is_closed:
        await session.send(Close(web_session.NORMAL_CLOSE))


class _Connection:
    def __init__(self, session: Session[WebRequest]) -> None:
        self._session = session
        self._is_connecting = True  # the application has not received `websocket.connect`
        self._is_accepted = False
        self._refusal: tuple[int, web_session.Headers] | None = None  # an HTTP response whose body follows
        self._has_refused = False
        self.is_closed = False
        self.disconnect: Disconnect | None = None

    async def receive(self) -> MutableMapping[str, Any]:
        if self._is_connecting:
            self._is_connecting = False
            return {"type": "websocket.connect"}
        parts: list[bytes] = []
        while self.disconnect is None:
            event, data = await self._session.receive()
            if isinstance(event, Disconnect):
                self.disconnect = event
            elif isinstance(event, MessagePart):
                parts.append(data)
                if not event.more:
                    message = parts[0] if len(parts) == 1 else b"".join(parts)
                    if event.is_text:
                        return {"type": "websocket.receive", "text": message.decode()}
                    return {"type": "websocket.receive", "bytes": message}
        return {"type": "websocket.disconnect", "code": self.disconnect.code, "reason": self.disconnect.reason}

    async def send(self, event: MutableMapping[str, Any]) -> None:
        kind = event["type"]
        if self.disconnect is not None:
            raise ClientDisconnected("the client is gone")
        if self.is_closed:
            raise RuntimeError(f"the application sent {kind!r} on a WebSocket that it has closed")
        if kind == "websocket.accept" and not self._is_accepted:
            self._is_accepted = True
            await self._session.send(Accept(event.get("subprotocol"), headers_of(event)))
        elif kind == "websocket.close":
            self.is_closed = True
            await self._session.send(Close(event.get("code") or web_session.NORMAL_CLOSE, event.get("reason") or ""))
        elif kind == "websocket.send" and self._is_accepted:
            await self._send_message(event)
        elif kind == "websocket.http.response.start" and not self._is_accepted and self._refusal is None:
            self._refusal = int(event["status"]), headers_of(event)
        elif kind == "websocket.http.response.body" and self._refusal is not None:
            await self._refuse(bytes(event.get("body", b"")), more=bool(event.get("more_body", False)))
        else:
            state = "an accepted" if self._is_accepted else "a waiting"
            raise RuntimeError(f"the application sent {kind!r} on {state} WebSocket")

    async def _send_message(self, event: Mapping[str, Any]) -> None:
        text = event.get("text")
        message = bytes(event.get("bytes") or b"") if text is None else text.encode()
        if len(message) > web_session.MAX_MESSAGE_BYTES:
            limit = web_session.MAX_MESSAGE_BYTES
            raise RuntimeError(f"a message of {len(message):,} bytes is larger than the {limit:,} of a WebSocket")
        for part, is_followed in web_session.parts_of(message):
            await self._session.send(MessagePart(text is not None, is_followed), part)

    async def _refuse(self, body: bytes, *, more: bool) -> None:
        assert self._refusal is not None
        for part, is_followed in web_session.parts_of(body):
            if self._has_refused:
                await self._session.send(BodyPart(more or is_followed), part)
            else:
                self._has_refused = True
                await self._session.send(ResponseStart(*self._refusal, more or is_followed), part)
        self.is_closed = not more
