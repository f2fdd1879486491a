"""A model's convolutions and products in int8, with scales from samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import onnx
import onnxruntime
from onnx import GraphProto, ModelProto, helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

from gpufn_builder.checks.samples import Case
from gpufn_builder.onnx_model.ingest import main_opset
from gpufn_builder.onnx_model.tensors import Arrays
from gpufn_builder.onnx_model.topological_order import sort_nodes
from gpufn_builder.precision.int8_weights import write_out
from gpufn_core.domain.engine import BuildStage
from gpufn_core.errors import BuildFailed

INT8_OPSET: Final = 13  # the first whose scales may be one for each channel
_STAGE: Final = BuildStage.TRANSFORM
_QUANTISED: Final = ["Conv", "ConvTranspose", "Gemm", "MatMul"]  # sums between them need their range, masks above all
_ERRORS_ONLY: Final = 3


def quantise(model: ModelProto, cases: Sequence[Case], path: Path, *, weights_beside: bool) -> bool:
    """Writes `model` to `path`, its weights into a file of their own if so. False where there is nothing to quantise.

    Raises BuildFailed without samples among `cases`, and where ONNX Runtime's tool fails.
    """
    given = [case for case in cases if case.is_given]
    if not given:
        raise BuildFailed("int8 is calibrated on samples, and there are none: give samples=", stage=_STAGE)
    if not any(node.op_type in _QUANTISED for node in model.graph.node):
        return False
    if (opset := main_opset(model)) < INT8_OPSET:
        raise BuildFailed(
            f"int8 needs opset {INT8_OPSET}, and this model of opset {opset} cannot be converted: export it with "
            f"opset_version={INT8_OPSET} or a later one",
            stage=_STAGE,
        )
    _keep_what_is_given_back(model.graph)
    # Shapes are inferred already, which is what the tool would warn about.
    model.metadata_props.add(key="onnx.quant.pre_process", value="onnxruntime.quant")
    onnxruntime.set_default_logger_severity(_ERRORS_ONLY)  # the tool's sessions have no options
    try:
        quantize_static(
            model,
            path,
            _Samples(given),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=_QUANTISED,
            per_channel=True,
            activation_type=QuantType.QInt8,
            weight_type=QuantType.QInt8,
            use_external_data_format=weights_beside,
            extra_options={"ActivationSymmetric": True},  # TensorRT knows no other
        )
    except Exception as error:  # it raises whatever comes
        reason = " ".join(str(error).split()) or type(error).__name__
        raise BuildFailed(f"the model cannot be quantised: {reason}", stage=_STAGE) from error
    _finish(path)
    return True


def _keep_what_is_given_back(graph: GraphProto) -> None:
    """Nodes take an input that is also an output by another name: the tool would round that output too, into itself."""
    given_back = {each.name for each in graph.output}
    for value in [each.name for each in graph.input if each.name in given_back]:
        taken = f"{value}.gpufn_taken"
        for node in graph.node:
            node.input[:] = [taken if name == value else name for name in node.input]
        graph.node.insert(0, helper.make_node("Identity", [value], [taken], name=taken))
        graph.value_info.extend(each for each in graph.input if each.name == value)
        graph.value_info[-1].name = taken


def _finish(path: Path) -> None:
    """What the tool leaves out: nodes after those that their bodies need, and weights of their own."""
    model = onnx.load(path, load_external_data=False)
    write_out(model.graph)
    sort_nodes(model.graph)
    path.write_bytes(model.SerializeToString())


class _Samples(CalibrationDataReader):  # type: ignore[misc]  # it has no types
    def __init__(self, cases: Sequence[Case]) -> None:
        self._left: Iterator[Arrays] = iter([case.inputs for case in cases])

    def get_next(self) -> Arrays | None:
        return next(self._left, None)
