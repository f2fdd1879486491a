"""A model on ONNX Runtime's CPU provider as it is written: nothing optimised, one thread, the same result each time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import onnxruntime

from gpufn.engine import BuildStage
from gpufn.model import TensorSpec
from gpufn_builder import ort_run
from gpufn_builder.tensors import Array, Arrays

_SILENT: Final = 4  # what matters is raised


class CpuSession:
    def __init__(self, path: Path, outputs: Sequence[TensorSpec], stage: BuildStage) -> None:
        """The model at `path`; its external data lie beside it. Raises BuildFailed(stage=stage) with the node."""
        self._stage = stage
        self._outputs = outputs
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.use_deterministic_compute = True
        options.log_severity_level = _SILENT
        try:
            self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise ort_run.failed("ONNX Runtime does not take the model", error, stage) from error

    def run(self, inputs: Mapping[str, Array]) -> Arrays:
        """Every output. Raises BuildFailed that names the node."""
        try:
            return ort_run.run(self._session, self._outputs, inputs)
        except Exception as error:
            raise ort_run.failed("the model does not run", error, self._stage) from error
