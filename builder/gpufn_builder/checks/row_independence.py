"""Whether calls may share runs of an engine: only where rows were seen to come out the same alone and beside others.

Shapes do not tell. A sort along the rows, a mean over them, a scale taken from all of them leave every shape as it is,
and give one caller what another sent. So rows are run alone and then together: two by two in both orders, for a sort
leaves alone what is sorted; all of them, and one twice, for some models count or drop what is equal; and beside them a
faint one, which a scale that all rows share would wipe out. Of a single row another is made by turning it. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import numpy as np

from gpufn_builder.onnx_model.tensors import Array, Arrays, is_float
from gpufn_core.errors import BuildFailed
from gpufn_core.spec.model_spec import ShapeProfile, Tolerance

Run = Callable[[Arrays], Arrays]  # raises BuildFailed for what cannot be run

NO_ROWS: Final = "the first dimension of its inputs and outputs does not count rows"
_MOST_ROWS: Final = 3
_FAINT: Final = 1 / 8
# Kernels for one row and for several may add in another order, in half precision too: so far apart may a row be, of its
# own norm, or of a tenth of the largest row's, for what is left of a difference is small beside its error.
_LEAST_APART: Final = 1e-3
_MOST_APART: Final = 1e-2
_SMALL: Final = 0.1


def why_alone(
    run: Run, cases: Iterable[Arrays], tuned: Arrays, profiles: Sequence[ShapeProfile], tolerance: Tolerance
) -> str:
    """Why each call needs a run of its own; empty when calls may share them.

    Rows come from those `cases` whose shapes are like `tuned` but for the rows, and from `tuned` itself, which has the
    shapes that the first of `profiles` is tuned for.
    """
    most = min((ranged.max[0] for ranged in profiles[0].inputs.values()), default=1) if profiles else 1
    if most < 2:
        return "a run takes one row: max_batch is 1"
    rows = _different_rows([each for each in (*cases, tuned) if _rest(each) == _rest(tuned)])
    if len(rows) < 2:
        return "no two rows were different, so nothing was seen of one beside another: give samples="
    apart = min(max(tolerance.rel_l2 or _MOST_APART, _LEAST_APART), _MOST_APART)
    try:
        alone = [run(row) for row in rows]
        for group in _groups(len(rows), most):
            together = run({name: np.concatenate([rows[index][name] for index in group]) for name in rows[0]})
            if why := _difference(group, alone, together, apart):
                return why
    except BuildFailed as error:
        return f"it does not run with other numbers of rows: {error.message}"
    return ""


def _groups(rows: int, most: int) -> Iterator[Sequence[int]]:
    for index in range(1, rows):
        yield index - 1, index
        yield index, index - 1
    if most > 2:
        yield [*range(rows), 0][-most:]


def _rest(inputs: Arrays) -> dict[str, tuple[int, ...]]:
    return {name: array.shape[1:] for name, array in inputs.items()}


def _different_rows(inputs: Iterable[Arrays]) -> list[Arrays]:
    """A few rows that differ, each as inputs of one row."""
    found: list[Arrays] = []
    for each in inputs:
        for index in range(min((array.shape[0] for array in each.values() if array.ndim), default=0)):
            row = {name: array[index : index + 1] for name, array in each.items()}
            if len(found) < _MOST_ROWS and not _is_one_of(found, row):
                found.append(row)
    if found:
        faint = {name: _faint(array) for name, array in found[0].items()}
        if not _is_one_of(found, faint):
            found.append(faint)
    if len(found) == 1:
        turned = {name: np.roll(array, 1, -1) if array.ndim > 1 else array for name, array in found[0].items()}
        if not _is_one_of(found, turned):
            found.append(turned)
    return found


def _faint(array: Array) -> Array:
    return (array * _FAINT).astype(array.dtype) if is_float(array) else array


def _is_one_of(rows: Sequence[Arrays], row: Arrays) -> bool:
    return any(all(_is_equal(other[name], row[name]) for name in row) for other in rows)


def _is_equal(one: Array, other: Array) -> bool:
    return np.array_equal(one, other, equal_nan=is_float(one))


def _difference(group: Sequence[int], alone: Sequence[Arrays], together: Arrays, apart: float) -> str:
    """What differs between the rows of `group`, by their index in `alone`, and the same rows `together`, in words."""
    for name, array in together.items():
        own = [outputs[name] for outputs in alone]
        for place, index in enumerate(group):
            if own[index].shape[:1] != (1,):
                return f"output {name} has the shape {list(own[index].shape)} for one row"
            if array.shape != (len(group), *own[index].shape[1:]):
                return f"output {name} has the shape {list(array.shape)} for {len(group)} rows"
            if not _is_near(own[index], array[place : place + 1], own, apart):
                return f"output {name} of a row depends on the rows beside it"
    return ""


def _is_near(wanted: Array, found: Array, rows: Sequence[Array], apart: float) -> bool:
    if not is_float(wanted):
        return bool(np.array_equal(wanted, found))
    exact, other = wanted.astype(np.float64), found.astype(np.float64)
    finite = np.isfinite(exact)
    if not np.array_equal(finite, np.isfinite(other)) or not _is_equal(exact[~finite], other[~finite]):
        return False
    size = max(_norm(wanted), _SMALL * max(map(_norm, rows)))
    return float(np.linalg.norm(exact[finite] - other[finite])) <= apart * size


def _norm(array: Array) -> float:
    exact = array.astype(np.float64)
    return float(np.linalg.norm(exact[np.isfinite(exact)]))
