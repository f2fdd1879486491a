"""Error for inputs that have the model's types and shapes, and values that one of its operators refuses."""

from __future__ import annotations

import re

from gpufn_core.errors import InvalidInput
from gpufn_runtime.worker.engines.base import Array, Arrays

_STATUS = "Status Message: "  # ONNX Runtime repeats it for each subgraph that encloses the operator
_CHECK = re.compile(r"^\S+:\d+ .*? was false\. (?=\S)")  # ONNX Runtime's own file, function and condition
_OPERATOR = "while running"
_NOT_THE_INPUTS = re.compile(r"allocat\w* memory|out of memory|cuda|cudnn|cublas", re.IGNORECASE)
_MAX_REASON = 300
_MAX_VALUES = 4


def blames_inputs(error: Exception) -> bool:
    """Whether ONNX Runtime's `Fail` comes from an operator's check of its inputs.

    Most operators check shapes with it, Reshape and Conv for example. Memory that is not there and libraries of a GPU
    fail with it as well.
    """
    text = str(error)
    return _OPERATOR in text and _NOT_THE_INPUTS.search(text) is None


def refused_inputs(inputs: Arrays, error: Exception) -> InvalidInput:
    """Name every input with its type, its shape and the values of small ones, for a wrong value often fails elsewhere.

    The field is set where there is only one input.
    """
    reason = _CHECK.sub("", str(error).rpartition(_STATUS)[2].strip())[:_MAX_REASON]
    described = ", ".join(f"{name} {_described(array)}" for name, array in inputs.items())
    field = next(iter(inputs)) if len(inputs) == 1 else None
    return InvalidInput(f"the model refuses the values or shapes of its inputs: {described}: {reason}", field=field)


def _described(array: Array) -> str:
    text = f"{array.dtype}[{','.join(map(str, array.shape))}]"
    return f"{text} = {array.tolist()!r}" if array.size <= _MAX_VALUES and array.dtype.kind != "O" else text
