"""The variable that makes a function unfit to be sent by value.

A pickler reports the type of the object that it refuses, but not the name by which the function reaches it. So after a
refusal the variables of the function are tried one by one.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from gpufn.declare.function import Function, FunctionClass
from gpufn.deploy.by_value.pickler import is_sent_by_value, pickle_by_value

_DEEPEST = 8  # variables between the function and the object
_MADE_BY_PYTHON = {"__dict__", "__weakref__", "__module__", "__doc__", "__qualname__"}


class Refused(NamedTuple):
    """The way from a function to a value: `helper → config['lock']`. `value` is the rejected value, with `error`."""

    way: str
    value: Any
    error: Exception


def refused_variable(function: Any) -> Refused | None:
    """Return the first variable of `function` that cannot be sent, or None if each of them can be sent alone."""
    return _refused(function, "", set(), _DEEPEST)


def largest_variable(function: Any) -> tuple[str, int]:
    """Return the variable of `function` with the largest pickle, and the bytes of that. ("", 0) without variables."""
    sizes = [(name, len(pickle_by_value(value).data)) for name, value in _variables(function)]
    return max(sizes, key=lambda each: each[1], default=("", 0))


def _refused(thing: Any, way: str, seen: set[int], depth: int) -> Refused | None:
    for name, value in _parts(thing, way):
        if id(value) in seen:
            continue
        seen.add(id(value))
        try:
            pickle_by_value(value)
        except Exception as error:
            inner = _refused(value, name, seen, depth - 1) if depth else None
            return inner or Refused(name, value, error)
    return None


def _parts(thing: Any, way: str) -> Iterator[tuple[str, Any]]:
    """Yield the objects that `thing` consists of, with the way to them.

    An object of a library yields nothing: its attributes mean nothing to the user.
    """
    match thing:
        case Mapping():
            yield from ((f"{way}[{key!r}]", value) for key, value in thing.items())
        case list() | tuple() | set() | frozenset():
            yield from ((f"{way}[{index}]", value) for index, value in enumerate(thing))
        case Function() | FunctionClass() | FunctionType() | type():
            prefix = f"{way} → " if way else ""
            yield from ((f"{prefix}{name}", value) for name, value in _variables(thing))
        case _ if is_sent_by_value(type(thing)):
            yield from ((f"{way}.{name}", value) for name, value in getattr(thing, "__dict__", {}).items())


def _variables(thing: Any) -> Iterator[tuple[str, Any]]:
    """Yield the globals, closure variables and defaults of a function, or the attributes of a class."""
    thing = thing.raw if isinstance(thing, (Function, FunctionClass)) else thing
    if isinstance(thing, type):
        if is_sent_by_value(thing):
            yield from ((name, value) for name, value in vars(thing).items() if name not in _MADE_BY_PYTHON)
        return
    yield from zip(thing.__code__.co_freevars, _contents(thing), strict=True)
    yield from ((name, thing.__globals__[name]) for name in _names(thing.__code__) if name in thing.__globals__)
    for name, parameter in inspect.signature(thing).parameters.items():
        if parameter.default is not parameter.empty:
            yield name, parameter.default


def _contents(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # empty: assigned later
            yield None


def _names(code: CodeType) -> Iterator[str]:
    """Yield the global names that the code and its nested functions mention."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def describe(refused: Refused) -> str:
    """Describe a refused variable.

    >>> describe(Refused("helper → lock", object(), TypeError("no")))
    'its variable helper → lock (object): no'
    """
    return f"its variable {refused.way} ({type(refused.value).__qualname__}): {refused.error}"
