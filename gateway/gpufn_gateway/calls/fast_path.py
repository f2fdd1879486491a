"""The gateway's end of the fast path: calls go straight to a free slot of this host's runner while no call is queued.

A runner on another host has no socket here. Then there is no fast path: `offer` returns False and the call is queued.
`offer` also returns False if the revision's capacity is used up, and for a moment after a refusal, since other calls
wait in the queue then.
"""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import Protocol, cast

from gpufn_core.domain.revision import Revision
from gpufn_core.errors import PayloadTooLarge, ProtocolMismatch
from gpufn_core.protocol import fast_path, frames
from gpufn_core.protocol.messages import InvocationMessage, ResultReply
from gpufn_platform.process.unix_sockets import Outbox, peer_uid

log = logging.getLogger(__name__)

_REFUSAL_BACKOFF_S = 0.005

_Key = tuple[str, int, float]  # a Revision: function, number and creation time


class Owner(Protocol):
    """The caller that sends calls over the fast path and receives their outcome."""

    def on_end(self, reply: ResultReply, body: bytes) -> None: ...
    def on_refused(self, invocation: str) -> None: ...
    def on_lost(self, invocation: str) -> None: ...
    def on_queued(self, invocation: str) -> None: ...


class FastPath:
    """The connection to this host's runner. `tick` connects once the socket exists, and after a runner restart."""

    def __init__(self, path: Path, owner: Owner) -> None:
        self._path = path
        self._owner = owner
        self._capacity: dict[_Key, int] = {}
        self._in_flight: dict[str, _Key] = {}
        self._counts: dict[_Key, int] = {}
        self._refused_until: dict[_Key, float] = {}
        self._runner: _Runner | None = None
        self._loop = asyncio.get_running_loop()
        self._connecting: asyncio.Task[None] | None = None
        self._last_data_at = 0.0

    @property
    def is_connected(self) -> bool:
        """True if this host has a runner."""
        return self._runner is not None

    def offer(self, revision: Revision, message: InvocationMessage, body: bytes) -> bool:
        """Send a call to the runner. True if it was sent; the owner then receives its end or its refusal."""
        key = (revision.function, revision.number, revision.created_at)
        capacity = self._capacity.get(key)
        if capacity is None or self._runner is None:
            return False
        count = self._counts.get(key, 0)
        if count >= capacity or self._loop.time() < self._refused_until.get(key, 0.0):
            return False
        try:
            self._runner.send(fast_path.Offer(message), body)
        except PayloadTooLarge:
            return False  # the queue has the better error message
        self._counts[key] = count + 1
        self._in_flight[message.id] = key
        return True

    def withdraw(self, invocation: str) -> None:
        """Cancel a call that its client no longer waits for."""
        if self._forget(invocation) is not None and self._runner is not None:
            self._runner.send(fast_path.Withdraw(invocation))

    def tick(self, now: float) -> None:
        """Connect, or disconnect a silent runner. Call it about once a second with the loop's time."""
        if self._runner is not None:
            if now - self._last_data_at > fast_path.RUNNER_TIMEOUT_S:
                log.warning("this host's runner is silent: its calls go through the queue")
                self._runner.transport.abort()
        elif self._connecting is None and self._path.exists():
            self._connecting = self._loop.create_task(self._connect(), name="fast path connection")

    def close(self) -> None:
        if self._runner is not None:
            self._runner.transport.abort()

    async def _connect(self) -> None:
        try:
            await self._loop.create_unix_connection(lambda: _Runner(self), str(self._path))
        except OSError as error:
            log.debug("there is no runner at %s: %s", self._path, error)
        finally:
            self._connecting = None

    def _forget(self, invocation: str) -> _Key | None:
        key = self._in_flight.pop(invocation, None)
        if key is not None:
            self._counts[key] -= 1
            if not self._counts[key]:
                del self._counts[key]
        return key

    # --- from the socket ----------------------------------------------------------------------------------------------

    def on_connected(self, runner: _Runner) -> None:
        self._runner = runner
        self.on_data()

    def on_data(self) -> None:
        """Note that data arrived from the runner."""
        self._last_data_at = self._loop.time()

    def on_frame(self, frame: fast_path.RunnerFrame, body: bytes) -> None:
        if isinstance(frame, fast_path.Ended):
            self._forget(frame.reply.invocation)
            self._owner.on_end(frame.reply, body)
        elif isinstance(frame, fast_path.Refused):
            key = self._forget(frame.invocation)
            if key is not None:
                if key in self._capacity:
                    self._refused_until[key] = self._loop.time() + _REFUSAL_BACKOFF_S
                (self._owner.on_lost if frame.has_begun else self._owner.on_refused)(frame.invocation)
        elif isinstance(frame, fast_path.Queued):
            if self._forget(frame.invocation) is not None:
                self._owner.on_queued(frame.invocation)
        elif isinstance(frame, fast_path.Limit):
            revision = (frame.function, frame.revision, frame.created_at)
            if frame.calls:
                self._capacity[revision] = frame.calls
            else:
                self._capacity.pop(revision, None)
                self._refused_until.pop(revision, None)

    def on_disconnected(self, runner: _Runner) -> None:
        if self._runner is not runner:
            return
        self._runner = None
        in_flight = list(self._in_flight)
        for state in (self._capacity, self._in_flight, self._counts, self._refused_until):
            state.clear()
        for invocation in in_flight:  # it may have run: delivery is at least once, like from the queue
            self._owner.on_lost(invocation)


class _Runner(asyncio.Protocol):
    """The connection to the runner."""

    transport: asyncio.Transport

    def __init__(self, owner: FastPath) -> None:
        self._fast_path = owner
        self._reader: frames.FrameReader[fast_path.RunnerFrame] = frames.FrameReader(fast_path.RunnerFrame)

    def send(self, frame: fast_path.GatewayFrame, body: bytes = b"") -> None:
        self._outbox.write(frames.encode(frame, body))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's transports are not its subclasses
        self._outbox = Outbox(self.transport)
        uid = peer_uid(transport)
        if uid != os.getuid():
            log.warning("ignoring the socket of this host's runner: it belongs to uid %d", uid)
            self.transport.abort()
            return
        self._fast_path.on_connected(self)

    def data_received(self, data: bytes) -> None:
        owner = self._fast_path
        owner.on_data()
        try:
            for frame, body in self._reader.feed(data):
                owner.on_frame(frame, body)
        except ProtocolMismatch as error:
            log.warning("this host's runner violated the fast path's protocol: %s", error)
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._fast_path.on_disconnected(self)
