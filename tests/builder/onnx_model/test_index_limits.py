from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, ValueInfoProto, helper, shape_inference

from gpufn_builder.onnx_model.index_limits import index_limits
from tests.builder.models import constant, model, node, value, weights

INT64 = TensorProto.INT64
IDS = value("ids", ["N", 4], INT64)
Y = value("y", None)


def _limits(proto: ModelProto) -> dict[str, int]:
    return index_limits(shape_inference.infer_shapes(proto).graph)


def _branches(inner: ValueInfoProto) -> ModelProto:
    table = node("Gather", "table ids", "inner")
    branch = helper.make_graph([table], "branch", [], [inner])
    return model(
        [node("If", "flag", "y", then_branch=branch, else_branch=branch)],
        [IDS, value("flag", [], TensorProto.BOOL)],
        [Y],
        [weights("table", 7, 2)],
    )


@pytest.mark.parametrize(
    ("proto", "limits"),
    [
        (model([node("Gather", "table ids", "y")], [IDS], [Y], [weights("table", 9, 2)]), {"ids": 9}),
        (model([node("Gather", "table ids", "y", axis=-1)], [IDS], [Y], [weights("table", 9, 2)]), {"ids": 2}),
        (
            model(
                [node("Cast", "ids", "small", to=TensorProto.INT32), node("Gather", "table small", "y")],
                [IDS],
                [Y],
                [weights("table", 9, 2)],
            ),
            {"ids": 9},
        ),
        (
            model(
                [node("Gather", "long ids", "a"), node("Gather", "short ids", "b"), node("Add", "a b", "y")],
                [IDS],
                [Y],
                [weights("long", 9, 2), weights("short", 3, 2)],
            ),
            {"ids": 3},
        ),
        (
            model(
                [
                    node("DequantizeLinear", "table scale", "real"),
                    node("Gather", "real ids", "y"),
                ],
                [IDS],
                [Y],
                [constant("table", np.zeros((9, 2)), np.int8), constant("scale", 0.1)],
            ),
            {"ids": 9},
        ),
        (
            model(
                [node("OneHot", "ids depth ends", "y")],
                [IDS],
                [Y],
                [constant("depth", 5, np.int64), constant("ends", [0.0, 1.0])],
            ),
            {"ids": 5},
        ),
        (
            model(
                [node("Unsqueeze", "ids last", "each"), node("Equal", "each classes", "y")],
                [IDS],
                [Y],
                [constant("last", [2], np.int64), constant("classes", [[range(257)]], np.int64)],
            ),
            {"ids": 257},
        ),
        (_branches(value("inner", None)), {"ids": 7}),
        (model([node("Equal", "ids pad", "y")], [IDS], [Y], [constant("pad", [0], np.int64)]), {}),
        (model([node("Gather", "x ids", "y")], [IDS, value("x", ["M", 2])], [Y]), {}),
        (model([node("Mul", "ids ids", "y")], [IDS], [Y]), {}),
    ],
)
def test_the_graph_shows_how_many_values_of_an_input_are_valid(proto: ModelProto, limits: dict[str, int]) -> None:
    assert _limits(proto) == limits
