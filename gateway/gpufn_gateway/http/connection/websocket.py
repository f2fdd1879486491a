"""uvicorn's WebSocket protocol as the gateway runs it: it counts as a connection of its address, and logs no URLs.

The size of messages, and pings that detect disconnected clients, are options of the server.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from gpufn_core.protocol.streams.web_session import MAX_MESSAGE_BYTES
from gpufn_gateway.http.connection.lingering_close import ClosingTransport

_PING_EVERY_S = 20.0
_PONG_WITHIN_S = 20.0
_DISCARD_S = 2.0
_PART_BYTES = 2 << 10  # parsed at a time: a read of 256 KiB may hold 37,000 messages, which would stop the event loop
# Options of uvicorn.Config. A client is disconnected if it does not respond to a ping, or sends for so long without a
# reader. Compression would let a client multiply its bytes, and costs more time than it saves on the way.
OPTIONS: dict[str, Any] = {
    "ws_max_size": MAX_MESSAGE_BYTES,
    "ws_ping_interval": _PING_EVERY_S,
    "ws_ping_timeout": _PONG_WITHIN_S,
    "ws_per_message_deflate": False,
}
_log = logging.getLogger("gpufn_gateway.websocket")
_log.setLevel(logging.WARNING)


class WebSocketConnection(WebSocketsSansIOProtocol):
    """The protocol of a connection from its upgrade on. `release` is called at its end."""

    def __init__(self, *args: Any, release: Callable[[], None], **fields: Any) -> None:
        super().__init__(*args, **fields)
        self._release = release
        self._is_discarding = False
        self._unparsed = b""
        self.logger = _log  # uvicorn's would log the query of each request

    def connection_made(self, transport: Any) -> None:
        super().connection_made(ClosingTransport(transport, self._discard))  # type: ignore[arg-type]

    def data_received(self, data: bytes) -> None:
        self._unparsed += data
        self._parse()

    async def receive(self) -> Any:
        message = await super().receive()
        if self._unparsed and not self.read_paused:
            self._parse()
        return message

    async def send(self, message: Any) -> None:
        await super().send(message)
        if self.initial_response is not None and self.close_sent:
            self.handshake_complete = True  # a refusal; uvicorn would log an error for each

    def _parse(self) -> None:
        """Parse a part of the received data. The rest waits until other connections had their turn and the application
        has taken the messages."""
        if self._is_discarding:
            self._unparsed = b""
            return
        size = len(self._unparsed) if self.close_sent else _PART_BYTES
        part, self._unparsed = self._unparsed[:size], self._unparsed[size:]
        super().data_received(part)
        if self._unparsed:
            self._pause_reading()
            if self.queue.empty():  # otherwise `receive` goes on
                self.loop.call_soon(self._parse)
        elif self.read_paused and self.queue.empty():
            self.read_paused = False
            self.transport.resume_reading()

    def _pause_reading(self) -> None:
        if not self.read_paused and not self.transport.is_closing():
            self.read_paused = True
            self.transport.pause_reading()

    def _discard(self) -> bool:
        """Discard the rest of a message that was refused, so that the client receives the close frame."""
        if self.conn.parser_exc is None:
            return False
        if not self._is_discarding:
            self._is_discarding = True
            transport: Any = self.transport
            self.loop.call_later(_DISCARD_S, transport.close_now)
            if self.read_paused:
                transport.resume_reading()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._release()
