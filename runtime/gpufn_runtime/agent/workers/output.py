"""A worker's raw output: every byte is read, so that the worker never waits for us; only a bounded part is kept.

The budget refills by the second. What comes above it is counted and dropped, and the next line that is kept is
preceded by one that says so. The tail is kept in any case: it is where the reason of a crash is.
"""

from __future__ import annotations

_TAIL_BYTES = 8 << 10
_TAIL_LINES = 40
_LONGEST_LINE = 8 << 10
_BYTES_PER_S = 128 << 10
_BURST_BYTES = 1 << 20
_RESUME_BYTES = 64 << 10  # after a flood, wait until there is room for more than a few words
_LINE_COST = 100  # a short line costs the log stream more than its text


class OutputLog:
    """`feed` gives the lines to publish."""

    def __init__(self, now: float) -> None:
        self._tail = bytearray()
        self._rest = bytearray()  # a line whose end has not come yet
        self._rest_since = now
        self._budget = float(_BURST_BYTES)
        self._refilled_at = now
        self._dropped = 0

    def feed(self, data: bytes, now: float) -> list[str]:
        self._tail += data[-_TAIL_BYTES:]
        del self._tail[:-_TAIL_BYTES]
        self._budget = min(self._budget + (now - self._refilled_at) * _BYTES_PER_S, _BURST_BYTES)
        self._refilled_at = now
        if self._budget <= 0 or (self._dropped and self._budget < _RESUME_BYTES):
            self._dropped += len(self._rest) + len(data)
            self._rest.clear()
            return []
        lines = self._dropped_note()
        if not self._rest:
            self._rest_since = now
        *whole, last = (bytes(self._rest) + data).split(b"\n")
        self._rest = bytearray(last)
        while len(self._rest) > _LONGEST_LINE:
            whole.append(bytes(self._rest[:_LONGEST_LINE]))
            del self._rest[:_LONGEST_LINE]
        for number, line in enumerate(whole):
            if self._budget <= 0:
                self._dropped += sum(len(left) + 1 for left in whole[number:])
                break
            for start in range(0, len(line) or 1, _LONGEST_LINE):
                lines.append(_text(line[start : start + _LONGEST_LINE]))
            self._budget -= len(line) + _LINE_COST
        return lines

    def flush(self, now: float, *, older_than_s: float = 0.0) -> list[str]:
        """What is left without a line's end, and how much was dropped at last."""
        if now - self._rest_since < older_than_s:
            return []
        lines = [] if older_than_s else self._dropped_note()
        if self._rest:
            lines.append(_text(bytes(self._rest)))
            self._rest.clear()
        return lines

    def tail(self) -> str:
        lines = bytes(self._tail).rstrip(b"\r\n").split(b"\n")
        return "\n".join(map(_text, lines[-_TAIL_LINES:]))

    def _dropped_note(self) -> list[str]:
        dropped, self._dropped = self._dropped, 0
        if not dropped:
            return []
        return [f"[gpufn: {dropped:,} bytes of output were dropped: more than {_BYTES_PER_S >> 10} KiB/s]"]


def _text(line: bytes) -> str:
    """A progress bar draws over itself: only its last state is worth anything."""
    return line.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2]
