"""The marks that `@enter`, `@method` and their siblings leave: how they are found, here and in the worker."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

HOOK = "__gpufn_hook__"


def hooks(cls: type, hook: str) -> dict[str, Callable[..., Any]]:
    """The methods of `cls` with this mark, bases first, in the order of their definition.

    One that is overridden is found once; overridden by something unmarked, it is a hook no more.
    """
    found: dict[str, Callable[..., Any]] = {}
    for base in reversed(cls.__mro__):
        for name, value in vars(base).items():
            if inspect.isfunction(value) and getattr(value, HOOK, None) == hook:
                found[name] = value
            else:
                found.pop(name, None)
    return found
