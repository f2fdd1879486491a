"""The connection of a client to its command: bytes in both directions, and the limits of a terminal."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Final

import msgspec

from gpufn_core.errors import InvalidInput, InvocationTimedOut, WorkerLost
from gpufn_core.protocol.codec import pack
from gpufn_core.protocol.streams import terminal, web_session
from gpufn_core.protocol.streams.terminal import Channel, Status
from gpufn_core.protocol.streams.web_session import BodyPart, Disconnect, Down, MessagePart
from gpufn_gateway.http.body_reader import Receive, Send
from gpufn_gateway.problems import Problem, problem_of
from gpufn_gateway.web import session
from gpufn_platform.web.pending_session import PendingSession

IDLE_S: Final = 15 * 60.0  # without input or output
OUTPUT_BYTES_PER_S: Final = 1 << 20
_BURST_S: Final = 2.0  # seconds of output before the rate applies
_CHECK_S: Final = 1.0
_END_S: Final = 15.0  # for the worker, after its client has left
_NOTHING: Final = pack(MessagePart(False, False))


class Connection:
    """`check` raises Unauthorized once the client has other rights: a deleted key ends its terminals. `worker` and
    `exit_code` are known once the worker has reported them. `taken` and `sent` count bytes of input and output."""

    def __init__(self, pending: PendingSession, receive: Receive, send: Send, check: Callable[[], None]) -> None:
        self._check = check
        self._pending = pending
        self._receive = receive
        self._send = send
        self._active_at = self._alive_at = time.monotonic()
        self._left_at: float | None = None
        self._busy_until = 0.0  # when the output so far may have been sent
        self._message: list[bytes] = []
        self.worker = ""
        self.exit_code: int | None = None
        self.taken = self.sent = 0

    @property
    def is_left(self) -> bool:
        """Whether the client has disconnected."""
        return self._left_at is not None

    async def run(self) -> None:
        """Pass messages on until the command has ended. Its result is in the session's `future`."""
        async with (
            session.alongside(self._pending, self._follow_client()),
            session.alongside(self._pending, self._watch()),
        ):
            async for payload in self._pending.payloads():
                await self._take(*web_session.unpack_down(payload))

    async def _follow_client(self) -> None:
        while (message := await self._receive())["type"] == "websocket.receive":
            if not self._pending.has_begun:
                raise InvalidInput("a terminal takes no input before its command has started")
            self._check()
            data: bytes = message.get("bytes") or b""
            self._active_at = time.monotonic()
            self.taken += len(data)
            for part, is_followed in web_session.parts_of(data):
                await self._pending.send(pack(MessagePart(False, is_followed), part))
            await asyncio.sleep(0)  # a client with a thousand short messages takes turns with the others
        self._leave()

    def _leave(self) -> None:
        if self._left_at is None:
            self._left_at = time.monotonic()
            if self._pending.has_begun:
                self._pending.send_now(pack(Disconnect(web_session.ABNORMAL_CLOSE)))
            else:
                self._pending.cancel()

    async def _watch(self) -> None:
        """End an idle terminal, a terminal whose worker does not end, and a terminal whose key was deleted. Notify the
        worker that this gateway is alive."""
        while True:
            await asyncio.sleep(_CHECK_S)
            self._check()
            now = time.monotonic()
            if self._left_at is not None:
                if now - self._left_at > _END_S:
                    raise WorkerLost("the worker of a terminal did not end in time")
            elif not self._pending.has_begun:
                self._active_at = now
            elif now - self._active_at > IDLE_S:
                await self.fail(
                    problem_of(InvocationTimedOut(f"the terminal was idle for {IDLE_S / 60:g} minutes, and was closed"))
                )
                self._leave()
            elif now - self._alive_at > terminal.ALIVE_EVERY_S:
                self._alive_at = now
                self._pending.send_now(_NOTHING)

    async def _take(self, event: Down, data: bytes) -> None:
        if not isinstance(event, (MessagePart, BodyPart)):  # the close, after the exit code
            return
        self._message.append(data)
        if event.more:
            return
        message, self._message = b"".join(self._message), []
        if message[:1] == bytes([Channel.STATUS]):
            self._note(message[1:])
        else:
            self._active_at = time.monotonic()
            self.sent += len(message)
        if not self.is_left:
            await self._send({"type": "websocket.send", "bytes": message})
            await self._pace(len(message))

    def _note(self, status: bytes) -> None:
        with contextlib.suppress(msgspec.MsgspecError):
            noted = terminal.decode_status(status)
            self.worker = noted.worker or self.worker
            self.exit_code = self.exit_code if noted.exit_code is None else noted.exit_code

    async def _pace(self, size: int) -> None:
        """Wait if the command sends more than the limit. The worker waits too, because its reader gives no credit."""
        now = time.monotonic()
        self._busy_until = max(now, self._busy_until) + size / OUTPUT_BYTES_PER_S
        if (ahead := self._busy_until - now - _BURST_S) > 0:
            await asyncio.sleep(ahead)

    async def fail(self, problem: Problem) -> None:
        """Report a problem to the client, and close."""
        if not self.is_left:
            await report(self._send, problem)

    async def close(self) -> None:
        if not self.is_left:
            await self._send({"type": "websocket.close", "code": web_session.NORMAL_CLOSE})


async def report(send: Send, problem: Problem) -> None:
    """Send a problem on an open WebSocket, and close it."""
    status = msgspec.json.encode(Status(problem=msgspec.json.decode(problem.body())))
    await send({"type": "websocket.send", "bytes": bytes([Channel.STATUS]) + status})
    await send({"type": "websocket.close", "code": web_session.INTERNAL_ERROR, "reason": problem.code})
