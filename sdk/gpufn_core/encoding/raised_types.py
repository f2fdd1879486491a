"""Local types for exceptions that a function's code raised: `except KeyError` works in the caller. Pure.

A node names the class and its bases. A node must not be able to choose code that runs in the caller. So a class is
looked up only in modules that are already loaded. No module is imported, and no attribute is read that a module could
compute. The exception is an instance of FunctionRaised and of that class, created without any user-defined `__init__`
or `__new__`.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from typing import Any, Final

from gpufn_core.errors import FunctionRaised, GpufnError

# A generator or a task that raises one of these would end in another way; an exception group needs its members.
_NEVER: Final = (GpufnError, StopIteration, StopAsyncIteration, BaseExceptionGroup)
# Methods that would run code of the class when it is instantiated or subclassed.
_RUNS: Final = frozenset(("__init_subclass__", "__getattribute__", "__setattr__", "__del__"))
_IS_HEAP_TYPE: Final = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class written in Python or by an extension


def classes_of(kind: type[BaseException]) -> tuple[str, ...]:
    """Return a class and its bases, in MRO order, as `module:qualified name`.

    >>> classes_of(KeyError)
    ('builtins:KeyError', 'builtins:LookupError', 'builtins:Exception')
    """
    bases = (base for base in kind.__mro__ if base not in (BaseException, object))
    return tuple(f"{base.__module__}:{base.__qualname__}" for base in bases)


def as_local_type(error: FunctionRaised) -> FunctionRaised:
    """Return the error as an instance of the nearest class that is loaded here. A subclass is returned unchanged.

    >>> error = as_local_type(FunctionRaised("'x'", error_type="KeyError", error_classes=classes_of(KeyError)))
    >>> isinstance(error, KeyError), isinstance(error, FunctionRaised), str(error)
    (True, True, "KeyError: 'x'")
    """
    if type(error) is not FunctionRaised:
        return error
    for name in error.error_classes:
        kind: Any = _loaded_class(name)
        if kind is not None:
            with contextlib.suppress(TypeError):  # incompatible memory layouts
                return _build(_class_of(kind), error)
    return error


def _loaded_class(name: str) -> type[Exception] | None:
    module, _, qualname = name.partition(":")
    # A function's file is often the caller's script.
    attribute: Any = sys.modules.get(module, sys.modules.get("__main__"))
    for part in qualname.split("."):
        attribute = vars(attribute).get(part) if isinstance(attribute, (types.ModuleType, type)) else None
    return attribute if _is_usable(attribute) else None


def _is_usable(kind: Any) -> bool:
    if type(kind) is not type or not issubclass(kind, Exception) or kind is Exception or issubclass(kind, _NEVER):
        return False
    return not any(_RUNS & vars(base).keys() for base in kind.__mro__ if base.__flags__ & _IS_HEAP_TYPE)


@functools.lru_cache(maxsize=256)
def _class_of(kind: type[Exception]) -> type[FunctionRaised]:
    # Plain attributes; otherwise a property of the same name in `kind` would hide the instance's.
    attributes = dict.fromkeys(("message", "error_type", "traceback", "error_classes"), "")
    names = {"__module__": FunctionRaised.__module__, "__qualname__": FunctionRaised.__qualname__}
    methods = {"__reduce_ex__": lambda self, protocol: (_restore, (self.args, self.__dict__.copy()))}
    return type(FunctionRaised.__name__, (FunctionRaised, kind), {**attributes, **names, **methods})


def _build(cls: type[FunctionRaised], error: FunctionRaised) -> FunctionRaised:
    result = _blank(cls, error.args)
    result.args = error.args
    result.__dict__.update(error.__dict__)
    if isinstance(result, SyntaxError):
        result.msg = str(result)  # tracebacks show this instead of its text
    return result


def _blank(cls: type[FunctionRaised], args: tuple[Any, ...]) -> FunctionRaised:
    """Create an instance with the constructor of the first builtin base that fits its layout. Raises TypeError."""
    for base in cls.__mro__:
        if not base.__flags__ & _IS_HEAP_TYPE:
            with contextlib.suppress(TypeError):
                return base.__new__(cls, *args)
    raise TypeError(f"{cls!r} cannot be instantiated")


def _restore(args: tuple[Any, ...], state: dict[str, Any]) -> FunctionRaised:
    """Restore an error from a pickle or a copy."""
    error = FunctionRaised.__new__(FunctionRaised)
    error.args = args
    error.__dict__.update(state)
    return as_local_type(error)
