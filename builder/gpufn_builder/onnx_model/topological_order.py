"""Topological sort of a graph's nodes. ONNX requires this order, ONNX Runtime does not, and tools that rewrite graphs
often violate it, especially for outer values that the body of an If uses. Pure."""

from __future__ import annotations

import contextlib
from graphlib import CycleError, TopologicalSorter

from onnx import GraphProto

from gpufn_builder.onnx_model.graph_names import referenced_names, replace_items, subgraphs


def sort_nodes(graph: GraphProto) -> None:
    """Sort the nodes of `graph` and of its subgraphs. A sorted graph, or one with a cycle, is unchanged."""
    nodes = list(graph.node)
    for node in nodes:
        for inner in subgraphs(node):
            sort_nodes(inner)
    producers = {name: index for index, node in enumerate(nodes) for name in node.output if name}
    needs = {
        index: {producers[name] for name in referenced_names(node) if name in producers}
        for index, node in enumerate(nodes)
    }
    if all(producer < index for index, needed in needs.items() for producer in needed):
        return
    with contextlib.suppress(CycleError):
        replace_items(graph.node, [nodes[index] for index in TopologicalSorter(needs).static_order()])
