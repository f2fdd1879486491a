from __future__ import annotations

import pytest
from onnx import ModelProto, NodeProto, TensorProto, helper

from gpufn_builder.onnx_model.random_numbers import random_nodes, set_seeds
from tests.builder.models import branching, constant, model, node, value


def _model(*nodes: NodeProto, training: bool = True, opset: int = 20) -> ModelProto:
    constants = [constant("ratio", 0.5), constant("training", training, bool)]
    return model(nodes, [value("x", [1, 8])], [value("y", [1, 8])], constants, opset=opset)


def _seeds(proto: ModelProto) -> list[float]:
    return [
        helper.get_attribute_value(each)
        for every in proto.graph.node
        for each in every.attribute
        if each.name == "seed"
    ]


@pytest.mark.parametrize(
    "drawing",
    [
        node("RandomNormalLike", "x", "y"),
        node("RandomUniformLike", "x", "y"),
        node("RandomNormal", "", "y", shape=[1, 8]),
        node("RandomUniform", "", "y", shape=[1, 8]),
        node("Multinomial", "x", "y", sample_size=8),
        node("Bernoulli", "x", "y"),
        node("Dropout", "x ratio training", "y"),
    ],
    ids=lambda each: each.op_type,
)
def test_a_node_that_draws_random_numbers_gets_a_seed(drawing: NodeProto) -> None:
    proto = _model(drawing)
    assert random_nodes(proto) == ("y_node",)
    set_seeds(proto)
    (seed,) = _seeds(proto)
    assert isinstance(seed, int if drawing.op_type == "Dropout" else float)


def test_a_seed_is_kept_and_each_node_draws_other_numbers() -> None:
    proto = _model(
        node("RandomNormalLike", "x", "a", seed=7.0), node("RandomNormalLike", "x", "b"), node("Bernoulli", "b", "y")
    )
    set_seeds(proto)
    assert _seeds(proto)[0] == 7.0
    assert len(set(_seeds(proto))) == 3


@pytest.mark.parametrize(
    "proto",
    [
        _model(node("Dropout", "x", "y")),
        _model(node("Dropout", "x ratio", "y")),
        _model(node("Dropout", "x ratio training", "y"), training=False),
        _model(node("Constant", "", "t", value=constant("", False, bool)), node("Dropout", "x ratio t", "y")),
        _model(node("Dropout", "x", "y", ratio=0.5), opset=10),
    ],
)
def test_a_dropout_draws_numbers_in_training_mode_only(proto: ModelProto) -> None:
    assert random_nodes(proto) == ()


def test_a_dropout_whose_mode_is_an_input_may_draw_numbers() -> None:
    proto = _model(node("Dropout", "x ratio mode", "y"))
    proto.graph.input.append(value("mode", [], TensorProto.BOOL))
    assert random_nodes(proto) == ("y_node",)


def test_bodies_draw_numbers_too() -> None:
    proto = branching()
    body = next(each for each in proto.graph.node if each.op_type == "If").attribute[0].g
    body.node.append(node("RandomUniformLike", "h", "unused"))
    assert random_nodes(proto) == ("unused_node",)
