"""Typed ids and their generation: 26 characters of base32, sortable by time (ULID), safe in subjects and paths.

The id of a submitted call has its position in the queue in its last characters, unless the client chose the id. The
record of such a call is found by its id alone.

A client may choose the id of a call or a map. An id that the platform derives is larger than any ULID, so no client can
choose it first.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
import time
from typing import NewType

InvocationId = NewType("InvocationId", str)
MapId = NewType("MapId", str)
WorkerId = NewType("WorkerId", str)
Digest = NewType("Digest", str)  # sha256, lower-case hex

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's base32: no i, l, o, u
_PAIRS = [first + second for first in _ALPHABET for second in _ALPHABET]  # two digits, by their value
_ULID = re.compile(f"[{_ALPHABET}]{{26}}")
_CLIENT_ID = re.compile(f"[0-7][{_ALPHABET}]{{25}}")  # 128 bits, as in the ULID specification
CLIENT_ID_PATTERN = f"^[0-7][{_ALPHABET}{_ALPHABET[10:].upper()}]{{25}}$"  # a gateway also accepts capitals
_DERIVED = 1 << 129  # the first of 130 bits
DIGEST = re.compile(r"[0-9a-f]{64}")
_ITEM = re.compile(f"([{_ALPHABET}]{{26}})-(0|[1-9][0-9]{{0,11}})")


def _base32(value: int, length: int) -> str:
    """Encode a number in `length` digits, an even number."""
    return "".join([_PAIRS[(value >> shift) & 1023] for shift in range(5 * (length - 2), -1, -10)])


class _UlidSource:
    """Generator of ULIDs. The prefix is built once per millisecond: an id costs one random number and eight lookups."""

    def __init__(self) -> None:
        self._millisecond = 0
        self._prefix = ""

    def next(self) -> str:
        now = time.time_ns() // 1_000_000
        if now > self._millisecond:  # later ids still sort later after the clock is set back
            self._millisecond = now
            self._prefix = _base32(now, 10)
        pairs = _PAIRS
        a, b, c, d, e, f, g, h = _RANDOM.unpack(os.urandom(16))
        return (
            f"{self._prefix}{pairs[a & 1023]}{pairs[b & 1023]}{pairs[c & 1023]}{pairs[d & 1023]}"
            f"{pairs[e & 1023]}{pairs[f & 1023]}{pairs[g & 1023]}{pairs[h & 1023]}"
        )


_STEM_LENGTH = 18  # of 26
_PYTHON_DIGITS = str.maketrans(_ALPHABET, "0123456789abcdefghijklmnopqrstuv")

_RANDOM = struct.Struct("8H")
_source = _UlidSource()


def new_ulid() -> str:
    return _source.next()


def new_invocation_id() -> InvocationId:
    return InvocationId(new_ulid())


def new_stem() -> str:
    """Return an invocation id without its queue position, which is known once the invocation is stored."""
    return _source.next()[:_STEM_LENGTH]


def is_stem(text: str) -> bool:
    return len(text) == _STEM_LENGTH


def id_at(stem: str, place: int) -> InvocationId:
    """Return the id of the invocation that is stored at `place`.

    >>> id_at("01k9xq3zr7c8m2v5t0", 33)
    '01k9xq3zr7c8m2v5t000000011'
    """
    return InvocationId(stem + _base32(place, 8))


def queue_position_in(invocation: str) -> int:
    """Return where an invocation is stored if `id_at` made its id; any number otherwise.

    >>> queue_position_in("01k9xq3zr7c8m2v5t000000011"), queue_position_in("no id")
    (33, 0)
    """
    if not is_invocation_id(invocation):
        return 0
    return int(invocation[_STEM_LENGTH:].translate(_PYTHON_DIGITS), 32)


def new_worker_id() -> WorkerId:
    return WorkerId(f"w-{new_ulid()[-12:]}")


def is_invocation_id(text: str) -> bool:
    """Return whether `text` is the id of a single call: a ULID, which a client may have chosen, or a derived id."""
    return _ULID.fullmatch(text) is not None


def is_client_id(text: str) -> bool:
    """Return whether a client may choose `text` as the id of a call or map.

    >>> is_client_id("01k9xq3zr7c8m2v5t000000011"), is_client_id(invocation_id_for("f", "key", "order 1"))
    (True, False)
    """
    return _CLIENT_ID.fullmatch(text) is not None


def new_map_id() -> MapId:
    return MapId(new_ulid())


def item_id(map_id: str, index: int) -> InvocationId:
    """Return the invocation id of a map's item. An item that is sent again gets the same id.

    >>> item_id("01k9xq3zr7c8m2v5t0w4y6b1d3", 17)
    '01k9xq3zr7c8m2v5t0w4y6b1d3-17'
    """
    return InvocationId(f"{map_id}-{index}")


def item_of(invocation: str) -> tuple[MapId, int] | None:
    """Return the map and index that `item_id` combined; None for the id of a single call.

    >>> item_of("01k9xq3zr7c8m2v5t0w4y6b1d3-17"), item_of("01k9xq3zr7c8m2v5t0w4y6b1d3")
    (('01k9xq3zr7c8m2v5t0w4y6b1d3', 17), None)
    """
    match = _ITEM.fullmatch(invocation)
    return None if match is None else (MapId(match[1]), int(match[2]))


def is_call_or_item_id(text: str) -> bool:
    """Return whether `text` is the id of a single call or of a map's item."""
    return is_invocation_id(text) or item_of(text) is not None


def invocation_id_for(function: str, caller: str, idempotency_key: str) -> InvocationId:
    """Derive the id from the key: a repeated request finds its first invocation. Others may know the values from which
    it is derived, so a client cannot choose such an id: others could use it before the caller."""
    seed = "\0".join((function, caller, idempotency_key)).encode()
    number = int.from_bytes(hashlib.sha256(seed).digest()[:16], "big")
    return InvocationId(_base32(_DERIVED | number, 26))


def is_digest(text: str) -> bool:
    return DIGEST.fullmatch(text) is not None


def digest_of(data: bytes) -> Digest:
    return Digest(hashlib.sha256(data).hexdigest())
