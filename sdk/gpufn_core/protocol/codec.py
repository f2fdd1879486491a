"""Encoding of messages: a msgpack header followed by the user's bytes, which are never decoded in transit.

4 bytes, big endian: length of the header · header · body
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from gpufn_core.encoding.msgspec_errors import DECODE_ERRORS
from gpufn_core.errors import ProtocolMismatch

PROTOCOL = 1  # increased when an older process would misread a changed message

T = TypeVar("T")

encode = msgspec.msgpack.Encoder().encode


def pack(header: msgspec.Struct, body: bytes | memoryview = b"") -> bytes:
    head = encode(header)
    return b"".join((len(head).to_bytes(4, "big"), head, body))


class Unpacker(Generic[T]):
    """Decoder of packed messages of one type, which may be a tagged union."""

    def __init__(self, header_type: Any) -> None:
        self._decode = msgspec.msgpack.Decoder(header_type).decode

    def __call__(self, data: bytes) -> tuple[T, bytes]:
        end = 4 + int.from_bytes(data[:4], "big")
        if len(data) < 4 or end > len(data):
            raise ProtocolMismatch(f"a message of {len(data)} bytes is truncated")
        try:
            return self._decode(data[4:end]), data[end:]
        except DECODE_ERRORS as error:
            raise ProtocolMismatch(f"a message could not be decoded: {error}") from error
