"""Messages between the service, its build process, and the processes of the build's candidates.

To the child: a request, in a JSON file. From the child: a ProgressUpdate or Failed per line on a pipe, in JSON; and on
success a result in a file beside the request, in msgpack, because JSON has no infinities. Each line is progress
of the process, as its output may be (`process`).
"""

from __future__ import annotations

from typing import Final

import msgspec

from gpufn_builder.identity import Target
from gpufn_builder.report.report import CandidateRow, OutputRow, StageRow
from gpufn_core.domain.devices.engine import Accuracy, BuildStage, EngineIdentity, EngineManifest, Latency
from gpufn_core.errors import ErrorInfo
from gpufn_core.spec.model_spec import ModelSpec, ShapeProfile, TensorSpec, Tolerance

MODEL: Final = "model"  # folder of a build: the model's files
SAMPLES: Final = "samples"  # separate folder, because users choose the file names, which may collide
WAITS_TO_MEASURE: Final = "waiting for the measurement of another build"  # detail of a progress
PUBLISH_BEGINS: Final = 0.95  # the build's progress at the end of its process


class MeasurePlan(msgspec.Struct, frozen=True):
    """Times of a measurement: warm-up, minimum duration, and maximum duration until it settles. `trial_s` is the time
    for each setting that a compiler chooses by trying."""

    warm_up_s: float = 0.2
    least_s: float = 3.0
    most_s: float = 12.0
    trial_s: float = 0.25

    def scaled(self, least_s: float) -> MeasurePlan:
        """Return the plan scaled to another `least_s`."""
        factor = least_s / self.least_s
        return MeasurePlan(self.warm_up_s * factor, least_s, self.most_s * factor, self.trial_s * factor)


THOROUGH: Final = MeasurePlan()


def truncate_error(error: ErrorInfo) -> ErrorInfo:
    """Truncate an error to a single line of bounded size. It is sent through a pipe and stored in a record, and an
    untrusted model chooses the names of its nodes."""
    return msgspec.structs.replace(
        error,
        message=one_line(error.message),
        node=one_line(error.node) if error.node else None,
        traceback=error.traceback[-8000:] if error.traceback else None,
    )


def one_line(text: str) -> str:
    """Return `text` as one line of bounded length."""
    return " ".join(text.split())[:1000]


class ProgressUpdate(msgspec.Struct, frozen=True, tag="told"):
    """Progress of a process: `progress` is from 0 to 1 of all its work."""

    stage: BuildStage
    progress: float
    detail: str = ""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """With a `case`, the engine is not accurate enough for it."""

    error: ErrorInfo
    case: str = ""


Line = ProgressUpdate | Failed


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """The request of a child process. The memory limit applies to allocated data of each process, not to mapped files.
    A process and its descendants have twice as much: a candidate's process runs beside the build's. Their files may
    grow by the disk limit."""

    memory_limit_bytes: int | None = None
    disk_limit_bytes: int | None = None


class BuildRequest(Request, frozen=True, kw_only=True):
    """`folder` contains MODEL and SAMPLES and is for all files of the build. `candidates` are in the order of the
    chain."""

    build: str
    spec: ModelSpec
    target: Target
    candidates: tuple[EngineIdentity, ...]
    folder: str
    caches: str
    timeout_s: float  # without progress
    measuring: MeasurePlan = THOROUGH


class BuiltEngine(msgspec.Struct, frozen=True):
    """An engine that passed but is not published yet: `folder` contains the manifest's files."""

    manifest: EngineManifest
    folder: str


class BuildResult(msgspec.Struct, frozen=True, kw_only=True):
    """With an `error` there are no engines; the rows show how far the build got."""

    engines: tuple[BuiltEngine, ...] = ()
    stages: tuple[StageRow, ...] = ()
    candidates: tuple[CandidateRow, ...] = ()
    error: ErrorInfo | None = None


class CandidateRequest(Request, frozen=True, kw_only=True):
    """`cases` are files written by `golden`: inputs and reference outputs; the first becomes the golden sample.
    `measured` is the file to measure with, according to `measuring`; None: do not measure. `caches` is a folder that
    outlives the build."""

    identity: EngineIdentity
    model: str  # the transformed ONNX file
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    profiles: tuple[ShapeProfile, ...]
    tolerance: Tolerance | None  # None: do not verify
    batched: bool  # the shapes allow batches
    cases: dict[str, str]  # name → file
    measured: str  # a file
    folder: str  # for the engine's files
    caches: str
    measuring: MeasurePlan | None
    rounding_floors: tuple[dict[str, float], ...] = ()  # of each case, by output
    draws_other_numbers: bool = False  # the engine draws other random numbers than the reference


class CandidateResult(msgspec.Struct, frozen=True, kw_only=True):
    """`files` are names in the request's folder: the engine first, `golden.npz` last."""

    files: tuple[str, ...]
    settings: dict[str, int | str]
    why_alone: str  # as in EngineManifest
    accuracy: Accuracy | None  # None: not verified
    outputs: tuple[OutputRow, ...]
    latency: Latency | None  # None: not measured
    quantiles_s: tuple[float, ...]  # of the run times, evenly spaced from the fastest to the slowest
    gpu_nodes: int
    cpu_nodes: int
    nodes: dict[str, int]  # "operator on provider" → count
    notes: tuple[str, ...]
    seconds: dict[BuildStage, float]
