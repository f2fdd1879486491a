"""Cases that bare ONNX Runtime passes and gpufn refuses, by type, because new releases of ONNX change the names."""

from __future__ import annotations

import numpy as np

from tests.conformance.suite import Case

_EIGHT_BITS = "float8"  # prefix of numpy's names of these types


def why_refused(case: Case) -> str:
    """Return text that the refusal of a case contains; "" for a case that has to pass."""
    values = (*case.inputs.values(), *case.outputs.values())
    if not all(isinstance(value, np.ndarray) for value in values):
        return " and only tensors can be "  # no sequences and no optional tensors
    if any(value.dtype.name.startswith(_EIGHT_BITS) for value in values):
        return " has elements of type FLOAT8"  # the Open Inference Protocol has no name for it
    return ""
