"""What the service, its build process and that one's candidate processes tell each other.

Down: a request, in a JSON file. Up: a Told or Failed per line on a pipe, in JSON, and when all went well a result, in a
file beside the request; in msgpack, for JSON has no infinities.
"""

from __future__ import annotations

from typing import Final

import msgspec

from gpufn_builder.identity import Target
from gpufn_builder.report.report import CandidateRow, OutputRow, StageRow
from gpufn_core.domain.engine import Accuracy, BuildStage, EngineIdentity, EngineManifest, Latency
from gpufn_core.errors import ErrorInfo
from gpufn_core.spec.model_spec import ModelSpec, ShapeProfile, TensorSpec, Tolerance

MODEL: Final = "model"  # a folder of a build's: the model's files
SAMPLES: Final = "samples"  # another: their names are the user's, and may be equal
PUBLISH_BEGINS: Final = 0.95  # of a build's progress; what comes before is the build process's


class MeasurePlan(msgspec.Struct, frozen=True):
    """How long an engine runs before it counts, for how long it counts at least, and how long it may take to settle;
    before that, how long each setting runs that a compiler chooses by trying."""

    warm_up_s: float = 0.2
    least_s: float = 3.0
    most_s: float = 12.0
    trial_s: float = 0.25

    def scaled(self, least_s: float) -> MeasurePlan:
        """The same in proportion."""
        factor = least_s / self.least_s
        return MeasurePlan(self.warm_up_s * factor, least_s, self.most_s * factor, self.trial_s * factor)


THOROUGH: Final = MeasurePlan()


def shortened(error: ErrorInfo) -> ErrorInfo:
    """As much of it as is read, on one line: it goes through a pipe and into a record, and what a model's nodes are
    called, a stranger has chosen."""
    return msgspec.structs.replace(
        error,
        message=_one_line(error.message),
        node=_one_line(error.node) if error.node else None,
        traceback=error.traceback[-8000:] if error.traceback else None,
    )


def _one_line(text: str) -> str:
    return " ".join(text.split())[:1000]


class Told(msgspec.Struct, frozen=True, tag="told"):
    """How far it is: `progress` from 0 to 1 of all that the process does."""

    stage: BuildStage
    progress: float
    detail: str = ""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    error: ErrorInfo


Line = Told | Failed


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What a process of its own is started with. The limit is of its data: what is allocated, not what is mapped."""

    memory_limit_bytes: int | None = None


class BuildRequest(Request, frozen=True, kw_only=True):
    """`folder` holds MODEL and SAMPLES, and is for all that is made. `candidates` are the best first."""

    build: str
    spec: ModelSpec
    target: Target
    candidates: tuple[EngineIdentity, ...]
    folder: str
    caches: str
    measuring: MeasurePlan = THOROUGH


class MadeEngine(msgspec.Struct, frozen=True):
    """An engine that passed, not published yet: `folder` holds the manifest's files."""

    manifest: EngineManifest
    folder: str


class BuildResult(msgspec.Struct, frozen=True, kw_only=True):
    """With an `error` there are no engines; the rows tell how far it got."""

    engines: tuple[MadeEngine, ...] = ()  # the best first
    stages: tuple[StageRow, ...] = ()
    candidates: tuple[CandidateRow, ...] = ()
    error: ErrorInfo | None = None


class CandidateRequest(Request, frozen=True, kw_only=True):
    """`cases` are files as `golden` writes them: inputs, and the outputs of the reference; the first becomes the golden
    sample. `measured` is the one to measure with. `caches` is a folder that outlives the build."""

    identity: EngineIdentity
    model: str  # the transformed ONNX file
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    profiles: tuple[ShapeProfile, ...]
    tolerance: Tolerance
    batched: bool  # as far as the shapes tell
    cases: dict[str, str]  # name → file
    measured: str  # a file
    folder: str  # where the engine's files go
    caches: str
    measuring: MeasurePlan


class CandidateResult(msgspec.Struct, frozen=True, kw_only=True):
    """`files` are names in the request's folder: the engine first, `golden.npz` last."""

    files: tuple[str, ...]
    settings: dict[str, int | str]
    why_alone: str  # as an EngineManifest has it
    accuracy: Accuracy
    outputs: tuple[OutputRow, ...]
    latency: Latency
    quantiles_s: tuple[float, ...]  # of a run, evenly spaced from the fastest to the slowest
    gpu_nodes: int
    cpu_nodes: int
    nodes: dict[str, int]  # "operator on provider" → how many
    notes: tuple[str, ...]
    seconds: dict[BuildStage, float]
