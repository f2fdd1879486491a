"""Stand-ins for packages that a user's file imports but that are not installed here.

A deploy imports the file only to read names, options and signatures; the code runs in workers. Every attribute of a
stand-in is a class. So it can be a base class or a type hint, can be called, and works as a decorator that returns the
function unchanged.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from abc import ABCMeta
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FunctionType, ModuleType, TracebackType
from typing import Any

from gpufn.deploy.imports import import_guard
from gpufn.deploy.imports.import_collector import is_below

_EXCEPTION_SUFFIXES = ("Error", "Exception", "Warning")


def missing_package(error: BaseException) -> str | None:
    """Return the name of the missing package that `error` reports.

    None for any other error, and if the package is installed, part of the standard library, or the project's.
    """
    name = error.name or "" if isinstance(error, ModuleNotFoundError) else ""
    top, _, rest = name.partition(".")
    if not top or import_guard.is_reserved(top) or top in _finder.names:
        return None
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return top
    is_namespace = spec.origin is None and spec.submodule_search_locations is not None
    return name if rest and is_namespace and name not in _finder.names else None


def add_stand_in(name: str) -> None:
    """Make `name` and the modules below it importable as stand-ins."""
    _finder.names.add(name)
    if _finder not in sys.meta_path:
        sys.meta_path.append(_finder)
    importlib.invalidate_caches()


def remove_stand_ins() -> None:
    """Undo every `add_stand_in`."""
    for name in [name for name, module in sys.modules.items() if isinstance(module, _StandInModule)]:
        del sys.modules[name]
    _finder.names.clear()


def unload_project(root: Path, before: frozenset[str]) -> None:
    """Remove the project's modules that were imported since `before`, so that the next import runs them again."""
    for name in sys.modules.keys() - before:
        file = getattr(sys.modules[name], "__file__", None)
        if isinstance(file, str) and is_below(Path(file).resolve(), root):
            del sys.modules[name]


class _StandInType(ABCMeta):
    """Metaclass of all stand-ins except modules. The stand-ins are classes."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        attribute = _stand_in(name)
        type.__setattr__(cls, name, attribute)
        return attribute

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        is_decorator = len(args) == 1 and not kwargs and isinstance(args[0], (FunctionType, type))
        return args[0] if is_decorator and not isinstance(args[0], _StandInType) else _stand_in(cls.__name__)

    def __getitem__(cls, key: Any) -> Any:
        return cls

    def __setitem__(cls, key: Any, value: Any) -> None:
        pass

    def __iter__(cls) -> Iterator[Any]:
        return iter(())

    def __len__(cls) -> int:
        return 0

    def __bool__(cls) -> bool:
        return True

    def __contains__(cls, item: Any) -> bool:
        return False

    def __enter__(cls) -> Any:
        return cls

    def __exit__(cls, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        pass

    def __index__(cls) -> int:
        return 0

    def __float__(cls) -> float:
        return 0.0

    def _compare(cls, other: Any) -> bool:
        return False

    def _combine(cls, *others: Any) -> Any:
        return cls

    def __or__(cls, other: Any) -> Any:
        union = type.__or__(cls, other)
        return cls if union is NotImplemented else union

    def __ror__(cls, other: Any) -> Any:
        union = type.__ror__(cls, other)
        return cls if union is NotImplemented else union

    __lt__ = __le__ = __gt__ = __ge__ = _compare
    __add__ = __sub__ = __mul__ = __truediv__ = __floordiv__ = __mod__ = __pow__ = __matmul__ = __and__ = _combine
    __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rfloordiv__ = __rmod__ = __rpow__ = __rmatmul__ = _combine
    __neg__ = __pos__ = __abs__ = __invert__ = __lshift__ = __rshift__ = _combine


def _stand_in(name: str) -> Any:
    bases = (Exception,) if name.endswith(_EXCEPTION_SUFFIXES) else ()
    return _StandInType(name, bases, {"__module__": __name__})


class _StandInModule(ModuleType):
    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        attribute = _stand_in(name)
        setattr(self, name, attribute)
        return attribute


class _StandInFinder(MetaPathFinder, Loader):
    """Finds `names` and the modules below them. Runs after all other finders."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        parts = fullname.split(".")
        if not any(".".join(parts[:end]) in self.names for end in range(1, len(parts) + 1)):
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandInModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


_finder = _StandInFinder()
