"""Normalization of an ingested model: validated, without functions, with inferred shapes, in a new file.

1. Remove the parts that only concern other programs: training information, functions, unused opsets.
2. Set a version of the file format that the runtime supports, and seeds of random numbers. Add zero points that the
   runtime handles wrongly when they are omitted, and sort the nodes.
3. Run the checker and shape inference.
4. Write the model beside a copy of its external data.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
import onnx
from google.protobuf.message import EncodeError
from onnx import (
    GraphProto,
    ModelProto,
    TensorProto,
    TypeProto,
    ValueInfoProto,
    checker,
    inliner,
    numpy_helper,
    shape_inference,
    version_converter,
)

from gpufn_builder.onnx_model import ort_capabilities, random_numbers
from gpufn_builder.onnx_model.graph_names import replace_items
from gpufn_builder.onnx_model.index_limits import index_limits
from gpufn_builder.onnx_model.ingest import SourceModel, all_nodes, canonical_domain, used_domains
from gpufn_builder.onnx_model.tensors import datatype_of
from gpufn_builder.onnx_model.topological_order import sort_nodes
from gpufn_builder.precision.int8_weights import make_constants_explicit
from gpufn_core.domain.devices.engine import BuildStage
from gpufn_core.errors import BuildFailed
from gpufn_core.spec.model_spec import Precision, TensorSpec

_STAGE: Final = BuildStage.NORMALISE
_NAME: Final = "model.onnx"
_FIRST_IR_WITH_CONSTANTS: Final = 4  # before, each initializer had to be an input as well
_MAX_DEFAULT_ELEMENTS: Final = 1024  # of an overridable input; a larger one is a weight
_MAX_PARAMETER_ELEMENTS: Final = 16  # if all initializers are inputs, a larger one shows that they are weights
_HALVES: Final = ((TensorProto.BFLOAT16, Precision.BF16), (TensorProto.FLOAT16, Precision.FP16))
_SIXTEEN_BITS: Final = (TensorProto.INT16, TensorProto.UINT16)
_INTEGER_PRODUCTS: Final = frozenset(
    {
        "ConvInteger", "MatMulInteger", "QLinearConv", "QLinearMatMul",
        "DynamicQuantizeLSTM", "DynamicQuantizeMatMul", "MatMulIntegerToFloat", "QAttention", "QGemm",
    }
)  # fmt: skip
_NODE: Final = re.compile(r"(?:node name: |Name: |node: \nname: )([^\s,)]+)")


@dataclass(frozen=True)
class NormalModel:
    """The model at `path`. `random_nodes` draw random numbers. An output whose rank is unknown has the shape ().

    `batched`: the first dimension of every input and output is dynamic, and may count rows because the inputs' first
    dimensions have the same name or none. `row_independence` finds out whether rows are independent.
    `arithmetic` is the coarsest arithmetic in the model's own types. `index_limits` are the limits of inputs
    that select from a table.
    """

    path: Path
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    batched: bool
    external: tuple[str, ...] = ()
    arithmetic: Precision = Precision.FP32
    has_integer_products: bool = False
    random_nodes: tuple[str, ...] = ()
    index_limits: Mapping[str, int] = field(default_factory=dict)


def normalise(source: SourceModel, into: Path, *, set_seeds: bool = True) -> NormalModel:
    """Normalize `source` in the folder `into`, which must differ from the source's. Modifies `source.proto`. With
    `set_seeds`, a node that draws random numbers gets a seed, so that its outputs can be compared with the reference.

    Raises BuildFailed(stage="normalise").
    """
    model = _without_functions(source.proto)
    model.ClearField("training_info")
    _drop_unused_opsets(model)
    _use_canonical_names(model.graph)
    defaults = _extract_defaults(model)
    _clear_negative_sizes(model.graph)
    if set_seeds:
        random_numbers.set_seeds(model)
    make_constants_explicit(model.graph)
    sort_nodes(model.graph)
    model.ir_version = min(max(model.ir_version, _FIRST_IR_WITH_CONSTANTS), ort_capabilities.newest_ir_version())
    for name in source.external:
        shutil.copyfile(source.folder / name, into / name)
    path = into / _free_name(source.external)
    _check(model, path)
    _infer(path)
    return _normal_model(onnx.load(path, load_external_data=False), path, source.external, defaults)


def _without_functions(proto: ModelProto) -> ModelProto:
    if not proto.functions:
        return proto
    try:
        return inliner.inline_local_functions(proto, convert_version=True)
    except (version_converter.ConvertError, RuntimeError) as error:
        raise BuildFailed(f"the model's functions cannot be inlined: {error}", stage=_STAGE) from error


def _drop_unused_opsets(model: ModelProto) -> None:
    used = used_domains(model) | {""}
    replace_items(model.opset_import, [opset for opset in model.opset_import if canonical_domain(opset.domain) in used])


def _use_canonical_names(graph: GraphProto) -> None:
    """Change names that the checker rejects and ONNX Runtime accepts."""
    graph.name = "graph"  # the name may be missing or invalid UTF-8
    for node in all_nodes(graph):
        node.domain = canonical_domain(node.domain)


def _extract_defaults(model: ModelProto) -> dict[str, bytes]:
    """Return the default values of inputs that a caller may override, and turn the other such inputs into constants.

    An input with an initializer is overridable, with two exceptions: before IR version 4 (old exporters), where each
    weight is also an input, and for large tensors, which are weights too. An overridable input loses its initializer
    here, because compilers would fold it into the graph.
    """
    graph = model.graph
    inputs = {value.name for value in graph.input}
    listed = [tensor for tensor in graph.initializer if tensor.name in inputs]
    all_listed = len(listed) == len(graph.initializer)
    are_weights = all_listed and any(math.prod(tensor.dims) > _MAX_PARAMETER_ELEMENTS for tensor in listed)
    defaults: dict[str, bytes] = {}
    if model.ir_version >= _FIRST_IR_WITH_CONSTANTS and not are_weights:
        defaults = {tensor.name: data for tensor in listed if (data := _default(tensor)) is not None}
    kept = [tensor for tensor in graph.initializer if tensor.name not in defaults]
    constants = {tensor.name for tensor in kept} | {tensor.values.name for tensor in graph.sparse_initializer}
    replace_items(graph.initializer, kept)
    replace_items(graph.input, [value for value in graph.input if value.name not in constants])
    return defaults


def _default(tensor: TensorProto) -> bytes | None:
    """Return the elements of a small numeric tensor, else None."""
    datatype = datatype_of(tensor.data_type)
    if tensor.data_location == TensorProto.EXTERNAL or datatype in (None, "BYTES"):
        return None
    if math.prod(tensor.dims) > _MAX_DEFAULT_ELEMENTS:
        return None
    try:
        return bytes(numpy_helper.to_array(tensor).tobytes())
    except ValueError:  # the checker reports the problem
        return None


def _clear_negative_sizes(graph: GraphProto) -> None:
    """Remove sizes of -1, which some converters write for a dynamic size and ONNX Runtime accepts."""
    for value in (*graph.input, *graph.value_info, *graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_value < 0:
                dim.ClearField("dim_value")


def _free_name(external: tuple[str, ...]) -> str:
    name = _NAME
    while name in external:
        name = f"_{name}"
    return name


def _write(model: ModelProto, path: Path) -> None:
    try:
        path.write_bytes(model.SerializeToString())
    except (EncodeError, ValueError) as error:
        message = "the model is larger than the limit of a protobuf: keep its weights as external data"
        raise BuildFailed(message, stage=_STAGE) from error


def _check(model: ModelProto, path: Path) -> None:
    """Write `model` to `path` if it is valid. The checker reads external data, so they must exist already. It requires
    a rank of each output, which ONNX Runtime does not: outputs without a rank are hidden from it."""
    outputs = list(model.graph.output)
    ranked = [value for value in outputs if _has_rank(value)]
    replace_items(model.graph.output, ranked)
    _write(model, path)
    try:
        checker.check_model(path)
    except (checker.ValidationError, ValueError) as error:  # ValueError: the model cannot be parsed
        raise _failed("the model is not valid ONNX", error) from error
    if len(ranked) < len(outputs):
        replace_items(model.graph.output, outputs)
        _write(model, path)


def _infer(path: Path) -> None:
    """Add the shapes of values to the model at `path`. If strict inference fails, try the lenient one: ONNX Runtime may
    still accept the model."""
    for strict in (True, False):
        try:
            shape_inference.infer_shapes_path(path, check_type=strict, strict_mode=strict, data_prop=True)
            break
        except shape_inference.InferenceError:
            continue
        except (RuntimeError, ValueError, checker.ValidationError) as error:
            raise _failed("the shapes of the model's values cannot be inferred", error) from error


def _normal_model(
    model: ModelProto, path: Path, external: tuple[str, ...], defaults: Mapping[str, bytes]
) -> NormalModel:
    graph = model.graph
    for value in graph.output:
        if value.type.WhichOneof("value") != "tensor_type" or _datatype(value.type) is None:
            raise BuildFailed(f"output {value.name} is not a tensor that can be sent", stage=_STAGE, node=value.name)
    return NormalModel(
        path,
        tuple(msgspec.structs.replace(_spec(value), default=defaults.get(value.name)) for value in graph.input),
        tuple(_spec(value) for value in graph.output),
        _may_be_batched(graph.input, graph.output),
        external,
        _arithmetic(graph),
        any(node.op_type in _INTEGER_PRODUCTS for node in all_nodes(graph)),
        random_numbers.random_nodes(model),
        index_limits(graph),
    )


def _arithmetic(graph: GraphProto) -> Precision:
    """Return the coarsest arithmetic of the model. It is int8 if values between nodes are rounded to 8 bits. The
    compiled model then multiplies integers, and its values may differ by one step where the float result is between two
    steps."""
    values = (*graph.input, *graph.value_info, *graph.output)
    by_name = {value.name: value.type.tensor_type.elem_type for value in values}
    steps = {by_name.get(each.output[0]) for each in all_nodes(graph) if each.op_type == "QuantizeLinear"}
    if steps.difference(_SIXTEEN_BITS):
        return Precision.INT8
    types = {*by_name.values()} | {each.data_type for each in graph.initializer}
    return next((precision for element, precision in _HALVES if element in types), Precision.FP32)


def _spec(value: ValueInfoProto) -> TensorSpec:
    tensor = value.type.tensor_type
    shape = tuple(dim.dim_value if dim.HasField("dim_value") else -1 for dim in tensor.shape.dim)
    return TensorSpec(value.name, _datatype(value.type) or "", shape)


def _has_rank(value: ValueInfoProto) -> bool:
    return bool(value.type.tensor_type.HasField("shape"))


def _datatype(type_: TypeProto) -> str | None:
    return datatype_of(type_.tensor_type.elem_type)


def _may_be_batched(inputs: Iterable[ValueInfoProto], outputs: Iterable[ValueInfoProto]) -> bool:
    """Return whether the first dimensions may count rows. Outputs may have other names, because converters give every
    dynamic size its own name."""
    rows = [_first_size(value) for value in inputs]
    return (
        bool(rows)
        and all(row is not None for row in (*rows, *map(_first_size, outputs)))
        and len({row for row in rows if row}) <= 1
    )


def _first_size(value: ValueInfoProto) -> str | None:
    """Return the name of a dynamic first dimension, "" if it has no name; None if it is fixed or missing."""
    shape = value.type.tensor_type.shape
    return None if not shape.dim or shape.dim[0].HasField("dim_value") else shape.dim[0].dim_param


def _failed(what: str, error: Exception) -> BuildFailed:
    text = str(error)
    node = _NODE.search(text)
    return BuildFailed(f"{what}: {' '.join(text.split())}", stage=_STAGE, node=node[1] if node else "")
