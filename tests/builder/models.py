"""Small ONNX models of the kinds that users deploy, and folders with their files."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from gpufn_core.spec.model_spec import ModelFile, ModelSpec

OPSET = 20
Dims = Sequence[int | str | None] | None


def value(name: str, dims: Dims, element: int = TensorProto.FLOAT) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, element, dims)


def weights(name: str, *shape: int, scale: float | None = None) -> TensorProto:
    """Reproducible weights, scaled so that activations stay near 1."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
    fan_in = int(np.prod(shape[1:])) if len(shape) > 2 else shape[0]
    drawn = np.random.default_rng(seed).standard_normal(shape) * (scale or fan_in**-0.5)
    return numpy_helper.from_array(drawn.astype(np.float32), name)


def constant(name: str, content: Any, dtype: Any = np.float32) -> TensorProto:
    return numpy_helper.from_array(np.array(content, dtype), name)


def node(op: str, inputs: str, outputs: str, **attributes: Any) -> NodeProto:
    """Make a node. Names are separated by spaces; the node has the name of its first output."""
    made = outputs.split()
    return helper.make_node(op, inputs.split(), made, name=f"{made[0]}_node", **attributes)


def model(
    nodes: Sequence[NodeProto],
    inputs: Sequence[ValueInfoProto],
    outputs: Sequence[ValueInfoProto],
    constants: Sequence[TensorProto] = (),
    *,
    opset: int = OPSET,
    **more: Any,
) -> ModelProto:
    graph = helper.make_graph(list(nodes), "graph", list(inputs), list(outputs), list(constants))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10, **more)


def mlp(batch: int | str | None = "N", element: int = TensorProto.FLOAT) -> ModelProto:
    dtype = helper.tensor_dtype_to_np_dtype(element)
    constants = [weights("w1", 8, 16), weights("b1", 16), weights("w2", 16, 4)]
    return model(
        [node("MatMul", "x w1", "h"), node("Add", "h b1", "hb"), node("Relu", "hb", "r"), node("MatMul", "r w2", "y")],
        [value("x", [batch, 8], element)],
        [value("y", [batch, 4], element)],
        [numpy_helper.from_array(numpy_helper.to_array(each).astype(dtype), each.name) for each in constants],
    )


def cnn() -> ModelProto:
    return model(
        [
            node("Conv", "image k1", "c1", pads=[1, 1, 1, 1]),
            node("Relu", "c1", "r1"),
            node("Conv", "r1 k2", "c2", pads=[1, 1, 1, 1]),
            node("Add", "c2 r1", "sum"),
            node("GlobalAveragePool", "sum", "pool"),
            node("Flatten", "pool", "flat"),
            node("Gemm", "flat w b", "logits"),
            node("Softmax", "logits", "scores", axis=-1),
        ],
        [value("image", ["N", 3, 8, 8])],
        [value("scores", ["N", 5])],
        [weights("k1", 4, 3, 3, 3), weights("k2", 4, 4, 3, 3), weights("w", 4, 5), weights("b", 5)],
    )


def amplified_rounding() -> ModelProto:
    """A difference of large, almost equal terms. The optimizer multiplies the scale into the convolution, which changes
    the rounding of the terms by more than fp32's tolerance of the difference."""
    return model(
        [
            node("Conv", "x k", "c", pads=[1, 1, 1, 1]),
            node("BatchNormalization", "c scale bias mean variance", "n"),
            node("Slice", "n first second channel", "one"),
            node("Slice", "n second third channel", "other"),
            node("Sub", "one other", "y"),
        ],
        [value("x", [1, 3, 16, 16])],
        [value("y", [1, 1, 16, 16])],
        [
            constant("k", np.repeat(numpy_helper.to_array(weights("k", 1, 3, 3, 3)), 2, 0)),
            constant("scale", [1e4, 1.0001e4]), constant("bias", [0.1, 0.2]), constant("mean", [0.3, 0.3]),
            constant("variance", [2.0, 2.0]), constant("first", [0], np.int64), constant("second", [1], np.int64),
            constant("third", [2], np.int64), constant("channel", [1], np.int64),
        ],
    )  # fmt: skip


def overflowing() -> ModelProto:
    """Products of which `large` exceeds the largest number of fp16, and `y` takes it back into its range."""
    return model(
        [
            node("MatMul", "x w", "h"),
            node("Relu", "h", "r"),
            node("MatMul", "r up", "large"),
            node("MatMul", "large down", "y"),
        ],
        [value("x", ["N", 8])],
        [value("y", ["N", 8])],
        [weights("w", 8, 8, scale=2.0), weights("up", 8, 8, scale=1e4), weights("down", 8, 8, scale=1e-3)],
    )


