"""The type hint of a parameter, read where it was written. Pure."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable
from typing import Any


def resolved(annotation: Any, function: Callable[..., Any]) -> Any:
    """A hint out of the signature of `function`; Any where there is none, or it cannot be read.

    Each on its own: a name that only type checkers know must not spoil the others. Names are those of the function that
    decorators wrap, as the signature is.
    """
    if annotation is inspect.Parameter.empty:
        return Any
    holder = types.SimpleNamespace(__annotations__={"hint": annotation})
    try:
        written = inspect.unwrap(function, stop=lambda each: hasattr(each, "__signature__"))
        names = getattr(getattr(written, "__func__", written), "__globals__", {})
        return typing.get_type_hints(holder, names, include_extras=True)["hint"]
    except Exception:  # it runs the user's text
        return Any
