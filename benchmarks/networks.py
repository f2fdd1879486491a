"""The benchmarks' models, with weights from a fixed seed: the results are meaningless, the cost is realistic.

| model | in | out |
|---|---|---|
| `resnet18` | images FP32 [n, 3, 64, 64] | logits FP32 [n, 1000] |
| `encoder` | tokens INT64 [n, 64] | embedding FP32 [n, 128] |
| `negative` | x FP32 [n, 2621440], 10 MiB a row | y, the same |
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, checker, helper, numpy_helper

PIXELS = 64  # per side of an image: a run takes milliseconds on a CPU, as 224 pixels (ImageNet) do on a GPU
CLASSES = 1000
SEQUENCE, WIDTH, HEADS, LAYERS, WORDS = 64, 128, 4, 4, 8192
LARGE = 10 * 2**20 // 4  # elements of a row of `negative`

_STAGES = (
    (64, 1),
    (64, 1),
    (128, 2),
    (128, 1),
    (256, 2),
    (256, 1),
    (512, 2),
    (512, 1),
)  # channels and stride per block


def resnet18() -> ModelProto:
    """ResNet-18 as in torchvision, with batch normalization; only the images are smaller."""
    graph = _Graph()
    x = graph.add("Relu", graph.conv("images", 3, 64, kernel=7, stride=2))
    x = graph.add("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    before = 64
    for channels, stride in _STAGES:
        y = graph.add("Relu", graph.conv(x, before, channels, kernel=3, stride=stride))
        y = graph.conv(y, channels, channels, kernel=3, stride=1)
        shortcut = x if (before, stride) == (channels, 1) else graph.conv(x, before, channels, kernel=1, stride=stride)
        x = graph.add("Relu", graph.add("Add", y, shortcut))
        before = channels
    x = graph.add("Flatten", graph.add("GlobalAveragePool", x))
    logits = graph.add("Gemm", x, graph.weight(CLASSES, before), graph.weight(CLASSES), transB=1)
    return graph.model("images", TensorProto.FLOAT, [3, PIXELS, PIXELS], logits, "logits", [CLASSES])


def encoder() -> ModelProto:
    """A pre-norm transformer encoder; the embedding is the mean over the sequence."""
    graph = _Graph()
    x = graph.add("Add", graph.add("Gather", graph.weight(WORDS, WIDTH), "tokens"), graph.weight(SEQUENCE, WIDTH))
    for _ in range(LAYERS):
        x = graph.add("Add", x, graph.attention(graph.norm(x)))
        y = graph.linear(graph.norm(x), WIDTH, 4 * WIDTH)
        erf = graph.add("Erf", graph.add("Div", y, graph.constant(np.float32(2**0.5))))
        gelu = graph.add(
            "Mul",
            graph.add("Mul", y, graph.add("Add", erf, graph.constant(np.float32(1)))),
            graph.constant(np.float32(0.5)),
        )
        x = graph.add("Add", x, graph.linear(gelu, 4 * WIDTH, WIDTH))
    embedding = graph.add("ReduceMean", graph.norm(x), axes=[1], keepdims=0)
    return graph.model("tokens", TensorProto.INT64, [SEQUENCE], embedding, "embedding", [WIDTH])


def negative() -> ModelProto:
    graph = _Graph()
    return graph.model("x", TensorProto.FLOAT, [LARGE], graph.add("Neg", "x"), "y", [LARGE])


def inputs(name: str, rows: int = 1) -> dict[str, NDArray[Any]]:
    """Return the inputs of a run of `rows`, always the same."""
    random = np.random.default_rng(rows)
    if name == "resnet18":
        return {"images": random.random((rows, 3, PIXELS, PIXELS), np.float32)}
    if name == "encoder":
        return {"tokens": random.integers(0, WORDS, (rows, SEQUENCE))}
    return {"x": random.random((rows, LARGE), np.float32)}


class _Graph:
    """An ONNX graph under construction; each method adds nodes and returns the name of their output."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(0)
        self._nodes: list[NodeProto] = []
        self._constants: list[TensorProto] = []

    def add(self, operator: str, *inputs: str, **attributes: Any) -> str:
        output = f"{operator.lower()}_{len(self._nodes)}"
        self._nodes.append(helper.make_node(operator, list(inputs), [output], name=output, **attributes))
        return output

    def constant(self, value: Any) -> str:
        name = f"constant_{len(self._constants)}"
        self._constants.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def weight(self, *shape: int) -> str:
        """Add a random weight, scaled so that activations keep their magnitude."""
        fan_in = int(np.prod(shape[1:])) or 1
        return self.constant(self._random.standard_normal(shape, np.float32) * np.float32(fan_in**-0.5))

    def conv(self, x: str, channels_in: int, channels: int, *, kernel: int, stride: int) -> str:
        """Add a convolution and its batch normalization."""
        weight = self.weight(channels, channels_in, kernel, kernel)
        y = self.add("Conv", x, weight, strides=[stride] * 2, pads=[kernel // 2] * 4)
        scale, shift, mean, variance = (self.constant(np.full(channels, value, np.float32)) for value in (1, 0, 0, 1))
        return self.add("BatchNormalization", y, scale, shift, mean, variance)

    def linear(self, x: str, width_in: int, width: int) -> str:
        product = self.add(
            "MatMul", x, self.constant(self._random.standard_normal((width_in, width), np.float32) * 0.05)
        )
        return self.add("Add", product, self.constant(np.zeros(width, np.float32)))

    def norm(self, x: str) -> str:
        ones, zeros = self.constant(np.ones(WIDTH, np.float32)), self.constant(np.zeros(WIDTH, np.float32))
        return self.add("LayerNormalization", x, ones, zeros, axis=-1)

    def attention(self, x: str) -> str:
        size = WIDTH // HEADS
        split, joined = (
            self.constant(np.array([0, SEQUENCE, HEADS, size])),
            self.constant(np.array([0, SEQUENCE, WIDTH])),
        )

        def heads(order: list[int]) -> str:
            return self.add("Transpose", self.add("Reshape", self.linear(x, WIDTH, WIDTH), split), perm=order)

        queries, keys, values = heads([0, 2, 1, 3]), heads([0, 2, 3, 1]), heads([0, 2, 1, 3])
        scores = self.add("Div", self.add("MatMul", queries, keys), self.constant(np.float32(size**0.5)))
        mixed = self.add("MatMul", self.add("Softmax", scores, axis=-1), values)
        return self.linear(self.add("Reshape", self.add("Transpose", mixed, perm=[0, 2, 1, 3]), joined), WIDTH, WIDTH)

    def model(  # noqa: PLR0917  in the order of the ONNX file
        self, input_name: str, kind: int, shape: list[int], computed: str, output: str, output_shape: list[int]
    ) -> ModelProto:
        self._nodes.append(helper.make_node("Identity", [computed], [output]))
        graph = helper.make_graph(
            self._nodes,
            "benchmark",
            [helper.make_tensor_value_info(input_name, kind, ["n", *shape])],
            [helper.make_tensor_value_info(output, TensorProto.FLOAT, ["n", *output_shape])],
            self._constants,
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        checker.check_model(model, full_check=True)
        return model
