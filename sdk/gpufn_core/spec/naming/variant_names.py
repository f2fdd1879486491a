"""Names of variants: pools of workers of one function, each with its own parameters. Pure.

    clf(size=big)                           as callers write it; the values are those of a query string
    clf(size=big).predict                   a method of it
    clf(%7B%22size%22%3A%22big%22%7D)       as the SDK writes it: JSON, percent-encoded
    clf=3f2a9c1b0d                          the full name of its record: the function, and a digest of the parameters

The text in parentheses is the *selector*. Patterns of keys and teams see a variant as its function (`function_of`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple
from urllib.parse import quote, unquote

import msgspec

from gpufn_core.errors import InvalidInput

MAX_SELECTOR_BYTES: Final = 4096
_MARK: Final = "="
_DIGEST_DIGITS: Final = 10
_SELECTED: Final = re.compile(r"(?P<function>[^(]*)\((?P<selector>[^()]*)\)(?:\.(?P<method>.*))?", re.DOTALL)
_json = msgspec.json.Encoder(order="sorted").encode


class Selection(NamedTuple):
    """The parts of a caller's name. `selector` is None without parentheses."""

    function: str
    selector: str | None
    method: str


def split(name: str) -> Selection:
    """Return the parts of a caller's name.

    >>> split("search/clf(size=big).predict")
    Selection(function='search/clf', selector='size=big', method='predict')
    >>> split("clf.predict")
    Selection(function='clf', selector=None, method='predict')
    """
    if match := _SELECTED.fullmatch(name):
        return Selection(match["function"], match["selector"], match["method"] or "")
    function, _, method = name.partition(".")
    return Selection(function, None, method)


def with_selector(function: str, parameters: Mapping[str, Any]) -> str:
    """Return the name of a variant as the SDK sends it. Raises InvalidInput for values that JSON cannot express.

    >>> with_selector("clf", {"size": "v1.5"})
    'clf(%7B%22size%22%3A%22v1%2E5%22%7D)'
    """
    if not parameters:
        return function
    for name, value in parameters.items():
        try:
            _json(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidInput(f"{name}: JSON cannot express {value!r:.100}: {error}", field=name) from None
    selector = quote(_json(dict(parameters)), safe="").replace(".", "%2E")
    if len(selector) > MAX_SELECTOR_BYTES:
        raise InvalidInput(f"the parameters of {function} exceed {MAX_SELECTOR_BYTES:,} bytes: pass a reference")
    return f"{function}({selector})"


def with_values(name: str, values: Mapping[str, Any]) -> str:
    """Return a caller's name of a function or a variant, without a method, with further values in its selector.

    >>> with_values("clf(size=big)", {"@cpu": 2})
    'clf(size=big&%40cpu=2)'
    """
    function, selector, _ = split(name)
    if not selector:
        return with_selector(function, values)
    if selector.startswith("%7B"):
        return with_selector(function, {**msgspec.json.decode(unquote(selector)), **values})
    pairs = [selector]
    for key, value in values.items():
        texts = map(_text, value if isinstance(value, (list, tuple)) else [value])
        pairs += [f"{quote(key, safe='')}={text}" for text in texts]
    return f"{function}({'&'.join(pairs)})"


def _text(value: Any) -> str:
    """Return a value as it is written in a query string."""
    return quote(value if isinstance(value, str) else _json(value), safe="").replace(".", "%2E")


def in_path(name: str) -> str:
    """Return a caller's name without slashes and dots in its selector, which would separate the parts of a path.

    >>> in_path("clf(model=org/v1.5).predict")
    'clf(model=org%2Fv1%2E5).predict'
    """
    if "(" not in name:
        return name
    function, selector, method = split(name)
    if selector is None:
        return name
    selector = selector.replace("/", "%2F").replace(".", "%2E")
    return f"{function}({selector}){'.' if method else ''}{method}"


def variant_name(function: str, parameters: Mapping[str, Any]) -> str:
    """Return the full name of a variant's record. Equal parameters have the same name, in any order.

    >>> variant_name("clf", {"size": "big", "layers": 2}) == variant_name("clf", {"layers": 2, "size": "big"})
    True
    """
    return f"{function}{_MARK}{hashlib.sha256(_json(dict(parameters))).hexdigest()[:_DIGEST_DIGITS]}"


def function_of(full: str) -> str:
    """Return the full name of the function that a full name belongs to.

    >>> function_of("prod/search/clf=3f2a9c1b0d"), function_of("clf")
    ('prod/search/clf', 'clf')
    """
    return full.partition(_MARK)[0]


def is_variant(full: str) -> bool:
    """Return whether a full name belongs to a variant."""
    return _MARK in full


def names_variant(name: str) -> bool:
    """Return whether a caller's name means a variant, by its parameters or by its record.

    >>> names_variant("clf(size=big).predict"), names_variant("clf=3f2a9c1b0d.predict"), names_variant("clf.predict")
    (True, True, False)
    """
    return "(" in name or _MARK in name


def described(function: str, parameters: Mapping[str, Any], options: Mapping[str, Any] = MappingProxyType({})) -> str:
    """Return a variant for people.

    >>> described("clf", {"size": "big", "layers": 2}, {"gpu": "L4"})
    'clf(layers=2, size="big", @gpu="L4")'
    """
    values = [*sorted(parameters.items()), *((f"@{name}", value) for name, value in sorted(options.items()))]
    return f"{function}({', '.join(f'{name}={_json(value).decode()}' for name, value in values)})"
