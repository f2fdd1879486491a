"""Builds, engines and models (docs/http.md)."""

from __future__ import annotations

from typing import Any

import msgspec

from gpufn_core.domain.devices.engine import Accuracy, BuildStage, BuildState, Latency
from gpufn_core.errors import ErrorInfo
from gpufn_core.spec.model_spec import ShapeProfile, TensorSpec


class BuildAhead(msgspec.Struct, frozen=True, kw_only=True):
    """The build that another one waits for. `function` is empty for a build without a function."""

    id: str
    model: str  # name of the ONNX file
    function: str = ""
    building_s: float = 0.0


class BuildView(msgspec.Struct, frozen=True, kw_only=True):
    """A Build: its progress and its end. `progress` is 0 to 1 over all stages; `change` increases with each change.
    `ahead` is the build that this one waits for."""

    id: str
    device: str
    state: BuildState
    stage: BuildStage | None = None
    progress: float = 0.0
    detail: str = ""
    engines: tuple[str, ...] = ()
    cached: bool = False
    error: ErrorInfo | None = None
    remarks: tuple[str, ...] = ()
    created_at: float | None = None
    started_at: float | None = None
    ended_at: float | None = None
    change: int = 0
    function: str = ""
    ahead: BuildAhead | None = None
    model: dict[str, Any] = {}

    @property
    def label(self) -> str:
        """The model's file and the DeviceKind, such as `resnet18.onnx on NVIDIA L4`."""
        files = self.model.get("files") or [{"name": self.model.get("parameter", "model")}]
        return f"{files[0]['name']} on {self.device}"


class EngineView(msgspec.Struct, frozen=True, kw_only=True):
    """A published engine and the revisions that use it. `model` is the name of the ONNX file."""

    key: str
    model: str
    backend: str
    device: str
    precision: str
    size: int
    accuracy: Accuracy | None = None
    latency: Latency | None = None
    remarks: tuple[str, ...] = ()
    built_at: float = 0.0
    used_by: tuple[str, ...] = ()


class ModelView(msgspec.Struct, frozen=True, kw_only=True):
    """A model of the revision that serves, and its engines by DeviceKind, best first."""

    name: str
    function: str
    revision: int
    file: str = ""
    parameter: str = ""
    precision: str = ""
    max_batch: int = 1
    batched: bool | None = None
    why_alone: str = ""
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    profiles: tuple[ShapeProfile, ...] = ()
    engines: dict[str, tuple[EngineView, ...]] = {}


class CollectedEngines(msgspec.Struct, frozen=True, kw_only=True):
    """Unused engines, and the number and bytes of the files that only they use."""

    engines: tuple[EngineView, ...] = ()
    files: int = 0
    bytes: int = 0
    dry_run: bool = False
