"""Parsers of the gateway's chunked streams: items, server-sent events, lines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from gpufn.client.responses import error_of
from gpufn_core.encoding import media
from gpufn_core.errors import GatewayUnavailable


def items_of(chunks: Iterable[bytes]) -> Iterator[tuple[str, bytes]]:
    """Parse `media.ITEMS` records into content type and body."""
    buffer = bytearray()
    for chunk in chunks:
        buffer += chunk
        offset = 0
        while len(buffer) - offset >= media.RECORD.size:
            kind, name_length, body_length = media.RECORD.unpack_from(buffer, offset)
            name_start = offset + media.RECORD.size
            body_start = name_start + name_length
            end = body_start + body_length
            if len(buffer) < end:
                break
            content_type, body = buffer[name_start:body_start].decode("ascii"), bytes(buffer[body_start:end])
            offset = end
            if kind == media.RecordKind.END:
                return
            if kind == media.RecordKind.ERROR:
                raise error_of(0, {}, body)
            yield content_type, body
        del buffer[:offset]
    raise GatewayUnavailable("the stream broke off before its end")


def events_of(lines: Iterable[bytes]) -> Iterator[Any]:
    """Parse server-sent events: the data of each `item`, until `end` or `error`."""
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
    parts: list[bytes] = []  # one line, which may be megabytes in a hundred chunks
    for chunk in chunks:
        first, *following = chunk.split(b"\n")
        parts.append(first)
        for line in following:
            yield b"".join(parts).removesuffix(b"\r")
            parts = [line]
    if rest := b"".join(parts):
        yield rest
