"""Default values of dataclasses that msgspec decodes.

msgspec sets the received fields and calls each `default_factory`, but leaves a plain default on the class, where
`instance.field` finds it. `vars(instance)` does not, and neither does msgspec when the function returns the instance:
its JSON would lack the field. A field that the class should compute but did not is absent in Python: it is deleted.
"""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

import msgspec

_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: created by a class statement


def may_hold_dataclass(hint: Any) -> bool:
    """Return whether `hint` is or contains a user's class, which may be a dataclass."""
    if isinstance(hint, type) and typing.get_origin(hint) is None:
        return bool(hint.__flags__ & _HEAP_TYPE)
    return any(map(may_hold_dataclass, typing.get_args(hint)))


def fill_defaults(value: Any) -> Any:
    """Return `value`, with defaults set as instance attributes on each dataclass in it."""
    pending = [value]  # no recursion: decoded values may be nested as deeply as Python allows
    while pending:
        part = pending.pop()
        if isinstance(part, dict):
            pending += part.keys()
            pending += part.values()
        elif isinstance(part, (list, tuple, set, frozenset)):
            pending += part
        elif isinstance(part, msgspec.Struct):
            pending += (getattr(part, name) for name in part.__struct_fields__)
        elif dataclasses.is_dataclass(part) and not isinstance(part, type):
            own = getattr(part, "__dict__", None)  # None: it has slots, all of which msgspec sets
            for field in dataclasses.fields(part):
                if not field.init and getattr(part, field.name, None) is msgspec.UNSET:
                    object.__delattr__(part, field.name)  # not computed by the class: `computed_fields_optional`
                if own is not None and field.name not in own and field.default is not dataclasses.MISSING:
                    object.__setattr__(part, field.name, field.default)
                pending.append(getattr(part, field.name, None))
    return value
