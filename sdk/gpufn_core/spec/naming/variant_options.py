"""The options of a function that a caller may change: they make a variant with other resources. Pure.

In a selector they have a mark, so that no parameter can have their names: `clf(size=big&@gpu=L4)`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from gpufn_core.errors import InvalidInput, InvalidSpec
from gpufn_core.spec.function_spec import FunctionSpec, spec_from_json
from gpufn_core.spec.resources import parse_gpu
from gpufn_core.spec.units import parse_bytes

MARK: Final = "@"


def _gpu(value: Any) -> dict[str, Any]:
    names, count = parse_gpu(value)
    return {"gpu": names, "gpu_count": count}


def _bytes(value: Any) -> int | None:
    return None if value is None else parse_bytes(value)


def _retries(value: Any) -> dict[str, Any] | None:
    return {"attempts": value} if value else None


# Option -> part of the spec ("" for the spec itself), and the fields that a value sets.
_OPTIONS: Final[Mapping[str, tuple[str, Callable[[Any], dict[str, Any]]]]] = {
    "gpu": ("resources", _gpu),
    "share": ("resources", lambda value: {"share": value}),
    "vram": ("resources", lambda value: {"vram_bytes": _bytes(value)}),
    "sm": ("resources", lambda value: {"sm_percent": value}),
    "cpu": ("resources", lambda value: {"cpu": value}),
    "memory": ("resources", lambda value: {"memory_bytes": _bytes(value)}),
    "max_workers": ("scaling", lambda value: {"max_workers": value}),
    "idle_timeout": ("scaling", lambda value: {"idle_timeout_s": value}),
    "concurrency": ("", lambda value: {"concurrency": value}),
    "retries": ("", lambda value: {"retries": _retries(value)}),
}


def check_names(options: Mapping[str, Any]) -> None:
    """Raise InvalidInput for an option that callers may not change."""
    for name in options:
        if name not in _OPTIONS:
            matches = difflib.get_close_matches(name[:100], _OPTIONS, n=1)
            hint = f"did you mean {matches[0]}?" if matches else f"these can be changed: {', '.join(_OPTIONS)}"
            raise InvalidInput(f"with_options cannot change {name[:100]!r}; {hint}", field=name[:100])


def marked(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options as they are in a selector.

    >>> marked({"gpu": "L4"})
    {'@gpu': 'L4'}
    """
    return {f"{MARK}{name}": value for name, value in options.items()}


def apply(spec: FunctionSpec, options: Mapping[str, Any]) -> FunctionSpec:
    """Return the spec with these options changed. Raises InvalidInput, which names the option."""
    if not options:
        return spec
    check_names(options)
    changed: dict[str, Any] = msgspec.to_builtins(spec)
    changed["scaling"]["min_workers"] = 0  # a variant has no workers before its first call
    for name, value in options.items():
        part, fields_of = _OPTIONS[name]
        try:
            fields = fields_of(value)
        except InvalidSpec as error:
            raise InvalidInput(f"{name}: {error.message}", field=name) from None
        (changed[part] if part else changed).update(fields)
    try:
        return spec_from_json(changed)
    except InvalidSpec as error:
        raise InvalidInput(error.message, field=next(iter(options)) if len(options) == 1 else None) from None
