"""The names in a graph and in its subgraphs, their types, and other helpers for protobufs of graphs. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from onnx import AttributeProto, GraphProto, NodeProto


def text(name: str | bytes) -> str:
    """Return a name as text. protobuf returns invalid UTF-8 as bytes."""
    return name.decode(errors="replace") if isinstance(name, bytes) else name


def subgraphs(node: NodeProto) -> Iterator[GraphProto]:
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.g
        yield from attribute.graphs


def referenced_names(node: NodeProto) -> Iterator[str]:
    """Yield the inputs of `node` and all names that its subgraphs refer to: outer values and their own."""
    yield from node.input
    for inner in subgraphs(node):
        yield from names_used_in(inner)


def names_used_in(graph: GraphProto) -> Iterator[str]:
    """Yield the inputs of its nodes and its outputs."""
    for node in graph.node:
        yield from referenced_names(node)
    yield from (value.name for value in graph.output)


def all_names(graph: GraphProto) -> set[str]:
    """Return all names of values and constants."""
    names = {tensor.name for tensor in graph.initializer} | {value.name for value in (*graph.input, *graph.output)}
    for node in graph.node:
        names |= {*node.input, *node.output}
        for inner in subgraphs(node):
            names |= all_names(inner)
    return names


def element_types(graph: GraphProto) -> dict[str, int]:
    """Return the element types of constants and of values whose type is known."""
    types = {tensor.name: tensor.data_type for tensor in graph.initializer}
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.WhichOneof("value") == "tensor_type":
            types[value.name] = value.type.tensor_type.elem_type
    return types


def replace_items(field: Any, items: Sequence[Any]) -> None:
    """Replace the content of a repeated field, which supports no assignment. The `items` may come from it."""
    del field[:]
    field.extend(items)
