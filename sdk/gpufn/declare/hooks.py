"""The marks that `@enter`, `@method` and the other method decorators set. The SDK and the worker look them up here."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import msgspec

from gpufn.declare.hints.type_hints import signature_of
from gpufn_core.spec.function_spec import Batch

HOOK = "__gpufn_hook__"
BATCH = "__gpufn_batch__"  # of a @method; the class's if it is not set
HOOKS_WITH_CAUSE = ("exit", "park", "resume")  # their methods may take the cause


def hooks(cls: type, hook: str) -> dict[str, Callable[..., Any]]:
    """Return the methods of `cls` with the mark `hook`: bases first, in the order of definition.

    An overridden method appears once. A method that an unmarked attribute overrides is no longer a hook.
    """
    methods: dict[str, Callable[..., Any]] = {}
    for base in reversed(cls.__mro__):
        for name, value in vars(base).items():
            if inspect.isfunction(value) and getattr(value, HOOK, None) == hook:
                methods[name] = value
            else:
                methods.pop(name, None)
    return methods


def batch_of(method: Callable[..., Any], default: Batch | None) -> Batch | None:
    """Return the batch of a method, or of a function: its own batch, otherwise the batch of `default`."""
    own: Batch | msgspec.UnsetType | None = getattr(method, BATCH, msgspec.UNSET)
    return default if own is msgspec.UNSET else own


def with_cause(hook: Callable[..., Any]) -> Callable[[str], Any]:
    """Return a bound method of HOOKS_WITH_CAUSE as a function of the cause."""
    return hook if signature_of(hook).parameters else lambda _cause: hook()
