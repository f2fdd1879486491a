"""Splitting of a ControllerReport into parts that fit a NATS message, and the joining of parts by readers. Pure.

    for payload in encode_parts(report, most_bytes): publish(payload)
    statuses = Statuses(); statuses.take(report); statuses.get("resize")

A reader uses each part as soon as it arrives. With the last part of a full report it drops the functions that none of
the parts contained. A lost or rejected part changes nothing: the previous status stays until a part replaces it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from gpufn_core.protocol.codec import encode
from gpufn_core.protocol.reports import ControllerReport, FunctionStatus

PART_BYTES: Final = 256 << 10
_ENVELOPE_BYTES: Final = 1 << 10  # a report without its functions


def encode_parts(report: ControllerReport, most_bytes: int = PART_BYTES) -> list[bytes]:
    """Encode a report in payloads of at most `most_bytes`, unless the status of a single function is larger. Each part
    of several is marked partial, for readers of an older version."""
    whole = encode(report)
    if len(whole) <= most_bytes:
        return [whole]
    parts = list(_split(report.functions, most_bytes - _ENVELOPE_BYTES))
    if report.partial:
        return [encode(msgspec.structs.replace(report, functions=part)) for part in parts]
    return [
        encode(msgspec.structs.replace(report, functions=part, partial=True, part=number, parts=len(parts)))
        for number, part in enumerate(parts, 1)
    ]


def _split(functions: tuple[FunctionStatus, ...], most_bytes: int) -> Iterator[tuple[FunctionStatus, ...]]:
    part: list[FunctionStatus] = []
    size = 0
    for status in functions:
        length = len(encode(status))
        if part and size + length > most_bytes:
            yield tuple(part)
            part, size = [], 0
        part.append(status)
        size += length
    yield tuple(part)


class Statuses:
    """The latest status of each function, joined from the reports of one controller at a time."""

    def __init__(self) -> None:
        self._statuses: dict[str, FunctionStatus] = {}
        self._report: tuple[int, int] = (0, 0)  # epoch and sequence of the full report that is being received
        self._parts: set[int] = set()
        self._functions: set[str] = set()  # functions in the parts received so far

    def __repr__(self) -> str:
        return f"<Statuses [{len(self._statuses)} functions]>"

    def __iter__(self) -> Iterator[FunctionStatus]:
        return iter(self._statuses.values())

    def get(self, function: str) -> FunctionStatus | None:
        return self._statuses.get(function)

    def pop(self, function: str) -> None:
        self._statuses.pop(function, None)

    def take(self, report: ControllerReport) -> None:
        received = {status.function: status for status in report.functions}
        if not report.partial:
            self._statuses = received
            return
        self._statuses.update(received)
        if report.parts > 1 and self._report != (report.epoch, report.sequence):
            self._report = report.epoch, report.sequence
            self._parts, self._functions = set(), set()
        self._functions.update(received)
        if report.parts > 1:
            self._parts.add(report.part)
            if len(self._parts) == report.parts:
                self._statuses = {name: status for name, status in self._statuses.items() if name in self._functions}
