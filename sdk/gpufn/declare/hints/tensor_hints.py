"""Parameters that are arrays of numpy. Clients of the Open Inference Protocol can pass them as tensors."""

from __future__ import annotations

import sys
import types
import typing
from typing import Any, Final, get_args, get_origin

from gpufn_core.spec.model_spec import DATATYPES

_BY_SCALAR: Final = {
    "bool": "BOOL", "bool_": "BOOL", "float16": "FP16", "float32": "FP32", "float64": "FP64",
    **{name.lower(): name for name in DATATYPES if name.startswith(("INT", "UINT"))},
}  # fmt: skip


def tensor_datatype(hint: Any) -> str | None:
    """Return the datatype of a tensor in the protocol's terms, "" for any; None for a hint that is no array.

    >>> import numpy
    >>> tensor_datatype(numpy.typing.NDArray[numpy.float32]), tensor_datatype(numpy.ndarray), tensor_datatype(int)
    ('FP32', '', None)
    """
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if get_origin(hint) in (typing.Union, types.UnionType):
        members = [member for member in get_args(hint) if member is not type(None)]
        return tensor_datatype(members[0]) if len(members) == 1 else None
    if get_origin(hint) is typing.Annotated:
        return tensor_datatype(get_args(hint)[0])
    kind = get_origin(hint) or hint
    if not (isinstance(kind, type) and issubclass(kind, numpy.ndarray)):
        return None
    for part in get_args(hint):  # ndarray[shape, dtype[float32]]
        if (get_origin(part) or part) is numpy.dtype:
            scalar = (*get_args(part), None)[0]
            return _BY_SCALAR.get(getattr(scalar, "__name__", ""), "")
    return ""
