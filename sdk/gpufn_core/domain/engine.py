"""Engines and Builds: what the builder makes of a ModelSpec, what names it, and how far a build has got.

An engine is a folder of files. Published it is an EngineManifest in the ENGINES bucket, under its EngineKey, and its
files in the object store, by digest; on a node it is `cache/engines/<key>/`, with the manifest beside its files.
"""

from __future__ import annotations

import enum
import hashlib

import msgspec

from gpufn_core.errors import ErrorInfo
from gpufn_core.spec.model_spec import ModelFile, ModelSpec, Precision, ShapeProfile, TensorSpec, Tolerance

ENGINE_SCHEMA = 3  # of the manifest and of what the builder does: a new number makes all engines anew
MANIFEST_FILE = "manifest.json"  # on a node, beside the engine's files
GOLDEN_FILE = "golden.npz"
CPU_KIND = "cpu"  # the DeviceKind of every CPU pool; a GPU's is its model name, as the driver tells it

_canonical = msgspec.json.Encoder(order="sorted")


class Backend(enum.StrEnum):
    TENSORRT = "tensorrt"
    ORT_CUDA = "onnxruntime-cuda"
    ORT_CPU = "onnxruntime-cpu"

    @property
    def on_gpu(self) -> bool:
        return self is not Backend.ORT_CPU


class EngineIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that makes two engines interchangeable; its digest is the EngineKey. A test changes each row.

    The driver's version is not here: it is recorded, and a golden sample at each load finds what it breaks.
    """

    model: str  # sha256 over the digests of the model's files
    recipe: Precision
    tools: dict[str, str]  # what rewrites the graph → its version
    profiles: tuple[ShapeProfile, ...]  # as asked for; empty: made from max_batch and the samples
    max_batch: int
    samples: str  # digest, or empty: they choose profiles and calibrate
    flags: dict[str, str]  # of the compiler
    backend: Backend
    versions: dict[str, str]  # onnxruntime, tensorrt, cuda, cudnn, as far as the backend uses them
    device: str  # DeviceKind
    compute_capability: str  # of a CPU: the vector instructions that the machine has
    os: str
    arch: str
    schema: int = ENGINE_SCHEMA

    @property
    def key(self) -> str:
        """The EngineKey: sha256 in hex."""
        return hashlib.sha256(_canonical.encode(self)).hexdigest()


def model_digest(files: tuple[ModelFile, ...]) -> str:
    """One sha256 for a model of several files. What the ONNX file, the first, is called is no matter; the names of the
    others are in it. Sizes follow from the digests."""
    model, *external = files
    return hashlib.sha256(_canonical.encode([model.digest, *((it.name, it.digest) for it in external)])).hexdigest()


class Accuracy(msgspec.Struct, frozen=True):
    """The worst of all outputs and samples, against the reference."""

    max_abs: float
    rel_l2: float
    cosine: float

    def beyond(self, tolerance: Tolerance) -> str:
        """What `tolerance` does not allow, in words; empty when it allows it.

        >>> Accuracy(max_abs=0.1, rel_l2=2e-3, cosine=0.9).beyond(Tolerance(rel_l2=1e-3, cosine=0.8))
        'rel_l2 is 0.002, and at most 0.001 is allowed'
        """
        found = []
        if tolerance.max_abs is not None and not self.max_abs <= tolerance.max_abs:
            found.append(f"max_abs is {self.max_abs:.6g}, and at most {tolerance.max_abs:g} is allowed")
        if tolerance.rel_l2 is not None and not self.rel_l2 <= tolerance.rel_l2:
            found.append(f"rel_l2 is {self.rel_l2:.6g}, and at most {tolerance.rel_l2:g} is allowed")
        if tolerance.cosine is not None and not self.cosine >= tolerance.cosine:
            found.append(f"cosine is {self.cosine:.6g}, and at least {tolerance.cosine:g} is allowed")
        return "; ".join(found)


class Latency(msgspec.Struct, frozen=True):
    """Of one run at the profile's `opt` shapes, in seconds; `per_s` counts runs. `settled` tells whether three windows
    agreed within 10 %."""

    p50_s: float
    p90_s: float
    p99_s: float
    per_s: float
    settled: bool


class EngineManifest(msgspec.Struct, frozen=True, kw_only=True):
    """An engine as published. `files` holds the engine first, then what it refers to, then GOLDEN_FILE.

    `arithmetic` is the coarsest in it: that of the recipe, or the model's own, which may have been in half precision
    or int8.

    The golden file has one sample, arrays ``in.<name>`` and ``out.<name>``: what a worker runs before it is READY.
    `batched` tells that the first dimension of each input and output counts rows, which the builder saw to be
    independent, so that calls can share a run of up to `max_batch` rows; `why_alone` says why they cannot.

    `settings` of onnxruntime: `intra_op_threads` (as many as the worker has cores when absent) and
    `graph_optimization`, what is left to do at load: `none`, `basic`, `extended` or `all` (when absent).
    """

    key: str
    identity: EngineIdentity
    model: str  # the ONNX file's name
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    profiles: tuple[ShapeProfile, ...]
    batched: bool
    max_batch: int
    files: tuple[ModelFile, ...]
    settings: dict[str, int | str]
    accuracy: Accuracy
    latency: Latency | None
    built_at: float  # unix seconds
    arithmetic: Precision = Precision.FP32
    why_alone: str = ""
    driver: str = ""
    gpu_nodes: int = 0  # of the graph: how many run on the GPU
    cpu_nodes: int = 0

    @property
    def backend(self) -> Backend:
        return self.identity.backend

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
    """One run of the builder, for one model on one DeviceKind. Also the job: a PENDING one waits in the BUILD stream.

    `engines` are EngineKeys, the best first: a worker takes the first that loads. `report` names the JSON report in the
    object store, `page` the HTML one. `detail` says in words what `stage` is at. A BUILDING one is one builder's:
    `builder`, a node and a mark of its process; `deaths` counts those that died while they had it.
    """

    id: str
    model: ModelSpec
    device: str  # DeviceKind
    created_at: float
    state: BuildState = BuildState.PENDING
    cancel: bool = False  # somebody asked for its end
    stage: BuildStage | None = None
    progress: float = 0.0  # of all stages, 0 to 1
    detail: str = ""
    engines: tuple[str, ...] = ()
    cached: bool = False  # nothing was compiled: the engines were there
    error: ErrorInfo | None = None
    report: str = ""
    page: str = ""
    started_at: float | None = None
    ended_at: float | None = None
    builder: str = ""
    deaths: int = 0
