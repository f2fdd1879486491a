"""The gateway's end of the lane: calls go straight to a free slot of this host's runner while nothing waits.

A runner that is not on this host has no socket here, and then there is simply no lane: `offer` says no and the call is
queued. So it does when the revision's room is used up, and for a moment after a refusal: others wait in the queue.
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

_REFUSED_S = 0.005

_Key = tuple[str, int, float]  # function, number and time of creation: a Revision


class Owner(Protocol):
    """Whose calls these are."""

    def on_end(self, reply: ResultReply, body: bytes) -> None: ...
    def on_refused(self, invocation: str) -> None: ...
    def on_lost(self, invocation: str) -> None: ...
    def on_queued(self, invocation: str) -> None: ...


class Lane:
    """Connects when `tick` finds the runner's socket, and again when the runner was started anew."""

    def __init__(self, path: Path, owner: Owner) -> None:
        self._path = path
        self._owner = owner
        self._rooms: dict[_Key, int] = {}
        self._under_way: dict[str, _Key] = {}
        self._counts: dict[_Key, int] = {}
        self._refused_until: dict[_Key, float] = {}
        self._runner: _Runner | None = None
        self._loop = asyncio.get_running_loop()
        self._connecting: asyncio.Task[None] | None = None
        self._heard_at = 0.0

    @property
    def is_connected(self) -> bool:
        """This host has a runner."""
        return self._runner is not None

    def offer(self, revision: Revision, message: InvocationMessage, body: bytes) -> bool:
        """Whether the call is on its way; its end, or its refusal, comes to the owner."""
        key = (revision.function, revision.number, revision.created_at)
        room = self._rooms.get(key)
        if room is None or self._runner is None:
            return False
        count = self._counts.get(key, 0)
        if count >= room or self._loop.time() < self._refused_until.get(key, 0.0):
            return False
        try:
            self._runner.send(fast_path.Offer(message), body)
        except PayloadTooLarge:
            return False  # the queue says it better
        self._counts[key] = count + 1
        self._under_way[message.id] = key
        return True

    def withdraw(self, invocation: str) -> None:
        """Nobody waits for it any more."""
        if self._forget(invocation) is not None and self._runner is not None:
            self._runner.send(fast_path.Withdraw(invocation))

    def tick(self, now: float) -> None:
        """About once a second; `now` is any clock that goes on."""
        if self._runner is not None:
            if now - self._heard_at > fast_path.SILENCE_S:
                log.warning("this host's runner says nothing: its calls go by the queue")
                self._runner.transport.abort()
        elif self._connecting is None and self._path.exists():
            self._connecting = self._loop.create_task(self._connect(), name="lane")

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
        key = self._under_way.pop(invocation, None)
        if key is not None:
            self._counts[key] -= 1
            if not self._counts[key]:
                del self._counts[key]
        return key

    # --- from the socket ----------------------------------------------------------------------------------------------

    def connected(self, runner: _Runner) -> None:
        self._runner = runner
        self.hear()

    def hear(self) -> None:
        """The runner has said something."""
        self._heard_at = self._loop.time()

    def take(self, frame: fast_path.RunnerFrame, body: bytes) -> None:
        if isinstance(frame, fast_path.Ended):
            self._forget(frame.reply.invocation)
            self._owner.on_end(frame.reply, body)
        elif isinstance(frame, fast_path.Refused):
            key = self._forget(frame.invocation)
            if key is not None:
                if key in self._rooms:
                    self._refused_until[key] = self._loop.time() + _REFUSED_S
                (self._owner.on_lost if frame.has_begun else self._owner.on_refused)(frame.invocation)
        elif isinstance(frame, fast_path.Queued):
            if self._forget(frame.invocation) is not None:
                self._owner.on_queued(frame.invocation)
        elif isinstance(frame, fast_path.Room):
            revision = (frame.function, frame.revision, frame.created_at)
            if frame.calls:
                self._rooms[revision] = frame.calls
            else:
                self._rooms.pop(revision, None)
                self._refused_until.pop(revision, None)

    def lost(self, runner: _Runner) -> None:
        if self._runner is not runner:
            return
        self._runner = None
        under_way = list(self._under_way)
        for left in (self._rooms, self._under_way, self._counts, self._refused_until):
            left.clear()
        for invocation in under_way:  # it may have run: at least once, as from the queue
            self._owner.on_lost(invocation)


class _Runner(asyncio.Protocol):
    """The connection to the runner."""

    transport: asyncio.Transport

    def __init__(self, owner: Lane) -> None:
        self._lane = owner
        self._reader: frames.FrameReader[fast_path.RunnerFrame] = frames.FrameReader(fast_path.RunnerFrame)

    def send(self, frame: fast_path.GatewayFrame, body: bytes = b"") -> None:
        self._out.write(frames.encode(frame, body))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's transports are not its subclasses
        self._out = Outbox(self.transport)
        uid = peer_uid(transport)
        if uid != os.getuid():
            log.warning("the socket of this host's runner belongs to uid %d: not used", uid)
            self.transport.abort()
            return
        self._lane.connected(self)

    def data_received(self, data: bytes) -> None:
        owner = self._lane
        owner.hear()
        try:
            for frame, body in self._reader.feed(data):
                owner.take(frame, body)
        except ProtocolMismatch as error:
            log.warning("this host's runner broke the lane's protocol: %s", error)
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lane.lost(self)
