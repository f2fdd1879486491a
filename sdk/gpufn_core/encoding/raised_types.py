"""The type of an exception that a function's code raised, where the caller has it: `except KeyError` works. Pure.

A node names the class and its bases. It must not choose code that runs in the caller. So a class is looked up among the
modules that are loaded already, no module is imported, and no attribute is asked of a module that could compute it. The
exception is an instance of FunctionRaised and of that class, made without any `__init__` or `__new__` of a user's.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from typing import Any, Final

from gpufn_core.errors import FunctionRaised, GpufnError

# A generator or a task that raises one of these ends in another way; a group needs its members.
_NEVER: Final = (GpufnError, StopIteration, StopAsyncIteration, BaseExceptionGroup)
# What would run code of the class when an instance is made, or a class is derived from it.
_RUNS: Final = frozenset(("__init_subclass__", "__getattribute__", "__setattr__", "__del__"))
_IS_HEAP_TYPE: Final = 1 << 9  # Py_TPFLAGS_HEAPTYPE: written in Python, or by an extension


def classes_of(kind: type[BaseException]) -> tuple[str, ...]:
    """Itself and its bases, the nearest first, as `module:qualified name`.

    >>> classes_of(KeyError)
    ('builtins:KeyError', 'builtins:LookupError', 'builtins:Exception')
    """
    bases = (base for base in kind.__mro__ if base not in (BaseException, object))
    return tuple(f"{base.__module__}:{base.__qualname__}" for base in bases)


def as_own_type(error: FunctionRaised) -> FunctionRaised:
    """The error as one that is also of the nearest class which is loaded here; a subclass as it is.

    >>> error = as_own_type(FunctionRaised("'x'", error_type="KeyError", error_classes=classes_of(KeyError)))
    >>> isinstance(error, KeyError), isinstance(error, FunctionRaised), str(error)
    (True, True, "KeyError: 'x'")
    """
    if type(error) is not FunctionRaised:
        return error
    for name in error.error_classes:
        kind: Any = _loaded(name)
        if kind is not None:
            with contextlib.suppress(TypeError):  # layouts that do not go together
                return _made(_class_of(kind), error)
    return error


def _loaded(name: str) -> type[Exception] | None:
    module, _, qualname = name.partition(":")
    # The file of a function is the script that runs at the caller, often.
    found: Any = sys.modules.get(module, sys.modules.get("__main__"))
    for part in qualname.split("."):
        found = vars(found).get(part) if isinstance(found, (types.ModuleType, type)) else None
    return found if _is_usable(found) else None


def _is_usable(kind: Any) -> bool:
    if type(kind) is not type or not issubclass(kind, Exception) or kind is Exception or issubclass(kind, _NEVER):
        return False
    return not any(_RUNS & vars(base).keys() for base in kind.__mro__ if base.__flags__ & _IS_HEAP_TYPE)


@functools.lru_cache(maxsize=256)
def _class_of(kind: type[Exception]) -> type[FunctionRaised]:
    # Plain attributes, which a property of the same name in `kind` would hide otherwise.
    attributes = dict.fromkeys(("message", "error_type", "traceback", "error_classes"), "")
    names = {"__module__": FunctionRaised.__module__, "__qualname__": FunctionRaised.__qualname__}
    methods = {"__reduce_ex__": lambda self, protocol: (_restored, (self.args, self.__dict__.copy()))}
    return type(FunctionRaised.__name__, (FunctionRaised, kind), {**attributes, **names, **methods})


def _made(cls: type[FunctionRaised], error: FunctionRaised) -> FunctionRaised:
    made = _blank(cls, error.args)
    made.args = error.args
    made.__dict__.update(error.__dict__)
    if isinstance(made, SyntaxError):
        made.msg = str(made)  # which tracebacks show in place of its text
    return made


def _blank(cls: type[FunctionRaised], args: tuple[Any, ...]) -> FunctionRaised:
    """Made by the constructor of the first of its builtin bases that fits its layout. Raises TypeError."""
    for base in cls.__mro__:
        if not base.__flags__ & _IS_HEAP_TYPE:
            with contextlib.suppress(TypeError):
                return base.__new__(cls, *args)
    raise TypeError(f"{cls!r} cannot be made")


def _restored(args: tuple[Any, ...], state: dict[str, Any]) -> FunctionRaised:
    """Of a pickle or a copy."""
    error = FunctionRaised.__new__(FunctionRaised)
    error.args = args
    error.__dict__.update(state)
    return as_own_type(error)
