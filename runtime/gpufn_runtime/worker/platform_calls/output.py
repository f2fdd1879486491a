"""What the user's code prints and logs, line by line, as Log frames of the attempt that it runs for.

Lines are cut at MAX_LINE and all of a worker's text together is limited (`output_limit`), so that printing a gigabyte
neither floods the platform nor takes long. What bypasses `sys.stdout` (C libraries, a crash) is in the process's
own output, which the agent reads.
"""

from __future__ import annotations

import io
import sys
import threading
import time
from typing import Any

from gpufn_core.protocol import frames
from gpufn_core.protocol.frames import Log
from gpufn_runtime.worker.context import current_attempt
from gpufn_runtime.worker.execute.attempts import Attempt
from gpufn_runtime.worker.link import Link
from gpufn_runtime.worker.platform_calls.output_limit import OutputLimit

MAX_LINE = 16 << 10  # characters
_RATE = 1 << 20  # bytes a second
_BURST = 4 << 20
_COST_OF_A_LINE = 64  # bytes that a line costs on top of its text, so that empty ones are not free
_CUT = " ... (cut)"


class Output:
    """Sends text. The streams that stand in for sys.stdout and sys.stderr write here."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._lock = threading.RLock()  # again from a signal handler or a __del__ that prints
        self._limit = OutputLimit(_RATE, _BURST, time.monotonic())
        self.released = False
        self._streams = (CapturedStream(self, "stdout", 1), CapturedStream(self, "stderr", 2))

    def capture(self) -> None:
        """Take the place of sys.stdout and sys.stderr."""
        sys.stdout, sys.stderr = self._streams

    def release(self) -> None:
        """Give the process's own streams back; the only thing safe in a child that the user's code forked."""
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        self.released = True
        self._lock = threading.RLock()  # a thread that is not in the child may hold the old one

    def capture_logging(self) -> None:
        """Take the log records that nobody else handles, once the user's code has loaded `logging`."""
        logging = sys.modules.get("logging")
        if logging is not None:
            handler = logging.StreamHandler(_Records(self))
            handler.terminator = ""
            handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
            # Not the root logger's own: `logging.basicConfig` does nothing where that has one.
            logging.lastResort = handler  # type: ignore[attr-defined]

    def end(self, attempt: Attempt | None) -> None:
        """Send what `attempt` printed without a line's end, and say what was dropped."""
        for stream in self._streams:
            stream.end(attempt)
        with self._lock:
            self._report_dropped(attempt)

    def send(self, stream: str, attempt: Attempt | None, lines: list[str]) -> None:
        """Each of `lines` as one Log frame, as far as the limit allows."""
        packed = []
        with self._lock:
            now = time.monotonic()
            number, link = _target(attempt)
            for line in lines:
                text = line if len(line) <= MAX_LINE else line[:MAX_LINE] + _CUT
                data = text.encode("utf-8", "backslashreplace")
                if self._limit.admits(len(data) + _COST_OF_A_LINE, now):
                    self._report_dropped(attempt)
                    packed.append(frames.encode(Log(number, stream), data))
        if packed:
            self._link.send_packed(b"".join(packed), link=link)

    def _report_dropped(self, attempt: Attempt | None) -> None:
        lines, size = self._limit.take_dropped()
        if lines:
            number, link = _target(attempt)
            text = f"... {lines} lines ({size >> 10} KiB) left out: more than {_RATE >> 20} MiB of output a second ..."
            self._link.send_packed(frames.encode(Log(number, "stderr"), text.encode()), link=link)


def _target(attempt: Attempt | None) -> tuple[int, int | None]:
    return (0, None) if attempt is None else (attempt.run.attempt, attempt.link)


class CapturedStream(io.TextIOBase):
    """A text stream whose lines go to who runs in this thread or task. A line's beginning waits for its end."""

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, output: Output, name: str, fd: int) -> None:
        self._output = output
        self._name = name
        self._fd = fd
        self._begun: dict[Attempt | None, str] = {}
        self._lock = threading.RLock()
        self.buffer = _Bytes(self)

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        if self._output.released:  # a handler of `logging` holds us, in a child
            return self._own_write(text)
        attempt = current_attempt.get()
        with self._lock:
            begun = self._begun.pop(attempt, "")
            end = text.rfind("\n")
            if end >= 0:
                lines = (begun + text[:end]).split("\n")
                begun = ""
            else:
                lines = []
            begun = (begun + text[end + 1 :])[: MAX_LINE + 1]
            if "\r" in begun:  # a progress bar draws over itself: only its last state is worth anything
                begun = _last_state(begun)
            if begun:
                self._begun[attempt] = begun
        if lines:
            self._output.send(self._name, attempt, [_last_state(line) for line in lines])
        return len(text)

    def _own_write(self, text: str) -> int:
        """To the process's own stream; at once, for nobody flushes that when a child ends by `os._exit`."""
        own = sys.__stdout__ if self._name == "stdout" else sys.__stderr__
        if own is not None:
            own.write(text)
            own.flush()
        return len(text)

    def end(self, attempt: Attempt | None) -> None:
        with self._lock:
            begun = self._begun.pop(attempt, "")
        if begun:
            self._output.send(self._name, attempt, [begun])

    def fileno(self) -> int:
        return self._fd

    def writable(self) -> bool:
        return True

    def reconfigure(self, **_: Any) -> None:
        """A script may ask for UTF-8 or for whole lines: both are so."""

    def flush(self) -> None:
        """Lines are sent as they end; half a line is not worth a message."""

    def close(self) -> None:
        """`with sys.stdout:` must not silence the rest of this worker's life."""


class _Bytes(io.RawIOBase):
    """`sys.stdout.buffer`."""

    def __init__(self, stream: CapturedStream) -> None:
        self._stream = stream

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._stream.write(bytes(data).decode("utf-8", "backslashreplace"))
        return len(data)

    def fileno(self) -> int:
        return self._stream.fileno()

    def close(self) -> None:
        pass


class _Records:
    """Where the handler of the root logger writes: one record, one Log frame, with its traceback's lines."""

    def __init__(self, output: Output) -> None:
        self._output = output

    def write(self, text: str) -> None:
        if self._output.released:
            sys.stderr.write(text + "\n")
        elif text:
            self._output.send("log", current_attempt.get(), [text])

    def flush(self) -> None:
        pass


def _last_state(line: str) -> str:
    return line.rstrip("\r").rpartition("\r")[2] if "\r" in line else line
