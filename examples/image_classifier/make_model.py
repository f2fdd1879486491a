"""Write classifier.onnx: ResNet-18 with an eighth of the channels, with the weights in weights.npz.

images  FP32 [n, 3, 64, 64], from 0 to 1  →  probabilities  FP32 [n, 8], in the order of `pictures.SHAPES`
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, checker, helper, numpy_helper

from pictures import SHAPES, SIZE

HERE = Path(__file__).parent
_STRIDES = (1, 1, 2, 1, 2, 1, 2, 1)  # of the eight blocks: four stages of two


class Graph:
    """An ONNX graph under construction; each method adds nodes and returns the name of their output."""

    def __init__(self, weights: dict[str, NDArray[np.float32]]) -> None:
        self.weights = weights
        self.nodes: list[NodeProto] = []

    def add(self, operator: str, *inputs: str, **attributes: Any) -> str:
        output = f"{operator.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, list(inputs), [output], name=output, **attributes))
        return output

    def conv(self, x: str, name: str, stride: int) -> str:
        size = self.weights[f"{name}.weight"].shape[-1]
        return self.add("Conv", x, f"{name}.weight", f"{name}.bias", strides=[stride] * 2, pads=[size // 2] * 4)

    def block(self, x: str, name: str, stride: int) -> str:
        """Add two convolutions and a shortcut around them."""
        y = self.conv(self.add("Relu", self.conv(x, f"{name}.first", stride)), f"{name}.second", 1)
        shortcut = self.conv(x, f"{name}.skip", stride) if f"{name}.skip.weight" in self.weights else x
        return self.add("Relu", self.add("Add", y, shortcut))

    def model(self, output: str) -> ModelProto:
        self.nodes.append(helper.make_node("Identity", [output], ["probabilities"]))
        graph = helper.make_graph(
            self.nodes,
            "classifier",
            [helper.make_tensor_value_info("images", TensorProto.FLOAT, ["n", 3, SIZE, SIZE])],
            [helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["n", len(SHAPES)])],
            [numpy_helper.from_array(weight, name) for name, weight in self.weights.items()],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        checker.check_model(model, full_check=True)
        return model


def classifier() -> ModelProto:
    with np.load(HERE / "weights.npz") as stored:
        graph = Graph({name: stored[name].astype(np.float32) for name in stored.files})
    x = graph.add("Relu", graph.conv("images", "stem", 2))
    x = graph.add("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    for number, stride in enumerate(_STRIDES):
        x = graph.block(x, f"block{number}", stride)
    x = graph.add("Flatten", graph.add("GlobalAveragePool", x))
    return graph.model(graph.add("Softmax", graph.add("Gemm", x, "head.weight", "head.bias", transB=1), axis=1))


if __name__ == "__main__":
    path = HERE / "classifier.onnx"
    path.write_bytes(classifier().SerializeToString())
    print(f"wrote {path.name}, {path.stat().st_size:,} bytes")
