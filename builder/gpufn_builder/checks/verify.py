"""Comparison of outputs with the reference, per output and case, and the check against the tolerance. Pure.

Floats are compared in float64. NaNs must be at the same positions and are excluded from the metrics, as are infinities
on both sides. An infinity on one side only is infinitely far. Other types are equal or infinitely far.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from gpufn_builder.onnx_model.tensors import Array, Arrays, is_float
from gpufn_builder.report.report import Element, OutputRow
from gpufn_core.domain.engine import Accuracy, BuildStage
from gpufn_core.errors import BuildFailed
from gpufn_core.spec.model_spec import TOLERANCES, Precision, Tolerance

_FP32: Final = TOLERANCES[Precision.FP32]
_FAR: Final = {"passes_fp32": False, "max_abs": math.inf, "p999_abs": math.inf, "rel_l2": math.inf, "cosine": 0.0}
_MARGIN: Final = 1.05  # of a proposed tolerance over the measured distance
_LONGEST_VALUE: Final = 80  # characters of an element


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
    cases: Sequence[str],
    reference: Sequence[Arrays],
    outputs: Sequence[Arrays],
    tolerance: Tolerance,
    *,
    floors: Sequence[Mapping[str, float]] = (),
    stage: BuildStage = BuildStage.VERIFY,
) -> Comparison:
    """Compare each case's `outputs` with its `reference`; `cases` are their names. `rounding` measures the `floors`.

    Raises BuildFailed for a missing output, another dtype or shape, or NaNs at other positions.
    """
    rows = []
    for case, expected, actual, floor in zip(cases, reference, outputs, floors or [{}] * len(cases), strict=True):
        for name, array in expected.items():
            if name not in actual:
                raise BuildFailed(f"there is no output {name} for {case}", stage=stage, node=name)
            row = OutputRow(case, name, str(array.dtype), array.shape)
            _check_form(row, array, actual[name], stage)
            rows.append(_with_distance(row, array, actual[name], tolerance, floor.get(name, 0.0)))
    return Comparison(tuple(rows))


def check(comparison: Comparison, tolerance: Tolerance, stage: BuildStage = BuildStage.VERIFY) -> None:
    """Raise BuildFailed for the worst output if any is not within `tolerance`."""
    failed = [row for row in comparison.outputs if exceeds(row, tolerance)]
    if failed:
        row = max(failed, key=lambda row: (row.worst.excess if row.worst else 0, row.rel_l2, row.max_abs, -row.cosine))
        problem = f"output {row.name} is too far from the reference for {row.case}: {exceeds(row, tolerance)}"
        message = f"{problem}{_describe_worst(row)}. {_remedy(comparison.worst, tolerance)}"
        raise BuildFailed(message, stage=stage, node=row.name)


def exceeds(row: OutputRow, tolerance: Tolerance) -> str:
    """Describe the limits of `tolerance` that `row` exceeds; empty if it exceeds none. An output that passes fp32
    passes every preset: a coarser precision cannot require more, not even of outputs near zero."""
    if row.passes_fp32 and tolerance in TOLERANCES.values():
        return ""
    limits = _exceeded_limits(row.accuracy, tolerance)
    if row.worst is not None and row.worst.excess > 1:
        limits = [
            f"max_abs is {row.max_abs:.6g}, and an element may differ by {row.worst.allowed:.6g} "
            f"(atol {tolerance.atol or 0:g} and rtol {tolerance.rtol or 0:g})",
            *limits,
        ]
    if not limits or math.isfinite(row.max_abs):
        return "; ".join(limits)
    if "float" in row.dtype:
        return "an infinity on one side only"
    return f"{row.argmax:.1%} of its elements are equal, not all"


def _exceeded_limits(accuracy: Accuracy, tolerance: Tolerance) -> list[str]:
    exceeded = []
    if tolerance.max_abs is not None and not accuracy.max_abs <= tolerance.max_abs:
        exceeded.append(f"max_abs is {accuracy.max_abs:.6g}, and at most {tolerance.max_abs:g} is allowed")
    if tolerance.rel_l2 is not None and not accuracy.rel_l2 <= tolerance.rel_l2:
        exceeded.append(f"rel_l2 is {accuracy.rel_l2:.6g}, and at most {tolerance.rel_l2:g} is allowed")
    if tolerance.cosine is not None and not accuracy.cosine >= tolerance.cosine:
        exceeded.append(f"cosine is {accuracy.cosine:.6g}, and at least {tolerance.cosine:g} is allowed")
    return exceeded


def _describe_worst(row: OutputRow) -> str:
    if row.worst is None:
        return ""
    element = f"its element {list(row.worst.index)} is {row.worst.value} instead of {row.worst.reference}"
    return f"; {element}, max_abs is {row.max_abs:.6g}"


def _remedy(worst: Accuracy, tolerance: Tolerance) -> str:
    """Propose a tolerance that all outputs are within, if there is one."""
    samples = "if the generated inputs make no sense to the model, set samples= (--samples)"
    if worst.max_abs == sys.float_info.max:
        return samples.capitalize()
    enough = msgspec.structs.asdict(tolerance)
    if tolerance.limits_elements:
        enough |= {"atol": _MARGIN * worst.max_abs, "rtol": None}
    for name in ("max_abs", "rel_l2"):
        if enough[name] is not None:
            enough[name] = max(enough[name], _MARGIN * getattr(worst, name))
    if tolerance.cosine is not None:
        enough["cosine"] = min(tolerance.cosine, 1 - _MARGIN * (1 - worst.cosine))
    options = " ".join(f"--tolerance {name}={limit:.6g}" for name, limit in enough.items() if limit is not None)
    return f"If this difference is acceptable, set tolerance= ({options}); {samples}"


def _check_form(row: OutputRow, expected: Array, actual: Array, stage: BuildStage) -> None:
    """Raise BuildFailed if the type, the shape or the places of NaNs differ."""
    name, case = row.name, row.case
    shapes = list(expected.shape), list(actual.shape)
    for what, right, seen in (("type", expected.dtype, actual.dtype), ("shape", *shapes)):
        if right != seen:
            raise BuildFailed(f"output {name} has the {what} {seen} for {case}, not {right}", stage=stage, node=name)
    if is_float(expected) and (differing := int(np.sum(np.isnan(expected) != np.isnan(actual)))):
        places = f"{differing} of {expected.size}"
        message = f"output {name} and its reference have NaNs at different places for {case}, {places}"
        raise BuildFailed(message, stage=stage, node=name)


def _with_distance(row: OutputRow, expected: Array, actual: Array, tolerance: Tolerance, floor: float) -> OutputRow:
    if expected.size == 0:
        return row
    if not is_float(expected):
        differs = np.asarray(expected != actual)
        allowed = np.zeros(expected.shape) if tolerance.limits_elements else None
        row = msgspec.structs.replace(row, worst=_worst(expected, actual, np.where(differs, math.inf, 0.0), allowed))
        if not differs.any():
            return row
        return msgspec.structs.replace(row, argmax=float(1 - np.mean(differs)), **_FAR)
    exact, other = expected.astype(np.float64), actual.astype(np.float64)
    nans = np.isnan(exact)
    difference = _difference(exact, other)
    allowed = _limits(exact, difference, tolerance, floor) if tolerance.limits_elements else None
    row = msgspec.structs.replace(
        row,
        nans=int(nans.sum()),
        argmax=_same_argmax(exact, other),
        worst=_worst(exact, other, difference, allowed),
        passes_fp32=bool(np.all(difference <= _limits(exact, difference, _FP32, floor))),
    )
    return _with_metrics(row, exact[~nans], other[~nans])


def _difference(exact: Array, other: Array) -> Array:
    """Return the difference of each element. NaNs and infinities on both sides do not differ."""
    with np.errstate(invalid="ignore", over="ignore"):
        return np.where((exact == other) | np.isnan(exact), 0.0, np.abs(exact - other))


def _limits(exact: Array, difference: Array, tolerance: Tolerance, floor: float) -> Array:
    """Return the limit of each difference, 0 for an infinite one."""
    with np.errstate(invalid="ignore", over="ignore"):
        allowed = (tolerance.atol or 0.0) + (tolerance.rtol or 0.0) * np.abs(exact)
        return np.where(np.isinf(difference), 0.0, np.maximum(np.nan_to_num(allowed, posinf=np.inf), floor))


def _worst(expected: Array, actual: Array, difference: Array, allowed: Array | None) -> Element:
    excess = difference
    if allowed is not None:
        excess = np.divide(difference, allowed, out=np.where(difference, math.inf, 0.0), where=allowed > 0)
    index = np.unravel_index(int(excess.argmax()), excess.shape)
    return Element(
        tuple(map(int, index)),
        _text(actual[index]),
        _text(expected[index]),
        float(difference[index]),
        None if allowed is None else float(allowed[index]),
    )


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, np.floating) else str(value)[:_LONGEST_VALUE]


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
