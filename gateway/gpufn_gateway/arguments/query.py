"""Arguments from a query string, beside a body that is one parameter's bytes. Pure.

`?min_score=0.9&tag=a&tag=b` has values without types: each is read as JSON or as text, whichever fits the parameter's
schema. A key that is repeated, or whose parameter is a list, makes a list. Bytes are text in base64, as in JSON.
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

MOST_VALUES: Final = 200


def arguments(query: bytes, signature: Signature, raw_parameter: str) -> dict[str, Any]:
    """The arguments beside `raw_parameter`, which is the body. Raises InvalidInput with the field."""
    given: dict[str, list[str]] = {}
    for name, text in _pairs(query):
        given.setdefault(name, []).append(text)
    if raw_parameter in given:
        raise InvalidInput(
            f"{raw_parameter}: the body is this argument: leave it out of the query", field=raw_parameter
        )
    others = [each for each in signature.names if each != raw_parameter]
    for name in given:
        check_name(name, signature, others, "the query")
    return values(given, signature, beside=[raw_parameter])


def values(texts: Mapping[str, Sequence[str]], signature: Signature, *, beside: Iterable[str]) -> dict[str, Any]:
    """The arguments that the texts stand for; the bytes of those `beside` them come in another way. Raises InvalidInput
    with the field."""
    found = {name: _value(name, each, signature) for name, each in texts.items()}
    signature.check_beside_bytes(msgspec.json.encode({**found, **dict.fromkeys(beside, "")}))
    for name in signature.bytes_names & found.keys():
        found[name] = _bytes(name, found[name], signature)
    return found


def _pairs(query: bytes) -> list[tuple[str, str]]:
    try:
        return urllib.parse.parse_qsl(
            query.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=MOST_VALUES
        )
    except ValueError:
        raise InvalidInput(f"the query is not valid: it is UTF-8 of at most {MOST_VALUES} fields") from None


def check_name(name: str, signature: Signature, names: Sequence[str], where: str) -> None:
    """Raises InvalidInput unless the signature takes the name. `where` takes `names`."""
    if signature.takes(name):
        return
    near = difflib.get_close_matches(name[:100], names, n=3)
    meant = f"did you mean {', '.join(near)}?" if near else f"{where} takes {', '.join(names) or 'no arguments'}"
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


def _bytes(name: str, value: Any, signature: Signature) -> bytes | None:
    """A worker reads base64 in JSON only, and these arguments reach it as msgpack."""
    try:
        if signature.fits(name, value):
            return None if value is None else binascii.a2b_base64(value, strict_mode=True)
    except ValueError:
        pass
    raise InvalidInput(f"{name}: expected bytes in base64", field=name)


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
