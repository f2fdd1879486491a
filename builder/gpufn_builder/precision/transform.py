"""Conversion of a model to the requested precision: rewrites the graph and checks its accuracy before compilation.

`identity.tools` lists the tools and versions that do it.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import onnx
from google.protobuf.message import EncodeError
from onnx import ModelProto, NodeProto, TensorProto, shape_inference, version_converter

from gpufn_builder.checks.cpu_session import CpuSession
from gpufn_builder.checks.samples import Case
from gpufn_builder.checks.verify import Comparison, check, compare
from gpufn_builder.onnx_model import ort_capabilities
from gpufn_builder.onnx_model.ingest import main_opset
from gpufn_builder.onnx_model.normalise import NormalModel
from gpufn_builder.onnx_model.tensors import Arrays
from gpufn_builder.precision.first_difference import Difference, find_first_difference, layer_to_keep, name_of
from gpufn_builder.precision.half_precision import lower
from gpufn_core.domain.engine import BuildStage
from gpufn_core.errors import BuildFailed
from gpufn_core.spec.model_spec import TOLERANCES, Precision, Tolerance

_STAGE: Final = BuildStage.TRANSFORM
_HALVES: Final[dict[Precision, int]] = {Precision.FP16: TensorProto.FLOAT16, Precision.BF16: TensorProto.BFLOAT16}
_BF16_OPSET: Final = 22  # the first with convolutions and poolings in bfloat16
_CONVERTIBLE_OPSET: Final = 9  # a Scan of opset 8 has other shapes, which the converter does not report
_INLINE_BYTES: Final = 1 << 30  # of constants; larger ones go to a separate file: a protobuf is limited to 2 GiB
_WEIGHTS: Final = "weights.bin"
MAX_KEPT: Final = 8  # layers in fp32; each costs a conversion and a run of all cases


@dataclass(frozen=True)
class TransformedModel:
    """`path` is for the compilers of GPU engines. `cpu_path`, which may be the same, runs in ONNX Runtime on the CPU.
    External data are beside both. `summary` describes the conversion. `comparison` is with the reference; None if
    nothing was changed or verified.

    `kept` are the names of layers that stay in fp32, because the outputs are not accurate enough without them.
    `first_difference` describes the first node whose output differs if no layer is kept; empty if none is.
    """

    path: Path
    cpu_path: Path
    summary: str
    comparison: Comparison | None = None
    kept: tuple[str, ...] = ()
    first_difference: str = ""


@dataclass(frozen=True)
class _Converted:
    """`checked` runs on the CPU and rounds as the engines do. `layers` are the converted nodes, by their first output.
    `values` are the values in half precision, with their names there."""

    path: Path
    cpu_path: Path
    checked: Path
    summary: str
    layers: tuple[str, ...]
    values: Mapping[str, str] = field(default_factory=dict)
    too_large: tuple[str, ...] = ()


def transform(
    model: NormalModel,
    precision: Precision,
    cases: Sequence[Case],
    *,
    reference: Sequence[Arrays],
    tolerance: Tolerance | None,
    into: Path,
    on_gpu: bool = True,
    on_cpu: bool = True,
) -> TransformedModel:
    """Convert `model` to `precision`, in the folder `into`. `reference` are the outputs of `cases`. int8 takes a graph
    each for engines `on_gpu` and `on_cpu`; if only one is needed, both paths are the same.

    Inputs and outputs keep their types. If an output is not within `tolerance`, the first node that differs stays in
    fp32 and the model is converted again, up to MAX_KEPT times. Raises BuildFailed(stage="transform") for the worst
    output if that does not suffice. Without a `tolerance`, outputs are not compared.
    """
    if precision in (Precision.FP32, Precision.TF32):
        return TransformedModel(model.path, model.path, "unchanged")
    graph = onnx.load(model.path, load_external_data=False).graph
    kept: list[NodeProto] = []
    first: Difference | None = None
    while True:
        folder = into / f"{precision}-{len(kept)}"
        folder.mkdir(parents=True)
        keep = [node.output[0] for node in kept]
        converted = _convert(model, precision, cases, folder, keep, on_gpu=on_gpu, on_cpu=on_cpu)
        if converted is None:
            return TransformedModel(model.path, model.path, "unchanged: there is nothing to quantize")
        made = TransformedModel(converted.path, converted.cpu_path, converted.summary)
        if tolerance is None:
            return made
        session = CpuSession(converted.checked, model.outputs, _STAGE, has_integer_products=model.has_integer_products)
        outputs = [session.run(case.inputs) for case in cases]
        try:
            comparison = _compare(cases, reference, outputs, tolerance)
        except BuildFailed as error:
            case = _first_failing(cases, reference, outputs, tolerance)
            difference = _first_difference(model, precision, converted, case, tolerance)
            first = first or difference
            layer = layer_to_keep(graph, difference.node, converted.layers) if difference else None
            if layer is None or len(converted.layers) == 1 or len(kept) == MAX_KEPT:
                raise _error(error, precision, converted, kept, first) from error
            kept.append(layer)
            shutil.rmtree(folder)
        else:
            names = tuple(map(name_of, kept))
            return replace(made, comparison=comparison, kept=names, first_difference=_describe(first, precision))


def _convert(
    model: NormalModel,
    precision: Precision,
    cases: Sequence[Case],
    into: Path,
    keep: Collection[str],
    *,
    on_gpu: bool,
    on_cpu: bool,
) -> _Converted | None:
    """Return the conversion with the layers `keep` in fp32; None if the model has nothing to convert."""
    if precision in _HALVES:
        return _lowered(model, precision, into, keep)
    path = cpu_path = into / "int8.onnx"
    layers = _quantise_model(model, cases, path, keep, for_gpu=on_gpu)
    if not layers:
        return None
    if on_gpu and on_cpu:
        cpu_path = into / "int8-cpu.onnx"
        _quantise_model(model, cases, cpu_path, keep, for_gpu=False)
    return _Converted(path, cpu_path, path, "quantized, with scales from the samples", layers)


def _lowered(model: NormalModel, precision: Precision, into: Path, keep: Collection[str]) -> _Converted:
    """Return the lowered model, and an emulation of it for the check. For the lowered model itself, ONNX Runtime on the
    CPU would compute in float32 without rounding between nodes."""
    half = _HALVES[precision]
    source = onnx.load(model.path)
    if precision is Precision.BF16:
        source = _in_opset(source, _BF16_OPSET)
    lowered = lower(source, half, keep=keep)
    path = _save(lowered.model, into / f"{precision}.onnx")
    emulated = lower(source, half, keep=keep, emulate=True)
    checked = _save(emulated.model, into / f"{precision}-emulated.onnx")
    summary = f"{len(lowered.nodes)} nodes in {precision}"
    if lowered.too_large:
        summary += f"; kept in fp32, as {precision} cannot represent their values: {listed(lowered.too_large)}"
    return _Converted(
        path,
        checked if precision is Precision.BF16 else path,  # ONNX Runtime has almost no bfloat16 on the CPU
        checked,
        summary,
        lowered.nodes,
        emulated.values,
        lowered.too_large,
    )


def _compare(
    cases: Sequence[Case], reference: Sequence[Arrays], outputs: Sequence[Arrays], tolerance: Tolerance
) -> Comparison:
    comparison = compare([case.name for case in cases], reference, outputs, tolerance, stage=_STAGE)
    check(comparison, tolerance, _STAGE)
    return comparison


def _first_failing(
    cases: Sequence[Case], reference: Sequence[Arrays], outputs: Sequence[Arrays], tolerance: Tolerance
) -> Case:
    for case, expected, actual in zip(cases, reference, outputs, strict=True):
        try:
            _compare([case], [expected], [actual], tolerance)
        except BuildFailed:
            return case
    raise AssertionError("one of the cases failed")


def _first_difference(
    model: NormalModel, precision: Precision, converted: _Converted, case: Case, tolerance: Tolerance
) -> Difference | None:
    """Return the first node that differs by more than is usual in `precision`, else the first by more than `tolerance`,
    which is meant for outputs: values between nodes have another scale."""
    half = _HALVES.get(precision, TensorProto.FLOAT)
    for limits in (TOLERANCES[precision], tolerance):
        try:
            found = find_first_difference(model, converted.checked, converted.values, half, case=case, tolerance=limits)
        except BuildFailed:  # such as too little memory; the caller reports the output that differs
            return None
        if found:
            return found
    return None


def _error(
    error: BuildFailed,
    precision: Precision,
    converted: _Converted,
    kept: Sequence[NodeProto],
    first: Difference | None,
) -> BuildFailed:
    parts = [f"in {precision} {error.message}", _describe(first, precision)]
    if kept:
        parts.append(f"with these layers in fp32, outputs still differ: {listed([name_of(node) for node in kept])}")
    if converted.too_large:
        parts.append(f"{listed(converted.too_large)} cannot be represented in {precision}")
    node = name_of(first.node) if first else error.node
    return BuildFailed("; ".join(filter(None, parts)), stage=_STAGE, node=node)


def _describe(first: Difference | None, precision: Precision) -> str:
    if first is None:
        return ""
    return f"the first node that differs in {precision} is {name_of(first.node)} ({first.reason})"


def _in_opset(model: ModelProto, least: int) -> ModelProto:
    """Return `model` in the opset `least`, unless its opset is newer; unchanged if it cannot be converted."""
    if not _CONVERTIBLE_OPSET <= main_opset(model) < least or ort_capabilities.newest_opset("") < least:
        return model
    try:
        return shape_inference.infer_shapes(version_converter.convert_version(model, least))
    except (version_converter.ConvertError, RuntimeError, ValueError, EncodeError):  # EncodeError: it is too large
        return model


def _quantise_model(
    model: NormalModel, cases: Sequence[Case], path: Path, keep: Collection[str], *, for_gpu: bool
) -> tuple[str, ...]:
    """Quantize the model into `path`. Return the quantized nodes, by their first output."""
    from gpufn_builder.precision.quantise import INT8_OPSET, quantise  # noqa: PLC0415  a fifth of a build's import time

    source = _in_opset(onnx.load(model.path), INT8_OPSET)
    return quantise(source, cases, path, keep=keep, weights_beside=_is_large(source), for_gpu=for_gpu)


def _save(model: ModelProto, path: Path) -> Path:
    is_large = _is_large(model)
    onnx.save(model, path, save_as_external_data=is_large, location=f"{path.stem}-{_WEIGHTS}" if is_large else None)
    return path


def _is_large(model: ModelProto) -> bool:
    return sum(len(tensor.raw_data) for tensor in model.graph.initializer) > _INLINE_BYTES


def listed(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
