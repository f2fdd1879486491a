"""Check of an engine against its published sample. It runs before a worker is READY and detects that a driver, a
library or a damaged file has broken the engine since it was verified."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gpufn_core.domain.devices.engine import EngineManifest
from gpufn_core.spec.model_spec import TOLERANCES, Precision, TensorSpec, Tolerance, absolute_limit
from gpufn_runtime.worker.engines.base import Array, Arrays
from gpufn_runtime.worker.engines.tensors import dtype_of

# The builder has verified the engine against the function's own tolerance. Here it may deviate from the record by the
# preset of its precision, or by twice the deviation that the builder measured: sums with another number of threads
# round differently.
_SLACK = 2.0
_LEAST = {Precision.FP32: 1e-5, Precision.INT8: 2e-2}  # relative L2 norm, for precisions whose preset has none


class WrongOutput(Exception):
    """The engine's outputs differ from those at build time."""


def read(path: Path, manifest: EngineManifest) -> tuple[Arrays, Arrays]:
    """Return the sample's inputs and outputs. Raises OSError, ValueError, KeyError for an invalid file."""
    with np.load(path, allow_pickle=False) as arrays:
        inputs = {spec.name: _with_dtype(arrays[f"in.{spec.name}"], spec) for spec in manifest.inputs}
        outputs = {spec.name: _with_dtype(arrays[f"out.{spec.name}"], spec) for spec in manifest.outputs}
    return inputs, outputs


def compare(outputs: Arrays, recorded: Arrays, manifest: EngineManifest) -> None:
    """Raises WrongOutput, which names the output that differs from the record. An engine that the builder did not
    verify is not compared, because its outputs may be random."""
    if manifest.accuracy is None:
        return
    for spec in manifest.outputs:
        _compare(spec.name, outputs[spec.name], recorded[spec.name], manifest.arithmetic, manifest.accuracy.rel_l2)


def _compare(name: str, actual: Array, recorded: Array, arithmetic: Precision, measured: float) -> None:
    if (actual.dtype, actual.shape) != (recorded.dtype, recorded.shape):
        raise WrongOutput(
            f"{name} is {actual.dtype}{list(actual.shape)} but was {recorded.dtype}{list(recorded.shape)} when built"
        )
    if actual.dtype == np.object_:
        if not np.array_equal(actual, recorded):
            raise WrongOutput(f"{name} has other texts than when it was built")
        return
    now, then = (array.astype(np.float64).reshape(-1) for array in (actual, recorded))
    finite = np.isfinite(then)
    if not np.array_equal(np.where(np.isfinite(now), 0, now), np.where(finite, 0, then), equal_nan=True):
        raise WrongOutput(f"{name} has NaN or infinities in other places than when it was built")
    preset = TOLERANCES[arithmetic]
    error = _distance(now[finite], then[finite])
    allowed = max(preset.rel_l2 or _LEAST[arithmetic], _SLACK * measured)
    if not (error <= allowed or _is_near(now[finite], then[finite], preset)):
        raise WrongOutput(f"{name} differs from the build: rel_l2 is {error:.2g}, but {allowed:.2g} is allowed")


def _is_near(now: Array, then: Array, preset: Tolerance) -> bool:
    if preset.atol is None or preset.rtol is None:
        return False
    size = np.abs(then)
    with np.errstate(over="ignore"):
        allowed = absolute_limit(preset, float(size.max(initial=0.0))) + preset.rtol * size
        return bool(np.all(np.abs(now - then) <= allowed))


def _distance(now: Array, then: Array) -> float:
    """Return the L2 norm of the difference relative to the norm of `then`, or the absolute norm if that is zero. Values
    are scaled by the largest one first, because squares overflow above 1e154 and underflow below 1e-162."""
    largest = float(max(np.abs(now).max(initial=0), np.abs(then).max(initial=0))) or 1.0
    now, then = now / largest, then / largest
    size, distance = float(np.linalg.norm(then)), float(np.linalg.norm(now - then))
    return distance / size if size else distance * largest


def _with_dtype(array: Array, spec: TensorSpec) -> Array:
    """Convert an npz array to the tensor's dtype: npz has no bfloat16, and only fixed-size strings."""
    expected = dtype_of(spec.datatype)
    if array.dtype == expected:
        return array
    if expected == np.object_:
        return array.astype(np.object_)
    if spec.datatype == "BF16" and array.dtype.itemsize == 2:
        return array.view(expected)
    raise ValueError(f"{spec.name} is {array.dtype} in the golden sample, not {expected}")
