"""Raw output of a worker: all bytes are read, so that the worker never blocks; a bounded part is kept.

A byte budget refills over time. Output beyond the budget is counted and dropped, and the next published line is
preceded by a note about that. The tail is always kept, because it holds the reason of a crash.
"""

from __future__ import annotations

from gpufn_core.spec.units import format_bytes
from gpufn_platform.secrets.redaction import Redactor

_TAIL_BYTES = 8 << 10
_TAIL_LINES = 40
_MAX_LINE_BYTES = 8 << 10
_BYTES_PER_S = 128 << 10
_BURST_BYTES = 1 << 20
_RESUME_BYTES = 64 << 10  # after dropping, wait until the budget allows more than a few words
_LINE_COST = 100  # in bytes: each line has overhead in the log stream


class OutputLog:
    """Rate-limited log of one worker's output. `feed` returns the lines to publish. `redactor` masks secrets; the start
    of a secret is held back for as long as an unfinished line."""

    def __init__(self, now: float, redactor: Redactor | None = None) -> None:
        self._redactor = redactor
        self._fed_at = now
        self._tail = bytearray()
        self._partial_line = bytearray()  # not yet ended
        self._partial_since = now
        self._budget = float(_BURST_BYTES)
        self._refilled_at = now
        self._dropped = 0

    def feed(self, data: bytes, now: float) -> list[str]:
        self._fed_at = now
        return self._add(data if self._redactor is None else self._redactor.feed(data), now)

    def _add(self, data: bytes, now: float) -> list[str]:
        self._tail += data[-_TAIL_BYTES:]
        del self._tail[:-_TAIL_BYTES]
        self._budget = min(self._budget + (now - self._refilled_at) * _BYTES_PER_S, _BURST_BYTES)
        self._refilled_at = now
        if self._budget <= 0 or (self._dropped and self._budget < _RESUME_BYTES):
            self._dropped += len(self._partial_line) + len(data)
            self._partial_line.clear()
            return []
        lines = self._dropped_note()
        if not self._partial_line:
            self._partial_since = now
        *complete_lines, last = (bytes(self._partial_line) + data).split(b"\n")
        self._partial_line = bytearray(last)
        while len(self._partial_line) > _MAX_LINE_BYTES:
            complete_lines.append(bytes(self._partial_line[:_MAX_LINE_BYTES]))
            del self._partial_line[:_MAX_LINE_BYTES]
        for number, line in enumerate(complete_lines):
            if self._budget <= 0:
                self._dropped += sum(len(skipped) + 1 for skipped in complete_lines[number:])
                break
            for start in range(0, len(line) or 1, _MAX_LINE_BYTES):
                lines.append(_text(line[start : start + _MAX_LINE_BYTES]))
            self._budget -= len(line) + _LINE_COST
        return lines

    def flush(self, now: float, *, older_than_s: float = 0.0) -> list[str]:
        """Return the unfinished line and the note about dropped output."""
        if self._redactor is not None and self._redactor.is_holding and now - self._fed_at >= older_than_s:
            return self._add(self._redactor.flush(), self._fed_at) + self.flush(now, older_than_s=older_than_s)
        if now - self._partial_since < older_than_s:
            return []
        lines = [] if older_than_s else self._dropped_note()
        if self._partial_line:
            lines.append(_text(bytes(self._partial_line)))
            self._partial_line.clear()
        return lines

    def tail(self) -> str:
        lines = bytes(self._tail).rstrip(b"\r\n").split(b"\n")
        return "\n".join(map(_text, lines[-_TAIL_LINES:]))

    def _dropped_note(self) -> list[str]:
        dropped, self._dropped = self._dropped, 0
        if not dropped:
            return []
        return [f"[gpufn: {dropped:,} bytes of output were dropped: more than {format_bytes(_BYTES_PER_S)}/s]"]


def _text(line: bytes) -> str:
    """Decode a line. A progress bar overwrites itself: only its last state is kept."""
    return line.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2]
