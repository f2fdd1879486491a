"""GPU memory that a worker's engines need, compared with the function's `vram`. Pure.

A TensorRT session holds the weights, which are nearly all of the plan's bytes, and one execution context for each slot.
TensorRT reports the memory of a context (`ICudaEngine.device_memory_size_v2`), and the builder records it. ONNX Runtime
reports no such figure, so its engines are not counted. The buffers of inputs and outputs, and CUDA's own context, are
not included either.
"""

from __future__ import annotations

from collections.abc import Mapping

from gpufn_core.domain.devices.engine import Build, EngineManifest
from gpufn_core.domain.revision import Revision
from gpufn_core.spec.units import format_bytes


def memory_problem(revision: Revision, builds: list[Build], manifests: Mapping[str, EngineManifest]) -> str:
    """Return why the engines of one DeviceKind do not fit into `vram`, or "". `builds` have succeeded."""
    vram_bytes, contexts = revision.spec.resources.vram_bytes, revision.spec.concurrency
    if vram_bytes is None:
        return ""
    for device in sorted({build.device for build in builds}):
        total, parts = 0, []
        for build in builds:
            manifest = manifests.get(build.engines[0]) if build.device == device and build.engines else None
            if manifest is None or not manifest.context_bytes:
                continue
            total += manifest.size + contexts * manifest.context_bytes
            several = f"{contexts} contexts of" if contexts > 1 else "a context of"
            sizes = f"{format_bytes(manifest.size)} and {several} {format_bytes(manifest.context_bytes)}"
            parts.append(f"{build.model.files[0].name} {sizes}")
        if total > vram_bytes:
            remedy = "a smaller max_batch or a lower concurrency" if contexts > 1 else "a smaller max_batch"
            return (
                f"the engines for {device} need {format_bytes(total)} of GPU memory ({'; '.join(parts)}), and vram is "
                f"{format_bytes(vram_bytes)}: declare more vram, {remedy}"
            )
    return ""
