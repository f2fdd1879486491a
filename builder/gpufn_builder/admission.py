"""Admission of builds: whether a build may run beside the running builds. Pure.

1. A kind of device without a running build always admits one. So a build waits only for builds of its own kind, and a
   model whose build never ends does not block the other kinds.
2. Otherwise the number of builds is below its limit, and the memory suffices: of the host, and for a GPU of the device.

The memory that a running build still needs, beyond its present use, is reserved for it. GPU memory is reserved in full,
although the running builds already reduce the free memory: this admits fewer builds, but causes no failures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gpufn_core.spec.model_spec import ModelSpec

# A build of matrix products of 100 to 400 MiB took 4 times their size in fp32 and 8 times in fp16, and 160 MiB in all
# for a small model.
_HOST_BYTES: Final = 256 << 20
_HOST_COPIES: Final = 8
_CUDA_HOST_BYTES: Final = 3 << 30  # the libraries of CUDA and TensorRT; an assumption
# An assumption: a CUDA context, the workspace of TensorRT (`identity`), and the weights in the builder and the engine.
_GPU_BYTES: Final = (1 << 29) + (4 << 30)
_GPU_COPIES: Final = 2
_MARGIN: Final = 1.2  # on what an earlier build held: it was sampled


@dataclass(frozen=True)
class Need:
    """The estimated memory of a build."""

    host_bytes: int
    gpu_bytes: int = 0


@dataclass(frozen=True)
class RunningBuild:
    """`held_bytes` is the host memory that its processes hold now."""

    device: str  # DeviceKind
    need: Need
    held_bytes: int = 0


@dataclass(frozen=True)
class FreeMemory:
    """`gpu_bytes` is of the device of the build. None means unknown, which admits the build."""

    host_bytes: int | None
    gpu_bytes: int | None = None


def estimate(spec: ModelSpec, *, on_gpu: bool, limit_bytes: int, earlier_bytes: int | None) -> Need:
    """Estimate the memory of a build. `earlier_bytes` is the most host memory that successful builds of the model held,
    if known. `limit_bytes` is the limit of each of its two processes: the build process and the candidate's."""
    size = sum(file.size for file in spec.files)
    host_bytes = _HOST_BYTES + _HOST_COPIES * size + (_CUDA_HOST_BYTES if on_gpu else 0)
    if earlier_bytes is not None:
        host_bytes = int(earlier_bytes * _MARGIN)
    return Need(min(host_bytes, 2 * limit_bytes), _GPU_BYTES + _GPU_COPIES * size if on_gpu else 0)


def may_start(device: str, running: Sequence[RunningBuild], most: int) -> bool:
    """Return whether the number of running builds permits one more for `device`."""
    return len(running) < most or all(build.device != device for build in running)


def shortage(device: str, need: Need, running: Sequence[RunningBuild], free: FreeMemory, most: int) -> str:
    """Return the missing resource of a build for `device`, or "" if it may run."""
    same_device = [build for build in running if build.device == device]
    if not same_device:
        return ""
    if not may_start(device, running, most):
        return f"{len(running)} builds run, and the limit is {most}"
    reserved_bytes = sum(max(0, build.need.host_bytes - build.held_bytes) for build in running)
    if free.host_bytes is not None and need.host_bytes > free.host_bytes - reserved_bytes:
        return "too little free memory of the host"
    gpu_reserved_bytes = sum(build.need.gpu_bytes for build in same_device)
    if free.gpu_bytes is not None and need.gpu_bytes > free.gpu_bytes - gpu_reserved_bytes:
        return f"too little free memory of {device}"
    return ""
