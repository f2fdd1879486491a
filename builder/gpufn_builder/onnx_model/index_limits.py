"""The limits of integer inputs that select from a table, such as the ids of tokens. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto, ValueInfoProto, numpy_helper

from gpufn_builder.onnx_model.ingest import all_nodes
from gpufn_builder.onnx_model.tensors import Array

_KEEP_VALUES: Final = frozenset(
    {
        "Cast", "Expand", "Flatten", "Gather", "Identity", "Reshape", "Slice", "Squeeze", "Tile", "Transpose",
        "Unsqueeze",
    }
)  # fmt: skip
_SELECT: Final = frozenset({"Gather", "GatherElements"})
_INTEGERS: Final = frozenset(
    {
        TensorProto.INT8, TensorProto.INT16, TensorProto.INT32, TensorProto.INT64,
        TensorProto.UINT8, TensorProto.UINT16, TensorProto.UINT32, TensorProto.UINT64,
    }
)  # fmt: skip
_MAX_CLASSES: Final = 1 << 20  # of a one-hot comparison; a larger constant is not read


def index_limits(graph: GraphProto) -> dict[str, int]:
    """Return, for each input whose values select from a table or are compared with a range, how many values are valid:
    0 up to the limit. Sizes come from shape inference."""
    inputs = {value.name: value.name for value in graph.input}
    constants = {tensor.name: tensor for tensor in graph.initializer}
    sizes = dict(_sizes(graph))
    limits: dict[str, int] = {}
    for node in all_nodes(graph):
        for name, limit in _limits(node, sizes, constants):
            if (origin := inputs.get(name)) is not None:
                limits[origin] = min(limit, limits.get(origin, limit))
        if node.op_type in _KEEP_VALUES and not node.domain and node.input[0] in inputs:
            inputs[node.output[0]] = inputs[node.input[0]]
    return limits


def _limits(
    node: NodeProto, sizes: Mapping[str, tuple[int, ...]], constants: Mapping[str, TensorProto]
) -> Iterator[tuple[str, int]]:
    """Yield the limits that `node` sets for its inputs."""
    if node.domain:
        return
    if node.op_type in _SELECT and (table := sizes.get(node.input[0])):
        axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 0)
        if -len(table) <= axis < len(table) and table[axis] > 0:
            yield node.input[1], table[axis]
    if node.op_type == "OneHot" and (classes := _largest(constants.get(node.input[1]))):
        yield node.input[0], classes
    if node.op_type == "Equal":
        for name, other in (node.input, reversed(node.input)):
            if _is_range(constants.get(other)):
                yield name, math.prod(constants[other].dims)


def _sizes(graph: GraphProto) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the shapes of values; a size that is not known is 0."""
    for value in (*graph.input, *graph.value_info):
        yield value.name, _shape(value)
    for tensor in graph.initializer:
        yield tensor.name, tuple(tensor.dims)


def _shape(value: ValueInfoProto) -> tuple[int, ...]:
    return tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim)


def _is_range(tensor: TensorProto | None) -> bool:
    """Return whether `tensor` is 0, 1, 2 and so on, as in the comparison that makes a one-hot vector."""
    values = _values(tensor)
    return values is not None and values.size > 1 and np.array_equal(values.ravel(), np.arange(values.size))


def _largest(tensor: TensorProto | None) -> int:
    values = _values(tensor)
    return 0 if values is None or not values.size else max(0, int(values.max()))


def _values(tensor: TensorProto | None) -> Array | None:
    if (
        tensor is None
        or tensor.data_location == TensorProto.EXTERNAL
        or tensor.data_type not in _INTEGERS
        or math.prod(tensor.dims) > _MAX_CLASSES
    ):
        return None
    return numpy_helper.to_array(tensor)
