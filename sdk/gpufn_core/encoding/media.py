"""Content types, and the records of a stream of items: the words that gateway, worker and client share.

A body is JSON, msgpack or the SDK's own encoding, each under the names below; anything else, `…+json` included, is the
bytes of the one parameter that takes bytes (docs/http.md).
"""

from __future__ import annotations

import enum
import struct
from typing import Final

JSON: Final = "application/json"
MSGPACK: Final = "application/msgpack"
NATIVE: Final = "application/vnd.gpufn.msgpack"
# The same encoding with pickles in it, which run code where they are read (decision 0030).
PICKLED: Final = "application/vnd.gpufn.pickle"
BYTES: Final = "application/octet-stream"
FORM: Final = "multipart/form-data"
PROBLEM: Final = "application/problem+json"
EVENTS: Final = "text/event-stream"
ITEMS: Final = "application/vnd.gpufn.items"
LINES: Final = "application/x-ndjson"
# The items of a chunk of a map, in the SDK's encoding: each as 4 bytes, big endian, of its length, and the arguments.
CALLS: Final = "application/vnd.gpufn.calls"
PICKLED_CALLS: Final = "application/vnd.gpufn.pickled-calls"  # the same, of items as PICKLED
OUTCOMES: Final = "application/vnd.gpufn.outcomes"
# An Open Inference Protocol request or response body as it came: a JSON head, `;header-bytes=N` long, and the tensors'
# bytes after it; without the parameter all of it is JSON.
TENSORS: Final = "application/vnd.gpufn.tensors"

_HEADER_BYTES: Final = "header-bytes="

_SAME_AS = {
    "": JSON,
    "application/x-www-form-urlencoded": JSON,  # `curl -d` says so; nobody means it
    "text/json": JSON,
    "application/x-msgpack": MSGPACK,
    "application/vnd.msgpack": MSGPACK,
}


def media_type(content_type: str) -> str:
    """`content_type` without its parameters, under its usual name.

    >>> media_type("application/json; charset=utf-8"), media_type(""), media_type("application/geo+json")
    ('application/json', 'application/json', 'application/geo+json')
    """
    bare = content_type.partition(";")[0].strip().lower()
    return _SAME_AS.get(bare, bare)


def tensors(header_bytes: int | None) -> str:
    """`TENSORS` with the length of its JSON head; None when there is nothing after it.

    >>> tensors(70), tensors(None)
    ('application/vnd.gpufn.tensors;header-bytes=70', 'application/vnd.gpufn.tensors')
    """
    return TENSORS if header_bytes is None else f"{TENSORS};{_HEADER_BYTES}{header_bytes}"


def header_bytes(content_type: str) -> int | None:
    """What `tensors` put in.

    >>> header_bytes(tensors(70)), header_bytes(tensors(None))
    (70, None)
    """
    length = content_type.partition(";")[2].strip().removeprefix(_HEADER_BYTES)
    return int(length) if length.isdecimal() else None


class RecordKind(enum.IntEnum):
    ITEM = 0
    END = 1
    ERROR = 2  # the body is a problem


# A record of `ITEMS`: its kind, the length of the content type, the length of the body; then both.
RECORD: Final = struct.Struct("!BBI")


class OutcomeKind(enum.IntEnum):
    RESULT = 0
    PROBLEM = 1
    ELSEWHERE = 2  # a result that is too large to be here: it is asked for by the item's id
    NOTHING = 3  # sent now and then, to say that the gateway is there


# A record of `OUTCOMES`: its kind, the lengths of content type and body; the item's index, the place of its end among
# all ends, and how many of the map had ended by then; then content type and body.
OUTCOME: Final = struct.Struct("!BBIQQQ")
