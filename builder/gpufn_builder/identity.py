"""The identity of an engine before it exists: the EngineIdentity of each candidate for a model on one device.

It is computed only from the ModelSpec, the device and the installed versions, without imports: an existing engine is
found by its EngineKey in milliseconds. The compilers use exactly these flags.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from gpufn_core.domain.devices.device import Device
from gpufn_core.domain.devices.engine import CPU_KIND, Backend, EngineIdentity, model_digest
from gpufn_core.spec.model_spec import ModelSpec, Precision

_WORKSPACE_BYTES: Final = str(4 << 30)  # by default TensorRT may take all of the GPU
# Backend → its parts, and the distributions that may provide each; the first installed one counts.
_PARTS: Final[dict[Backend, dict[str, tuple[str, ...]]]] = {
    Backend.TENSORRT: {
        "tensorrt": ("tensorrt-cu13-bindings", "tensorrt-cu12-bindings", "tensorrt"),
        "cuda": ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu13", "nvidia-cuda-runtime-cu12"),
    },
    Backend.ORT_CUDA: {
        "onnxruntime": ("onnxruntime-gpu",),
        "cuda": ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu13", "nvidia-cuda-runtime-cu12"),
        "cudnn": ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
    },
    Backend.ORT_CPU: {"onnxruntime": ("onnxruntime", "onnxruntime-gpu")},
}
_COMPILERS: Final = ("tensorrt", "onnxruntime")  # required by their backends; CUDA may be installed with the system
_SYSTEM_CUDA: Final = Path("/usr/local/cuda/version.json")
_DRIVER: Final = Path("/sys/module/nvidia/version")
_CPUINFO: Final = Path("/proc/cpuinfo")
# Instructions that select kernels, by their names in /proc/cpuinfo on x86 and on Arm.
_VECTOR_FLAGS: Final = (
    "sse4_2", "avx", "f16c", "fma", "avx2", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16",
    "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16",
    "asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2",
)  # fmt: skip
# Tools that rewrite the graph, in addition to the builder itself, whose changes `ENGINE_SCHEMA` counts.
_TOOLS: Final = ("onnx",)
_REWRITERS: Final = ("onnxruntime", "onnxruntime-gpu")


class Target(msgspec.Struct, frozen=True):
    """The device of a build. `uuid` is empty for the CPU. `driver` is recorded, but not part of any key."""

    kind: str
    compute_capability: str
    uuid: str = ""
    driver: str = ""

    @property
    def is_gpu(self) -> bool:
        return self.kind != CPU_KIND


def cpu_target() -> Target:
    return Target(CPU_KIND, vector_instructions(_read(_CPUINFO)))


def gpu_target(device: Device) -> Target:
    return Target(device.kind, device.compute_capability, device.uuid, _read(_DRIVER).strip())


def vector_instructions(cpuinfo: str) -> str:
    """Return the vector instructions of a machine from its /proc/cpuinfo.

    >>> vector_instructions("flags : fpu sse4_2 avx avx2 fma")
    'sse4_2 avx fma avx2'
    """
    for line in cpuinfo.splitlines():
        name, _, flags = line.partition(":")
        if name.strip() in ("flags", "Features"):
            present = set(flags.split())
            return " ".join(flag for flag in _VECTOR_FLAGS if flag in present)
    return ""


def chain(spec: ModelSpec, target: Target) -> tuple[Backend, ...]:
    """Return the backends to try. Usually the first is the fastest; `backend_choice` compares the measured ones."""
    on_cpu = (Backend.ORT_CPU,) if spec.allow_cpu or not target.is_gpu else ()
    return (Backend.TENSORRT, Backend.ORT_CUDA, *on_cpu) if target.is_gpu else on_cpu


@functools.cache
def installed() -> Mapping[Backend, Mapping[str, str]]:
    """Return the versions of each installed backend."""
    all_versions = {backend: _versions(parts) for backend, parts in _PARTS.items()}
    return {backend: versions for backend, versions in all_versions.items() if set(_COMPILERS) & versions.keys()}


@functools.cache
def tools(precision: Precision) -> dict[str, str]:
    """Return the versions of the tools that rewrite the graph."""
    rewriters = () if precision in (Precision.FP32, Precision.TF32) else _REWRITERS
    return {name: version for name in (*_TOOLS, *rewriters) if (version := _version(name))}


def flags(spec: ModelSpec, backend: Backend) -> dict[str, str]:
    """Return the compiler options for the model. The compilers follow them."""
    tf32 = "1" if spec.precision is Precision.TF32 else "0"
    match backend:
        case Backend.TENSORRT:
            return {"builder_optimization_level": "3", "tf32": tf32, "workspace_bytes": _WORKSPACE_BYTES}
        case Backend.ORT_CUDA:
            return {"graph_optimization_level": "extended", "use_tf32": tf32}
        case Backend.ORT_CPU:
            # The result of "extended" runs on every CPU. The further optimizations of "all" depend on the CPU
            # and are done at load.
            return {"graph_optimization_level": "extended"}


def identity(spec: ModelSpec, target: Target, backend: Backend, versions: Mapping[str, str]) -> EngineIdentity:
    """Return the identity of an engine. `versions` are the backend's. A CPU engine does not depend on the build's
    GPU."""
    if backend is Backend.ORT_CPU and target.is_gpu:
        target = cpu_target()
    return EngineIdentity(
        model=model_digest(spec.files),
        recipe=spec.precision,
        tools=tools(spec.precision),
        profiles=spec.profiles,
        max_batch=spec.max_batch,
        samples=spec.samples.digest if spec.samples else "",
        flags=flags(spec, backend),
        backend=backend,
        versions=dict(versions),
        device=target.kind,
        compute_capability=target.compute_capability,
        os=platform.system().lower(),
        arch=platform.machine(),
        tolerance=spec.tolerance,
        verified=spec.verify,
    )


def _versions(parts: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    versions = {}
    for part, names in parts.items():
        version = next((f"{name} {version}" for name in names if (version := _version(name))), "")
        if not version and part == "cuda":
            version = _system_cuda()
        if version:
            versions[part] = version
    return versions


def _version(distribution: str) -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(distribution)
    return ""


def _system_cuda() -> str:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(_read(_SYSTEM_CUDA) or "{}")["cuda"]["version"])
    return ""


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
