"""A chunk of a map as it comes: its items, and whether they fit the signature. Pure.

application/x-ndjson          the arguments of one item per line, a JSON object
application/vnd.gpufn.calls   `gpufn_core.encoding.media.CALLS`, which the worker checks; pickled-calls the same
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from gpufn_core.encoding import media
from gpufn_core.errors import InvalidInput, PayloadTooLarge, UnsupportedMediaType
from gpufn_core.protocol.limits import CHUNK_ITEMS
from gpufn_gateway.arguments.signature import Signature

_LENGTH_BYTES: Final = 4
_LINE: Final = re.compile(rb"[^\n]+")
_BLANK: Final = re.compile(rb"\s*")
_ENCODINGS: Final = {media.LINES: media.JSON, media.CALLS: media.NATIVE, media.PICKLED_CALLS: media.PICKLED}


def encoding_of(content_type: bytes | None) -> str:
    """The content type of each item. Raises UnsupportedMediaType."""
    kind = media.media_type((content_type or media.LINES.encode()).decode("latin-1"))
    if kind not in _ENCODINGS:
        raise UnsupportedMediaType(
            f"Items are sent as {media.LINES}, the arguments of one per line; not as {kind[:80]}."
        )
    return _ENCODINGS[kind]


def split(encoding: str, body: bytes | memoryview) -> list[bytes | memoryview]:
    """The arguments of each item; of a memoryview, parts that are not copied. Raises InvalidInput, or PayloadTooLarge
    for too many."""
    items = _lines(body) if encoding == media.JSON else _calls(body)
    if len(items) > CHUNK_ITEMS:
        raise PayloadTooLarge(f"These are {len(items):,} items; send at most {CHUNK_ITEMS} at a time.")
    return items


def check(items: Sequence[bytes | memoryview], signature: Signature, first: int) -> None:
    """JSON arguments, of items `first` and following. Raises InvalidInput with the field, such as `items[17].text`."""
    for index, item in enumerate(items, first):
        try:
            signature.check(bytes(item))
        except InvalidInput as error:
            where = f"items[{index}]"
            if not error.field:
                raise InvalidInput(f"{where}: {error.message}", field=where) from None
            field = f"{where}.{error.field}"
            raise InvalidInput(f"{field}: {error.message.removeprefix(f'{error.field}: ')}", field=field) from None


def check_sizes(
    items: Sequence[bytes | memoryview], first: int, inline_bytes: int, *, together: int, each: int
) -> None:
    """Items of at most `inline_bytes` travel `together` in one batch; a larger one is stored by itself. Raises
    PayloadTooLarge."""
    for index, item in enumerate(items, first):
        if len(item) > each:
            raise PayloadTooLarge(f"items[{index}] has {len(item):,} bytes, more than the {each:,} of one call.")
    inline = sum(len(item) for item in items if len(item) <= inline_bytes)
    if inline > together:
        raise PayloadTooLarge(
            f"The items of this chunk with at most {inline_bytes:,} bytes each have {inline:,} together, more than the "
            f"{together:,} of one chunk: send them in several."
        )


def _lines(body: bytes | memoryview) -> list[bytes | memoryview]:
    lines = (body[found.start() : found.end()] for found in _LINE.finditer(body))
    return [line for line in lines if _BLANK.fullmatch(line) is None]


def _calls(body: bytes | memoryview) -> list[bytes | memoryview]:
    items, at = list[bytes | memoryview](), 0
    while at < len(body):
        start = at + _LENGTH_BYTES
        at = start + int.from_bytes(body[at:start], "big")
        if at > len(body) or start > len(body):
            raise InvalidInput("the chunk is cut short")
        items.append(body[start:at])
    return items
