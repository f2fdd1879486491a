"""Content types in requests: what a body is, and what its sender wants back. Their names are `gpufn_core.encoding.media`'s."""

from __future__ import annotations

import re
from typing import Final

from gpufn_core.encoding.media import BYTES, EVENTS, ITEMS, JSON, MSGPACK, NATIVE, PICKLED, media_type

# In the order of what keeps most.
_ARGUMENTS: Final = (PICKLED, NATIVE, MSGPACK, JSON)
_PLAIN = re.compile(r"[\x20-\x7e]{1,200}")
_NO_QUALITY = re.compile(r"\s*[qQ]\s*=\s*0(\.0{0,3})?\s*")
_CACHE_SIZE = 512

_kinds: dict[bytes | None, str] = {None: JSON}
_accepts: dict[bytes | None, str] = {None: ""}


def of_body(content_type: bytes | None) -> str:
    """`JSON` for everything that is read as JSON, `MSGPACK`, `NATIVE`, `PICKLED`, or the type of a raw body."""
    kind = _kinds.get(content_type)
    if kind is None:
        assert content_type is not None
        text = content_type.decode("latin-1").strip()
        kind = next((known for known in _ARGUMENTS if known == media_type(text)), clean(text))
        if not is_multipart(kind):  # each has a boundary of its own
            _remember(_kinds, content_type, kind)
    return kind


def is_multipart(kind: str) -> bool:
    return kind[:10].lower() == "multipart/"


def is_arguments(kind: str) -> bool:
    """True when a body of this kind holds keyword arguments rather than one parameter's bytes."""
    return kind in _ARGUMENTS


def wanted(accept: bytes | None) -> str:
    """The encoding of the result that `Accept` asks for; empty when the sender leaves it to us."""
    want = _accepts.get(accept)
    if want is None:
        assert accept is not None
        parts = [part for part in accept.decode("latin-1").split(",") if part.strip()]
        types = [media_type(part) for part in parts if not _is_refused(part)]
        known = [each for each in _ARGUMENTS if each in types]
        if known:
            want = known[0]
        elif ITEMS in types:
            want = NATIVE
        elif EVENTS in types:
            want = JSON
        else:
            want = next((clean(each) for each in types if "*" not in each), "")
        _remember(_accepts, accept, want)
    return want


def _is_refused(part: str) -> bool:
    """A part of `Accept` may name what the sender does not take; how much it likes the others is not asked.

    >>> _is_refused("text/html;q=0.1"), _is_refused("text/html; charset=utf-8; q=0.0")
    (False, True)
    """
    return any(_NO_QUALITY.fullmatch(parameter) for parameter in part.split(";")[1:])


def clean(content_type: str) -> str:
    """A content type that is safe in a header; one that is not becomes plain bytes."""
    return content_type if _PLAIN.fullmatch(content_type) else BYTES


def _remember(cache: dict[bytes | None, str], key: bytes, value: str) -> None:
    if len(cache) < _CACHE_SIZE and len(key) <= 200:
        cache[key] = value
