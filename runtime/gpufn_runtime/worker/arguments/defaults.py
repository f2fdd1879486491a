"""The defaults that msgspec leaves out of the dataclasses that it makes.

It sets what came and calls each `default_factory`; a plain default it leaves on the class, where `instance.field` finds
it. `vars(instance)` does not, nor does msgspec when the function returns it: its JSON would be without the field.
A field that the class was to work out itself, and did not, is not there in Python: it goes.
"""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

import msgspec

_MADE_AT_RUN_TIME = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class statement made it


def may_be_missing(hint: Any) -> bool:
    """Whether a value of `hint` is, or holds, a class of the user's, and with it perhaps a dataclass."""
    if isinstance(hint, type) and typing.get_origin(hint) is None:
        return bool(hint.__flags__ & _MADE_AT_RUN_TIME)
    return any(map(may_be_missing, typing.get_args(hint)))


def filled_in(value: Any) -> Any:
    """`value`, with the defaults of each dataclass in it among its own attributes."""
    left = [value]  # no recursion: what msgspec read may be nested as deeply as Python allows
    while left:
        part = left.pop()
        if isinstance(part, dict):
            left += part.keys()
            left += part.values()
        elif isinstance(part, (list, tuple, set, frozenset)):
            left += part
        elif isinstance(part, msgspec.Struct):
            left += (getattr(part, name) for name in part.__struct_fields__)
        elif dataclasses.is_dataclass(part) and not isinstance(part, type):
            own = getattr(part, "__dict__", None)  # None: it has slots, and msgspec sets them all
            for field in dataclasses.fields(part):
                if not field.init and getattr(part, field.name, None) is msgspec.UNSET:
                    object.__delattr__(part, field.name)  # nobody worked it out: `computed_fields_optional`
                if own is not None and field.name not in own and field.default is not dataclasses.MISSING:
                    object.__setattr__(part, field.name, field.default)
                left.append(getattr(part, field.name, None))
    return value
