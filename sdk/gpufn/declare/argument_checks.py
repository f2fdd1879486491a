"""What callers of the SDK give it, where no type checker looked: what is of a wrong kind is refused where it is given,
with what to give instead. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from reprlib import repr as shown
from typing import Any

from gpufn_core.errors import InvalidInput

_OF_MAPS = {
    "map": "map takes an iterable for each argument, as in .map(range(10))",
    "starmap": "starmap takes an iterable of tuples, as in .starmap([(1, 2), (3, 4)])",
}


def check_seconds(option: str, value: Any) -> None:
    """Raises InvalidInput for what is neither a number nor None.

    >>> check_seconds("timeout", "5s")
    Traceback (most recent call last):
        ...
    gpufn.errors.InvalidInput: timeout is a number of seconds, not '5s'
    """
    is_number = hasattr(type(value), "__float__") and not isinstance(value, bool)
    if value is not None and not (is_number and not math.isnan(value)):
        raise InvalidInput(f"{option} is a number of seconds, not {shown(value)}", field=option)


def check_positive_seconds(option: str, value: Any) -> None:
    """Raises InvalidInput for what is neither a number above 0 nor None."""
    check_seconds(option, value)
    if value is not None and not value > 0:
        raise InvalidInput(f"{option} is a number of seconds above 0, not {value}", field=option)


def check_count(option: str, value: Any) -> None:
    """Raises InvalidInput for what is no whole number from 1 on."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidInput(f"{option} is a whole number, not {shown(value)}", field=option)
    if value < 1:
        raise InvalidInput(f"{option} is at least 1, not {value}", field=option)


def check_body(body: Any) -> None:
    """Raises InvalidInput for what is no body of a request."""
    if not isinstance(body, (bytes, bytearray, str)):
        raise InvalidInput(
            f"the body is bytes, such as json.dumps(...).encode(), not {shown(body)}; client.invoke takes Python values"
        )


def check_list(option: str, value: Any, example: str) -> None:
    """Raises InvalidInput for one text in the place of several: its letters would be the items."""
    if isinstance(value, (str, bytes)) or not _is_iterable(value):
        raise InvalidInput(f"{option} is a list, such as {example}, not {shown(value)}", field=option)


def check_iterables(way: str, given: Iterable[Any], *, or_async: bool = False) -> None:
    """Raises TypeError, as plain Python does, for what a map cannot take its arguments from; reads none of them, for
    to begin may cost something."""
    for each in given:
        is_async = hasattr(type(each), "__aiter__")
        if not _is_iterable(each) and not (or_async and is_async):
            other = "; aio.starmap takes an asynchronous one of tuples" if is_async else ""
            raise TypeError(f"{_OF_MAPS[way]}, not {shown(each)}{other}")


def spread(item: Any) -> tuple[Any, ...]:
    """The arguments of one call of a starmap. Raises TypeError for what was not meant as several.

    >>> spread([1, 2])
    (1, 2)
    >>> spread("ab")
    Traceback (most recent call last):
        ...
    TypeError: starmap takes a tuple of arguments per call, not 'ab'; map takes one value per call
    """
    if isinstance(item, (str, bytes, Mapping)) or not _is_iterable(item):
        raise TypeError(f"starmap takes a tuple of arguments per call, not {shown(item)}; map takes one value per call")
    return tuple(item)


def _is_iterable(value: Any) -> bool:
    return hasattr(type(value), "__iter__") or hasattr(type(value), "__getitem__")
