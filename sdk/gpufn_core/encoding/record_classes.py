"""The classes that decoded records may be instances of: the classes in type hints, and their subclasses. Pure.

A sender names the class of a record by module and qualified name. If every loaded class were allowed, a caller could
create instances of classes that the function's author never intended, bypassing their `__init__`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from gpufn_core.encoding.hint_normalisation import classes_in
from gpufn_core.encoding.native import has_form, is_pydantic

# Common base classes, such as Enum or BaseModel: a hint of one must not allow all of its subclasses.
_NOT_OURS = sys.stdlib_module_names | {"msgspec", "pydantic", "typing_extensions", "numpy"}


class RecordClasses:
    """The allowed classes. `hints` is called at the first record; most calls have none.

    >>> import dataclasses
    >>> @dataclasses.dataclass
    ... class Point:
    ...     x: int
    >>> classes = RecordClasses(lambda: [list[Point] | None])
    >>> classes.find(Point.__module__, "Point") is Point, classes.find("builtins", "dict")
    (True, None)
    """

    def __init__(self, hints: Callable[[], Iterable[Any]]) -> None:
        self._hints = hints
        self._known: dict[str, list[type]] | None = None

    def find(self, module: str, qualname: str) -> type | None:
        """Return the class of that name in `module`. A script may be `__main__` on one side and a named module on the
        other, so the module is ignored for a class of a script."""
        if self._known is None:
            known: dict[str, list[type]] = {}
            for kind in _classes(self._hints()):
                if has_form(kind):
                    known.setdefault(kind.__qualname__, []).append(kind)
            self._known = known
        matches = self._known.get(qualname, ())
        scripts = (kind for kind in matches if "__main__" in (module, kind.__module__))
        return next((kind for kind in matches if kind.__module__ == module), next(scripts, None))


def _classes(hints: Iterable[Any]) -> Iterator[type]:
    seen: set[type] = set()
    pending = list(hints)
    while pending:
        for kind in classes_in(pending.pop()):
            if kind in seen:
                continue
            seen.add(kind)
            yield kind
            if is_pydantic(kind):
                pending += (field.annotation for field in kind.model_fields.values())  # type: ignore[attr-defined]
            if kind.__module__.partition(".")[0] not in _NOT_OURS:
                pending += type.__subclasses__(kind)
