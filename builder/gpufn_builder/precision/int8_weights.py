"""Int8 constants rewritten so that ONNX Runtime's optimizer can convert them to exact arithmetic. Pure.

With the settings of `gpufn_core.inference.ort_integers` the optimizer converts int8 constants before a
DequantizeLinear to uint8, one by one. It has three limitations:

- For a constant that several nodes share, or for a zero point, it creates the same tensor twice and rejects the model.
  So each node gets its own copy.
- If the zero point is omitted, it adds a scalar one, which does not run with a scale per channel or block. So the zero
  points are added here.
- In the body of an If, Loop or Scan it does not find constants of the outer graph. So they are copied into the body.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto, numpy_helper

from gpufn_builder.onnx_model.graph_names import replace_items, subgraphs

_Constants = Mapping[str, TensorProto]


def make_constants_explicit(graph: GraphProto) -> None:
    """Rewrite the constants of `graph` and of its subgraphs."""
    _make_explicit(graph, {}, itertools.count(1))


def _make_explicit(graph: GraphProto, outer: _Constants, numbers: Iterator[int]) -> None:
    """`outer` are the constants of the graphs that contain `graph`."""
    defined = {each.name for each in graph.input}.union(*(node.output for node in graph.node))
    outer = {name: tensor for name, tensor in outer.items() if name not in defined}
    constants = outer | _constant_nodes(graph) | {tensor.name: tensor for tensor in graph.initializer}
    _write_zero_points(graph, constants)
    for node in graph.node:
        for body in subgraphs(node):
            _make_explicit(body, constants, numbers)
    _copy_shared_constants(graph, outer, numbers)


def _constant_nodes(graph: GraphProto) -> dict[str, TensorProto]:
    return {
        node.output[0]: attribute.t
        for node in graph.node
        if node.op_type == "Constant"
        for attribute in node.attribute
        if attribute.name == "value"
    }


def _write_zero_points(graph: GraphProto, constants: _Constants) -> None:
    for node in graph.node:
        if node.op_type != "DequantizeLinear" or any(node.input[2:]):
            continue
        content, scales = (constants.get(name) for name in node.input[:2])
        if content is not None and scales is not None and content.data_type == TensorProto.INT8 and scales.dims:
            name = f"{node.output[0]}.gpufn_zero_point"
            graph.initializer.append(numpy_helper.from_array(np.zeros(tuple(scales.dims), np.int8), name))
            node.input[2:] = [name]


def _copy_shared_constants(graph: GraphProto, outer: _Constants, numbers: Iterator[int]) -> None:
    """Give each DequantizeLinear its own constants. Tensors in external files stay there and are not duplicated."""
    used = outer.keys() - {tensor.name for tensor in graph.initializer}
    constants = {name: outer[name] for name in used}
    constants |= {tensor.name: tensor for tensor in graph.initializer if tensor.data_type == TensorProto.INT8}
    consumers: dict[str, list[tuple[NodeProto, int]]] = {}
    for node in graph.node:
        for position, name in enumerate(node.input):
            consumers.setdefault(name, []).append((node, position))

    def copy_constants(node: NodeProto) -> None:
        for position, name in enumerate(node.input):
            if name in used:
                tensor = graph.initializer.add()
                tensor.CopyFrom(constants[name])
                node.input[position] = tensor.name = f"{name}.gpufn_{next(numbers)}"
            elif name in constants:
                used.add(name)

    def with_copies() -> Iterator[NodeProto]:
        for node in graph.node:
            yield node
            if node.op_type != "DequantizeLinear" or node.input[0] not in constants:
                continue
            original = NodeProto()
            original.CopyFrom(node)
            copy_constants(node)
            for consumer, position in consumers.get(node.output[0], [])[1:]:
                copy = NodeProto()
                copy.CopyFrom(original)
                copy_constants(copy)
                copy.name = copy.output[0] = consumer.input[position] = f"{node.output[0]}.gpufn_{next(numbers)}"
                yield copy

    replace_items(graph.node, list(with_copies()))
