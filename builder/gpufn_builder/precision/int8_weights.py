"""Int8 weights written out as ONNX Runtime's optimiser needs them to count exactly with them. Pure.

Told to (`gpufn_core.inference.ort_integers`), it makes uint8 of int8 constants before a DequantizeLinear, one by one:

- of one that several nodes share, or of a zero point, it makes the same tensor twice, and refuses the model: each node
  gets its own
- where zero points are left out, for 0, it writes one that is for all, which does not run with a scale per channel or
  block: they are written out
- those that the body of an If, Loop or Scan takes from around it, it does not find: they get into the body
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto, numpy_helper

from gpufn_builder.onnx_model.graph_names import subgraphs

_Constants = Mapping[str, TensorProto]


def write_out(graph: GraphProto) -> None:
    """And in graphs within it."""
    _write_out(graph, {}, itertools.count(1))


def _write_out(graph: GraphProto, around: _Constants, numbers: Iterator[int]) -> None:
    """`around` are the constants of the graphs that `graph` lies in."""
    made = {each.name for each in graph.input}.union(*(node.output for node in graph.node))
    around = {name: tensor for name, tensor in around.items() if name not in made}
    constants = around | _given_by_nodes(graph) | {tensor.name: tensor for tensor in graph.initializer}
    _write_zero_points(graph, constants)
    for node in graph.node:
        for body in subgraphs(node):
            _write_out(body, constants, numbers)
    _copy_what_is_shared(graph, around, numbers)


def _given_by_nodes(graph: GraphProto) -> dict[str, TensorProto]:
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


def _copy_what_is_shared(graph: GraphProto, around: _Constants, numbers: Iterator[int]) -> None:
    """Tensors that lie in a file of their own go on lying there, once."""
    taken = around.keys() - {tensor.name for tensor in graph.initializer}
    constants = {name: around[name] for name in taken}
    constants |= {tensor.name: tensor for tensor in graph.initializer if tensor.data_type == TensorProto.INT8}
    takers: dict[str, list[tuple[NodeProto, int]]] = {}
    for node in graph.node:
        for position, name in enumerate(node.input):
            takers.setdefault(name, []).append((node, position))

    def own_constants(node: NodeProto) -> None:
        for position, name in enumerate(node.input):
            if name in taken:
                tensor = graph.initializer.add()
                tensor.CopyFrom(constants[name])
                node.input[position] = tensor.name = f"{name}.gpufn_{next(numbers)}"
            elif name in constants:
                taken.add(name)

    def with_copies() -> Iterator[NodeProto]:
        for node in graph.node:
            yield node
            if node.op_type != "DequantizeLinear" or node.input[0] not in constants:
                continue
            original = NodeProto()
            original.CopyFrom(node)
            own_constants(node)
            for taker, position in takers.get(node.output[0], [])[1:]:
                copy = NodeProto()
                copy.CopyFrom(original)
                own_constants(copy)
                copy.name = copy.output[0] = taker.input[position] = f"{node.output[0]}.gpufn_{next(numbers)}"
                yield copy

    nodes = list(with_copies())
    del graph.node[:]
    graph.node.extend(nodes)
