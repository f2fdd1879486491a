"""Comparison of outputs with the reference, per output and case, and the check against the tolerance. Pure.

Floats are compared in float64. NaNs must be at the same positions and are excluded from the metrics, as are infinities
on both sides. An infinity on one side only is infinitely far. Other types are equal or infinitely far.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import msgspec
import numpy as np

from gpufn_builder.onnx_model.tensors import Array, Arrays, is_float
from gpufn_builder.report.report import OutputRow
from gpufn_core.domain.engine import Accuracy, BuildStage
from gpufn_core.errors import BuildFailed
from gpufn_core.spec.model_spec import Tolerance

_FAR = {"max_abs": math.inf, "p999_abs": math.inf, "rel_l2": math.inf, "cosine": 0.0}


class Comparison(msgspec.Struct, frozen=True):
    """All outputs of all cases, and the worst values. An infinite distance becomes the largest float in `worst`,
    because `worst` is stored in a manifest, which is JSON on a node, and JSON has no infinities."""

    outputs: tuple[OutputRow, ...]

    @property
    def worst(self) -> Accuracy:
        return Accuracy(
            min(max((row.max_abs for row in self.outputs), default=0.0), sys.float_info.max),
            min(max((row.rel_l2 for row in self.outputs), default=0.0), sys.float_info.max),
            min((row.cosine for row in self.outputs), default=1.0),
        )


def compare(
    cases: Sequence[str], reference: Sequence[Arrays], outputs: Sequence[Arrays], stage: BuildStage = BuildStage.VERIFY
) -> Comparison:
    """Compare each case's `outputs` with its `reference`; `cases` are their names.

    Raises BuildFailed for a missing output, another dtype or shape, or NaNs at other positions.
    """
    rows = []
    for case, expected, actual in zip(cases, reference, outputs, strict=True):
        for name, array in expected.items():
            if name not in actual:
                raise BuildFailed(f"there is no output {name} for {case}", stage=stage, node=name)
            rows.append(_compare(case, name, array, actual[name], stage))
    return Comparison(tuple(rows))


def check(comparison: Comparison, tolerance: Tolerance, stage: BuildStage = BuildStage.VERIFY) -> None:
    """Raise BuildFailed for the worst output if any is not within `tolerance`."""
    failed = [row for row in comparison.outputs if row.accuracy.beyond(tolerance)]
    if failed:
        row = max(failed, key=lambda row: (row.rel_l2, row.max_abs, -row.cosine))
        message = f"output {row.name} is too far from the reference for {row.case}: {_excess(row, tolerance)}"
        raise BuildFailed(message, stage=stage, node=row.name)


def _compare(case: str, name: str, expected: Array, actual: Array, stage: BuildStage) -> OutputRow:
    row = OutputRow(case, name, str(expected.dtype), expected.shape)
    shapes = list(expected.shape), list(actual.shape)
    for what, right, seen in (("type", expected.dtype, actual.dtype), ("shape", *shapes)):
        if right != seen:
            raise BuildFailed(f"output {name} has the {what} {seen} for {case}, not {right}", stage=stage, node=name)
    if not is_float(expected):
        equal = expected == actual
        return row if bool(np.all(equal)) else msgspec.structs.replace(row, argmax=float(np.mean(equal)), **_FAR)
    if expected.size == 0:
        return row
    exact, other = expected.astype(np.float64), actual.astype(np.float64)
    nans = np.isnan(exact)
    if not np.array_equal(nans, np.isnan(other)):
        places = f"{int(np.sum(nans != np.isnan(other)))} of {expected.size}"
        message = f"output {name} and its reference have NaNs at different places for {case}, {places}"
        raise BuildFailed(message, stage=stage, node=name)
    row = msgspec.structs.replace(row, nans=int(nans.sum()), argmax=_same_argmax(exact, other))
    return _with_metrics(row, exact[~nans], other[~nans])


def _with_metrics(row: OutputRow, exact: Array, other: Array) -> OutputRow:
    finite = np.isfinite(exact) & np.isfinite(other)
    if not np.array_equal(exact[~finite], other[~finite]):
        return msgspec.structs.replace(row, **_FAR)
    exact, other = exact[finite], other[finite]
    if exact.size == 0:
        return row
    # Squares of numbers above 1e154 overflow, and of those below 1e-162 underflow, so scale by a power of two.
    _, exponent = math.frexp(max(np.abs(exact).max(), np.abs(other).max()))
    scale = math.ldexp(1.0, exponent - 1)
    exact, other = exact / scale, other / scale
    difference = np.abs(exact - other)
    norm, other_norm, distance = (float(np.linalg.norm(array)) for array in (exact, other, difference))
    return msgspec.structs.replace(
        row,
        max_abs=float(difference.max()) * scale,
        p999_abs=float(np.quantile(difference, 0.999)) * scale,
        rel_l2=distance / norm if norm else distance * scale,
        cosine=_cosine(exact, other, norm, other_norm),
    )


def _cosine(exact: Array, other: Array, norm: float, other_norm: float) -> float:
    if norm == 0 or np.array_equal(exact, other):
        return 1.0
    return min(1.0, float(np.dot(exact / norm, other / other_norm))) if other_norm else 0.0


def _same_argmax(exact: Array, other: Array) -> float:
    if exact.ndim == 0 or exact.shape[-1] < 2:
        return 1.0
    return float(np.mean(exact.argmax(-1) == other.argmax(-1)))


def _excess(row: OutputRow, tolerance: Tolerance) -> str:
    if math.isfinite(row.max_abs):
        return row.accuracy.beyond(tolerance)
    if "float" in row.dtype:
        return "an infinity on one side only"
    return f"{row.argmax:.1%} of its elements are equal, not all"
