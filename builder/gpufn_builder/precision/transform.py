"""A model in the precision that was asked for: the graph rewritten, and shown to be near enough before it is compiled.

`identity.tools` says which tools and versions do it.
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
_CONVERTIBLE_OPSET: Final = 9  # a Scan of opset 8 takes other shapes, which the converter does not tell
_INLINE_BYTES: Final = 1 << 30  # of constants; more of them lie in a file of their own, for a protobuf ends at 2 GiB
_WEIGHTS: Final = "weights.bin"


@dataclass(frozen=True)
class TransformedModel:
    """`path` is for compilers that have every operator in this precision; `cpu_path`, which may be the same, runs in
    ONNX Runtime on the CPU. External data lie beside both. `found` says in words what was done. `comparison` is with
    the reference; None where nothing was changed."""

    path: Path
    cpu_path: Path
    found: str
    comparison: Comparison | None = None


def transform(
    model: NormalModel,
    precision: Precision,
    cases: Sequence[Case],
    *,
    reference: Sequence[Arrays],
    tolerance: Tolerance,
    into: Path,
) -> TransformedModel:
    """`model` in `precision`, in the folder `into`. `reference` are the outputs of `cases`.

    Inputs and outputs keep their types. Raises BuildFailed(stage="transform") that names the worst output when it is
    not within `tolerance`.
    """
    if precision in (Precision.FP32, Precision.TF32):
        return TransformedModel(model.path, model.path, "as it is")
    too_large: tuple[str, ...] = ()
    if precision is Precision.INT8:
        path = checked = into / "int8.onnx"
        if not _quantised(model, cases, path):
            return TransformedModel(model.path, model.path, "as it is: there is nothing to quantise")
        found = "quantised, with scales from the samples"
    else:
        path, checked, lowered = _lowered(model, precision, into)
        too_large = lowered.too_large
        found = f"{lowered.nodes} nodes in {precision}"
        if too_large:
            found += f"; beyond {precision} and left in fp32: {_listed(too_large)}"
    session = CpuSession(checked, model.outputs, _STAGE, has_integer_products=model.has_integer_products)
    outputs = [session.run(case.inputs) for case in cases]
    try:
        comparison = compare([case.name for case in cases], reference, outputs, _STAGE)
        check(comparison, tolerance, _STAGE)
    except BuildFailed as error:
        hint = f"; {_listed(too_large)} cannot be held in {precision}" if too_large else ""
        raise BuildFailed(f"in {precision} {error.message}{hint}", stage=_STAGE, node=error.node) from error
    # ONNX Runtime has next to no operator for bfloat16 on the CPU.
    return TransformedModel(path, checked if precision is Precision.BF16 else path, found, comparison)


def _lowered(model: NormalModel, precision: Precision, into: Path) -> tuple[Path, Path, Lowered]:
    """The lowered model, and its twin to check: of the first, ONNX Runtime on the CPU would compute in float32 and
    leave out the rounding between nodes."""
    half = _HALVES[precision]
    source = onnx.load(model.path)
    if precision is Precision.BF16:
        source = _in_opset(source, _BF16_OPSET)
    lowered = lower(source, half)
    path = _save(lowered.model, into / f"{precision}.onnx")
    emulated = lower(source, half, emulate=True)
    return path, _save(emulated.model, into / f"{precision}-emulated.onnx"), lowered


def _in_opset(model: ModelProto, least: int) -> ModelProto:
    """`model` in the opset `least`, unless it is in a later one; as it is where the converter does not know the way."""
    if not _CONVERTIBLE_OPSET <= main_opset(model) < least or ort_capabilities.newest_opset("") < least:
        return model
    try:
        return shape_inference.infer_shapes(version_converter.convert_version(model, least))
    except (version_converter.ConvertError, RuntimeError, ValueError, EncodeError):  # the last: it is too large
        return model


def _quantised(model: NormalModel, cases: Sequence[Case], path: Path) -> bool:
    """Whether there was something to quantise."""
    from gpufn_builder.precision.quantise import INT8_OPSET, quantise  # noqa: PLC0415  its tool is a fifth of a build's start

    source = _in_opset(onnx.load(model.path), INT8_OPSET)
    return quantise(source, cases, path, weights_beside=_is_large(source))


def _save(model: ModelProto, path: Path) -> Path:
    is_large = _is_large(model)
    onnx.save(model, path, save_as_external_data=is_large, location=f"{path.stem}-{_WEIGHTS}" if is_large else None)
    return path


def _is_large(model: ModelProto) -> bool:
    return sum(len(tensor.raw_data) for tensor in model.graph.initializer) > _INLINE_BYTES


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
