"""Arguments from a query string, beside a body that is one parameter's bytes. Pure.

`?min_score=0.9&tag=a&tag=b` has values without types: each is read as JSON or as text, whichever fits the parameter's
schema. A key that is repeated, or whose parameter is a list, makes a list.
"""

from __future__ import annotations

import difflib
import urllib.parse
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from gpufn.errors import InvalidInput
from gpufn.misfits import is_number_word
from gpufn_gateway.signature import Signature

_MOST_KEYS: Final = 200


def arguments(query: bytes, signature: Signature, raw_parameter: str) -> dict[str, Any]:
    """The arguments beside `raw_parameter`, which is the body. Raises InvalidInput with the field."""
    given: dict[str, list[str]] = {}
    for name, text in _pairs(query):
        given.setdefault(name, []).append(text)
    for name in given:
        _check_name(name, signature, raw_parameter)
    found = {name: _value(name, texts, signature) for name, texts in given.items()}
    signature.check(msgspec.json.encode({**found, raw_parameter: ""}))
    return found


def _pairs(query: bytes) -> list[tuple[str, str]]:
    try:
        return urllib.parse.parse_qsl(
            query.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=_MOST_KEYS
        )
    except ValueError:
        raise InvalidInput(f"the query is not valid: it is UTF-8 of at most {_MOST_KEYS} fields") from None


def _check_name(name: str, signature: Signature, raw_parameter: str) -> None:
    if name == raw_parameter:
        raise InvalidInput(f"{name}: the body is this argument: leave it out of the query", field=name)
    if signature.takes(name):
        return
    others = [each for each in signature.names if each != raw_parameter]
    near = difflib.get_close_matches(name[:100], others, n=3)
    meant = f"did you mean {', '.join(near)}?" if near else f"the query takes {', '.join(others) or 'no arguments'}"
    raise InvalidInput(f"{name}: there is no such argument; {meant}", field=name)


def _value(name: str, texts: Sequence[str], signature: Signature) -> Any:
    candidates = list(_candidates(texts))
    for each in candidates:
        if signature.fits(name, each):
            return each
    if (word := next(filter(is_number_word, texts), None)) is not None:
        said = f"JSON has no {word}, and the query is read as JSON: send application/msgpack"
        raise InvalidInput(f"{name}: {said}", field=name)
    return candidates[0]


def _candidates(texts: Sequence[str]) -> Iterator[Any]:
    """What the texts may stand for, the likeliest first.

    >>> list(_candidates(["0.9"])), list(_candidates(["a"]))
    ([0.9, '0.9', [0.9], ['0.9']], ['a', ['a']])
    """
    read = [_read(text) for text in texts]
    is_text = read == list(texts)
    if len(texts) == 1:
        yield read[0]
        if not is_text:
            yield texts[0]
    yield read
    if not is_text:
        yield list(texts)


def _read(text: str) -> Any:
    """As JSON; a JSON string is text with quotes, and stays it."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text
    return text if isinstance(value, str) else value
