"""Functions with code that the Open Inference Protocol can call: those with a parameter that is an array. Pure."""

from __future__ import annotations

from typing import Final

from gpufn_core.spec.function_spec import MethodSpec

DATATYPE: Final = "x-tensor"  # in the JSON Schema of a parameter: its datatype, or "" for any


def tensor_inputs(method: MethodSpec) -> dict[str, str]:
    """Return the parameters that are arrays, with their datatypes.

    >>> tensor_inputs(MethodSpec(parameters={"properties": {"x": {"x-tensor": "FP32"}, "top": {"type": "integer"}}}))
    {'x': 'FP32'}
    """
    properties = method.parameters.get("properties", {})
    return {name: schema[DATATYPE] for name, schema in properties.items() if DATATYPE in schema}


def takes_tensors(method: MethodSpec) -> bool:
    """Return whether the protocol can call the method: it has a parameter that is an array, and returns no stream."""
    return not method.kind.streams and bool(tensor_inputs(method))
