"""Exceptions of msgspec's decoders, and parsing of their messages about values that do not fit their type. Pure."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import msgspec

# Errors for bytes from an untrusted sender: a text may not be UTF-8, and nesting may be deeper than msgspec reads.
DECODE_ERRORS: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_AT = re.compile(r" - at (?P<key>`key` in )?`\$?\.?(?P<path>.*?)`$", re.DOTALL)
_OF_FIELD = re.compile(r"^Object (?:(?P<missing>missing required)|contains unknown) field `(?P<name>.+)`$", re.DOTALL)

_BYTE = re.compile(r"\(byte (\d+)\)$")
_NUMBER = re.compile(rb"-?(?:NaN|Infinity)")
_LONGEST_NUMBER = len("Infinity")
_LARGEST_SEARCHED = 64 << 10  # the search takes 10 ms per MB


class ValidationIssue(NamedTuple):
    """`at` is the path to the value; "" is the whole value. `path` is the same, except for a field that `is_missing` or
    `is_unknown`, where it is the path to that field."""

    at: str
    path: str
    text: str
    is_missing: bool = False
    is_unknown: bool = False
    is_key: bool = False  # the misfit is a key of the value, not the value


def parse_validation_error(message: str, within: str = "") -> ValidationIssue:
    """Parse msgspec's `message` about a value that is located at `within`.

    >>> parse_validation_error("Expected `str`, got `int` - at `$.texts[0]`")[:2]
    ('texts[0]', 'texts[0]')
    >>> missing = parse_validation_error("Object missing required field `rate` - at `$.limits`", within="key")
    >>> missing.at, missing.path, missing.text
    ('key.limits', 'key.limits.rate', 'object missing required field rate')
    """
    match = _AT.search(message)
    problem = message[: match.start()] if match else message
    at = _joined(within, match["path"] if match else "")
    text = (problem[:1].lower() + problem[1:]).replace("`", "")
    if (field := _OF_FIELD.match(problem)) is not None:
        is_missing = field["missing"] is not None
        return ValidationIssue(at, _joined(at, field["name"]), text, is_missing=is_missing, is_unknown=not is_missing)
    return ValidationIssue(at, at, text, is_key=match is not None and match["key"] is not None)


def describe_json_error(error: Exception, body: bytes | memoryview) -> str:
    """Describe why a body is not JSON, and name a non-finite number, which JSON does not have.

    >>> describe_json_error(ValueError("JSON is malformed: invalid character (byte 6)"), b'{"x": NaN}')
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
    """The text of a number that JSON does not have."""


def number_field(body: bytes | memoryview) -> str:
    """Return the path to the first number that JSON does not have; "" if the body has none or is large.

    >>> number_field(b'{"a": "NaN", "b": {"c": [1, -Infinity]}}'), number_field(b'{"a": ')
    ('b.c[1]', '')
    """
    if len(body) > _LARGEST_SEARCHED:
        return ""
    with contextlib.suppress(ValueError, RecursionError):
        return _path_to_word(json.loads(bytes(body), parse_constant=_Word)) or ""
    return ""


def _path_to_word(value: Any) -> str | None:
    if isinstance(value, _Word):
        return ""
    steps: Iterable[tuple[str, Any]] = ()
    if isinstance(value, dict):
        steps = value.items()
    elif isinstance(value, list):
        steps = ((f"[{index}]", item) for index, item in enumerate(value))
    paths = ((step, _path_to_word(item)) for step, item in steps)
    return next((_joined(step, path) for step, path in paths if path is not None), None)


def is_number_word(text: str) -> bool:
    """Return whether `text` is a number that JSON does not have.

    >>> is_number_word("-Infinity"), is_number_word("nan")
    (True, False)
    """
    return _NUMBER.fullmatch(text.encode()) is not None


def _joined(path: str, rest: str) -> str:
    return path + rest if not path or not rest or rest.startswith("[") else f"{path}.{rest}"
