"""ONNX Runtime, on the CPU and with its CUDA provider: the engine is the optimized graph.

1. Optimize the graph, as far as the result runs on every machine of its kind, and save it.
2. Record which provider runs each node. Reject an engine for a GPU that would run entirely on the CPU.
3. On the CPU try several numbers of threads, and keep the least that is as fast as the best.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import onnxruntime

from gpufn_builder.checks import ort_run
from gpufn_builder.compilers.base import Compiled, CompileJob, ReportProgress
from gpufn_builder.compilers.threads import Trials, choose_threads, run_race
from gpufn_builder.onnx_model.tensors import Arrays
from gpufn_core.domain.devices.engine import Backend, BuildStage
from gpufn_core.errors import BuildFailed
from gpufn_core.inference.ort_integers import EXACT
from gpufn_core.inference.ort_threads import spin_config
from gpufn_core.spec.model_spec import TensorSpec

_ENGINE: Final = "model.onnx"
_WEIGHTS: Final = "model.onnx.data"
# Weights from this size on are stored in a file beside the graph. That keeps the graph far below protobuf's 2 GiB, and
# workers share the file's pages. Without this file the engine would refer to the model's external data.
_INLINE_BYTES: Final = "1024"
_LEVELS: Final = {
    "none": onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "extended": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "all": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
}
_ERRORS_ONLY: Final = 3
_CPU: Final = "CPUExecutionProvider"
_CUDA: Final = "CUDAExecutionProvider"


class OnnxRuntime:
    def __init__(self, backend: Backend) -> None:
        self._on_gpu = backend.on_gpu

    def compile(self, job: CompileJob, report_progress: ReportProgress) -> Compiled:
        report_progress(0.0, "optimizing the graph")
        self._optimise(job)
        nodes = self._count_nodes(job)
        gpu_nodes = sum(count for name, count in nodes.items() if name.endswith(_CUDA))
        if self._on_gpu and not gpu_nodes:
            raise BuildFailed("ONNX Runtime would run no node of this model on the GPU", stage="compile")
        compiled = Compiled(
            files=tuple(name for name in (_ENGINE, _WEIGHTS) if (job.folder / name).exists()),
            settings={"graph_optimization": "all", "intra_op_threads": 1},
            gpu_nodes=gpu_nodes,
            cpu_nodes=sum(nodes.values()) - gpu_nodes,
            nodes=nodes,
        )
        if self._on_gpu:
            return compiled
        return self._with_threads(job, compiled, partial(report_progress, 0.5, "choosing the number of threads"))

    def load(self, job: CompileJob, compiled: Compiled) -> OrtEngine:
        settings = compiled.settings
        options = _options(str(settings["graph_optimization"]))
        options.intra_op_num_threads = int(settings["intra_op_threads"])
        for entry, value in spin_config(onnxruntime.__version__).items():
            options.add_session_config_entry(entry, value)
        if self._on_gpu and not compiled.cpu_nodes:
            options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        return OrtEngine(self._session(job, job.folder / compiled.files[0], options), job.outputs)

    def _optimise(self, job: CompileJob) -> None:
        """Optimize the graph and save the engine."""
        options = _options(job.flags["graph_optimization_level"])
        options.optimized_model_filepath = str(job.folder / _ENGINE)
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", _WEIGHTS)
        min_size = "session.optimized_model_external_initializers_min_size_in_bytes"
        options.add_session_config_entry(min_size, _INLINE_BYTES)
        self._session(job, job.model, options)

    def _count_nodes(self, job: CompileJob) -> dict[str, int]:
        """Count the engine's nodes by operator and provider."""
        options = _options("none")
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        counted: Counter[str] = Counter()
        for part in self._session(job, job.folder / _ENGINE, options).get_provider_graph_assignment_info():
            counted.update(f"{node.op_type} on {part.ep_name}" for node in part.get_nodes())
        return dict(counted)

    def _session(self, job: CompileJob, model: Path, options: Any) -> Any:
        if self._on_gpu:
            onnxruntime.preload_dlls()  # CUDA libraries from wheels, where the loader does not look
        for entry, value in EXACT.items():
            options.add_session_config_entry(entry, value)
        provider, settings = (_CUDA, {"use_tf32": job.flags["use_tf32"]}) if self._on_gpu else (_CPU, {})
        try:
            session = onnxruntime.InferenceSession(model, options, providers=[provider], provider_options=[settings])
        except Exception as error:
            raise ort_run.failed("ONNX Runtime rejects the model", error, BuildStage.COMPILE) from error
        if (actual := session.get_providers()[0]) != provider:
            raise BuildFailed(f"ONNX Runtime chose {actual} instead of {provider}", stage="compile")
        return session

    def _with_threads(self, job: CompileJob, compiled: Compiled, on_progress: Callable[[], None]) -> Compiled:
        """Choose the least number of threads that more threads do not beat by much."""
        trials = Trials()

        def with_threads(threads: int) -> Compiled:
            return msgspec.structs.replace(compiled, settings=compiled.settings | {"intra_op_threads": threads})

        def race(fewer: int, more: int) -> tuple[float, float]:
            with (
                closing(self.load(job, with_threads(fewer))) as one,
                closing(self.load(job, with_threads(more))) as other,
            ):
                runs = one.bind(job.golden), other.bind(job.golden)
                return trials.judge(fewer, more, run_race(*runs, job.trial_s, on_progress))

        chosen = with_threads(choose_threads(len(os.sched_getaffinity(0)), race))
        return msgspec.structs.replace(chosen, notes=trials.notes())


def _options(graph_optimization: str) -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = _ERRORS_ONLY
    options.graph_optimization_level = _LEVELS[graph_optimization]
    return options


class OrtEngine:
    """An engine with inputs and outputs on the host, so that the timing of a run on a GPU includes both copies."""

    def __init__(self, session: Any, outputs: Sequence[TensorSpec]) -> None:
        self._session = session
        self._outputs = outputs

    def run(self, inputs: Arrays) -> Arrays:
        try:
            return ort_run.run(self._session, self._outputs, inputs)
        except Exception as error:
            raise ort_run.failed("the engine does not run", error, BuildStage.VERIFY) from error

    def bind(self, inputs: Arrays) -> Callable[[], object]:
        return partial(self.run, inputs)

    def close(self) -> None:
        del self._session
