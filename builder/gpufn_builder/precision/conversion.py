"""Conversion of a graph to half precision or int8. `transform` decides which layers stay in fp32."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import onnx
from google.protobuf.message import EncodeError
from onnx import ModelProto, TensorProto, shape_inference, version_converter

from gpufn_builder.checks.samples import Case
from gpufn_builder.checks.steps import OnStep, ignore_step
from gpufn_builder.onnx_model import ort_capabilities
from gpufn_builder.onnx_model.ingest import main_opset
from gpufn_builder.onnx_model.normalise import NormalModel
from gpufn_builder.precision.half_precision import lower
from gpufn_core.spec.model_spec import Precision

HALVES: Final[dict[Precision, int]] = {Precision.FP16: TensorProto.FLOAT16, Precision.BF16: TensorProto.BFLOAT16}
_BF16_OPSET: Final = 22  # the first with convolutions and poolings in bfloat16
_CONVERTIBLE_OPSET: Final = 9  # a Scan of opset 8 has other shapes, which the converter does not report
_INLINE_BYTES: Final = 1 << 30  # for constants; larger ones go to a separate file: a protobuf is limited to 2 GiB
_WEIGHTS: Final = "weights.bin"


@dataclass(frozen=True)
class Conversion:
    """`path` is for the compilers of GPU engines. `cpu_path`, which may be the same, runs in ONNX Runtime on the CPU.
    Each graph of `checked` runs on the CPU and rounds as one kind of engine does. External data are beside all of them.

    `layers` are the converted products, by their first output. `values` are the values in half precision, with their
    names there. `too_large` are constants that half precision cannot represent.
    """

    path: Path
    cpu_path: Path
    checked: tuple[Path, ...]
    summary: str
    layers: tuple[str, ...]
    values: Mapping[str, str] = field(default_factory=dict)
    too_large: tuple[str, ...] = ()


def convert(
    model: NormalModel,
    precision: Precision,
    cases: Sequence[Case],
    into: Path,
    keep: Collection[str] = (),
    *,
    on_gpu: bool,
    on_cpu: bool,
    on_step: OnStep = ignore_step,
) -> Conversion | None:
    """Convert `model` into the folder `into`, except for nodes whose first output is in `keep`. Return None if there is
    nothing to convert. Raises BuildFailed."""
    on_step(f"conversion to {precision}")
    if precision in HALVES:
        return _lower(model, precision, into, keep, on_gpu=on_gpu, on_cpu=on_cpu)
    path = cpu_path = into / "int8.onnx"
    layers = _quantise_model(model, cases, path, keep, for_gpu=on_gpu, on_step=on_step)
    if not layers:
        return None
    if on_gpu and on_cpu:
        cpu_path = into / "int8-cpu.onnx"
        _quantise_model(model, cases, cpu_path, keep, for_gpu=False, on_step=on_step)
    checked = tuple(dict.fromkeys((path, cpu_path)))
    return Conversion(path, cpu_path, checked, "quantized, with scales from the samples", layers)


def _lower(
    model: NormalModel, precision: Precision, into: Path, keep: Collection[str], *, on_gpu: bool, on_cpu: bool
) -> Conversion:
    """Lower the model. Engines on a GPU are checked with an emulation, because ONNX Runtime on the CPU computes some
    operators in float32 and adds in half precision in others. It has almost none in bfloat16, so its engine is the
    emulation."""
    half = HALVES[precision]
    source = onnx.load(model.path)
    if precision is Precision.BF16:
        source = _in_opset(source, _BF16_OPSET)
    lowered = lower(source, half, keep=keep)
    path = cpu_path = _save(lowered.model, into / f"{precision}.onnx")
    checked = []
    if on_gpu or precision is Precision.BF16:
        emulated = lower(source, half, keep=keep, emulate=True)
        checked.append(_save(emulated.model, into / f"{precision}-emulated.onnx"))
    if precision is Precision.BF16:
        cpu_path = checked[0]
    elif on_cpu:
        checked.append(path)
    summary = f"{lowered.nodes} nodes in {precision}"
    if lowered.too_large:
        summary += f"; kept in fp32, as {precision} cannot represent their values: {listed(lowered.too_large)}"
    return Conversion(path, cpu_path, tuple(checked), summary, lowered.products, lowered.values, lowered.too_large)


def listed(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _in_opset(model: ModelProto, least: int) -> ModelProto:
    """Return `model` in the opset `least`, unless its opset is newer; unchanged if it cannot be converted."""
    if not _CONVERTIBLE_OPSET <= main_opset(model) < least or ort_capabilities.newest_opset("") < least:
        return model
    try:
        return shape_inference.infer_shapes(version_converter.convert_version(model, least))
    except (version_converter.ConvertError, RuntimeError, ValueError, EncodeError):  # EncodeError: it is too large
        return model


def _quantise_model(
    model: NormalModel, cases: Sequence[Case], path: Path, keep: Collection[str], *, for_gpu: bool, on_step: OnStep
) -> tuple[str, ...]:
    """Quantize the model into `path`. Return the quantized nodes, by their first output."""
    from gpufn_builder.precision.quantise import INT8_OPSET, quantise  # noqa: PLC0415  a fifth of a build's import time

    source = _in_opset(onnx.load(model.path), INT8_OPSET)
    weights_beside = _is_large(source)
    return quantise(source, cases, path, keep=keep, weights_beside=weights_beside, for_gpu=for_gpu, on_step=on_step)


def _save(model: ModelProto, path: Path) -> Path:
    is_large = _is_large(model)
    onnx.save(model, path, save_as_external_data=is_large, location=f"{path.stem}-{_WEIGHTS}" if is_large else None)
    return path


def _is_large(model: ModelProto) -> bool:
    return sum(len(tensor.raw_data) for tensor in model.graph.initializer) > _INLINE_BYTES
