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

from gpufn_builder.checks.inaccurate_output import InaccurateOutput
from gpufn_builder.onnx_model.tensors import Array, Arrays, is_float
from gpufn_builder.report.report import Element, OutputRow
from gpufn_core.domain.devices.engine import Accuracy, BuildStage
from gpufn_core.errors import BuildFailed
from gpufn_core.spec.model_spec import TOLERANCES, Precision, Tolerance, absolute_limit

_FP32: Final = TOLERANCES[Precision.FP32]
_FAR: Final = {"passes_fp32": False, "max_abs": math.inf, "p999_abs": math.inf, "rel_l2": math.inf, "cosine": 0.0}
_MARGIN: Final = 1.05  # ratio of a proposed tolerance to the measured distance
_OTHER_NUMBERS: Final = (
    "The model draws random numbers, and a GPU draws other numbers than the reference: set verify=False (--no-verify)"
)
_LONGEST_VALUE: Final = 80  # characters of an element


class Comparison(msgspec.Struct, frozen=True):
    """All outputs of all cases. An infinite distance becomes the largest float in `worst_accuracy`, because a manifest
    stores it as JSON, which has no infinities."""

    outputs: tuple[OutputRow, ...]

    @property
    def worst_accuracy(self) -> Accuracy:
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
    rounding_floors: Sequence[Mapping[str, float]] = (),
    stage: BuildStage = BuildStage.VERIFY,
) -> Comparison:
    """Compare each case's `outputs` with its `reference`; `cases` are their names. `rounding_floors` are of each case,
    by output.

    Raises BuildFailed for a missing output, another dtype or shape; InaccurateOutput for NaNs at other positions.
    """
    rows = []
    all_floors = rounding_floors or [{}] * len(cases)
    for case, expected, actual, floors in zip(cases, reference, outputs, all_floors, strict=True):
        for name, array in expected.items():
            if name not in actual:
                raise BuildFailed(f"there is no output {name} for {case}", stage=stage, node=name)
            row = OutputRow(case, name, str(array.dtype), array.shape)
            _check_form(row, array, actual[name], stage)
            rows.append(_with_distance(row, array, actual[name], tolerance, floors.get(name, 0.0)))
    return Comparison(tuple(rows))


def check(
    comparison: Comparison,
    tolerance: Tolerance,
    stage: BuildStage = BuildStage.VERIFY,
    *,
    draws_other_numbers: bool = False,
) -> None:
    """Raise InaccurateOutput for the worst output if any is not within `tolerance`. With `draws_other_numbers`, the
    engine draws other random numbers than the reference, and the error mentions it."""
    failed = [row for row in comparison.outputs if exceeds(row, tolerance)]
    if failed:
        row = max(failed, key=_distance)
        problem = f"output {row.name} is too far from the reference for {row.case}: {exceeds(row, tolerance)}"
        remedy = _OTHER_NUMBERS if draws_other_numbers else _remedy(comparison.worst_accuracy, tolerance)
        message = f"{problem}{_describe_worst(row)}. {remedy}"
        raise InaccurateOutput(message, stage=stage, node=row.name, case=row.case)


def exceeds(row: OutputRow, tolerance: Tolerance) -> str:
    """Describe the limits of `tolerance` that `row` exceeds; empty if it exceeds none. An output that passes fp32
    passes every preset: a coarser precision cannot require more, not even of outputs near zero."""
    if row.passes_fp32 and tolerance in TOLERANCES.values():
        return ""
    exceeded = _exceeded_limits(row.accuracy, tolerance)
    element = row.worst_element
    if element is not None and element.times_limit > 1:
        reduced = ", reduced for small values" if tolerance == _FP32 else ""
        exceeded = [
            f"max_abs is {row.max_abs:.6g}, and an element may differ by {element.limit:.6g} "
            f"(atol {tolerance.atol or 0:g} and rtol {tolerance.rtol or 0:g}{reduced})",
            *exceeded,
        ]
    if not exceeded or math.isfinite(row.max_abs):
        return "; ".join(exceeded)
    if "float" in row.dtype:
        return "an infinity on one side only"
    return f"{row.argmax:.1%} of its elements are equal, not all"


def _distance(row: OutputRow) -> tuple[float, ...]:
    """Return a key that sorts outputs by their distance from the reference."""
    return row.worst_element.times_limit if row.worst_element else 0.0, row.rel_l2, row.max_abs, -row.cosine


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
    if (element := row.worst_element) is None:
        return ""
    difference = f"its element {list(element.index)} is {element.value} instead of {element.reference}"
    return f"; {difference}, max_abs is {row.max_abs:.6g}"


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
        enough["cosine"] = max(-1.0, min(tolerance.cosine, 1 - _MARGIN * (1 - worst.cosine)))
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
        raise InaccurateOutput(message, stage=stage, node=name, case=case)


def _with_distance(row: OutputRow, expected: Array, actual: Array, tolerance: Tolerance, floor: float) -> OutputRow:
    if expected.size == 0:
        return row
    if not is_float(expected):
        differs = np.asarray(expected != actual)
        difference = np.where(differs, math.inf, 0.0)
        limits = np.zeros(expected.shape) if tolerance.limits_elements else None
        row = msgspec.structs.replace(row, worst_element=_worst_element(expected, actual, difference, limits))
        if not differs.any():
            return row
        return msgspec.structs.replace(row, argmax=float(1 - np.mean(differs)), **_FAR)
    exact, other = expected.astype(np.float64), actual.astype(np.float64)
    nans = np.isnan(exact)
    difference = _difference(exact, other)
    limits = _element_limits(exact, difference, tolerance, floor) if tolerance.limits_elements else None
    row = msgspec.structs.replace(
        row,
        nans=int(nans.sum()),
        argmax=_same_argmax(exact, other),
        worst_element=_worst_element(exact, other, difference, limits),
        passes_fp32=bool(np.all(difference <= _element_limits(exact, difference, _FP32, floor))),
    )
    return _with_metrics(row, exact[~nans], other[~nans])


def _difference(exact: Array, other: Array) -> Array:
    """Return the difference of each element. NaNs and infinities on both sides do not differ."""
    with np.errstate(invalid="ignore", over="ignore"):
        return np.where((exact == other) | np.isnan(exact), 0.0, np.abs(exact - other))


def _element_limits(exact: Array, difference: Array, tolerance: Tolerance, floor: float) -> Array:
    """Return the limit of each difference, 0 for an infinite one."""
    with np.errstate(invalid="ignore", over="ignore"):
        size = np.abs(exact)
        largest = float(size.max(initial=0.0, where=np.isfinite(size)))
        limits = absolute_limit(tolerance, largest) + (tolerance.rtol or 0.0) * size
        return np.where(np.isinf(difference), 0.0, np.maximum(np.nan_to_num(limits, posinf=np.inf), floor))


def _worst_element(expected: Array, actual: Array, difference: Array, limits: Array | None) -> Element:
    distance = difference
    if limits is not None:
        distance = np.divide(difference, limits, out=np.where(difference, math.inf, 0.0), where=limits > 0)
    index = np.unravel_index(int(distance.argmax()), distance.shape)
    return Element(
        tuple(map(int, index)),
        _text(actual[index]),
        _text(expected[index]),
        float(difference[index]),
        None if limits is None else float(limits[index]),
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
