"""Send the output and log records of user code line by line, as Log frames of the attempt that the code runs for.

Lines are cut at MAX_LINE, and the total text of a worker is rate-limited (`output_limit`), so that printing a gigabyte
is fast and does not flood the platform. Output that bypasses `sys.stdout` (C libraries, a crash) goes to the process's
own output, which the agent reads.
"""

from __future__ import annotations

import io
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from gpufn_core.protocol import frames
from gpufn_core.protocol.frames import Log
from gpufn_core.spec.units import format_bytes
from gpufn_runtime.worker.context import current_attempt
from gpufn_runtime.worker.execute.attempts import Attempt
from gpufn_runtime.worker.link import Link
from gpufn_runtime.worker.platform_calls.output_limit import OutputLimit

if TYPE_CHECKING:
    from gpufn_platform.secrets.redaction import Patterns, Redactor

MAX_LINE = 16 << 10  # characters
_RATE = 1 << 20  # bytes a second
_BURST = 4 << 20
_LINE_COST = 64  # bytes charged per line in addition to its text, so that empty lines are not free
_CUT = " ... (cut)"


class Output:
    """Sends text. The replacements of sys.stdout and sys.stderr write to it."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._lock = threading.RLock()  # reentrant: a signal handler or a __del__ may print
        self._limit = OutputLimit(_RATE, _BURST, time.monotonic())
        self.released = False
        self.patterns: Patterns = ()  # of secrets
        self._streams = (CapturedStream(self, "stdout", 1), CapturedStream(self, "stderr", 2))

    def redact(self, patterns: Patterns) -> None:
        """Mask secrets from now on."""
        self.patterns = patterns

    def capture(self) -> None:
        """Replace sys.stdout and sys.stderr."""
        sys.stdout, sys.stderr = self._streams

    def release(self) -> None:
        """Restore the process's own streams. In a child that user code forked, this is the only safe option."""
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        self.released = True
        self._lock = threading.RLock()  # a thread that does not exist in the child may hold the old lock

    def capture_logging(self) -> None:
        """Take log records that have no other handler, if user code has imported `logging`."""
        logging = sys.modules.get("logging")
        if logging is not None:
            handler = logging.StreamHandler(_Records(self))
            handler.terminator = ""
            handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
            # Not as a handler of the root logger: then `logging.basicConfig` would do nothing.
            logging.lastResort = handler  # type: ignore[attr-defined]

    def end(self, attempt: Attempt | None) -> None:
        """Send the incomplete last line of `attempt`, and report dropped lines."""
        for stream in self._streams:
            stream.end(attempt)
        with self._lock:
            self._report_dropped(attempt)

    def send(self, stream: str, attempt: Attempt | None, lines: list[str]) -> None:
        """Send each of `lines` as one Log frame, within the rate limit."""
        packed = []
        with self._lock:
            now = time.monotonic()
            number, link = _target(attempt)
            for line in lines:
                text = line if len(line) <= MAX_LINE else line[:MAX_LINE] + _CUT
                data = text.encode("utf-8", "backslashreplace")
                if self._limit.admits(len(data) + _LINE_COST, now):
                    self._report_dropped(attempt)
                    packed.append(frames.encode(Log(number, stream), data))
        if packed:
            self._link.send_packed(b"".join(packed), link=link)

    def _report_dropped(self, attempt: Attempt | None) -> None:
        lines, size = self._limit.take_dropped()
        if lines:
            number, link = _target(attempt)
            limit = format_bytes(_RATE)
            text = f"... {lines} lines ({format_bytes(size)}) dropped: more than {limit} of output a second ..."
            self._link.send_packed(frames.encode(Log(number, "stderr"), text.encode()), link=link)


def _target(attempt: Attempt | None) -> tuple[int, int | None]:
    return (0, None) if attempt is None else (attempt.run.attempt, attempt.link)


class CapturedStream(io.TextIOBase):
    """A text stream whose lines belong to the attempt of the current thread or task. It buffers incomplete lines."""

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, output: Output, name: str, fd: int) -> None:
        self._output = output
        self._name = name
        self._fd = fd
        self._incomplete: dict[Attempt | None, str] = {}
        self._redactors: dict[Attempt | None, Redactor] = {}
        self._lock = threading.RLock()
        self.buffer = _Bytes(self)

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        if self._output.released:  # in a child, where a handler of `logging` still refers to this stream
            return self._own_write(text)
        attempt, written = current_attempt.get(), len(text)
        with self._lock:
            if self._output.patterns:
                text = self._redacted(attempt, text)
            incomplete = self._incomplete.pop(attempt, "")
            end = text.rfind("\n")
            if end >= 0:
                lines = (incomplete + text[:end]).split("\n")
                incomplete = ""
            else:
                lines = []
            incomplete = (incomplete + text[end + 1 :])[: MAX_LINE + 1]
            if "\r" in incomplete:  # a progress bar overwrites itself: only its last state matters
                incomplete = _last_state(incomplete)
            if incomplete:
                self._incomplete[attempt] = incomplete
        if lines:
            self._output.send(self._name, attempt, [_last_state(line) for line in lines])
        return written

    def _redacted(self, attempt: Attempt | None, text: str) -> str:
        """Return the output that is decided; the start of a secret waits for the next output, or the attempt's end."""
        from gpufn_platform.secrets.redaction import Redactor  # noqa: PLC0415  (most functions have no secrets)

        redactor = self._redactors.get(attempt)
        if redactor is None:
            redactor = self._redactors[attempt] = Redactor(self._output.patterns)
        return redactor.feed(text.encode("utf-8", "surrogatepass")).decode("utf-8", "surrogatepass")

    def _own_write(self, text: str) -> int:
        """Write to the process's own stream; flush at once, because a child may end by `os._exit`."""
        stream = sys.__stdout__ if self._name == "stdout" else sys.__stderr__
        if stream is not None:
            stream.write(text)
            stream.flush()
        return len(text)

    def end(self, attempt: Attempt | None) -> None:
        with self._lock:
            incomplete = self._incomplete.pop(attempt, "")
            if (redactor := self._redactors.pop(attempt, None)) is not None:
                incomplete += redactor.flush().decode("utf-8", "surrogatepass")
        if incomplete:
            self._output.send(self._name, attempt, incomplete.removesuffix("\n").split("\n"))

    def fileno(self) -> int:
        return self._fd

    def writable(self) -> bool:
        return True

    def reconfigure(self, **_: Any) -> None:
        """Do nothing: a script may request UTF-8 or line buffering, and the stream has both."""

    def flush(self) -> None:
        """Do nothing: complete lines are sent at once, incomplete ones are not worth a message."""

    def close(self) -> None:
        """Do nothing: `with sys.stdout:` must not silence the worker from then on."""


class _Bytes(io.RawIOBase):
    """The binary `sys.stdout.buffer`."""

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
    """Stream of the root logger's handler: sends one Log frame per record, including its traceback."""

    def __init__(self, output: Output) -> None:
        self._output = output

    def write(self, text: str) -> None:
        if self._output.released:
            sys.stderr.write(text + "\n")
        elif text:
            self._output.send("log", current_attempt.get(), [self._redacted(text)])

    def _redacted(self, text: str) -> str:
        if not self._output.patterns:
            return text
        from gpufn_platform.secrets.redaction import redact  # noqa: PLC0415  (most functions have no secrets)

        return redact(self._output.patterns, text)

    def flush(self) -> None:
        pass


def _last_state(line: str) -> str:
    return line.rstrip("\r").rpartition("\r")[2] if "\r" in line else line
