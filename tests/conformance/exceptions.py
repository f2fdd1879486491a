"""What bare ONNX Runtime passes and we refuse, by what the case is of: which cases there are, and which of them pass,
changes with the releases of both."""

from __future__ import annotations

import numpy as np

from tests.conformance.suite import Case

_EIGHT_BITS = "float8"  # how numpy's names of them begin


def why_refused(case: Case) -> str:
    """What the refusal of a case has to say; empty for one that has to pass."""
    values = (*case.inputs.values(), *case.outputs.values())
    if not all(isinstance(value, np.ndarray) for value in values):
        return " and only tensors can be "  # no sequences of them, and none that may be absent
    if any(value.dtype.name.startswith(_EIGHT_BITS) for value in values):
        return " has elements of type FLOAT8"  # for which the Open Inference Protocol has no name
    return ""
