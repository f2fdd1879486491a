"""Resolution of type hints, which are strings under `from __future__ import annotations`. Pure.

Each hint is resolved on its own, so that a name that only type checkers know does not break the others. Python 3.14
evaluates all hints of a function together, at the first access. So this module reads them as forward references.
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
        """Return `inspect.signature(function)`. A hint that cannot be resolved stays a forward reference."""
        return inspect.signature(function, annotation_format=Format.FORWARDREF)

    def _annotations(obj: types.FunctionType | type) -> dict[str, Any]:
        hints, strings = (get_annotations(obj, format=form) for form in (Format.FORWARDREF, Format.STRING))
        namespace = _namespace(obj)
        return {name: strings[name] if _resolve(hint, namespace) is Any else hint for name, hint in hints.items()}
else:
    signature_of = inspect.signature

    def _annotations(obj: types.FunctionType | type) -> dict[str, Any]:
        hints: dict[str, Any] = vars(obj).get("__annotations__", {}) if isinstance(obj, type) else obj.__annotations__
        return hints


def resolve_hint(annotation: Any, function: Callable[..., Any]) -> Any:
    """Resolve a hint from the signature of `function`. Return Any if there is none or it cannot be resolved.

    Names are looked up in the module of the function that decorators wrap, whose signature `inspect` shows.
    """
    if annotation is inspect.Parameter.empty:
        return Any
    wrapped = inspect.unwrap(function, stop=lambda inner: hasattr(inner, "__signature__"))
    return _resolve(annotation, getattr(getattr(wrapped, "__func__", wrapped), "__globals__", {}))


def field_hints(kind: type) -> dict[str, Any]:
    """Return the hints of a class and its bases, with Any for each hint that cannot be resolved."""
    annotations = ((base, item) for base in reversed(kind.__mro__) for item in _annotations(base).items())
    return {name: _resolve(hint, _namespace(base)) for base, (name, hint) in annotations}


def resolve_in_place(thing: types.FunctionType | type) -> None:
    """Replace the string hints of a function or a class with their values, where they can be resolved."""
    hints, namespace = _annotations(thing), _namespace(thing)
    for name, hint in hints.items():
        if isinstance(hint, (str, typing.ForwardRef)) and (value := _resolve(hint, namespace)) is not Any:
            hints[name] = value
    if hints:
        thing.__annotations__ = hints


def _namespace(obj: types.FunctionType | type) -> dict[str, Any]:
    if isinstance(obj, type):
        return getattr(sys.modules.get(obj.__module__), "__dict__", {})
    return obj.__globals__


def _resolve(annotation: Any, namespace: dict[str, Any]) -> Any:
    holder = types.SimpleNamespace(__annotations__={"hint": annotation})
    try:
        return typing.get_type_hints(holder, namespace, include_extras=True)["hint"]
    except Exception:  # evaluates code of the user's, which may raise anything
        return Any
