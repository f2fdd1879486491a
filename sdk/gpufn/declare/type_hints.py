"""Type hints, read where they were written: with `from __future__ import annotations` they are texts. Pure.

Each is read on its own: a name that only type checkers know must not spoil the others. Python 3.14 reads hints
when they are asked for, all of a function at once: here they are asked for as they are written.
"""

from __future__ import annotations

import inspect
import sys
import types
import typing
from collections.abc import Callable
from typing import Any

if sys.version_info >= (3, 14):
    from annotationlib import Format, get_annotations

    def signature_of(function: Callable[..., Any]) -> inspect.Signature:
        """`inspect.signature`, in which a hint that cannot be read is as it was written."""
        return inspect.signature(function, annotation_format=Format.FORWARDREF)

    def _written(thing: types.FunctionType | type) -> dict[str, Any]:
        hints, texts = (get_annotations(thing, format=form) for form in (Format.FORWARDREF, Format.STRING))
        names = _names_around(thing)
        return {name: texts[name] if _read(hint, names) is Any else hint for name, hint in hints.items()}
else:
    signature_of = inspect.signature

    def _written(thing: types.FunctionType | type) -> dict[str, Any]:
        hints: dict[str, Any] = (
            vars(thing).get("__annotations__", {}) if isinstance(thing, type) else thing.__annotations__
        )
        return hints


def resolved(annotation: Any, function: Callable[..., Any]) -> Any:
    """A hint out of the signature of `function`; Any where there is none, or it cannot be read.

    Names are those of the function that decorators wrap, as the signature is.
    """
    if annotation is inspect.Parameter.empty:
        return Any
    written = inspect.unwrap(function, stop=lambda each: hasattr(each, "__signature__"))
    return _read(annotation, getattr(getattr(written, "__func__", written), "__globals__", {}))


def of_fields(kind: type) -> dict[str, Any]:
    """The hints of a class and its bases; Any in place of each that cannot be read."""
    written = ((base, each) for base in reversed(kind.__mro__) for each in _written(base).items())
    return {name: _read(hint, _names_around(base)) for base, (name, hint) in written}


def read_in(thing: types.FunctionType | type) -> None:
    """Put the hints of a function or a class in the places of their texts, as far as they can be read."""
    hints, names = _written(thing), _names_around(thing)
    for name, hint in hints.items():
        if isinstance(hint, (str, typing.ForwardRef)) and (meant := _read(hint, names)) is not Any:
            hints[name] = meant
    if hints:
        thing.__annotations__ = hints


def _names_around(thing: types.FunctionType | type) -> dict[str, Any]:
    if isinstance(thing, type):
        return getattr(sys.modules.get(thing.__module__), "__dict__", {})
    return thing.__globals__


def _read(annotation: Any, names: dict[str, Any]) -> Any:
    holder = types.SimpleNamespace(__annotations__={"hint": annotation})
    try:
        return typing.get_type_hints(holder, names, include_extras=True)["hint"]
    except Exception:  # it runs the user's text
        return Any
