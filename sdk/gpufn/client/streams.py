"""Streams of a gateway as they come in chunks: items, server-sent events, lines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from gpufn.client.responses import error_of
from gpufn_core.encoding import media
from gpufn_core.errors import GatewayUnavailable


def items_of(chunks: Iterable[bytes]) -> Iterator[tuple[str, bytes]]:
    """The records of `media.ITEMS`."""
    buffer = bytearray()
    for chunk in chunks:
        buffer += chunk
        at = 0
        while len(buffer) - at >= media.RECORD.size:
            kind, name_length, body_length = media.RECORD.unpack_from(buffer, at)
            name_at = at + media.RECORD.size
            start = name_at + name_length
            end = start + body_length
            if len(buffer) < end:
                break
            content_type, body = buffer[name_at:start].decode("ascii"), bytes(buffer[start:end])
            at = end
            if kind == media.RecordKind.END:
                return
            if kind == media.RecordKind.ERROR:
                raise error_of(0, {}, body)
            yield content_type, body
        del buffer[:at]
    raise GatewayUnavailable("the stream broke off before its end")


def events_of(lines: Iterable[bytes]) -> Iterator[Any]:
    """Server-sent events: `item`, then `end` or `error`."""
    event, data = "", b""
    for line in lines:
        if line:
            name, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            if name == b"event":
                event = value.decode()
            elif name == b"data":
                data += (b"\n" if data else b"") + value
            continue
        if event == "item":
            yield msgspec.json.decode(data)
        elif event == "end":
            return
        elif event == "error":
            raise error_of(0, {}, data)
        event, data = "", b""
    raise GatewayUnavailable("the stream broke off before its end")


def lines_of(chunks: Iterable[bytes]) -> Iterator[bytes]:
    begun: list[bytes] = []  # of a line, which may be megabytes and come in a hundred chunks
    for chunk in chunks:
        first, *following = chunk.split(b"\n")
        begun.append(first)
        for line in following:
            yield b"".join(begun).removesuffix(b"\r")
            begun = [line]
    if rest := b"".join(begun):
        yield rest
