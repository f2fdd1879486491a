"""Views of a model in the Open Inference Protocol: metadata, Triton model configuration, statistics. Pure."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from gpufn_core.domain.devices.engine import Backend, EngineManifest
from gpufn_core.domain.invocation import OutcomeKind
from gpufn_core.domain.revision import Revision
from gpufn_core.spec.function_spec import MethodSpec
from gpufn_core.spec.model_spec import TensorSpec
from gpufn_core.spec.tensor_signature import tensor_inputs
from gpufn_gateway.metrics.call_stats import CallStats

_PYTHON: Final = "python"  # as Triton names it
# Backend → Triton's platform and backend.
_PLATFORMS: dict[Backend, tuple[str, str]] = {
    Backend.TENSORRT: ("tensorrt_plan", "tensorrt"),
    Backend.ORT_CUDA: ("onnxruntime_onnx", "onnxruntime"),
    Backend.ORT_CPU: ("onnxruntime_onnx", "onnxruntime"),
}


def metadata(revision: Revision, manifest: EngineManifest) -> dict[str, Any]:
    return {
        "name": revision.function,
        "versions": [str(revision.number)],
        "platform": _PLATFORMS[manifest.backend][0],
        "inputs": [msgspec.structs.replace(spec, default=None) for spec in manifest.inputs],
        "outputs": manifest.outputs,
    }


def function_metadata(revision: Revision, name: str, method: MethodSpec) -> dict[str, Any]:
    """Return the metadata of a function with code. Its shapes and its outputs are not declared; "" is any datatype."""
    return {
        "name": name,
        "versions": [str(revision.number)],
        "platform": _PYTHON,
        "inputs": [
            {"name": name, "datatype": datatype, "shape": [-1]} for name, datatype in tensor_inputs(method).items()
        ],
        "outputs": [],
    }


def function_config(revision: Revision, name: str, method: MethodSpec) -> dict[str, Any]:
    """Return the configuration of a function with code, in Triton's format."""
    inputs = [
        {"name": name, "data_type": f"TYPE_{datatype or 'INVALID'}", "dims": [-1]}
        for name, datatype in tensor_inputs(method).items()
    ]
    return {
        "name": name,
        "platform": _PYTHON,
        "backend": _PYTHON,
        "max_batch_size": 0,
        "input": inputs,
        "output": [],
    }


def config(revision: Revision, manifest: EngineManifest) -> dict[str, Any]:
    """Return the model configuration in Triton's format.

    `max_batch_size` 0 means that the first dimension is not a batch dimension. Otherwise `dims` omits it.
    """
    platform, backend = _PLATFORMS[manifest.backend]
    model_config: dict[str, Any] = {
        "name": revision.function,
        "platform": platform,
        "backend": backend,
        "max_batch_size": manifest.max_batch if manifest.batched else 0,
        "input": [_tensor(spec, is_batched=manifest.batched) for spec in manifest.inputs],
        "output": [_tensor(spec, is_batched=manifest.batched) for spec in manifest.outputs],
    }
    if (batch := revision.spec.batch) is not None and manifest.batched:
        model_config["dynamic_batching"] = {
            "preferred_batch_size": [manifest.max_batch],
            "max_queue_delay_microseconds": round(batch.max_wait_ms * 1000),
        }
    return model_config


def _tensor(spec: TensorSpec, *, is_batched: bool) -> dict[str, Any]:
    datatype = "STRING" if spec.datatype == "BYTES" else spec.datatype
    optional = {} if spec.default is None else {"optional": True}
    return {
        "name": spec.name,
        "data_type": f"TYPE_{datatype}",
        "dims": spec.shape[1:] if is_batched else spec.shape,
        **optional,
    }


def statistics(revision: Revision, name: str, stats: CallStats) -> dict[str, Any]:
    """Return the statistics of calls at this gateway. `compute_infer` is their run time, batched or not.

    The methods of a class have the statistics of the class. The number of model executions is not known here, since
    calls share runs in the worker.
    """
    succeeded = stats.outcomes.get(OutcomeKind.SUCCEEDED, 0)
    ended = sum(stats.outcomes.values())
    failed_s = stats.latency.total - stats.succeeded_s
    return {
        "name": name,
        "version": str(revision.number),
        "inference_count": succeeded,
        "inference_stats": {
            "success": {"count": succeeded, "ns": round(stats.succeeded_s * 1e9)},
            "fail": {"count": ended - succeeded, "ns": round(failed_s * 1e9)},
            "queue": {"count": stats.queue.count, "ns": round(stats.queue.total * 1e9)},
            "compute_infer": {"count": stats.run.count, "ns": round(stats.run.total * 1e9)},
        },
        "batch_stats": [],
    }
