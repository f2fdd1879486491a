"""A Function by value: its pickle, the modules that its code imports, and the source of the cells that define it.

The pickle of a function does not depend on the process: running a notebook again gives the same bytes.
"""

from __future__ import annotations

import hashlib
import io
import linecache
import os
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import cloudpickle
import msgspec

from gpufn.declare.hints import type_hints
from gpufn.deploy.imports.import_collector import imports_of


class Pickled(NamedTuple):
    """`imported` are modules that the code imports at run time, which the pickle does not name. `cells` are sources by
    file name, for the tracebacks of the worker."""

    data: bytes
    imported: list[str]
    cells: dict[str, bytes]


def pickle_by_value(thing: Any) -> Pickled:
    """Pickle a function with its globals. Raises the error of the first value that cannot be pickled.

    The pickle does not have the names in string type hints, so the hints are evaluated first.
    """
    imported: dict[str, None] = {}
    cells: dict[str, bytes] = {}

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # untyped
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, CodeType):
                imported.update(dict.fromkeys(imports_of(obj)))
                if (source := _lines_in_cell(obj)) is not None:
                    name = f"cell-{hashlib.sha256(source).hexdigest()[:12]}.py"
                    cells[name] = source
                    return _with_filename(self.dispatch_table[CodeType](_renamed(obj, name)), name)
                if obj.co_filename in cells:  # a function inside
                    return _with_filename(self.dispatch_table[CodeType](obj), obj.co_filename)
            elif isinstance(obj, (FunctionType, type)) and is_sent_by_value(obj):
                if isinstance(obj, type) and issubclass(obj, msgspec.Struct):
                    raise TypeError(f"{obj.__qualname__} is a msgspec.Struct, which loses its fields when pickled")
                type_hints.resolve_in_place(obj)
                return _without_caches(super().reducer_override(obj))
            return super().reducer_override(obj)

    buffer = io.BytesIO()
    Pickler(buffer).dump(thing)
    return Pickled(buffer.getvalue(), list(imported), cells)


def _without_caches(reduced: Any) -> Any:
    """Remove the data that msgspec stores in the namespace of a class at its first encoding, because it cannot be
    pickled."""
    if isinstance(reduced, tuple) and isinstance(state := reduced[2], tuple) and isinstance(state[0], dict):
        state[0].pop("__msgspec_cache__", None)
    return reduced


def is_sent_by_value(thing: FunctionType | type) -> bool:
    return thing.__module__ == "__main__" or "<locals>" in thing.__qualname__


def _lines_in_cell(code: CodeType) -> bytes | None:
    """Return the source of code in a notebook's cell, at its line numbers, without the other lines of the cell.

    Python knows the source although there is no such file.
    """
    if os.path.exists(code.co_filename) or not (lines := linecache.getlines(code.co_filename)):
        return None
    last = max(number for each in _with_nested(code) for *_, number in each.co_lines() if number is not None)
    own = "".join(lines[code.co_firstlineno - 1 : last])
    return ("\n" * (code.co_firstlineno - 1) + own).encode("utf-8", "surrogatepass")


def _with_nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_nested(constant)


def _with_filename(reduced: tuple[Any, tuple[Any, ...]], filename: str) -> tuple[Any, tuple[Any, ...]]:
    """Restore the file name of reduced code, which cloudpickle replaces from version 3.1.3 on."""
    kind, arguments = reduced
    return kind, tuple(filename if each == "<dynamic-code>" else each for each in arguments)


def _renamed(code: CodeType, filename: str) -> CodeType:
    constants = (_renamed(each, filename) if isinstance(each, CodeType) else each for each in code.co_consts)
    return code.replace(co_filename=filename, co_consts=tuple(constants))
