"""The node tests of ONNX itself. Each case has a model of one or two nodes, inputs, and expected outputs.

`bare` runs a case with bare ONNX Runtime, without gpufn. A case that passes there has to pass on gpufn.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import math
import pkgutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, compose, helper, numpy_helper
from onnx.backend.test.case import node as node_tests
from onnx.backend.test.loader import load_model_tests
from onnx.backend.test.runner import Runner

from gpufn_builder.onnx_model.tensors import datatype_of

_SILENT = 4
_NEWEST_IR = 13  # newest version that this ONNX Runtime supports; models of version 14 in the suite use no new feature
Tensors = Mapping[str, Any]  # by name: an array, a list for a sequence, None for an absent optional


@dataclass(frozen=True)
class Case:
    name: str
    model: ModelProto
    inputs: Tensors
    outputs: Tensors
    rtol: float
    atol: float

    @property
    def is_of_tensors(self) -> bool:
        """Return whether the protocol can represent all inputs and outputs: tensors with datatypes that it names."""
        values = (*self.inputs.values(), *self.outputs.values())
        return all(isinstance(value, np.ndarray) and _datatype(value) is not None for value in values)

    def check(self, outputs: Sequence[Any]) -> None:
        """Raise ONNX's AssertionError for outputs that are not close enough."""
        Runner.assert_similar_outputs(list(self.outputs.values()), outputs, self.rtol, self.atol)


@functools.cache
def cases() -> dict[str, Case]:
    """Return all cases by name. They are the same in each process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the suite overflows and divides by zero on purpose
        found = {test.name: _case(test) for test in load_model_tests(kind="node")}
    return dict(sorted(found.items()))


@functools.cache
def cases_without_pools() -> dict[str, Case]:
    """Return the cases that are made in a second. Loops in Python compute the outputs of the others for four more."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in pkgutil.walk_packages(node_tests.__path__, f"{node_tests.__name__}."):
            if not module.name.endswith("pool"):
                importlib.import_module(module.name)
        return {test.name: _case(test) for test in node_tests._NodeTestCases}


def one_of_each_kind() -> list[Case]:
    """Return cases that together have each set of operators, and each set of types of inputs and outputs.

    Combinations of these, and attributes of operators, change what ONNX Runtime computes, but not what gpufn does.
    """
    seen: set[object] = set()
    found = []
    for case in cases().values():
        parts = {_operators(case), _types(case)}
        if not parts <= seen:
            seen |= parts
            found.append(case)
    return found


def joined(cases: Sequence[Case]) -> Case:
    """Return one case that computes all of these, which use the same operators' versions and tolerances.

    The names of its values begin with the names of their cases.
    """
    first = cases[0]
    if len(cases) == 1:
        return first
    model = ModelProto()
    model.CopyFrom(first.model)
    graph = GraphProto()
    inputs: dict[str, Any] = {}
    outputs: dict[str, Any] = {}
    for case in cases:
        assert (case.rtol, case.atol, _versions(case)) == (first.rtol, first.atol, _versions(first)), case.name
        prefix = f"{case.name}."
        graph.MergeFrom(compose.add_prefix_graph(case.model.graph, prefix))
        inputs |= {prefix + name: value for name, value in case.inputs.items()}
        outputs |= {prefix + name: value for name, value in case.outputs.items()}
    graph.name = "joined"
    model.graph.CopyFrom(graph)
    return replace(first, model=model, inputs=inputs, outputs=outputs)


def _versions(case: Case) -> object:
    return {(operators.domain, operators.version) for operators in case.model.opset_import}


def passes_bare(case: Case) -> bool:
    """Return whether bare ONNX Runtime passes the case."""
    try:
        bare(case)
    except Exception:
        return False
    return True


