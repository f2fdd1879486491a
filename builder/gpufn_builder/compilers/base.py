"""What every compiler does: a transformed ONNX model in, a folder with an engine out, and the engine loaded again.

    compiler = compiler_for(Backend.ORT_CPU)
    compiled = compiler.compile(job, tell)
    with compiler.load(job, compiled) as engine: outputs = engine.run(inputs)

A backend's library is imported when it is asked for, in a candidate's own process.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol, Self, cast

import msgspec

from gpufn_builder.onnx_model.tensors import Arrays
from gpufn_builder.processes.process_messages import THOROUGH
from gpufn_core.domain.engine import Backend
from gpufn_core.spec.model_spec import ShapeProfile, TensorSpec

Tell = Callable[[float, str], None]  # progress from 0 to 1, and what it does

_MODULES: Final = {
    Backend.TENSORRT: "gpufn_builder.compilers.tensorrt",
    Backend.ORT_CUDA: "gpufn_builder.compilers.onnxruntime",
    Backend.ORT_CPU: "gpufn_builder.compilers.onnxruntime",
}


class CompileJob(msgspec.Struct, frozen=True, kw_only=True):
    """`flags` are the EngineIdentity's, and hold all that is to be chosen. `golden` is an input to tune with.
    `caches` outlives the job; `trial_s` is how long each setting runs that is chosen by trying."""

    model: Path
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    profiles: tuple[ShapeProfile, ...]
    flags: Mapping[str, str]
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
    """An engine in memory. It owns what it has on a device, until the end of its `with`."""

    def run(self, inputs: Arrays) -> Arrays:
        """Every output, by name. Raises BuildFailed(stage="verify")."""
        ...

    def bind(self, inputs: Arrays) -> Callable[[], None]:
        """What runs the engine on these inputs once and returns when it is done, for measuring."""
        ...

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Compiler(Protocol):
    def compile(self, job: CompileJob, tell: Tell) -> Compiled:
        """Raises BuildFailed(stage="compile") that names the node where the compiler does."""
        ...

    def load(self, job: CompileJob, compiled: Compiled) -> Engine: ...


def compiler_for(backend: Backend) -> Compiler:
    module: Any = importlib.import_module(_MODULES[backend])
    return cast("Compiler", module.compiler(backend))
