"""What msgspec says of a value that does not fit its type, taken apart. Pure."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

_AT = re.compile(r" - at (?P<key>`key` in )?`\$?\.?(?P<path>.*?)`$", re.DOTALL)
_OF_FIELD = re.compile(r"^Object (?:(?P<missing>missing required)|contains unknown) field `(?P<name>.+)`$", re.DOTALL)

_BYTE = re.compile(r"\(byte (\d+)\)$")
_NUMBER = re.compile(rb"-?(?:NaN|Infinity)")
_LONGEST_NUMBER = len("Infinity")
_LARGEST_SEARCHED = 64 << 10  # the search takes 10 ms per MB


class Misfit(NamedTuple):
    """`at` is the way to the value; "" is the whole. `path` is the same, but of a field that `is_missing`, or
    `is_unknown`, the way to that."""

    at: str
    path: str
    text: str
    is_missing: bool = False
    is_unknown: bool = False
    is_key: bool = False  # not the value there, but one of its keys


def misfit(said: str, within: str = "") -> Misfit:
    """`said` of a value that stands at `within`.

    >>> misfit("Expected `str`, got `int` - at `$.texts[0]`")[:2]
    ('texts[0]', 'texts[0]')
    >>> missing = misfit("Object missing required field `rate` - at `$.limits`", within="key")
    >>> missing.at, missing.path, missing.text
    ('key.limits', 'key.limits.rate', 'object missing required field rate')
    """
    found = _AT.search(said)
    what = said[: found.start()] if found else said
    at = _joined(within, found["path"] if found else "")
    text = (what[:1].lower() + what[1:]).replace("`", "")
    if (field := _OF_FIELD.match(what)) is not None:
        is_missing = field["missing"] is not None
        return Misfit(at, _joined(at, field["name"]), text, is_missing=is_missing, is_unknown=not is_missing)
    return Misfit(at, at, text, is_key=found is not None and found["key"] is not None)


def json_fault(error: Exception, body: bytes | memoryview) -> str:
    """Describe why a body is not JSON, and name a number that JSON lacks.

    >>> json_fault(ValueError("JSON is malformed: invalid character (byte 6)"), b'{"x": NaN}')
    'JSON has no NaN (byte 6): send "NaN" as text to a model, and application/msgpack to a function'
    """
    position = _BYTE.search(str(error))
    at = int(position[1]) if position else 0
    number = _NUMBER.search(bytes(body[max(0, at - 1) : at + _LONGEST_NUMBER]))
    if position is None or number is None:
        return str(error)
    word = number[0].decode()
    return f'JSON has no {word} (byte {at}): send "{word}" as text to a model, and application/msgpack to a function'


class _Word(str):
    """The text of a number that JSON lacks."""


def number_field(body: bytes | memoryview) -> str:
    """The way to the first number that JSON lacks; "" where the body has none, or is large.

    >>> number_field(b'{"a": "NaN", "b": {"c": [1, -Infinity]}}'), number_field(b'{"a": ')
    ('b.c[1]', '')
    """
    if len(body) > _LARGEST_SEARCHED:
        return ""
    with contextlib.suppress(ValueError, RecursionError):
        return _way_to_word(json.loads(bytes(body), parse_constant=_Word)) or ""
    return ""


def _way_to_word(value: Any) -> str | None:
    if isinstance(value, _Word):
        return ""
    steps: Iterable[tuple[str, Any]] = ()
    if isinstance(value, dict):
        steps = value.items()
    elif isinstance(value, list):
        steps = ((f"[{index}]", item) for index, item in enumerate(value))
    ways = ((step, _way_to_word(item)) for step, item in steps)
    return next((_joined(step, way) for step, way in ways if way is not None), None)


def is_number_word(text: str) -> bool:
    """Whether it is a number that JSON lacks.

    >>> is_number_word("-Infinity"), is_number_word("nan")
    (True, False)
    """
    return _NUMBER.fullmatch(text.encode()) is not None


def _joined(path: str, rest: str) -> str:
    return path + rest if not path or not rest or rest.startswith("[") else f"{path}.{rest}"