def bare(case: Case) -> None:
    """Run the case with bare ONNX Runtime. Raises its errors, and AssertionError as `Case.check` does."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = _SILENT
    session = onnxruntime.InferenceSession(case.model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = list(case.outputs)
    if all(_is_plain(value) for value in (*case.inputs.values(), *case.outputs.values())):
        case.check(session.run(names, dict(case.inputs)))
        return
    values = {name: _ort_value(array) for name, array in case.inputs.items()}
    case.check([_array(value) for value in session.run_with_ort_values(names, values)])


def write(case: Case, folder: Path) -> tuple[Path, Path | None]:
    """Write the files of a user: the model, and its inputs as one sample if a file can represent them."""
    folder.mkdir(parents=True, exist_ok=True)
    model, samples = folder / f"{case.name}.onnx", folder / f"{case.name}.npz"
    model.write_bytes(case.model.SerializeToString())
    if not (case.inputs and case.is_of_tensors):
        return model, None
    np.savez(samples, **{name: _stacked(value) for name, value in case.inputs.items()})
    return model, samples


def max_batch(case: Case) -> int:
    """Return a `max_batch` that admits the inputs with a dynamic first dimension."""
    rows = [
        case.inputs[value.name].shape[0]
        for value in case.model.graph.input
        if (dims := value.type.tensor_type.shape.dim)
        and not dims[0].HasField("dim_value")
        and value.name in case.inputs
    ]
    return int(max(rows, default=1)) or 1


def _operators(case: Case) -> object:
    return frozenset((node.domain, node.op_type) for node in _nodes(case.model.graph))


def _types(case: Case) -> object:
    return tuple(tuple(map(_kind_of_value, side.values())) for side in (case.inputs, case.outputs))


def _kind_of_value(value: Any) -> object:
    if not isinstance(value, np.ndarray):
        return type(value)
    return value.dtype.name, value.ndim == 0, value.size == 0


def _nodes(graph: GraphProto) -> Iterator[NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            yield from _nodes(attribute.g)


def _stacked(value: Any) -> Any:
    """Return the value as one sample, along a new first axis."""
    array = np.asarray(value)[None]
    return array.astype(np.str_) if array.dtype == np.object_ else array


def _case(test: Any) -> Case:
    model = test.model
    model.ir_version = min(model.ir_version, _NEWEST_IR)
    [(inputs, outputs)] = test.data_sets
    return Case(
        test.name, model, _named(model.graph.input, inputs), _named(model.graph.output, outputs), test.rtol, test.atol
    )


def _named(values: Sequence[Any], data: Sequence[Any]) -> Tensors:
    return {value.name: _plain(each) for value, each in zip(values, data, strict=False)}


def _plain(value: Any) -> Any:
    if isinstance(value, TensorProto):
        return numpy_helper.to_array(value)
    return value if isinstance(value, list) or value is None else np.asarray(value)


def _is_plain(value: Any) -> bool:
    """Return whether `InferenceSession.run` accepts and returns the value. Types such as BF16 need OrtValues."""
    return not isinstance(value, np.ndarray) or _is_numpys(value.dtype)


def _datatype(array: np.ndarray[Any, Any]) -> str | None:
    return datatype_of(helper.np_dtype_to_tensor_dtype(array.dtype))


def _is_numpys(dtype: np.dtype[Any]) -> bool:
    return dtype.isbuiltin == 1


def _ort_value(array: Any) -> Any:
    element = helper.np_dtype_to_tensor_dtype(array.dtype)
    if _is_plain(array):
        return onnxruntime.OrtValue.ortvalue_from_numpy(array)
    bits = np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}").reshape(array.shape)
    return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, element)


def _array(value: Any) -> Any:
    dtype = helper.tensor_dtype_to_np_dtype(value.element_type())
    if _is_numpys(dtype):
        return value.numpy()
    shape = tuple(value.shape())
    return np.frombuffer(ctypes.string_at(value.data_ptr(), dtype.itemsize * math.prod(shape)), dtype).reshape(shape)
