"""Messages of the stream HISTORY.

ADD   the points of ten seconds: readers add them to their points of this slot, of its minute and of its hour
SET   the points of a minute or an hour that has ended: readers replace theirs
Event one mark on the time line

So a new reader gets minutes and hours whose ADDs were removed long ago.
"""

from __future__ import annotations

import enum
import hashlib
import itertools
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from gpufn_core.protocol import subjects
from gpufn_gateway.history.fields import pack, unpack

SECONDS_10: Final = 10
MINUTE: Final = 60
HOUR: Final = 3600
RESOLUTIONS: Final = (SECONDS_10, MINUTE, HOUR)
_MAX_SUBJECTS: Final = 2_000  # per message: below 300 KiB
_MAX_BYTES: Final = 64 << 20  # per unpacked message


class EventKind(enum.StrEnum):
    DEPLOY = "deploy"
    ROLLBACK = "rollback"
    DELETE = "delete"
    TRAFFIC = "traffic"
    SCALE = "scale"
    FAULT = "fault"
    QUARANTINE = "quarantine"
    RECOVERY = "recovery"
    NODE_UP = "node_up"
    NODE_LOST = "node_lost"
    NODE_DRAIN = "node_drain"
    BUDGET = "budget"


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """A mark on the time line. `subject` is the object of the event, such as ``function:prod/search/predict`` or
    ``node:a``; `at` is in unix seconds."""

    at: float
    kind: EventKind
    subject: str
    text: str
    revision: int | None = None
    node: str = ""
    details: dict[str, Any] = {}

    @property
    def identity(self) -> str:
        """An id that the gateways agree on: the stream stores the event once."""
        about = f"{self.kind}\n{self.subject}\n{self.text}\n{self.details}\n{int(self.at // SECONDS_10)}"
        return hashlib.sha256(about.encode()).hexdigest()[:32]


class Block(msgspec.Struct, frozen=True, array_like=True):
    """`slot` counts spans of `resolution` seconds since 1970. `gateway` is the name of the gateway that recorded it."""

    resolution: int
    slot: int
    gateway: str
    points: dict[str, dict[int, Any]]
    part: int = 0  # 0, or more if the span has many subjects


_encode: Final = msgspec.msgpack.Encoder().encode
_block: Final = msgspec.msgpack.Decoder(Block)
_event: Final = msgspec.msgpack.Decoder(Event)


def encode_blocks(resolution: int, slot: int, gateway: str, points: Mapping[str, dict[int, Any]]) -> Iterator[bytes]:
    """Yield the messages of one span, several if it has many subjects."""
    items = ((subject, pack(point)) for subject, point in points.items())
    for part in itertools.count():
        if not (packed := dict(itertools.islice(items, _MAX_SUBJECTS))):
            return
        yield zlib.compress(_encode(Block(resolution, slot, gateway, packed, part)), 6)


def decode_block(payload: bytes) -> Block:
    """Raises msgspec.MsgspecError, zlib.error."""
    unpacker = zlib.decompressobj()
    block = _block.decode(unpacker.decompress(payload, _MAX_BYTES))
    points = {subject: unpack(point) for subject, point in block.points.items()}
    return msgspec.structs.replace(block, points=points)


def encode_event(event: Event) -> bytes:
    return _encode(event)


def decode_event(payload: bytes) -> Event:
    return _event.decode(payload)


def subject_of(resolution: int) -> str:
    """Return the subject of the messages of a resolution."""
    return subjects.history(f"{resolution}s")
