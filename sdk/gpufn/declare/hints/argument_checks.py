"""Checks of the arguments that users pass to the SDK. Each error names the expected argument. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from reprlib import repr as short_repr
from typing import Any

from gpufn_core.errors import InvalidInput

_MAP_USAGE = {
    "map": "map takes an iterable for each argument, as in .map(range(10))",
    "starmap": "starmap takes an iterable of tuples, as in .starmap([(1, 2), (3, 4)])",
}


def check_seconds(option: str, value: Any) -> None:
    """Raise InvalidInput unless `value` is a number or None.

    >>> check_seconds("timeout", "5s")
    Traceback (most recent call last):
        ...
    gpufn.errors.InvalidInput: timeout is a number of seconds, not '5s'
    """
    is_number = hasattr(type(value), "__float__") and not isinstance(value, bool)
    if value is not None and not (is_number and not math.isnan(value)):
        raise InvalidInput(f"{option} is a number of seconds, not {short_repr(value)}", field=option)


def check_positive_seconds(option: str, value: Any) -> None:
    """Raise InvalidInput unless `value` is a number above 0 or None."""
    check_seconds(option, value)
    if value is not None and not value > 0:
        raise InvalidInput(f"{option} is a number of seconds above 0, not {value}", field=option)


def check_count(option: str, value: Any) -> None:
    """Raise InvalidInput unless `value` is an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidInput(f"{option} is an integer, not {short_repr(value)}", field=option)
    if value < 1:
        raise InvalidInput(f"{option} is at least 1, not {value}", field=option)


def check_body(body: Any) -> None:
    """Raise InvalidInput unless `body` can be the body of a request."""
    if not isinstance(body, (bytes, bytearray, str)):
        raise InvalidInput(
            f"the body is bytes, such as json.dumps(...).encode(), not {short_repr(body)}; "
            "client.invoke takes Python values"
        )


def check_list(option: str, value: Any, example: str) -> None:
    """Raise InvalidInput for a string in place of a list of strings: its characters would become the items."""
    if isinstance(value, (str, bytes)) or not _is_iterable(value):
        raise InvalidInput(f"{option} is a list, such as {example}, not {short_repr(value)}", field=option)


def check_iterables(method: str, iterables: Iterable[Any], *, allow_async: bool = False) -> None:
    """Raise TypeError, as plain Python does, unless a map can iterate over its arguments.

    Does not call `iter`, because starting an iteration may be expensive.
    """
    for value in iterables:
        is_async = hasattr(type(value), "__aiter__")
        if not _is_iterable(value) and not (allow_async and is_async):
            hint = "; aio.starmap takes an asynchronous iterable of tuples" if is_async else ""
            raise TypeError(f"{_MAP_USAGE[method]}, not {short_repr(value)}{hint}")


def unpack_arguments(item: Any) -> tuple[Any, ...]:
    """Return the arguments of one call of a starmap. Raise TypeError for a single value.

    >>> unpack_arguments([1, 2])
    (1, 2)
    >>> unpack_arguments("ab")
    Traceback (most recent call last):
        ...
    TypeError: starmap takes a tuple of arguments per call, not 'ab'; map takes one value per call
    """
    if isinstance(item, (str, bytes, Mapping)) or not _is_iterable(item):
        raise TypeError(
            f"starmap takes a tuple of arguments per call, not {short_repr(item)}; map takes one value per call"
        )
    return tuple(item)


def _is_iterable(value: Any) -> bool:
    return hasattr(type(value), "__iter__") or hasattr(type(value), "__getitem__")
