"""The order of a graph's nodes: each after those that it needs. ONNX demands it, ONNX Runtime does not; tools that
rewrite graphs forget it, above all of what bodies of an If take from around them. Pure."""

from __future__ import annotations

import contextlib
from graphlib import CycleError, TopologicalSorter

from onnx import GraphProto

from gpufn_builder.onnx_model.graph_names import names_taken, subgraphs


def sort_nodes(graph: GraphProto) -> None:
    """And those of graphs in it. What is in order, or needs itself, is left as it is."""
    nodes = list(graph.node)
    for node in nodes:
        for inner in subgraphs(node):
            sort_nodes(inner)
    makers = {name: index for index, node in enumerate(nodes) for name in node.output if name}
    needs = {index: {makers[name] for name in names_taken(node) if name in makers} for index, node in enumerate(nodes)}
    if all(maker < index for index, makers_of in needs.items() for maker in makers_of):
        return
    with contextlib.suppress(CycleError):
        ordered = [nodes[index] for index in TopologicalSorter(needs).static_order()]
        del graph.node[:]
        graph.node.extend(ordered)
