"""The interface of compilers: from a transformed ONNX model to a folder with an engine, and the loaded engine.

    compiled = compiler.compile(job, report_progress)
    with contextlib.closing(compiler.load(job, compiled)) as engine: outputs = engine.run(inputs)

`compile_process.compiler_for` imports the compiler of a backend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from gpufn_builder.onnx_model.tensors import Arrays
from gpufn_builder.processes.process_messages import THOROUGH
from gpufn_core.spec.model_spec import ShapeProfile, TensorSpec

ReportProgress = Callable[[float, str], None]  # progress from 0 to 1, and the current step


class CompileJob(msgspec.Struct, frozen=True, kw_only=True):
    """`flags` and `device` come from the EngineIdentity; the flags determine all choices of the compiler. `golden` is
    an input for tuning. `caches` outlives the job. `trial_s` is the time for each setting that is chosen by trying."""

    model: Path
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    profiles: tuple[ShapeProfile, ...]
    flags: Mapping[str, str]
    device: str
    golden: Arrays
    folder: Path
    caches: Path
    trial_s: float = THOROUGH.trial_s


class Compiled(msgspec.Struct, frozen=True, kw_only=True):
    """`files` are names in the job's folder, the engine first. `nodes` counts "operator on provider"."""

    files: tuple[str, ...]
    settings: dict[str, int | str]
    gpu_nodes: int = 0
    cpu_nodes: int = 0
    nodes: dict[str, int] = {}
    notes: tuple[str, ...] = ()


class Engine(Protocol):
    """A loaded engine."""

    def run(self, inputs: Arrays) -> Arrays:
        """Return every output by name. Raises BuildFailed(stage="verify")."""

    def bind(self, inputs: Arrays) -> Callable[[], object]:
        """Return a callable that runs the engine once on these inputs and waits for the end, for measuring."""

    def close(self) -> None:
        """Free the device memory."""


class Compiler(Protocol):
    def compile(self, job: CompileJob, report_progress: ReportProgress) -> Compiled:
        """Compile the model. Raises BuildFailed(stage="compile") with the node, if the compiler reports it."""

    def load(self, job: CompileJob, compiled: Compiled) -> Engine: ...
