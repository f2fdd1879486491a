"""Parse a chunk of a map into its items, and check them against the signature. Pure.

application/x-ndjson                  one JSON object with the arguments of an item per line
application/vnd.gpufn.calls           `gpufn_core.encoding.media.CALLS`; only the worker checks it
application/vnd.gpufn.pickled-calls   the same with pickled arguments
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
    """Return the content type of each item. Raises UnsupportedMediaType."""
    kind = media.media_type((content_type or media.LINES.encode()).decode("latin-1"))
    if kind not in _ENCODINGS:
        raise UnsupportedMediaType(
            f"Send items as {media.LINES}, with the arguments of one item per line, not as {kind[:80]}."
        )
    return _ENCODINGS[kind]


def split(encoding: str, body: bytes | memoryview) -> list[bytes | memoryview]:
    """Split a body into the arguments of each item. The parts of a memoryview are not copied.

    Raises InvalidInput, or PayloadTooLarge for too many items.
    """
    items = _lines(body) if encoding == media.JSON else _calls(body)
    if len(items) > CHUNK_ITEMS:
        raise PayloadTooLarge(f"The chunk has {len(items):,} items; send at most {CHUNK_ITEMS} at a time.")
    return items


def check(items: Sequence[bytes | memoryview], signature: Signature, first: int) -> None:
    """Check JSON arguments of the items from `first` on. Raises InvalidInput with the field: `items[17].text`."""
    for index, item in enumerate(items, first):
        try:
            signature.check(bytes(item))
        except InvalidInput as error:
            item_name = f"items[{index}]"
            if not error.field:
                raise InvalidInput(f"{item_name}: {error.message}", field=item_name) from None
            field = f"{item_name}.{error.field}"
            raise InvalidInput(f"{field}: {error.message.removeprefix(f'{error.field}: ')}", field=field) from None


def check_sizes(
    items: Sequence[bytes | memoryview], first: int, inline_bytes: int, *, max_total_bytes: int, max_item_bytes: int
) -> None:
    """Check the sizes of items and of the chunk. Raises PayloadTooLarge.

    Items of at most `inline_bytes` travel in one batch of at most `max_total_bytes`. Larger ones are stored separately.
    """
    for index, item in enumerate(items, first):
        if len(item) > max_item_bytes:
            raise PayloadTooLarge(
                f"items[{index}] has {len(item):,} bytes; the limit for one call is {max_item_bytes:,}."
            )
    total_inline_bytes = sum(len(item) for item in items if len(item) <= inline_bytes)
    if total_inline_bytes > max_total_bytes:
        raise PayloadTooLarge(
            f"The items of this chunk with at most {inline_bytes:,} bytes each have {total_inline_bytes:,} bytes "
            f"together; the limit for one chunk is {max_total_bytes:,}. Send several chunks."
        )


def _lines(body: bytes | memoryview) -> list[bytes | memoryview]:
    lines = (body[match.start() : match.end()] for match in _LINE.finditer(body))
    return [line for line in lines if _BLANK.fullmatch(line) is None]


def _calls(body: bytes | memoryview) -> list[bytes | memoryview]:
    items, end = list[bytes | memoryview](), 0
    while end < len(body):
        start = end + _LENGTH_BYTES
        end = start + int.from_bytes(body[end:start], "big")
        if end > len(body) or start > len(body):
            raise InvalidInput("the chunk is truncated")
        items.append(body[start:end])
    return items
