"""Typed ids and how new ones are made: 26 characters of base32, sortable by time (ULID), safe in subjects and paths.

A submitted call that did not come with an id of its own has one whose last characters are its place in the queue: who
is asked for it finds it there.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from typing import NewType

InvocationId = NewType("InvocationId", str)
MapId = NewType("MapId", str)
WorkerId = NewType("WorkerId", str)
Digest = NewType("Digest", str)  # sha256, lower-case hex

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's base32: no i, l, o, u
_ULID = re.compile(f"[{_ALPHABET}]{{26}}")
ULID_PATTERN = f"^[{_ALPHABET}{_ALPHABET[10:].upper()}]{{26}}$"  # a gateway also takes one in capitals
DIGEST = re.compile(r"[0-9a-f]{64}")
_ITEM = re.compile(f"([{_ALPHABET}]{{26}})-(0|[1-9][0-9]{{0,11}})")


def _base32(value: int, length: int) -> str:
    return "".join(_ALPHABET[(value >> shift) & 31] for shift in range(5 * (length - 1), -1, -5))


class _UlidSource:
    """Prefixes are made once per millisecond: the hot path pays one random number and eight look-ups."""

    def __init__(self) -> None:
        self._millisecond = 0
        self._prefix = ""

    def next(self) -> str:
        now = time.time_ns() // 1_000_000
        if now > self._millisecond:  # later ids sort later, though the clock be set back
            self._millisecond = now
            self._prefix = _base32(now, 10)
        tail = int.from_bytes(os.urandom(10), "big")
        pairs = _PAIRS
        return self._prefix + "".join([pairs[(tail >> shift) & 1023] for shift in range(70, -1, -10)])


_STEM_LENGTH = 18  # of 26
_PYTHONS_DIGITS = str.maketrans(_ALPHABET, "0123456789abcdefghijklmnopqrstuv")

_PAIRS = [_base32(value, 2) for value in range(1024)]
_source = _UlidSource()


def new_ulid() -> str:
    return _source.next()


def new_invocation_id() -> InvocationId:
    return InvocationId(new_ulid())


def new_stem() -> str:
    """An invocation's id without its place in the queue, which is known once it is stored."""
    return _source.next()[:_STEM_LENGTH]


def is_stem(text: str) -> bool:
    return len(text) == _STEM_LENGTH


def id_at(stem: str, place: int) -> InvocationId:
    """The id of the invocation that is stored at `place`.

    >>> id_at("01k9xq3zr7c8m2v5t0", 33)
    '01k9xq3zr7c8m2v5t000000011'
    """
    return InvocationId(stem + "".join([_PAIRS[(place >> shift) & 1023] for shift in (30, 20, 10, 0)]))


def place_in(invocation: str) -> int:
    """Where an invocation of this id is stored, if its id was made by `id_at`; else any number.

    >>> place_in("01k9xq3zr7c8m2v5t000000011"), place_in("no id")
    (33, 0)
    """
    if not is_invocation_id(invocation):
        return 0
    return int(invocation[_STEM_LENGTH:].translate(_PYTHONS_DIGITS), 32)


def new_worker_id() -> WorkerId:
    return WorkerId(f"w-{new_ulid()[-12:]}")


def is_invocation_id(text: str) -> bool:
    """Of a call by itself: a ULID, which a client may have chosen."""
    return _ULID.fullmatch(text) is not None


def new_map_id() -> MapId:
    return MapId(new_ulid())


def item_id(map_id: str, index: int) -> InvocationId:
    """The invocation id of a map's item, so that an item that is sent again is the same call.

    >>> item_id("01k9xq3zr7c8m2v5t0w4y6b1d3", 17)
    '01k9xq3zr7c8m2v5t0w4y6b1d3-17'
    """
    return InvocationId(f"{map_id}-{index}")


def item_of(invocation: str) -> tuple[MapId, int] | None:
    """The map and the index that `item_id` put together; None for a call by itself.

    >>> item_of("01k9xq3zr7c8m2v5t0w4y6b1d3-17"), item_of("01k9xq3zr7c8m2v5t0w4y6b1d3")
    (('01k9xq3zr7c8m2v5t0w4y6b1d3', 17), None)
    """
    match = _ITEM.fullmatch(invocation)
    return None if match is None else (MapId(match[1]), int(match[2]))


def names_invocation(text: str) -> bool:
    """Of a call by itself, or of a map's item."""
    return is_invocation_id(text) or item_of(text) is not None


def invocation_id_for(function: str, caller: str, idempotency_key: str) -> InvocationId:
    """The same id for the same key: a repeated request meets its first invocation."""
    seed = "\0".join((function, caller, idempotency_key)).encode()
    number = int.from_bytes(hashlib.sha256(seed).digest()[:16], "big")
    return InvocationId(_base32(number & ((1 << 130) - 1), 26))


def is_digest(text: str) -> bool:
    return DIGEST.fullmatch(text) is not None


def digest_of(data: bytes) -> Digest:
    return Digest(hashlib.sha256(data).hexdigest())
