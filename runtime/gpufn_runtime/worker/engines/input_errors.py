"""Error for inputs with the model's types and shapes but with values that one of its operators rejects."""

from __future__ import annotations

import re

from gpufn_core.errors import InvalidInput
from gpufn_runtime.worker.engines.base import Array, Arrays

_STATUS = "Status Message: "  # ONNX Runtime repeats it for each subgraph around the operator
_CHECK = re.compile(r"^\S+:\d+ .*? was false\. (?=\S)")  # ONNX Runtime's own file, function and condition
_OPERATOR = "while running"
_OTHER_CAUSES = re.compile(r"allocat\w* memory|out of memory|cuda|cudnn|cublas", re.IGNORECASE)
_MAX_REASON = 300
_MAX_VALUES = 4


def blames_inputs(error: Exception) -> bool:
    """Return whether ONNX Runtime's `Fail` comes from an operator's check of its inputs.

    Most operators, such as Reshape and Conv, check shapes with it. Missing memory and GPU libraries fail with it too.
    """
    text = str(error)
    return _OPERATOR in text and _OTHER_CAUSES.search(text) is None


def refused_inputs(inputs: Arrays, error: Exception) -> InvalidInput:
    """Name every input with its type, its shape and its values if small: a wrong value often fails elsewhere.

    The error's field is set if there is only one input.
    """
    reason = _CHECK.sub("", str(error).rpartition(_STATUS)[2].strip())[:_MAX_REASON]
    described = ", ".join(f"{name} {_describe_array(array)}" for name, array in inputs.items())
    field = next(iter(inputs)) if len(inputs) == 1 else None
    return InvalidInput(f"the model refuses the values or shapes of its inputs: {described}: {reason}", field=field)


def _describe_array(array: Array) -> str:
    text = f"{array.dtype}[{','.join(map(str, array.shape))}]"
    return f"{text} = {array.tolist()!r}" if array.size <= _MAX_VALUES and array.dtype.kind != "O" else text
