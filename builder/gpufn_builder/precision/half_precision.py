"""Conversion of a graph to half precision: FP16 or BF16 where it is useful, float32 elsewhere, with casts in between.

TensorRT computes in the types of the graph, so precision is a rewrite of the graph. Each float32 value keeps its name;
its half-precision version has a separate name. Nodes are processed in order:

    1. A node is lowered if its operator supports half precision and is not in `_KEPT`.
    2. Arithmetic whose inputs are all float32 is kept: lowering starts at matrix products.
    3. A constant that half precision cannot represent keeps its nodes in float32; nothing is clipped.
    4. Layers that the caller names are kept: half precision is too coarse for them.
    5. Bodies of If, Loop and Scan, and the model's inputs and outputs, are kept.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from gpufn_builder.onnx_model.graph_names import (
    all_names,
    element_types,
    names_used_in,
    referenced_names,
    replace_items,
    subgraphs,
)
from gpufn_builder.onnx_model.ingest import main_opset
from gpufn_builder.onnx_model.tensors import BF16, Array

_NAMES: Final[dict[int, str]] = {TensorProto.FLOAT16: "fp16", TensorProto.BFLOAT16: "bf16"}
_DTYPES: Final[dict[int, np.dtype[Any]]] = {TensorProto.FLOAT16: np.dtype(np.float16), TensorProto.BFLOAT16: BF16}
# Operators that benefit from half precision.
_PRODUCTS: Final = frozenset(
    {"Attention", "Conv", "ConvTranspose", "DeformConv", "Einsum", "GRU", "Gemm", "LSTM", "MatMul", "RNN"}
)
# Sums, powers and exponentials overflow half precision where their results do not. Indices, ranges and random numbers
# need every bit. The others produce or change types themselves.
_KEPT: Final = frozenset(
    {
        "CumProd", "CumSum", "Exp", "LpNormalization", "MeanVarianceNormalization", "Pow", "ReduceL1", "ReduceL2",
        "ReduceLogSum", "ReduceLogSumExp", "ReduceMean", "ReduceProd", "ReduceSum", "ReduceSumSquare",
        "ArgMax", "ArgMin", "Bernoulli", "Dropout", "Multinomial", "NonMaxSuppression", "OneHot", "RandomNormalLike",
        "RandomUniformLike", "Range", "RoiAlign", "TopK", "Unique",
        "Cast", "CastLike", "Constant", "DequantizeLinear", "DynamicQuantizeLinear", "EyeLike", "QuantizeLinear",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Lowered:
    """`nodes` nodes were lowered. `products` are the products that start lowering, by their first output. `values` are
    outputs of lowered nodes, with their names in half precision. `too_large` are constants that half precision cannot
    represent."""

    model: ModelProto
    nodes: int
    products: tuple[str, ...]
    values: dict[str, str]
    too_large: tuple[str, ...]


def lower(model: ModelProto, half: int, *, keep: Collection[str] = (), emulate: bool = False) -> Lowered:
    """Lower `model` to the element type `half`. Its values must have types and its constants must be loaded. Nodes
    whose first output is in `keep` stay in float32.

    With `emulate`, lowered nodes compute in float32 and their results are rounded, for runtimes that lack operators in
    `half`.
    """
    return _Lowering(model, half, keep, emulate).result()


class _Lowering:
    def __init__(self, model: ModelProto, half: int, keep: Collection[str], emulate: bool) -> None:
        self._model = ModelProto()
        self._model.CopyFrom(model)
        self._half = half
        self._keep = keep
        self._emulate = emulate
        self._graph = self._model.graph
        _constants_to_initialisers(self._graph)
        self._opset = main_opset(model)
        self._types = element_types(self._graph)
        self._constants = {tensor.name: tensor for tensor in self._graph.initializer}
        self._fills = {node.output[0]: _floats(node) for node in self._graph.node if node.op_type == "ConstantOfShape"}
        self._names = all_names(self._graph)
        self._nodes: list[NodeProto] = []
        self._float: set[str] = {value.name for value in self._graph.input} | set(self._constants)
        self._halves: dict[str, str] = {}  # value → name of its half-precision version
        self._made_half: set[str] = set()  # outputs of lowered nodes
        self._floats_of_halves: dict[str, str] = {}  # used only for emulation
        self._lowered = 0
        self._products: list[str] = []
        self._too_large: dict[str, None] = {}

    def result(self) -> Lowered:
        for node in self._graph.node:
            if roles := self._lowerable(node):
                self._add_lowered(node, roles)
            else:
                self._add_kept(node)
        for output in self._graph.output:
            self._as_float(output.name)
        self._finish()
        values = {value: self._halves[value] for value in self._made_half}
        return Lowered(self._model, self._lowered, tuple(self._products), values, tuple(self._too_large))

    def _lowerable(self, node: NodeProto) -> tuple[set[int], set[int]] | None:
        """Return the positions of the inputs and outputs of `node` that become half precision; None to keep the
        node."""
        if node.domain not in ("", "ai.onnx") or node.op_type in _KEPT or any(subgraphs(node)):
            return None
        if node.output[0] in self._keep:
            return None
        if any(name and name not in self._types for name in (*node.input, *node.output)):
            return None
        schema = onnx.defs.get_schema(node.op_type, self._opset)
        supported = {
            constraint.type_param_str
            for constraint in schema.type_constraints
            if f"tensor({_DTYPES[self._half]})" in constraint.allowed_type_strs
        }
        inputs = {
            i for i, name in enumerate(node.input) if self._is_float(name) and _role(schema.inputs, i) in supported
        }
        roles = {_role(schema.inputs, i) for i in inputs}
        outputs = {i for i, name in enumerate(node.output) if self._is_float(name)}
        if not inputs or any(_role(schema.outputs, i) not in roles for i in outputs):
            return None
        if self._stays_in_float(node, inputs) or not all(self._fits(node.input[i]) for i in inputs):
            return None
        return inputs, outputs

    def _is_float(self, name: str) -> bool:
        return bool(name) and self._types.get(name) == TensorProto.FLOAT

    def _stays_in_float(self, node: NodeProto, inputs: set[int]) -> bool:
        values = [node.input[i] for i in inputs if node.input[i] not in self._constants]
        return bool(values) and node.op_type not in _PRODUCTS and not self._made_half.intersection(values)

    def _fits(self, name: str) -> bool:
        """Return whether half precision can represent a constant: no new infinities, and not all of its nonzero values
        become zero."""
        tensor = self._constants.get(name) or self._fills.get(name)
        if tensor is None:
            return True
        exact = numpy_helper.to_array(tensor)
        rounded = self._rounded(exact)
        if np.array_equal(np.isinf(exact), np.isinf(rounded)) and (bool(np.any(rounded)) or not np.any(exact)):
            return True
        self._too_large[name] = None
        return False

    def _rounded(self, exact: Array) -> Array:
        with np.errstate(over="ignore", under="ignore"):
            return exact.astype(_DTYPES[self._half])

    def _add_lowered(self, node: NodeProto, roles: tuple[set[int], set[int]]) -> None:
        inputs, outputs = roles
        copy = NodeProto()
        copy.CopyFrom(node)
        for i, name in enumerate(node.input):
            if i in inputs:
                copy.input[i] = self._float_of_half(self._as_half(name)) if self._emulate else self._as_half(name)
            elif name:
                self._as_float(name)
        rounded = []
        for i in outputs:
            half = self._halves[node.output[i]] = self._name(node.output[i], _NAMES[self._half])
            self._made_half.add(node.output[i])
            copy.output[i] = half
            if self._emulate:
                copy.output[i] = self._name(half, "exact")
                rounded.append(self._cast(copy.output[i], half, self._half))
        self._nodes += [copy, *rounded]
        self._float.update(name for i, name in enumerate(node.output) if i not in outputs)
        self._lowered += 1
        if node.op_type in _PRODUCTS:
            self._products.append(node.output[0])

    def _add_kept(self, node: NodeProto) -> None:
        for name in referenced_names(node):
            self._as_float(name)
        self._nodes.append(node)
        self._float.update(node.output)

    def _as_float(self, name: str) -> None:
        if name in self._halves and name not in self._float:
            self._nodes.append(self._cast(self._halves[name], name, TensorProto.FLOAT))
            self._float.add(name)

    def _as_half(self, name: str) -> str:
        if name not in self._halves:
            half = self._halves[name] = self._name(name, _NAMES[self._half])
            if name in self._constants:
                rounded = self._rounded(numpy_helper.to_array(self._constants[name]))
                self._graph.initializer.append(
                    helper.make_tensor(half, self._half, rounded.shape, rounded.tobytes(), raw=True)
                )
            else:
                self._nodes.append(self._cast(name, half, self._half))
        return self._halves[name]

    def _float_of_half(self, half: str) -> str:
        if half not in self._floats_of_halves:
            self._floats_of_halves[half] = self._name(half, "rounded")
            self._nodes.append(self._cast(half, self._floats_of_halves[half], TensorProto.FLOAT))
        return self._floats_of_halves[half]

    def _cast(self, name: str, into: str, to: int) -> NodeProto:
        return helper.make_node("Cast", [name], [into], name=f"{into}.cast", to=to)

    def _name(self, name: str, suffix: str) -> str:
        unique = f"{name}.{suffix}"
        while unique in self._names:
            unique += "_"
        self._names.add(unique)
        return unique

    def _finish(self) -> None:
        """Replace the nodes, and remove constants and types of values that are no longer used."""
        replace_items(self._graph.node, self._nodes)
        used = {value.name for value in self._graph.output} | set(names_used_in(self._graph))
        for fields in (self._graph.initializer, self._graph.value_info):
            replace_items(fields, [field for field in fields if field.name in used])


def _constants_to_initialisers(graph: GraphProto) -> None:
    """Turn float constants into initializers, so that they are rounded once instead of cast in each run."""
    kept = []
    for node in graph.node:
        tensor = _floats(node) if node.op_type == "Constant" else None
        if tensor is not None:
            graph.initializer.append(tensor)
            graph.initializer[-1].name = node.output[0]
        else:
            kept.append(node)
    replace_items(graph.node, kept)


def _floats(node: NodeProto) -> TensorProto | None:
    """Return the value of a Constant or ConstantOfShape if it is float32, from any of its attributes."""
    for attribute in node.attribute:
        if attribute.name == "value" and attribute.t.data_type == TensorProto.FLOAT:
            tensor: TensorProto = attribute.t
            return tensor
        if attribute.name == "value_float":
            return numpy_helper.from_array(np.array(attribute.f, np.float32))
        if attribute.name == "value_floats":
            return numpy_helper.from_array(np.array(attribute.floats, np.float32))
    return None


def _role(formals: Any, position: int) -> str:
    """Return the type variable of a position; the last formal may be variadic."""
    return str(formals[min(position, len(formals) - 1)].type_str)
