"""Type hints, read where they were written: with `from __future__ import annotations` they are texts. Pure.

Each is read on its own: a name that only type checkers know must not spoil the others.
"""

from __future__ import annotations

import inspect
import sys
import types
import typing
from collections.abc import Callable
from typing import Any


def resolved(annotation: Any, function: Callable[..., Any]) -> Any:
    """A hint out of the signature of `function`; Any where there is none, or it cannot be read.

    Names are those of the function that decorators wrap, as the signature is.
    """
    if annotation is inspect.Parameter.empty:
        return Any
    written = inspect.unwrap(function, stop=lambda each: hasattr(each, "__signature__"))
    return _read(annotation, getattr(getattr(written, "__func__", written), "__globals__", {}))


def read_in(thing: types.FunctionType | type) -> None:
    """Put the hints of a function or a class in the places of their texts, as far as they can be read."""
    if isinstance(thing, type):
        hints, names = (
            vars(thing).get("__annotations__", {}),
            getattr(sys.modules.get(thing.__module__), "__dict__", {}),
        )
    else:
        hints, names = thing.__annotations__, thing.__globals__
    for name, hint in hints.items():
        if isinstance(hint, (str, typing.ForwardRef)) and (meant := _read(hint, names)) is not Any:
            hints[name] = meant


def _read(annotation: Any, names: dict[str, Any]) -> Any:
    holder = types.SimpleNamespace(__annotations__={"hint": annotation})
    try:
        return typing.get_type_hints(holder, names, include_extras=True)["hint"]
    except Exception:  # it runs the user's text
        return Any