def outlier() -> ModelProto:
    """A model whose input has one large feature, which the weights of `h` ignore. Int8 has no steps for the others."""
    w = numpy_helper.to_array(weights("w", 8, 8)).copy()
    w[0] = 0.0
    return model(
        [
            node("Mul", "x sizes", "scaled"),
            node("MatMul", "scaled w", "h"),
            node("Relu", "h", "r"),
            node("MatMul", "r v", "y"),
        ],
        [value("x", ["N", 8])],
        [value("y", ["N", 8])],
        [constant("sizes", [1e4, *[1.0] * 7]), constant("w", w), weights("v", 8, 8)],
    )


def noisy() -> ModelProto:
    """An input plus random numbers without a seed."""
    return model(
        [node("RandomNormalLike", "x", "noise"), node("Add", "x noise", "y")], [value("x", [8])], [value("y", [8])]
    )


def faint_scores() -> ModelProto:
    """Probabilities that are almost zero, as a detector returns for an image without objects."""
    return model(
        [
            node("Conv", "x k", "c", pads=[1, 1, 1, 1]),
            node("BatchNormalization", "c scale bias mean variance", "n"),
            node("Sigmoid", "n", "y"),
        ],
        [value("x", [1, 3, 16, 16])],
        [value("y", [1, 1, 16, 16])],
        [
            weights("k", 1, 3, 3, 3), constant("scale", [1.3]), constant("bias", [-14.0]),
            constant("mean", [0.3]), constant("variance", [2.0]),
        ],
    )  # fmt: skip


def encoder() -> ModelProto:
    """An encoder with one head: from tokens and a mask of dynamic length, with the usual -3.4e38, to an embedding."""
    d = 8
    return model(
        [
            node("Gather", "table tokens", "e"),
            node("MatMul", "e wq", "q"),
            node("MatMul", "e wk", "k"),
            node("MatMul", "e wv", "v"),
            node("Transpose", "k", "kt", perm=[0, 2, 1]),
            node("MatMul", "q kt", "qk"),
            node("Mul", "qk scale", "s"),
            node("Cast", "mask", "m", to=TensorProto.FLOAT),
            node("Sub", "one m", "inverse"),
            node("Mul", "inverse lowest", "bias"),
            node("Unsqueeze", "bias axis1", "bias3"),
            node("Add", "s bias3", "masked"),
            node("Softmax", "masked", "p", axis=-1),
            node("MatMul", "p v", "a"),
            node("Add", "a e", "res"),
            node("ReduceMean", "res last", "mu", keepdims=1),
            node("Sub", "res mu", "centred"),
            node("Pow", "centred two", "squared"),
            node("ReduceMean", "squared last", "variance", keepdims=1),
            node("Add", "variance epsilon", "safe"),
            node("Sqrt", "safe", "deviation"),
            node("Div", "centred deviation", "normal"),
            node("ReduceMean", "normal axis1", "embedding", keepdims=0),
        ],
        [
            value("tokens", ["N", "length"], TensorProto.INT64),
            value("mask", ["N", "length"], TensorProto.INT64),
        ],
        [value("embedding", ["N", d])],
        [
            weights("table", 32, d, scale=1.0), weights("wq", d, d), weights("wk", d, d), weights("wv", d, d),
            constant("scale", d**-0.5), constant("one", 1.0), constant("lowest", np.finfo(np.float32).min),
            constant("two", 2.0), constant("epsilon", 1e-12),
            constant("axis1", [1], np.int64), constant("last", [-1], np.int64),
        ],
    )  # fmt: skip


def texts() -> ModelProto:
    return model(
        [node("StringConcat", "left right", "joined")],
        [value("left", ["N"], TensorProto.STRING), value("right", ["N"], TensorProto.STRING)],
        [value("joined", ["N"], TensorProto.STRING)],
    )


def branching() -> ModelProto:
    """An If whose branches use a value of the outer graph and a constant of their own."""
    branches = {
        name: helper.make_graph(
            [node(op, f"h {name}_w", f"{name}_y")], name, [], [value(f"{name}_y", None)], [weights(f"{name}_w", 4, 4)]
        )
        for name, op in (("then_branch", "MatMul"), ("else_branch", "Add"))
    }
    return model(
        [
            node("MatMul", "x w", "h"),
            node("ReduceSum", "h", "total", keepdims=0),
            node("Greater", "total zero", "positive"),
            node("If", "positive", "y", **branches),
        ],
        [value("x", [4, 4])],
        [value("y", [4, 4])],
        [weights("w", 4, 4), constant("zero", 0.0)],
    )


def several_outputs() -> ModelProto:
    return model(
        [
            node("MatMul", "x w", "logits"),
            node("ArgMax", "logits", "label", axis=-1, keepdims=0),
            node("Greater", "logits zero", "above"),
        ],
        [value("x", ["N", 4])],
        [
            value("logits", ["N", 3]),
            value("label", ["N"], TensorProto.INT64),
            value("above", ["N", 3], TensorProto.BOOL),
        ],
        [weights("w", 4, 3), constant("zero", 0.0)],
    )


