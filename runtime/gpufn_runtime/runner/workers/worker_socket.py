"""Connection to a worker's socket: reads and writes frames, and checks the peer's uid."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol, cast

from gpufn_core.errors import ProtocolMismatch
from gpufn_core.protocol import frames
from gpufn_platform.process.unix_sockets import Outbox, peer_uid

log = logging.getLogger(__name__)

_MAX_UNREAD_BYTES = 1 << 30  # a long call into C code may keep the worker from reading its responses


class SocketOwner(Protocol):
    """The worker at the other end, which decides about connections and handles frames."""

    id: str
    path: Path
    peer: WorkerSocket | None

    def accept(self, peer: WorkerSocket) -> bool: ...
    def handle(self, frame: frames.WorkerFrame, body: bytes) -> None: ...
    def on_disconnected(self, peer: WorkerSocket, reason: str, *, runs_on: bool) -> None: ...


class WorkerSocket(asyncio.Protocol):
    transport: asyncio.Transport

    def __init__(self, link: SocketOwner) -> None:
        self._link = link
        self._reader: frames.FrameReader[frames.WorkerFrame] = frames.FrameReader(frames.WorkerFrame)
        self._reason = "it closed its socket"
        self._has_aborted = False  # the runner closed the connection; the process lives

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's transports are not its subclasses
        self._out = Outbox(self.transport)
        uid = peer_uid(transport)
        if uid != _owner_of(self._link.path) or not self._link.accept(self):
            log.warning("refused a connection of uid %d to the socket of worker %s", uid, self._link.id)
            self.transport.abort()

    def write(self, data: bytes) -> None:
        unread_bytes = self.transport.get_write_buffer_size()
        if unread_bytes > _MAX_UNREAD_BYTES and not self.transport.is_closing():
            self._abort(f"it did not read {unread_bytes >> 20:,} MiB")
        self._out.write(data)

    def data_received(self, data: bytes) -> None:
        if self._link.peer is self:
            self._handle(self._reader.feed(data))

    def resume_reading(self, deferred: list[tuple[frames.WorkerFrame, bytes]]) -> None:
        self._handle(deferred)
        if not self.transport.is_closing():
            self.transport.resume_reading()

    def _handle(self, messages: Iterable[tuple[frames.WorkerFrame, bytes]]) -> None:
        try:
            for frame, body in messages:
                self._link.handle(frame, body)
        except ProtocolMismatch as error:
            self._abort(f"it broke the protocol: {error}")

    def _abort(self, reason: str) -> None:
        self._reason, self._has_aborted = reason, True
        log.warning("worker %s: %s", self._link.id, reason)
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._link.on_disconnected(self, self._reason, runs_on=self._has_aborted)


def _owner_of(path: Path) -> int | None:
    """Return the uid that owns the worker's folder, or None if the folder no longer exists."""
    with contextlib.suppress(OSError):
        return path.parent.stat().st_uid
    return None
