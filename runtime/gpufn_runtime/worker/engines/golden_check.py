"""The sample that an engine was published with: run before a worker is READY, it finds what a driver, a library or a
damaged file broke since the engine was verified."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gpufn_core.domain.engine import EngineManifest
from gpufn_core.spec.model_spec import TOLERANCES, TensorSpec
from gpufn_runtime.worker.engines.base import Array, Arrays
from gpufn_runtime.worker.engines.tensors import dtype_of

# The builder has held the engine to the function's own tolerance. Here it may differ from the record by what is usual
# for its precision, or by twice what the builder measured: the record may be the reference's, and sums made by another
# number of threads round otherwise.
_SLACK = 2.0
_USUAL = 2e-2  # relative L2 norm, where the precision has no tolerance for it (int8)


class WrongOutput(Exception):
    """The engine does not compute what it did when it was built."""


def read(path: Path, manifest: EngineManifest) -> tuple[Arrays, Arrays]:
    """Inputs and outputs of the sample. Raises OSError, ValueError, KeyError for a file that is none."""
    with np.load(path, allow_pickle=False) as arrays:
        inputs = {spec.name: _typed(arrays[f"in.{spec.name}"], spec) for spec in manifest.inputs}
        outputs = {spec.name: _typed(arrays[f"out.{spec.name}"], spec) for spec in manifest.outputs}
    return inputs, outputs


def compare(found: Arrays, recorded: Arrays, manifest: EngineManifest) -> None:
    """WrongOutput names the output that is not as recorded."""
    for spec in manifest.outputs:
        _compare(spec.name, found[spec.name], recorded[spec.name], manifest)


def _compare(name: str, found: Array, recorded: Array, manifest: EngineManifest) -> None:
    if (found.dtype, found.shape) != (recorded.dtype, recorded.shape):
        raise WrongOutput(
            f"{name} is {found.dtype}{list(found.shape)}, and was {recorded.dtype}{list(recorded.shape)} when built"
        )
    if found.dtype == np.object_:
        if not np.array_equal(found, recorded):
            raise WrongOutput(f"{name} has other texts than when it was built")
        return
    now, then = (array.astype(np.float64).reshape(-1) for array in (found, recorded))
    finite = np.isfinite(then)
    if not np.array_equal(np.where(np.isfinite(now), 0, now), np.where(finite, 0, then), equal_nan=True):
        raise WrongOutput(f"{name} has NaN or infinities in other places than when it was built")
    error = _distance(now[finite], then[finite])
    allowed = max(TOLERANCES[manifest.arithmetic].rel_l2 or _USUAL, _SLACK * manifest.accuracy.rel_l2)
    if not error <= allowed:
        raise WrongOutput(f"{name} is not what it was when built: rel_l2 is {error:.2g}, and {allowed:.2g} is allowed")


def _distance(now: Array, then: Array) -> float:
    """L2 norm of the difference over that of `then`; the norm itself where that is all zeros. Squares of numbers beyond
    1e154 are none, and of those below 1e-162 nothing is left: all are taken of the largest."""
    largest = float(max(np.abs(now).max(initial=0), np.abs(then).max(initial=0))) or 1.0
    now, then = now / largest, then / largest
    size, distance = float(np.linalg.norm(then)), float(np.linalg.norm(now - then))
    return distance / size if size else distance * largest


def _typed(array: Array, spec: TensorSpec) -> Array:
    """npz files have no bfloat16, and texts only of a fixed size."""
    wanted = dtype_of(spec.datatype)
    if array.dtype == wanted:
        return array
    if wanted == np.object_:
        return array.astype(np.object_)
    if spec.datatype == "BF16" and array.dtype.itemsize == 2:
        return array.view(wanted)
    raise ValueError(f"{spec.name} is {array.dtype} in the golden sample, not {wanted}")