def products_of_integers() -> ModelProto:
    """A sum of sixteen products 255 * 127, which overflows 16 bits."""
    return model(
        [node("MatMulInteger", "x w", "y")],
        [value("x", ["N", 16], TensorProto.UINT8)],
        [value("y", ["N", 4], TensorProto.INT32)],
        [constant("w", np.full((16, 4), 127), np.int8)],
    )


def weights_of_few_bits(element: int, block_size: int = 0) -> ModelProto:
    """Floats times integers with a scale for each channel, or for each block of one. The zero point, 0, is omitted,
    which ONNX allows."""
    limits = 8 if element == TensorProto.INT4 else 128
    drawn = np.random.default_rng(0).integers(-limits, limits, 64 * 8)
    how = {"axis": 0, "block_size": block_size} if block_size else {"axis": 1}
    return model(
        [node("DequantizeLinear", "integers scales", "w", **how), node("MatMul", "x w", "y")],
        [value("x", ["N", 64])],
        [value("y", ["N", 8])],
        [
            helper.make_tensor("integers", element, [64, 8], drawn.tolist()),
            weights("scales", 64 // block_size, 8) if block_size else weights("scales", 8, scale=1.0),
        ],
        opset=21,
    )


def integers_in_branches(*, own: bool) -> ModelProto:
    """Like `weights_of_few_bits`, in the branches of an If, whose values have the same names. The weights are the
    branches' `own`, or in the outer graph."""
    drawn = np.random.default_rng(0).integers(-128, 128, (2, 64, 8))
    constants = [
        [constant(f"integers{index}", each, np.int8), weights(f"scales{index}", 8, scale=0.02)]
        for index, each in enumerate(drawn)
    ]
    then_branch, else_branch = (
        helper.make_graph(
            [
                node("DequantizeLinear", f"integers{index} scales{index}", "w", axis=1),
                node("MatMul", "x w", "product"),
            ],
            "branch",
            [],
            [value("product", None)],
            constants[index] if own else [],
        )
        for index in range(2)
    )
    return model(
        [
            node("ReduceMax", "x", "largest", keepdims=0),
            node("Greater", "largest zero", "positive"),
            node("If", "positive", "y", then_branch=then_branch, else_branch=else_branch),
        ],
        [value("x", ["N", 64])],
        [value("y", ["N", 8])],
        [constant("zero", 0.0), *([] if own else [*constants[0], *constants[1]])],
        opset=21,
    )


def fused() -> ModelProto:
    """A model as written by ONNX Runtime's tools, with one of its own operators."""
    proto = model(
        [node("MatMul", "x w", "h"), node("Gelu", "h", "g", domain="com.microsoft"), node("MatMul", "g v", "y")],
        [value("x", ["N", 8])],
        [value("y", ["N", 4])],
        [weights("w", 8, 8), weights("v", 8, 4)],
    )
    proto.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return proto


def over_rows() -> ModelProto:
    """A model whose rows depend on each other: its dynamic first dimension cannot be batched."""
    return model(
        [node("ReduceMean", "x axis", "mean", keepdims=1), node("Sub", "x mean", "y")],
        [value("x", ["N", 4])],
        [value("y", ["N", 4])],
        [constant("axis", [0], np.int64)],
    )


def externalise(proto: ModelProto, folder: Path, location: str = "weights.bin") -> None:
    """Move the constants of `proto` to a file in `folder`."""
    data = bytearray()
    for tensor in proto.graph.initializer:
        content = numpy_helper.to_array(tensor).tobytes()
        refer(tensor, location, offset=len(data), length=len(content))
        data += content
    (folder / location).write_bytes(data)


def refer(tensor: TensorProto, location: str, **more: int | str) -> None:
    """Make `tensor` refer to external data at `location`."""
    tensor.ClearField("raw_data")
    tensor.ClearField("external_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, content in {"location": location, **more}.items():
        tensor.external_data.add(key=key, value=str(content))


def put(proto: ModelProto | bytes, folder: Path) -> None:
    """Write the model as `model.onnx`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.onnx").write_bytes(proto if isinstance(proto, bytes) else proto.SerializeToString())


def spec_of(folder: Path, **options: Any) -> ModelSpec:
    """Return a ModelSpec of the files in `folder`, `model.onnx` first."""
    names = sorted((path.name for path in folder.iterdir() if path.is_file()), key=lambda name: name != "model.onnx")
    return ModelSpec(
        parameter="model",
        files=tuple(
            ModelFile(name, hashlib.sha256((folder / name).read_bytes()).hexdigest(), (folder / name).stat().st_size)
            for name in names
        ),
        **options,
    )
