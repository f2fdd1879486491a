"""A model in the precision that was asked for: the graph rewritten, and shown to be near enough before it is compiled.

`identity.tools` says which tools and versions do it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Final

import onnx
import onnxruntime
from google.protobuf.message import EncodeError
from onnx import ModelProto, TensorProto, shape_inference, version_converter
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

from gpufn.engine import BuildStage
from gpufn.errors import BuildFailed
from gpufn.model import Precision, Tolerance
from gpufn_builder import accepted
from gpufn_builder.cpu_session import CpuSession
from gpufn_builder.lowering import Lowered, lower, names_taken
from gpufn_builder.normalise import NormalModel
from gpufn_builder.samples import Case
from gpufn_builder.tensors import Arrays
from gpufn_builder.verify import Comparison, check, compare

_STAGE: Final = BuildStage.TRANSFORM
_HALVES: Final[dict[Precision, int]] = {Precision.FP16: TensorProto.FLOAT16, Precision.BF16: TensorProto.BFLOAT16}
_BF16_OPSET: Final = 22
_CONVERTIBLE_OPSET: Final = 9  # a Scan of opset 8 takes other shapes, which the converter does not tell
_QUANTISED: Final = ["Conv", "ConvTranspose", "Gemm", "MatMul"]  # sums between them need their range, masks above all
_ERRORS_ONLY: Final = 3
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
        if not _quantise(model, cases, path):
            return TransformedModel(model.path, model.path, "as it is: there is nothing to quantise")
        found = "quantised, with scales from the samples"
    else:
        path, checked, lowered = _lowered(model, precision, into)
        too_large = lowered.too_large
        found = f"{lowered.nodes} nodes in {precision}"
        if too_large:
            found += f"; beyond {precision} and left in fp32: {_listed(too_large)}"
    session = CpuSession(checked, model.outputs, _STAGE)
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
        source = _with_bf16_operators(source)
    lowered = lower(source, half)
    path = _save(lowered.model, into / f"{precision}.onnx")
    emulated = lower(source, half, emulate=True)
    return path, _save(emulated.model, into / f"{precision}-emulated.onnx"), lowered


def _with_bf16_operators(model: ModelProto) -> ModelProto:
    """`model` in the opset that has convolutions and poolings in bfloat16, where the converter knows the way."""
    opset = max((each.version for each in model.opset_import if each.domain in ("", "ai.onnx")), default=0)
    if not _CONVERTIBLE_OPSET <= opset < _BF16_OPSET or accepted.newest_opset("") < _BF16_OPSET:
        return model
    try:
        return shape_inference.infer_shapes(version_converter.convert_version(model, _BF16_OPSET))
    except (RuntimeError, ValueError, EncodeError):  # its own errors are the first; the others, that it is too large
        return model


def _quantise(model: NormalModel, cases: Sequence[Case], path: Path) -> bool:
    """Whether there was something to quantise."""
    given = [case for case in cases if case.is_given]
    if not given:
        raise BuildFailed("int8 is calibrated on samples, and there are none: give samples=", stage=_STAGE)
    source = onnx.load(model.path)
    if not any(node.op_type in _QUANTISED for node in source.graph.node):
        return False
    # Shapes are inferred already, which is what the tool would warn about.
    source.metadata_props.add(key="onnx.quant.pre_process", value="onnxruntime.quant")
    is_large = _bytes_of(source) > _INLINE_BYTES
    onnxruntime.set_default_logger_severity(_ERRORS_ONLY)  # the tool's sessions have no options
    try:
        quantize_static(
            source,
            path,
            _Samples(given),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=_QUANTISED,
            per_channel=True,
            activation_type=QuantType.QInt8,
            weight_type=QuantType.QInt8,
            use_external_data_format=is_large,
            extra_options={"ActivationSymmetric": True},  # TensorRT knows no other
        )
    except Exception as error:  # it raises whatever comes
        reason = " ".join(str(error).split()) or type(error).__name__
        raise BuildFailed(f"the model cannot be quantised: {reason}", stage=_STAGE) from error
    _sort(path)
    return True


def _sort(path: Path) -> None:
    """The nodes of the model at `path` after those that they need. The tool does not look into bodies of an If."""
    model = onnx.load(path, load_external_data=False)
    nodes = list(model.graph.node)
    makers = {name: index for index, node in enumerate(nodes) for name in node.output if name}
    needs = {index: {makers[name] for name in names_taken(node) if name in makers} for index, node in enumerate(nodes)}
    ordered = [nodes[index] for index in TopologicalSorter(needs).static_order()]
    del model.graph.node[:]
    model.graph.node.extend(ordered)
    path.write_bytes(model.SerializeToString())


class _Samples(CalibrationDataReader):  # type: ignore[misc]  # it has no types
    def __init__(self, cases: Sequence[Case]) -> None:
        self._left: Iterator[Arrays] = iter([case.inputs for case in cases])

    def get_next(self) -> Arrays | None:
        return next(self._left, None)


def _save(model: ModelProto, path: Path) -> Path:
    is_large = _bytes_of(model) > _INLINE_BYTES
    onnx.save(model, path, save_as_external_data=is_large, location=f"{path.stem}-{_WEIGHTS}" if is_large else None)
    return path


def _bytes_of(model: ModelProto) -> int:
    return sum(len(tensor.raw_data) for tensor in model.graph.initializer)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
