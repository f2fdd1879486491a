"""Quantization of a model's convolutions and matrix products to int8, calibrated on samples.

Compilers expect pairs of QuantizeLinear and DequantizeLinear (Q/DQ) in different places:

- TensorRT fuses a product with the nodes that follow it if only its inputs have Q/DQ. It rejects int32 biases, and
  accepts only symmetric scales. Source: TensorRT documentation, "Working with Quantized Types", Q/DQ placement.
- ONNX Runtime on the CPU computes a product in int8 only if its output has Q/DQ too.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

import onnx
import onnxruntime
from onnx import GraphProto, ModelProto, helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

from gpufn_builder.checks.samples import Case
from gpufn_builder.checks.steps import OnStep, ignore_step
from gpufn_builder.onnx_model.ingest import main_opset
from gpufn_builder.onnx_model.tensors import Arrays
from gpufn_builder.onnx_model.topological_order import sort_nodes
from gpufn_builder.precision.int8_weights import make_constants_explicit
from gpufn_core.domain.devices.engine import BuildStage
from gpufn_core.errors import BuildFailed

INT8_OPSET: Final = 13  # the first opset with scales per channel
_STAGE: Final = BuildStage.TRANSFORM
_QUANTISED: Final = ["Conv", "ConvTranspose", "Gemm", "MatMul"]  # sums between them need their range, especially masks
_OPTIONS: Final = {"ActivationSymmetric": True, "WeightSymmetric": True}
_GPU_OPTIONS: Final = {"QuantizeBias": False, "OpTypesToExcludeOutputQuantization": _QUANTISED}
_ERRORS_ONLY: Final = 3


def quantise(
    model: ModelProto,
    cases: Sequence[Case],
    path: Path,
    *,
    keep: Collection[str],
    weights_beside: bool,
    for_gpu: bool,
    on_step: OnStep = ignore_step,
) -> tuple[str, ...]:
    """Quantize `model` and write it to `path`, with its weights in a separate file if `weights_beside`. Place Q/DQ for
    TensorRT if `for_gpu`, else for ONNX Runtime on the CPU. Nodes whose first output is in `keep` stay in fp32. Return
    the quantized nodes, by their first output; without one, nothing is written.

    Raises BuildFailed if `cases` has no user samples, or if ONNX Runtime's quantization tool fails.
    """
    user_samples = [case for case in cases if case.is_user_sample]
    if not user_samples:
        raise BuildFailed("int8 is calibrated on samples, and there are none: set samples= (--samples)", stage=_STAGE)
    layers = [node for node in model.graph.node if node.op_type in _QUANTISED]
    quantised = tuple(node.output[0] for node in layers if node.output[0] not in keep)
    if not quantised:
        return ()
    if (opset := main_opset(model)) < INT8_OPSET:
        raise BuildFailed(
            f"int8 needs opset {INT8_OPSET}, and this model of opset {opset} cannot be converted: export it with "
            f"opset_version={INT8_OPSET} or a later one",
            stage=_STAGE,
        )
    for node in layers:
        node.name = node.output[0]  # unique, unlike the names in many models
    _protect_returned_inputs(model.graph)
    # Shapes are already inferred; this entry silences the tool's warning about that.
    model.metadata_props.add(key="onnx.quant.pre_process", value="onnxruntime.quant")
    onnxruntime.set_default_logger_severity(_ERRORS_ONLY)  # the sessions of the tool cannot be configured
    try:
        quantize_static(
            model,
            path,
            _Samples(user_samples, on_step),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=_QUANTISED,
            nodes_to_exclude=list(keep),
            per_channel=True,
            activation_type=QuantType.QInt8,
            weight_type=QuantType.QInt8,
            use_external_data_format=weights_beside,
            extra_options=_OPTIONS | (_GPU_OPTIONS if for_gpu else {}),
        )
    except Exception as error:  # the tool raises arbitrary exceptions
        reason = " ".join(str(error).split()) or type(error).__name__
        raise BuildFailed(f"the model cannot be quantized: {reason}", stage=_STAGE) from error
    _finish(path)
    return quantised


def _protect_returned_inputs(graph: GraphProto) -> None:
    """Rename an input that is also an output inside the graph. Otherwise the tool would quantize that output too, with
    the output as its own input."""
    outputs = {each.name for each in graph.output}
    for value in [each.name for each in graph.input if each.name in outputs]:
        alias = f"{value}.gpufn_taken"
        for node in graph.node:
            node.input[:] = [alias if name == value else name for name in node.input]
        graph.node.insert(0, helper.make_node("Identity", [value], [alias], name=alias))
        graph.value_info.extend(each for each in graph.input if each.name == value)
        graph.value_info[-1].name = alias


def _finish(path: Path) -> None:
    """Complete the work of the tool: sort nodes after the inputs of their subgraphs, and rewrite shared constants."""
    model = onnx.load(path, load_external_data=False)
    make_constants_explicit(model.graph)
    sort_nodes(model.graph)
    path.write_bytes(model.SerializeToString())


class _Samples(CalibrationDataReader):  # type: ignore[misc]  # it is untyped
    def __init__(self, cases: Sequence[Case], on_step: OnStep) -> None:
        self._remaining = iter(cases)
        self._on_step = on_step

    def get_next(self) -> Arrays | None:
        if (case := next(self._remaining, None)) is None:
            return None
        self._on_step(f"calibration with {case.name}")
        return case.inputs
