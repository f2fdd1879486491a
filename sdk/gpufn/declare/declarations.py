"""Registry of the functions that this process has declared with `@gpu_function`."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from gpufn.declare.options import Settings


class Declaration(Protocol):
    """A declared function or class: the user's object and its settings."""

    raw: Any
    settings: Settings
    __qualname__: str


# By name, with the app if there is one, then by module and qualified name. A notebook declares the same function many
# times: the last declaration that is still referenced counts. A copy by value counts as a declaration, because its
# original may no longer exist.
_declarations: dict[str, dict[tuple[str, str], list[weakref.ref[Declaration]]]] = {}
_deployed: dict[str, weakref.ref[Declaration]] = {}  # by name


def register(declared: Declaration) -> None:
    """Add a declaration. The registry holds a weak reference."""
    places = _declarations.setdefault(declared.settings.path, {})
    place = declared.raw.__module__, declared.raw.__qualname__
    living = [reference for reference in places.get(place, ()) if reference() is not None]
    places[place] = [*living, weakref.ref(declared)]


def declarations_of(name: str) -> list[Declaration]:
    """Return the declarations that would be deployed as `name`."""
    return [declared for references in _declarations.get(name, {}).values() for declared in _last_of(references)]


def mark_deployed(declared: Declaration) -> None:
    """Record that this process has deployed `declared`."""
    _deployed[declared.settings.path] = weakref.ref(declared)


def was_declared_again(name: str) -> bool:
    """Return whether the function was declared again after this process had deployed it."""
    deployed, declared = _deployed.get(name), declarations_of(name)
    return deployed is not None and len(declared) == 1 and deployed() is not declared[0]


def declarations_in(module: str) -> list[Declaration]:
    """Return the declarations of a module's code, whatever its names are bound to now."""
    places = [place for places in _declarations.values() for place in places.items()]
    return [declared for (name, _), references in places if name == module for declared in _last_of(references)]


def _last_of(references: list[weakref.ref[Declaration]]) -> list[Declaration]:
    living = [declared for reference in references if (declared := reference()) is not None]
    return living[-1:]
