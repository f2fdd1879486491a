"""The classes that values may be made of here: those that type hints name, and their subclasses. Pure.

A sender names the class of a record by module and qualified name. If any loaded class were taken, a caller could have
instances made of classes that the function's author never thought of, without their `__init__`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from gpufn_core.encoding.hint_normalisation import classes_in
from gpufn_core.encoding.native import has_form, is_pydantic

# Every class derives from one of theirs, such as Enum or BaseModel, as a hint of them would say nothing.
_NOT_OURS = sys.stdlib_module_names | {"msgspec", "pydantic", "typing_extensions", "numpy"}


class RecordClasses:
    """`hints` is called when the first record comes, which most calls have none of.

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
        """Of that module, unless it is the script that runs at one side and has a name of its own at the other."""
        if self._known is None:
            known: dict[str, list[type]] = {}
            for kind in _classes(self._hints()):
                if has_form(kind):
                    known.setdefault(kind.__qualname__, []).append(kind)
            self._known = known
        found = self._known.get(qualname, ())
        scripts = (kind for kind in found if "__main__" in (module, kind.__module__))
        return next((kind for kind in found if kind.__module__ == module), next(scripts, None))


def _classes(hints: Iterable[Any]) -> Iterator[type]:
    seen: set[type] = set()
    left = list(hints)
    while left:
        for kind in classes_in(left.pop()):
            if kind in seen:
                continue
            seen.add(kind)
            yield kind
            if is_pydantic(kind):
                left += (field.annotation for field in kind.model_fields.values())  # type: ignore[attr-defined]
            if kind.__module__.partition(".")[0] not in _NOT_OURS:
                left += type.__subclasses__(kind)
