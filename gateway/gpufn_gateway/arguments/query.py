"""Arguments from a query string, for a request whose body is the bytes of one parameter. Pure.

`?min_score=0.9&tag=a&tag=b` has values without types. Each value is parsed as JSON or as text, whichever fits the
parameter's schema. A repeated key, or a list parameter, makes a list. Bytes are base64 text, as in JSON.
"""

from __future__ import annotations

import binascii
import difflib
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from gpufn_core.encoding.msgspec_errors import is_number_word
from gpufn_core.errors import InvalidInput
from gpufn_gateway.arguments.signature import Signature

MAX_VALUES: Final = 200


def arguments(query: bytes, signature: Signature, raw_parameter: str) -> dict[str, Any]:
    """Parse the arguments other than `raw_parameter`, which is the body. Raises InvalidInput with the field."""
    texts = texts_by_name(query)
    if raw_parameter in texts:
        raise InvalidInput(f"{raw_parameter}: the body is this argument; remove it from the query", field=raw_parameter)
    other_names = [candidate for candidate in signature.names if candidate != raw_parameter]
    for name in texts:
        check_name(name, signature, other_names, "the query")
    return values(texts, signature, raw_names=[raw_parameter])


def texts_by_name(query: bytes) -> dict[str, list[str]]:
    """Parse a query string. Raises InvalidInput."""
    texts: dict[str, list[str]] = {}
    for name, text in _pairs(query):
        texts.setdefault(name, []).append(text)
    return texts


def merged(query: bytes, body: bytes, signature: Signature) -> bytes:
    """Add the arguments of a query to a JSON body, and return all as JSON.

    Raises InvalidInput with the field.
    """
    try:
        fields = msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise InvalidInput(f"the body is not a JSON object of arguments: {error}") from None
    texts = texts_by_name(query)
    for name in texts:
        if name in fields:
            raise InvalidInput(f"{name} is in the query and in the body: send it once", field=name)
        check_name(name, signature, signature.names, "the query")
    parsed = {name: _value(name, value_texts, signature) for name, value_texts in texts.items()}
    data = msgspec.json.encode(fields | parsed)
    signature.check(data)
    return data


def values(texts: Mapping[str, Sequence[str]], signature: Signature, *, raw_names: Iterable[str]) -> dict[str, Any]:
    """Convert texts to arguments. `raw_names` are the arguments that are sent as raw bytes.

    Raises InvalidInput with the field.
    """
    parsed = {name: _value(name, value_texts, signature) for name, value_texts in texts.items()}
    signature.check_without_bytes(msgspec.json.encode({**parsed, **dict.fromkeys(raw_names, "")}))
    for name in signature.bytes_names & parsed.keys():
        parsed[name] = _bytes(name, parsed[name], signature)
    return parsed


def _pairs(query: bytes) -> list[tuple[str, str]]:
    try:
        return urllib.parse.parse_qsl(
            query.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=MAX_VALUES
        )
    except ValueError:
        raise InvalidInput(f"the query is not valid: it must be UTF-8 with at most {MAX_VALUES} fields") from None


def check_name(name: str, signature: Signature, names: Sequence[str], source: str) -> None:
    """Raises InvalidInput unless the signature has the name. `source` accepts `names`."""
    if signature.takes(name):
        return
    matches = difflib.get_close_matches(name[:100], names, n=3)
    hint = f"did you mean {', '.join(matches)}?" if matches else f"{source} takes {', '.join(names) or 'no arguments'}"
    raise InvalidInput(f"{name}: there is no such argument; {hint}", field=name)


def _value(name: str, texts: Sequence[str], signature: Signature) -> Any:
    candidates = list(_candidates(texts))
    for candidate in candidates:
        if signature.fits(name, candidate):
            return candidate
    if (word := next(filter(is_number_word, texts), None)) is not None:
        message = f"JSON has no {word}, and the query is read as JSON: send application/msgpack"
        raise InvalidInput(f"{name}: {message}", field=name)
    return candidates[0]


def _bytes(name: str, value: Any, signature: Signature) -> bytes | None:
    """Decode base64 here: these arguments reach the worker as msgpack, and it decodes base64 only in JSON."""
    try:
        if signature.fits(name, value):
            return None if value is None else binascii.a2b_base64(value, strict_mode=True)
    except ValueError:
        pass
    raise InvalidInput(f"{name}: expected bytes in base64", field=name)


def _candidates(texts: Sequence[str]) -> Iterator[Any]:
    """Yield the possible values of the texts, the most likely first.

    >>> list(_candidates(["0.9"])), list(_candidates(["a"]))
    ([0.9, '0.9', [0.9], ['0.9']], ['a', ['a']])
    """
    parsed = [read_value(text) for text in texts]
    is_text = parsed == list(texts)
    if len(texts) == 1:
        yield parsed[0]
        if not is_text:
            yield texts[0]
    yield parsed
    if not is_text:
        yield list(texts)


def read_value(text: str) -> Any:
    """Parse as JSON. A JSON string stays text, with its quotes."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text
    return text if isinstance(value, str) else value
