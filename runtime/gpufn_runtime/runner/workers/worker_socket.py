"""One connection to a worker's socket: bytes to and from its link, and who may be at the other end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, cast

from gpufn_core.errors import ProtocolMismatch
from gpufn_core.protocol import frames
from gpufn_platform.process.unix_sockets import Outbox, peer_uid

if TYPE_CHECKING:
    from gpufn_runtime.runner.workers.worker_link import WorkerLink

log = logging.getLogger(__name__)

_MOST_UNREAD_BYTES = 1 << 30  # of what it asked for, while a long call into C keeps its interpreter from reading


class WorkerSocket(asyncio.Protocol):
    """One connection to a worker's socket."""

    transport: asyncio.Transport

    def __init__(self, link: WorkerLink) -> None:
        self._link = link
        self._reader: frames.FrameReader[frames.WorkerFrame] = frames.FrameReader(frames.WorkerFrame)
        self._why = "it closed its socket"
        self._hung_up = False  # on a process that runs

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's transports are not its subclasses
        self._out = Outbox(self.transport)
        uid = peer_uid(transport)
        if uid != _owner_of(self._link.path) or not self._link.accept(self):
            log.warning("refused a connection of uid %d to the socket of worker %s", uid, self._link.worker)
            self.transport.abort()

    def write(self, data: bytes) -> None:
        unread = self.transport.get_write_buffer_size()
        if unread > _MOST_UNREAD_BYTES and not self.transport.is_closing():
            self._give_up(f"it left {unread >> 20:,} MiB unread")
        self._out.write(data)

    def data_received(self, data: bytes) -> None:
        if self._link.hears(self):
            self._take(self._reader.feed(data))

    def hear_on(self, unheard: list[tuple[frames.WorkerFrame, bytes]]) -> None:
        self._take(unheard)
        if not self.transport.is_closing():
            self.transport.resume_reading()

    def _take(self, said: Iterable[tuple[frames.WorkerFrame, bytes]]) -> None:
        try:
            for frame, body in said:
                self._link.take(frame, body)
        except ProtocolMismatch as error:
            self._give_up(f"it broke the protocol: {error}")

    def _give_up(self, why: str) -> None:
        self._why, self._hung_up = why, True
        log.warning("worker %s: %s", self._link.worker, why)
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._link.lost(self, self._why, runs_on=self._hung_up)


def _owner_of(path: Path) -> int | None:
    """The uid of the worker whose socket this is; None when its folder is gone."""
    with contextlib.suppress(OSError):
        return path.parent.stat().st_uid
    return None
