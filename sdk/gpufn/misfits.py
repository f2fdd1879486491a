"""What msgspec says of a value that does not fit its type, taken apart. Pure."""

from __future__ import annotations

import re
from typing import NamedTuple

_AT = re.compile(r" - at (?P<key>`key` in )?`\$?\.?(?P<path>.*?)`$", re.DOTALL)
_OF_FIELD = re.compile(r"^Object (?:(?P<missing>missing required)|contains unknown) field `(?P<name>.+)`$", re.DOTALL)

_BYTE = re.compile(r"\(byte (\d+)\)$")
_NUMBER = re.compile(rb"-?(?:NaN|Infinity)")
_LONGEST_NUMBER = len("Infinity")


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


def _joined(path: str, rest: str) -> str:
    return path + rest if not path or not rest or rest.startswith("[") else f"{path}.{rest}"
