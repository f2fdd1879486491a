"""Conversion of a model to the requested precision: rewrites the graph and checks its accuracy before compilation.

`identity.tools` lists the tools and versions that do it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import onnx
from google.protobuf.message import EncodeError
from onnx import ModelProto, TensorProto, shape_inference, version_converter

from gpufn_builder.checks.cpu_session import CpuSession
from gpufn_builder.checks.samples import Case
from gpufn_builder.checks.verify import Comparison, check, compare
from gpufn_builder.onnx_model import ort_capabilities
from gpufn_builder.onnx_model.ingest import main_opset
from gpufn_builder.onnx_model.normalise import NormalModel
from gpufn_builder.onnx_model.tensors import Arrays
from gpufn_builder.precision.half_precision import Lowered, lower
from gpufn_core.domain.engine import BuildStage
from gpufn_core.errors import BuildFailed
from gpufn_core.spec.model_spec import Precision, Tolerance

_STAGE: Final = BuildStage.TRANSFORM
_HALVES: Final[dict[Precision, int]] = {Precision.FP16: TensorProto.FLOAT16, Precision.BF16: TensorProto.BFLOAT16}
_BF16_OPSET: Final = 22  # the first with convolutions and poolings in bfloat16
_CONVERTIBLE_OPSET: Final = 9  # a Scan of opset 8 has other shapes, which the converter does not report
_INLINE_BYTES: Final = 1 << 30  # of constants; larger ones go to a separate file: a protobuf is limited to 2 GiB
_WEIGHTS: Final = "weights.bin"


@dataclass(frozen=True)
class TransformedModel:
    """`path` is for the compilers of GPU engines. `cpu_path`, which may be the same, runs in ONNX Runtime on the CPU.
    External data are beside both. `summary` describes the conversion. `comparison` is with the
    reference; None if nothing was changed."""

    path: Path
    cpu_path: Path
    summary: str
    comparison: Comparison | None = None


def transform(
    model: NormalModel,
    precision: Precision,
    cases: Sequence[Case],
    *,
    reference: Sequence[Arrays],
    tolerance: Tolerance,
    into: Path,
    on_gpu: bool = True,
    on_cpu: bool = True,
) -> TransformedModel:
    """Convert `model` to `precision`, in the folder `into`. `reference` are the outputs of `cases`. int8 takes a graph
    each for engines `on_gpu` and `on_cpu`; if only one is needed, both paths are the same.

    Inputs and outputs keep their types. Raises BuildFailed(stage="transform") for the worst output if it is not within
    `tolerance`.
    """
    if precision in (Precision.FP32, Precision.TF32):
        return TransformedModel(model.path, model.path, "unchanged")
    too_large: tuple[str, ...] = ()
    if precision is Precision.INT8:
        path = checked = cpu_path = into / "int8.onnx"
        if not _quantise_model(model, cases, path, for_gpu=on_gpu):
            return TransformedModel(model.path, model.path, "unchanged: there is nothing to quantize")
        if on_gpu and on_cpu:
            cpu_path = into / "int8-cpu.onnx"
            _quantise_model(model, cases, cpu_path, for_gpu=False)
        summary = "quantized, with scales from the samples"
    else:
        path, checked, lowered = _lowered(model, precision, into)
        cpu_path = checked if precision is Precision.BF16 else path  # ONNX Runtime has almost no bfloat16 on the CPU
        too_large = lowered.too_large
        summary = f"{lowered.nodes} nodes in {precision}"
        if too_large:
            summary += f"; kept in fp32, as {precision} cannot represent their values: {_listed(too_large)}"
    session = CpuSession(checked, model.outputs, _STAGE, has_integer_products=model.has_integer_products)
    outputs = [session.run(case.inputs) for case in cases]
    try:
        comparison = compare([case.name for case in cases], reference, outputs, tolerance, stage=_STAGE)
        check(comparison, tolerance, _STAGE)
    except BuildFailed as error:
        hint = f"; {_listed(too_large)} cannot be represented in {precision}" if too_large else ""
        raise BuildFailed(f"in {precision} {error.message}{hint}", stage=_STAGE, node=error.node) from error
    return TransformedModel(path, cpu_path, summary, comparison)


def _lowered(model: NormalModel, precision: Precision, into: Path) -> tuple[Path, Path, Lowered]:
    """Return the lowered model, and an emulation of it for the check. For the lowered model itself, ONNX Runtime on the
    CPU would compute in float32 without rounding between nodes."""
    half = _HALVES[precision]
    source = onnx.load(model.path)
    if precision is Precision.BF16:
        source = _in_opset(source, _BF16_OPSET)
    lowered = lower(source, half)
    path = _save(lowered.model, into / f"{precision}.onnx")
    emulated = lower(source, half, emulate=True)
    return path, _save(emulated.model, into / f"{precision}-emulated.onnx"), lowered


def _in_opset(model: ModelProto, least: int) -> ModelProto:
    """Return `model` in the opset `least`, unless its opset is newer; unchanged if it cannot be converted."""
    if not _CONVERTIBLE_OPSET <= main_opset(model) < least or ort_capabilities.newest_opset("") < least:
        return model
    try:
        return shape_inference.infer_shapes(version_converter.convert_version(model, least))
    except (version_converter.ConvertError, RuntimeError, ValueError, EncodeError):  # EncodeError: it is too large
        return model


def _quantise_model(model: NormalModel, cases: Sequence[Case], path: Path, *, for_gpu: bool) -> bool:
    """Quantize the model into `path`. Return whether there was something to quantize."""
    from gpufn_builder.precision.quantise import INT8_OPSET, quantise  # noqa: PLC0415  a fifth of a build's import time

    source = _in_opset(onnx.load(model.path), INT8_OPSET)
    return quantise(source, cases, path, weights_beside=_is_large(source), for_gpu=for_gpu)


def _save(model: ModelProto, path: Path) -> Path:
    is_large = _is_large(model)
    onnx.save(model, path, save_as_external_data=is_large, location=f"{path.stem}-{_WEIGHTS}" if is_large else None)
    return path


def _is_large(model: ModelProto) -> bool:
    return sum(len(tensor.raw_data) for tensor in model.graph.initializer) > _INLINE_BYTES


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
