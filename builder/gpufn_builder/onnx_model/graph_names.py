"""The names in a graph, and in the graphs that its nodes hold. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from onnx import AttributeProto, GraphProto, NodeProto


def text(name: str | bytes) -> str:
    """A name to show: protobuf gives what is no UTF-8 as bytes."""
    return name.decode(errors="replace") if isinstance(name, bytes) else name


def subgraphs(node: NodeProto) -> Iterator[GraphProto]:
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.g
        yield from attribute.graphs


def names_taken(node: NodeProto) -> Iterator[str]:
    """The inputs of `node`, and what the graphs in it refer to: values from around them, and their own."""
    yield from node.input
    for inner in subgraphs(node):
        yield from names_in(inner)


def names_in(graph: GraphProto) -> Iterator[str]:
    """What its nodes take, and what it gives."""
    for node in graph.node:
        yield from names_taken(node)
    yield from (value.name for value in graph.output)


def all_names(graph: GraphProto) -> set[str]:
    """Of values and constants."""
    found = {tensor.name for tensor in graph.initializer} | {value.name for value in (*graph.input, *graph.output)}
    for node in graph.node:
        found |= {*node.input, *node.output}
        for inner in subgraphs(node):
            found |= all_names(inner)
    return found
