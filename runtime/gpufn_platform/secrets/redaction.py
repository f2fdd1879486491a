"""Redaction of secrets in output: values, and the forms in which programs print them. Pure.

A run of bytes that belong to secrets becomes one MASK. The result does not depend on how the output is split: a byte is
masked if any occurrence of a pattern covers it. Therefore a stream holds back the end of its output while that end may
be the start of a pattern: at most the length of the longest pattern - 1.
"""

from __future__ import annotations

import base64
import json
import urllib.parse
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

MASK = b"[redacted]"
SHORTEST_VALUE = 4  # bytes: the values of shorter secrets, such as "1", are part of too much output
_SHORTEST_ENCODED = 6  # bytes of a base64 text
_PREFIX = 8  # bytes
_CANDIDATES = 16


class Pattern(NamedTuple):
    """A text to mask. `borders[n]` is the length of the longest proper end of `text[:n + 1]` with which it also starts
    (the failure function of Knuth, Morris and Pratt)."""

    text: bytes
    borders: Sequence[int]

    @property
    def period(self) -> int:
        """Two occurrences start at least so many bytes apart."""
        return len(self.text) - self.borders[-1]


Patterns = tuple[Pattern, ...]


def patterns_of(values: Iterable[str]) -> Patterns:
    """Return the texts to mask: each value as it is, escaped, and in base64, also if it is encoded with text around."""
    texts = dict.fromkeys(text for value in values for text in _forms(value))
    return tuple(Pattern(text, _borders(text)) for text in texts)


def _borders(text: bytes) -> Sequence[int]:
    borders, length = array("I", bytes(4 * len(text))), 0
    for at in range(1, len(text)):
        while length and text[at] != text[length]:
            length = borders[length - 1]
        length += text[at] == text[length]
        borders[at] = length
    return borders


def _forms(value: str) -> Iterator[bytes]:
    data = value.encode()
    if len(data) < SHORTEST_VALUE:
        return
    yield data
    yield json.dumps(value)[1:-1].encode()
    yield json.dumps(value, ensure_ascii=False)[1:-1].encode()
    yield repr(value)[1:-1].encode(errors="backslashreplace")
    yield urllib.parse.quote(value, safe="").encode()
    for text in _base64_cores(data):
        if len(text) >= _SHORTEST_ENCODED:
            yield text
            yield text.translate(bytes.maketrans(b"+/", b"-_"))


def _base64_cores(data: bytes) -> Iterator[bytes]:
    """Return the part of the base64 text that depends on `data` only, for each of its positions in a group of three
    bytes. The first characters and the last one also encode bits of the neighbours."""
    for offset in range(3):
        text = base64.b64encode(bytes(offset) + data)
        first = (offset * 8 + 5) // 6  # the first character without bits of the bytes before `data`
        yield text[first : (offset + len(data)) * 8 // 6]


class Redactor:
    """Redacts one stream. `feed` returns the output that is decided, `flush` the rest."""

    def __init__(self, patterns: Patterns) -> None:
        self._patterns = patterns
        self._held = b""  # it may be the start of a pattern
        self._covered = 0  # bytes of `_held` that an occurrence which began earlier covers
        self._in_mask = False  # the last byte that was returned is masked

    def feed(self, data: bytes) -> bytes:
        buffer = self._held + data
        end = min((_start_of(buffer, pattern) for pattern in self._patterns), default=len(buffer))
        return self._emit(buffer, self._occurrences(buffer), end)

    def flush(self) -> bytes:
        """Return the text that is held back. A secret that continues after it is not recognized."""
        buffer = self._held
        output = self._emit(buffer, self._occurrences(buffer), len(buffer))
        self._in_mask = False
        return output

    @property
    def is_holding(self) -> bool:
        return bool(self._held)

    def _occurrences(self, buffer: bytes) -> list[tuple[int, int]]:
        """Return the covered ranges: merged, in order."""
        found = [(0, self._covered)] if self._covered else []
        for pattern in self._patterns:
            found += _ranges(buffer, pattern)
        merged: list[tuple[int, int]] = []
        for start, end in sorted(found):
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            else:
                merged.append((start, end))
        return merged

    def _emit(self, buffer: bytes, covered: list[tuple[int, int]], end: int) -> bytes:
        """Return `buffer` up to `end`, masked, and hold the rest."""
        output, at, self._covered = bytearray(), 0, 0
        for start, stop in covered:
            if start > 0 and start >= end:
                break  # found again with the next output
            if start > at:
                output += buffer[at:start]
                self._in_mask = False
            if not self._in_mask and start < end:
                output += MASK
                self._in_mask = True
            at = min(stop, end)
            self._covered = stop - at
        if at < end:
            output += buffer[at:end]
            self._in_mask = False
        self._held = buffer[end:]
        return bytes(output)


def redact(patterns: Patterns, text: str) -> str:
    """Redact a complete text."""
    redactor = Redactor(patterns)
    data = redactor.feed(text.encode("utf-8", "surrogatepass")) + redactor.flush()
    return data.decode("utf-8", "surrogatepass")


def _ranges(buffer: bytes, pattern: Pattern) -> Iterator[tuple[int, int]]:
    """Return the ranges that occurrences cover. The time is linear also for a pattern such as `aaaa` in its own text,
    which a worker may print to block its agent."""
    text, period = pattern.text, pattern.period
    at = buffer.find(text)
    while at >= 0:
        end = at + len(text)
        while buffer.startswith(text[-period:], end):  # the occurrence that is `period` further
            end += period
        yield at, end
        # Every later occurrence starts here or later: overlaps of other lengths are shorter than a period.
        at = buffer.find(text, end - min(period, len(text) - period))


def _start_of(buffer: bytes, pattern: Pattern) -> int:
    """Return the first position from which `buffer` is the start of the text, but not all of it; else its length."""
    text = pattern.text
    first = max(0, len(buffer) - len(text) + 1)
    head = text[:_PREFIX]
    at = buffer.find(head, first)
    for _ in range(_CANDIDATES):
        if at < 0:
            break
        if text.startswith(buffer[at:]):
            return at
        at = buffer.find(head, at + 1)
    else:
        return len(buffer) - _overlap(pattern, buffer[first:])
    for at in range(max(first, len(buffer) - len(head) + 1), len(buffer)):
        if text.startswith(buffer[at:]):
            return at
    return len(buffer)


def _overlap(pattern: Pattern, end: bytes) -> int:
    """Return the length of the longest end of `end` with which the text starts, in linear time. `end` is shorter than
    the text."""
    text, borders = pattern
    length = 0
    for byte in end:
        while length and text[length] != byte:
            length = borders[length - 1]
        length += text[length] == byte
    return length
