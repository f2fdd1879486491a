"""Write encoder.onnx and index.onnx, which together find a name despite typing errors.

    encoder   trigrams  INT64 [n, 32], rows of a table, 0 for none  →  vector  FP32 [n, 256], of length 1
    index     vector    FP32 [n, 256]  →  scores  FP32 [n, 3] and places  INT64 [n, 3], best first

The models are not trained: a word is the sum of a random vector for each of its trigrams, so words that share many
trigrams are close. A trained encoder would fit together with the index in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, checker, helper, numpy_helper

from words import CITIES, LONGEST, ROWS, trigrams

HERE = Path(__file__).parent
_WIDTH = 256
_BEST = 3

Tensors = dict[str, tuple[str, list[int]]]  # name -> datatype, and the shape of a row


def encoder() -> ModelProto:
    nodes = [
        helper.make_node("Gather", ["table", "trigrams"], ["each"]),
        helper.make_node("ReduceSum", ["each", "axis"], ["sum"], keepdims=0),
        helper.make_node("LpNormalization", ["sum"], ["vector"], axis=1, p=2),
    ]
    constants = {"table": _table(), "axis": np.array([1], np.int64)}
    return _model("encoder", nodes, {"trigrams": ("INT64", [LONGEST])}, {"vector": ("FLOAT", [_WIDTH])}, constants)


def index() -> ModelProto:
    """Return the index, which holds the vector of every city: a search is one matrix product."""
    vectors = _table()[np.array([trigrams(city) for city in CITIES])].sum(1)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    nodes = [
        helper.make_node("MatMul", ["vector", "cities"], ["likeness"]),
        helper.make_node("TopK", ["likeness", "best"], ["scores", "places"]),
    ]
    constants = {"cities": np.ascontiguousarray(vectors.T), "best": np.array([_BEST], np.int64)}
    outputs = {"scores": ("FLOAT", [_BEST]), "places": ("INT64", [_BEST])}
    return _model("index", nodes, {"vector": ("FLOAT", [_WIDTH])}, outputs, constants)


def _table() -> Any:
    table = np.random.default_rng(0).normal(size=(ROWS, _WIDTH)).astype(np.float32)
    table[0] = 0  # padding adds nothing
    return table


def _model(name: str, nodes: Sequence[NodeProto], inputs: Tensors, outputs: Tensors, constants: Any) -> ModelProto:
    """Return a model whose inputs and outputs have a row per word, with a free number of rows."""
    tensors = [
        [helper.make_tensor_value_info(key, getattr(TensorProto, kind), ["n", *shape]) for key, (kind, shape) in each]
        for each in (inputs.items(), outputs.items())
    ]
    weights = [numpy_helper.from_array(value, key) for key, value in constants.items()]
    graph = helper.make_graph(nodes, name, tensors[0], tensors[1], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    checker.check_model(model, full_check=True)
    return model


if __name__ == "__main__":
    for model in (encoder(), index()):
        path = HERE / f"{model.graph.name}.onnx"
        path.write_bytes(model.SerializeToString())
        print(f"wrote {path.name}, {path.stat().st_size:,} bytes")
