"""The nodes of a model that draw random numbers, and their seeds. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from gpufn_builder.onnx_model.graph_names import text
from gpufn_builder.onnx_model.ingest import all_nodes, main_opset

_SEED: Final = "seed"
_RANDOM: Final = frozenset(
    {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)
_TRAINING_OPSET: Final = 12  # the first in which an input of Dropout sets the training mode
_TRAINING_MODE: Final = 2  # position of this input


def random_nodes(model: ModelProto) -> tuple[str, ...]:
    """Return the names of the nodes that draw random numbers, in subgraphs as well."""
    return tuple(text(node.name) or text(node.output[0]) for node in _random_nodes(model))


def set_seeds(model: ModelProto) -> None:
    """Set a distinct seed for each node that draws random numbers and has none."""
    for number, node in enumerate(_random_nodes(model), 1):
        if not any(attribute.name == _SEED for attribute in node.attribute):
            seed = number if node.op_type == "Dropout" else float(number)
            node.attribute.append(helper.make_attribute(_SEED, seed))


def _random_nodes(model: ModelProto) -> Iterator[NodeProto]:
    false = _false_constants(model)
    opset = main_opset(model)
    for node in all_nodes(model.graph):
        if node.domain:
            continue
        if node.op_type in _RANDOM or (
            node.op_type == "Dropout" and opset >= _TRAINING_OPSET and _may_train(node, false)
        ):
            yield node


def _may_train(node: NodeProto, false: set[str]) -> bool:
    mode = node.input[_TRAINING_MODE] if len(node.input) > _TRAINING_MODE else ""
    return bool(mode) and mode not in false


def _false_constants(model: ModelProto) -> set[str]:
    constants: dict[str, TensorProto] = {tensor.name: tensor for tensor in model.graph.initializer}
    constants |= {
        node.output[0]: attribute.t
        for node in model.graph.node
        if node.op_type == "Constant"
        for attribute in node.attribute
        if attribute.name == "value"
    }
    return {
        name
        for name, tensor in constants.items()
        if tensor.data_type == TensorProto.BOOL and not numpy_helper.to_array(tensor).any()
    }
