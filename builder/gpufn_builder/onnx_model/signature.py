"""Checks of a model's inputs and outputs: requests must be able to name and carry them. Pure."""

from __future__ import annotations

from typing import Final

from onnx import GraphProto, TensorProto, ValueInfoProto

from gpufn_builder.onnx_model.graph_names import text
from gpufn_builder.onnx_model.tensors import datatype_of
from gpufn_core.domain.devices.engine import BuildStage
from gpufn_core.errors import BuildFailed
from gpufn_core.spec.model_spec import LARGEST_SIZE, LONGEST_NAME, MAX_DIMENSIONS

_STAGE: Final = BuildStage.INGEST


def check(graph: GraphProto) -> None:
    """Check the inputs and outputs. Raises BuildFailed(stage="ingest") with the name of the input or output."""
    if not graph.output:
        raise _error("the model has no output")
    constants = {tensor.name for tensor in graph.initializer} | {
        tensor.values.name for tensor in graph.sparse_initializer
    }
    for value in graph.input:
        if value.name not in constants:
            _check_input(value)
    for value in graph.output:
        _check_name("output", value.name)
        kind = value.type.WhichOneof("value")
        if kind == "tensor_type" and value.type.tensor_type.elem_type and _datatype(value) is None:
            raise _error(f"output {value.name} has elements of type {_type_name(value)}, which cannot be sent")
        if kind not in ("tensor_type", None):
            is_zipped = any(node.op_type == "ZipMap" for node in graph.node if value.name in node.output)
            hint = ": convert the model with options={'zipmap': False}" if is_zipped else ""
            raise _error(f"output {value.name} is {_in_words(kind)}, and only tensors can be sent{hint}")


def _check_name(role: str, name: str | bytes) -> None:
    if isinstance(name, bytes):
        raise _error(f"the name of an {role} is not UTF-8: {text(name)[:40]}")
    if len(name) > LONGEST_NAME:
        raise _error(f"the name of an {role} has {len(name)} characters; {LONGEST_NAME} are allowed: {name[:40]}…")
    if "\0" in name:
        raise _error(f"the name of an {role} has a NUL in it: {name[:40]!r}")


def _check_input(value: ValueInfoProto) -> None:
    _check_name("input", value.name)
    kind = value.type.WhichOneof("value")
    if kind != "tensor_type":
        raise _error(f"input {value.name} is {_in_words(kind)}, and only tensors can be received")
    if _datatype(value) is None:
        raise _error(f"input {value.name} has elements of type {_type_name(value)}, which cannot be received")
    if not value.type.tensor_type.HasField("shape"):
        raise _error(
            f"input {value.name} has no declared number of dimensions: export the model with a shape for it, whose "
            "sizes may be dynamic"
        )
    dims = value.type.tensor_type.shape.dim
    if len(dims) > MAX_DIMENSIONS:
        raise _error(f"input {value.name} has {len(dims)} dimensions; {MAX_DIMENSIONS} are allowed")
    if (largest := max((dim.dim_value for dim in dims), default=0)) > LARGEST_SIZE:
        raise _error(f"input {value.name} has a size of {largest}; {LARGEST_SIZE} is allowed")


def _datatype(value: ValueInfoProto) -> str | None:
    return datatype_of(value.type.tensor_type.elem_type)


def _type_name(value: ValueInfoProto) -> str:
    number = value.type.tensor_type.elem_type
    return TensorProto.DataType.Name(number) if number in TensorProto.DataType.values() else str(number)


def _in_words(kind: str | None) -> str:
    return {"sequence_type": "a sequence", "optional_type": "optional", "map_type": "a map"}.get(
        kind or "", "of no type" if kind is None else "not a dense tensor"
    )


def _error(message: str) -> BuildFailed:
    return BuildFailed(message, stage=_STAGE)
