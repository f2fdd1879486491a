"""Content types, and the record formats of streams, which gateway, worker and client share.

A body is JSON, msgpack or the SDK's own encoding, under the names below. Any other type, including `…+json`, is passed
as bytes to the parameter that takes bytes (docs/http.md).
"""

from __future__ import annotations

import enum
import struct
from typing import Final

JSON: Final = "application/json"
MSGPACK: Final = "application/msgpack"
NATIVE: Final = "application/vnd.gpufn.msgpack"
# The same encoding with pickles, which run code when they are read (decision 0030).
PICKLED: Final = "application/vnd.gpufn.pickle"
BYTES: Final = "application/octet-stream"
FORM: Final = "multipart/form-data"
URLENCODED: Final = "application/x-www-form-urlencoded"
PROBLEM: Final = "application/problem+json"
EVENTS: Final = "text/event-stream"
ITEMS: Final = "application/vnd.gpufn.items"
LINES: Final = "application/x-ndjson"
# The items of a chunk of a map in the SDK's encoding. Each item: its length in 4 bytes, big endian, and the arguments.
CALLS: Final = "application/vnd.gpufn.calls"
PICKLED_CALLS: Final = "application/vnd.gpufn.pickled-calls"  # the same, with items as PICKLED
OUTCOMES: Final = "application/vnd.gpufn.outcomes"
# An unchanged Open Inference Protocol body: a JSON head of `;header-bytes=N` bytes followed by the tensors' bytes.
# Without the parameter all of it is JSON.
TENSORS: Final = "application/vnd.gpufn.tensors"

_HEADER_BYTES: Final = "header-bytes="

_SAME_AS = {
    "": JSON,
    URLENCODED: JSON,  # `curl -d` sends this type for JSON too
    "text/json": JSON,
    "application/x-msgpack": MSGPACK,
    "application/vnd.msgpack": MSGPACK,
}


def media_type(content_type: str) -> str:
    """Return `content_type` without parameters, under its canonical name.

    >>> media_type("application/json; charset=utf-8"), media_type(""), media_type("application/geo+json")
    ('application/json', 'application/json', 'application/geo+json')
    """
    bare = content_type.partition(";")[0].strip().lower()
    return _SAME_AS.get(bare, bare)


def tensors(header_bytes: int | None) -> str:
    """Return `TENSORS` with the length of its JSON head; None means that the body is only JSON.

    >>> tensors(70), tensors(None)
    ('application/vnd.gpufn.tensors;header-bytes=70', 'application/vnd.gpufn.tensors')
    """
    return TENSORS if header_bytes is None else f"{TENSORS};{_HEADER_BYTES}{header_bytes}"


def header_bytes(content_type: str) -> int | None:
    """Return the length that `tensors` added.

    >>> header_bytes(tensors(70)), header_bytes(tensors(None))
    (70, None)
    """
    length = content_type.partition(";")[2].strip().removeprefix(_HEADER_BYTES)
    return int(length) if length.isdecimal() else None


class RecordKind(enum.IntEnum):
    ITEM = 0
    END = 1
    ERROR = 2  # the body is a problem


# A record of `ITEMS`: its kind, the length of the content type, the length of the body; then content type and body.
RECORD: Final = struct.Struct("!BBI")


class MapOutcomeKind(enum.IntEnum):
    RESULT = 0
    PROBLEM = 1
    BY_REFERENCE = 2  # a result too large for this record; fetch it by the item's id
    EMPTY = 3  # a heartbeat of the gateway; in a client, an outcome that is no longer stored


# A record of `OUTCOMES`: its kind, the lengths of content type and body; the item's index, the position of its end
# among all ends, and the number of items of the map that had ended by then; then content type and body.
OUTCOME: Final = struct.Struct("!BBIQQQ")
