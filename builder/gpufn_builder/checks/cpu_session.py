"""Execution on ONNX Runtime's CPU provider, unoptimized by default, with one thread and deterministic results.

Models with integer products are optimized anyway, because only then are the products exact
(`gpufn_core.inference.ort_integers`). Products between a DequantizeLinear and a QuantizeLinear are float products in an
unoptimized graph, and exact enough.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import onnxruntime

from gpufn_builder.checks import ort_run
from gpufn_builder.onnx_model.tensors import Array, Arrays
from gpufn_core.domain.devices.engine import BuildStage
from gpufn_core.inference.ort_integers import EXACT
from gpufn_core.spec.model_spec import TensorSpec

_SILENT: Final = 4  # errors are raised anyway


class CpuSession:
    def __init__(
        self,
        path: Path,
        outputs: Sequence[TensorSpec],
        stage: BuildStage,
        *,
        has_integer_products: bool = False,
        is_optimized: bool = False,
    ) -> None:
        """Load the model at `path`, with its external data beside it. Raises BuildFailed(stage=stage) with the node."""
        self._stage = stage
        self._outputs = outputs
        options = session_options(has_integer_products=has_integer_products, is_optimized=is_optimized)
        try:
            self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise ort_run.failed("ONNX Runtime rejects the model", error, stage) from error

    def run(self, inputs: Mapping[str, Array]) -> Arrays:
        """Return every output. Raises BuildFailed with the node."""
        try:
            return ort_run.run(self._session, self._outputs, inputs)
        except Exception as error:
            raise ort_run.failed("the model does not run", error, self._stage) from error


def session_options(*, has_integer_products: bool, is_optimized: bool = False) -> Any:
    levels = onnxruntime.GraphOptimizationLevel
    least = levels.ORT_ENABLE_EXTENDED if has_integer_products else levels.ORT_DISABLE_ALL
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if is_optimized else least
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.use_deterministic_compute = True
    options.log_severity_level = _SILENT
    for entry, value in EXACT.items():
        options.add_session_config_entry(entry, value)
    return options
