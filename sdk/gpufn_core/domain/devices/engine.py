"""Engines and builds: the builder's output for a ModelSpec, its identity, and the progress of a build.

An engine is a folder of files. A published engine is an EngineManifest in the ENGINES bucket, under its EngineKey, with
its files in the object store, by digest. On a node it is `cache/engines/<key>/`, with the manifest beside its files.
"""

from __future__ import annotations

import enum
import hashlib

import msgspec

from gpufn_core.errors import ErrorInfo
from gpufn_core.signing.statement import DeploySignature
from gpufn_core.spec.model_spec import ModelFile, ModelSpec, Precision, ShapeProfile, TensorSpec, Tolerance

ENGINE_SCHEMA = 4  # version of the manifest and of the builder's work: a new number rebuilds all engines
MANIFEST_FILE = "manifest.json"  # on a node, beside the engine's files
GOLDEN_FILE = "golden.npz"
CPU_KIND = "cpu"  # the DeviceKind of every CPU pool; a GPU's is its model name as the driver reports it

_canonical = msgspec.json.Encoder(order="sorted")


class Backend(enum.StrEnum):
    TENSORRT = "tensorrt"
    ORT_CUDA = "onnxruntime-cuda"
    ORT_CPU = "onnxruntime-cpu"

    @property
    def on_gpu(self) -> bool:
        return self is not Backend.ORT_CPU


class EngineIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that makes two engines interchangeable; its digest is the EngineKey. A test changes each field.

    `tolerance` is None for the preset. It decides which engines pass, and which layers stay in fp32.

    The driver's version is not included. It is recorded, and the golden sample at each load detects wrong outputs.
    """

    model: str  # sha256 over the digests of the model's files
    recipe: Precision
    tools: dict[str, str]  # tool that rewrites the graph → its version
    profiles: tuple[ShapeProfile, ...]  # as requested; empty: derived from max_batch and the samples
    max_batch: int
    samples: str  # digest, or empty; profiles and calibration depend on the samples
    flags: dict[str, str]  # of the compiler
    backend: Backend
    versions: dict[str, str]  # onnxruntime, tensorrt, cuda, cudnn, if the backend uses them
    device: str  # DeviceKind
    compute_capability: str  # for a CPU: the vector instructions of the machine
    os: str
    arch: str
    tolerance: Tolerance | None = None
    verified: bool = True
    schema: int = ENGINE_SCHEMA

    @property
    def key(self) -> str:
        """The EngineKey: sha256 in hex."""
        return hashlib.sha256(_canonical.encode(self)).hexdigest()


def model_digest(files: tuple[ModelFile, ...]) -> str:
    """Return one sha256 for a model of several files. The name of the ONNX file, which is the first, does not matter;
    the names of the others do. Sizes follow from the digests."""
    model, *external = files
    return hashlib.sha256(_canonical.encode([model.digest, *((it.name, it.digest) for it in external)])).hexdigest()


class Accuracy(msgspec.Struct, frozen=True):
    """The worst values over all outputs and samples, compared with the reference."""

    max_abs: float
    rel_l2: float
    cosine: float


class Latency(msgspec.Struct, frozen=True):
    """Latency of one run at the profile's `opt` shapes, in seconds; `per_s` is runs per second. `settled`: three
    windows agreed within 10 %."""

    p50_s: float
    p90_s: float
    p99_s: float
    per_s: float
    settled: bool


class EngineManifest(msgspec.Struct, frozen=True, kw_only=True):
    """A published engine. `files` lists the engine first, then the files that it refers to, then GOLDEN_FILE.

    `arithmetic` is the coarsest arithmetic in the engine. It comes from the recipe, or from the model itself if the
    model was in half precision or int8.

    The golden file has one sample, arrays ``in.<name>`` and ``out.<name>``, which a worker runs before it is READY.
    `batched` means that the first dimension of each input and output counts rows, and that the builder found the rows
    to be independent. Then calls can share a run of up to `max_batch` rows. `why_alone` is why they cannot. `accuracy`
    is None if the engine was not verified. `remarks` name differences between the engine and the requested one, such as
    layers kept in fp32.

    `settings` of onnxruntime: `intra_op_threads` (default: the worker's cores) and `graph_optimization`, the level that
    remains to be done at load: `none`, `basic`, `extended` or `all` (default). Of tensorrt: `device_memory_bytes`, the
    GPU memory of each execution context.
    """

    key: str
    identity: EngineIdentity
    model: str  # name of the ONNX file
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    profiles: tuple[ShapeProfile, ...]
    batched: bool
    max_batch: int
    files: tuple[ModelFile, ...]
    settings: dict[str, int | str]
    accuracy: Accuracy | None
    latency: Latency | None
    built_at: float  # unix seconds
    arithmetic: Precision = Precision.FP32
    why_alone: str = ""
    remarks: tuple[str, ...] = ()
    driver: str = ""
    gpu_nodes: int = 0  # nodes of the graph that run on the GPU
    cpu_nodes: int = 0

    @property
    def backend(self) -> Backend:
        return self.identity.backend

    @property
    def context_bytes(self) -> int:
        """GPU memory of each execution context, or 0 if the backend reports none."""
        return int(self.settings.get("device_memory_bytes", 0))

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


class BuildState(enum.StrEnum):
    PENDING = "pending"
    BUILDING = "building"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        return self not in (BuildState.PENDING, BuildState.BUILDING)


class BuildStage(enum.StrEnum):
    INGEST = "ingest"
    NORMALISE = "normalise"
    REFERENCE = "reference"
    TRANSFORM = "transform"
    COMPILE = "compile"
    VERIFY = "verify"
    MEASURE = "measure"
    PUBLISH = "publish"


class Build(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the builder, for one model on one DeviceKind. Also the job: a PENDING build waits in the BUILD stream.

    `engines` are EngineKeys, the best first: a worker uses the first that loads. `report` names the JSON report in the
    object store, `page` the HTML report. `detail` describes the current step of `stage`. A BUILDING build belongs to
    one builder: `builder` is its node and a token of its process. `deaths` counts builders that died during this build.
    """

    id: str
    model: ModelSpec
    device: str  # DeviceKind
    created_at: float
    function: str = ""  # that is deployed; empty for a build without one
    state: BuildState = BuildState.PENDING
    cancel: bool = False  # a user requested its end
    stage: BuildStage | None = None
    progress: float = 0.0  # over all stages, 0 to 1
    detail: str = ""
    engines: tuple[str, ...] = ()
    cached: bool = False  # the engines already existed, so the build compiled none
    error: ErrorInfo | None = None
    remarks: tuple[str, ...] = ()  # of the best engine
    report: str = ""
    page: str = ""
    started_at: float | None = None
    ended_at: float | None = None
    builder: str = ""
    deaths: int = 0
    signature: DeploySignature | None = None  # of the deploy
