"""The report of one build: the result of each stage, and the outcome, accuracy and speed of each candidate.

One struct, stored as JSON; `page` renders it.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from gpufn_core.domain.devices.engine import (
    Accuracy,
    Backend,
    BuildStage,
    BuildState,
    EngineIdentity,
    EngineManifest,
    Latency,
)
from gpufn_core.errors import ErrorInfo
from gpufn_core.spec.model_spec import ModelFile, Precision, ShapeProfile, TensorSpec, Tolerance

REPORT_SCHEMA = 1


class StageRow(msgspec.Struct, frozen=True):
    stage: BuildStage
    seconds: float
    found: str  # a description of the result


class Element(msgspec.Struct, frozen=True):
    """An element of an output, its reference and their difference. `limit` is the limit of this difference; None if
    the tolerance has no limit of elements. Values are texts, because JSON has no infinities."""

    index: tuple[int, ...]
    value: str
    reference: str
    difference: float
    limit: float | None = None

    @property
    def times_limit(self) -> float:
        """The difference as a multiple of the limit; 0 without one."""
        if self.limit is None or self.difference == 0:
            return 0.0
        return self.difference / self.limit if self.limit else math.inf


class OutputRow(msgspec.Struct, frozen=True):
    """One output of one case against the reference. In JSON an infinity is null.

    `p999_abs` is the 99.9th percentile of the differences. If the reference is all zeros, `rel_l2` is the norm of the
    difference and `cosine` is 1, because zeros have no direction. `argmax` is the share of rows (along the last axis)
    whose largest element is at the same position; for types other than floats, the share of equal elements. `nans`
    counts NaNs of the reference. `worst_element` exceeds its limit the most, or, if no limit concerns elements, has the
    largest difference; None for an empty output. `passes_fp32`: each element is within fp32's limits.
    """

    case: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    max_abs: float = 0.0
    p999_abs: float = 0.0
    rel_l2: float = 0.0
    cosine: float = 1.0
    argmax: float = 1.0
    nans: int = 0
    worst_element: Element | None = None
    passes_fp32: bool = True

    @property
    def accuracy(self) -> Accuracy:
        return Accuracy(self.max_abs, self.rel_l2, self.cosine)


class CandidateRow(msgspec.Struct, frozen=True, kw_only=True):
    """`found`: the engine already existed. `reason` is why there is no engine."""

    backend: Backend
    key: str = ""
    found: bool = False
    reason: str = ""
    log: str = ""
    seconds: dict[BuildStage, float] = {}
    size: int = 0
    settings: dict[str, int | str] = {}
    flags: dict[str, str] = {}
    versions: dict[str, str] = {}
    accuracy: Accuracy | None = None
    outputs: tuple[OutputRow, ...] = ()
    latency: Latency | None = None
    quantiles_s: tuple[float, ...] = ()  # of the run times, evenly spaced from the fastest to the slowest
    gpu_nodes: int = 0
    cpu_nodes: int = 0
    nodes: dict[str, int] = {}  # "operator on provider" → count
    notes: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.reason


class BuildReport(msgspec.Struct, frozen=True, kw_only=True):
    build: str
    model: str  # name of the ONNX file
    files: tuple[ModelFile, ...]
    precision: Precision
    tolerance: Tolerance
    device: str
    compute_capability: str
    driver: str
    state: BuildState
    started_at: float  # unix seconds
    seconds: float
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    profiles: tuple[ShapeProfile, ...] = ()
    batched: bool = False
    why_alone: str = ""  # set if it is not batched
    max_batch: int = 1
    stages: tuple[StageRow, ...] = ()
    candidates: tuple[CandidateRow, ...] = ()  # the best first
    error: ErrorInfo | None = None
    schema: int = REPORT_SCHEMA


def engine_row(manifest: EngineManifest, **fields: Any) -> CandidateRow:
    """Return the row of an engine; `fields` are not in its manifest."""
    return CandidateRow(
        backend=manifest.backend,
        key=manifest.key,
        size=manifest.size,
        settings=manifest.settings,
        flags=manifest.identity.flags,
        versions=manifest.identity.versions,
        accuracy=manifest.accuracy,
        latency=manifest.latency,
        gpu_nodes=manifest.gpu_nodes,
        cpu_nodes=manifest.cpu_nodes,
        remarks=manifest.remarks,
        **fields,
    )


def failed_row(identity: EngineIdentity, error: ErrorInfo) -> CandidateRow:
    return CandidateRow(
        backend=identity.backend,
        key=identity.key,
        reason=f"{error.stage}: {error.message}" if error.stage else error.message,
        log=error.traceback or "",
        flags=identity.flags,
        versions=identity.versions,
    )
