"""Content negotiation: the type of a request body and the encoding of the result.

The names of the types are in `gpufn_core.encoding.media`.
"""

from __future__ import annotations

import functools
import re
from typing import Final

from gpufn_core.encoding.media import BYTES, EVENTS, ITEMS, JSON, MSGPACK, NATIVE, PICKLED, URLENCODED, media_type

# Most expressive first.
_ARGUMENTS: Final = (PICKLED, NATIVE, MSGPACK, JSON)
_PLAIN = re.compile(r"[\x20-\x7e]{1,200}")
_NO_QUALITY = re.compile(r"\s*[qQ]\s*=\s*0(\.0{0,3})?\s*")
_CACHE_SIZE = 512


@functools.lru_cache(_CACHE_SIZE)
def body_kind(content_type: bytes | None) -> str:
    """Return `JSON`, `MSGPACK`, `NATIVE` or `PICKLED` for encoded arguments, otherwise the type of a raw body."""
    if content_type is None:
        return JSON
    text = content_type.decode("latin-1").strip()
    return next((known for known in _ARGUMENTS if known == media_type(text)), clean(text))


def is_multipart(kind: str) -> bool:
    return kind[:10].lower() == "multipart/"


def is_urlencoded(content_type: bytes | None) -> bool:
    """True for the type of a form without files, as a browser sends it."""
    return content_type is not None and content_type.decode("latin-1").partition(";")[0].strip().lower() == URLENCODED


def is_arguments(kind: str) -> bool:
    """True if a body of this kind holds keyword arguments, not the bytes of one parameter."""
    return kind in _ARGUMENTS


@functools.lru_cache(_CACHE_SIZE)
def result_encoding(accept: bytes | None) -> str:
    """Return the result encoding that `Accept` requests; empty if the client leaves the choice to us."""
    parts = [part for part in (accept or b"").decode("latin-1").split(",") if part.strip()]
    types = [media_type(part) for part in parts if not _is_rejected(part)]
    known = next((each for each in _ARGUMENTS if each in types), None)
    if known is not None:
        return known
    if ITEMS in types:
        return NATIVE
    if EVENTS in types:
        return JSON
    return next((clean(each) for each in types if "*" not in each), "")


def _is_rejected(part: str) -> bool:
    """True if this part of `Accept` has quality 0. Other quality values are ignored.

    >>> _is_rejected("text/html;q=0.1"), _is_rejected("text/html; charset=utf-8; q=0.0")
    (False, True)
    """
    return any(_NO_QUALITY.fullmatch(parameter) for parameter in part.split(";")[1:])


def clean(content_type: str) -> str:
    """Return the content type if it is safe in a header, otherwise application/octet-stream."""
    return content_type if _PLAIN.fullmatch(content_type) else BYTES
