"""The local side of `gpufn exec`: standard input, output and error, and the window of a terminal."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import termios
import threading
import tty
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from gpufn_core.protocol.streams.terminal import Channel, Size

if TYPE_CHECKING:
    from gpufn.client.endpoints.terminals import RemoteCommand

_STDIN, _STDOUT, _STDERR = 0, 1, 2
_READ_BYTES: Final = 32 << 10
_ENDING: Final = (signal.SIGTERM, signal.SIGHUP)


class Escape:
    """Detects Enter ~ . in the input, by which a user leaves a command that does not respond.

    >>> escape = Escape()
    >>> escape.take(b"ls ~.\\r"), escape.take(b"~"), escape.take(b"."), escape.is_complete
    (b'ls ~.\\r', b'', b'', True)
    """

    def __init__(self) -> None:
        self.is_complete = False
        self._is_at_start = True  # of a line
        self._has_tilde = False

    def take(self, data: bytes) -> bytes:
        """Return the input to send on. A tilde at the start of a line waits for the next byte."""
        passed = bytearray()
        for byte in data:
            if self._has_tilde:
                self._has_tilde = False
                if byte == ord("."):
                    self.is_complete = True
                    break
                passed += b"~"
            elif self._is_at_start and byte == ord("~"):
                self._has_tilde = True
                self._is_at_start = False
                continue
            self._is_at_start = byte in b"\r\n"
            passed.append(byte)
        return bytes(passed)


class LocalTerminal:
    """With `is_raw` every key is sent to the command, and its output is not changed."""

    def __init__(self, *, is_raw: bool) -> None:
        self._is_raw = is_raw

    def size(self) -> Size:
        try:
            columns, rows = os.get_terminal_size(_STDIN)  # not COLUMNS and LINES, which do not follow the window
        except OSError:
            columns, rows = shutil.get_terminal_size()
        return Size(max(1, rows), max(1, columns))

    def write(self, channel: Channel, data: bytes) -> None:
        fd = _STDERR if channel is Channel.STDERR else _STDOUT
        while data:
            data = data[os.write(fd, data) :]

    @contextlib.contextmanager
    def connected(self, remote: RemoteCommand) -> Iterator[None]:
        """Context in which input goes to the command. The terminal is restored at its end, also after a signal."""
        wake, notify = os.pipe()
        os.set_blocking(notify, False)
        handlers: dict[int, Any] = {number: signal.signal(number, _end) for number in _ENDING}
        if self._is_raw:
            handlers[signal.SIGWINCH] = signal.signal(signal.SIGWINCH, lambda *_: _notify(notify))
        before = termios.tcgetattr(_STDIN) if self._is_raw else None
        try:
            if self._is_raw:
                tty.setraw(_STDIN, termios.TCSADRAIN)  # keeps what was typed ahead
                _notify(notify)  # the window may have changed meanwhile
            threading.Thread(target=self._send_input, args=(remote, wake), name="input", daemon=True).start()
            yield
        finally:
            if before is not None:
                termios.tcsetattr(_STDIN, termios.TCSADRAIN, before)
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _send_input(self, remote: RemoteCommand, wake: int) -> None:
        escape = Escape()
        while True:
            try:
                ready, _, _ = select.select([_STDIN, wake], [], [])
                if wake in ready:
                    os.read(wake, 1)
                    remote.resize(self.size())
                if _STDIN not in ready:
                    continue
                data = os.read(_STDIN, _READ_BYTES)
            except (OSError, ValueError):  # standard input is closed
                data = b""
            if not data:
                (remote.close if self._is_raw else remote.end_input)()
                return
            if self._is_raw:
                data = escape.take(data)
            if data:
                remote.send_input(data)
            if escape.is_complete:
                remote.close()
                return


def _notify(fd: int) -> None:
    with contextlib.suppress(BlockingIOError):
        os.write(fd, b"w")


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
