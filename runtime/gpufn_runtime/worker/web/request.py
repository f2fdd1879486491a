"""Serve an HTTP request with an ASGI application."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, MutableMapping
from typing import Any

from gpufn_core.protocol.streams import web_session
from gpufn_core.protocol.streams.web_session import BodyPart, ResponseStart, WebRequest
from gpufn_runtime.worker.web.scope import headers_of, scope_of
from gpufn_runtime.worker.web.session import Session

_DISCONNECT = {"type": "http.disconnect"}


class ClientDisconnected(OSError):
    """The client has disconnected: it does not read the response."""


async def serve_request(
    app: Any, session: Session[WebRequest], state: Mapping[str, Any], *, ends_when_gone: bool = True
) -> None:
    """Serve the request. With `ends_when_gone` a `send` raises ClientDisconnected once the client has left; otherwise
    it does nothing then.

    Raises the errors of the application, and RuntimeError if it breaks the rules of ASGI.
    """
    exchange = _Exchange(session, ends_when_gone=ends_when_gone)
    try:
        await app(scope_of(session.request, state), exchange.receive, exchange.send)
    except ClientDisconnected:
        return
    finally:
        exchange.end()
    if not exchange.is_complete and not session.is_disconnected:
        what = "its response is incomplete" if exchange.has_started else "it sent no response"
        raise RuntimeError(f"the application returned, but {what}")


class _Exchange:
    def __init__(self, session: Session[WebRequest], *, ends_when_gone: bool) -> None:
        self._session = session
        self._ends_when_gone = ends_when_gone
        self._first: bytes | None = session.body
        self._has_body = session.request.has_more
        self._start: tuple[int, web_session.Headers] | None = None  # until its first part or the next iteration
        self._is_told = False  # the application has received `http.disconnect`
        self.has_started = False
        self.is_complete = False

    async def receive(self) -> MutableMapping[str, Any]:
        if self._first is not None:
            first, self._first = self._first, None
            return {"type": "http.request", "body": first, "more_body": self._has_body}
        if self.is_complete or self._is_told:
            return dict(_DISCONNECT)
        event, data = await self._session.receive()
        if isinstance(event, BodyPart):
            self._has_body = event.more
            return {"type": "http.request", "body": data, "more_body": event.more}
        self._is_told = True
        return dict(_DISCONNECT)

    async def send(self, event: MutableMapping[str, Any]) -> None:
        kind = event["type"]
        if kind == "http.response.start":
            if self.has_started:
                raise RuntimeError("the application started its response twice")
            self.has_started = True
            self._start = int(event["status"]), headers_of(event)
            asyncio.get_running_loop().call_soon(self._flush_start)
        elif kind == "http.response.body":
            await self._send_body(bytes(event.get("body", b"")), more=bool(event.get("more_body", False)))
        else:
            raise RuntimeError(f"the application sent {kind!r} in response to a request")

    async def _send_body(self, body: bytes, *, more: bool) -> None:
        if not self.has_started:
            raise RuntimeError("the application sent a body before it started its response")
        if self.is_complete:
            raise RuntimeError("the application sent a body after the end of its response")
        for part, is_followed in web_session.parts_of(body):
            if self._session.is_disconnected:
                if self._ends_when_gone:
                    raise ClientDisconnected("the client is gone")
                return
            is_last = not (more or is_followed)
            if self._start is not None:
                (status, headers), self._start = self._start, None
                await self._session.send(ResponseStart(status, headers, not is_last), part)
            elif part or is_last:
                await self._session.send(BodyPart(not is_last), part)
        if not more:
            self.is_complete = True
            self._session.end_input()

    def end(self) -> None:
        """Send nothing more: the session ends."""
        self._start = None

    def _flush_start(self) -> None:
        """Send the head of a response whose body takes longer."""
        if self._start is not None:
            (status, headers), self._start = self._start, None
            self._session.send_now(ResponseStart(status, headers, True))
