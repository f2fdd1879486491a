"""File descriptors of a terminal, on the worker's event loop: the ends of pipes, or of a pseudo-terminal."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import struct
import termios
from collections.abc import AsyncIterator
from typing import Final

from gpufn_core.protocol.streams.terminal import Size

_READ_BYTES: Final = 32 << 10


class Reader:
    """The output of a command. After `finish`, it ends when nothing more can be read at once: a process that the
    command left behind may hold the other end."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._changed = asyncio.Event()
        self._is_finishing = False

    def close(self) -> None:
        os.close(self._fd)

    def finish(self) -> None:
        self._is_finishing = True
        self._changed.set()

    async def parts(self) -> AsyncIterator[bytes]:
        while True:
            try:
                part = os.read(self._fd, _READ_BYTES)
            except BlockingIOError:
                if self._is_finishing:
                    return
                await self._wait()
                continue
            except OSError:  # EIO: no process has the terminal open
                return
            if not part:
                return
            yield part

    async def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        self._changed.clear()
        loop.add_reader(self._fd, self._changed.set)
        try:
            if not self._is_finishing:
                await self._changed.wait()
        finally:
            loop.remove_reader(self._fd)


class Writer:
    """The input of a command."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd: int | None = fd

    async def write(self, data: bytes) -> None:
        """Write all. Does nothing if the command does not read any more."""
        while data and self._fd is not None:
            try:
                data = data[os.write(self._fd, data) :]
            except BlockingIOError:
                await self._wait(self._fd)
            except OSError:
                return

    async def _wait(self, fd: int) -> None:
        loop, writable = asyncio.get_running_loop(), asyncio.Event()
        loop.add_writer(fd, writable.set)
        try:
            await writable.wait()
        finally:
            loop.remove_writer(fd)

    def close(self) -> None:
        if self._fd is not None:
            fd, self._fd = self._fd, None
            os.close(fd)


def set_size(fd: int, size: Size) -> None:
    """Set the window of a pseudo-terminal. Its foreground process receives SIGWINCH."""
    with contextlib.suppress(OSError):  # the command has ended
        fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", size.rows, size.columns, 0, 0))
