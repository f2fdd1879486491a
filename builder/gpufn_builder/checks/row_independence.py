"""Decides whether calls may share runs of an engine: only if rows give the same result alone and together. Pure.

Shapes do not show this. A sort along the rows, a mean over them, or a scale computed from all of them keeps every
shape, but makes one caller's result depend on another caller's input. So each row is run alone, beside copies
of itself, and beside others.

The runs with copies and with others have the same number of rows, so they use the same kernels, and each row must give
the same result at the same place. Copies may differ more from the row alone, because the kernels for other numbers of
rows round differently, and inputs that make no sense to a model can increase these errors.

All rows run together in both orders, because a sort does not change sorted rows, and with one duplicate, because some
models count or drop equal rows. One row is faint: a scale over all rows would erase it. If there is only one row,
another is made by rotating it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import numpy as np

from gpufn_builder.onnx_model.tensors import Array, Arrays, is_float
from gpufn_core.errors import BuildFailed
from gpufn_core.spec.model_spec import ShapeProfile, Tolerance

Run = Callable[[Arrays], Arrays]  # raises BuildFailed for inputs that it cannot run

NO_ROWS: Final = "the first dimension of its inputs and outputs does not count rows"
_MAX_ROWS: Final = 3
_FAINT: Final = 1 / 8
# A row may differ by this fraction of its own norm, or of a tenth of the largest row's norm: errors of large rows
# dominate a small row.
_MIN_DISTANCE: Final = 1e-3
_MAX_DISTANCE: Final = 1e-2
_COPIES_DISTANCE: Final = 5e-2  # of copies from the row alone
_SMALL: Final = 0.1
_HINT: Final = "; set samples= (--samples) if only generated inputs do this"


def why_alone(
    run: Run, cases: Iterable[Arrays], tuned: Arrays, profiles: Sequence[ShapeProfile], tolerance: Tolerance | None
) -> str:
    """Return why each call needs its own run; empty if calls may share runs.

    The rows come from `tuned`, which has the shapes that the first profile is tuned for, and from the `cases` with the
    same shapes except for the number of rows.
    """
    most = min((ranged.max[0] for ranged in profiles[0].inputs.values()), default=1) if profiles else 1
    if most < 2:
        return "a run takes one row: max_batch is 1"
    rows = _different_rows([each for each in (*cases, tuned) if _rest(each) == _rest(tuned)])
    if len(rows) < 2:
        return "no two rows were different, so their independence could not be checked: set samples= (--samples)"
    distance = tolerance and (tolerance.rel_l2 or tolerance.rtol)
    limit = min(max(distance or _MAX_DISTANCE, _MIN_DISTANCE), _MAX_DISTANCE)
    try:
        alone = [run(row) for row in rows]
        copies: dict[int, Arrays] = {}  # all groups have one size
        for group in _groups(len(rows), most):
            size = len(group)
            for index in group:
                if index not in copies:
                    copies[index] = _run_together(run, rows, [index] * size)
                    if reason := _difference([index] * size, alone, copies[index], _COPIES_DISTANCE):
                        return reason
            beside_copies = [
                {name: array[place : place + 1] for name, array in copies[index].items()}
                for place, index in enumerate(group)
            ]
            together = _run_together(run, rows, group)
            if reason := _difference(range(size), beside_copies, together, limit):
                return reason
    except BuildFailed as error:
        return f"it does not run with other numbers of rows: {error.message}"
    return ""


def _run_together(run: Run, rows: Sequence[Arrays], group: Sequence[int]) -> Arrays:
    return run({name: np.concatenate([rows[index][name] for index in group]) for name in rows[0]})


def _groups(rows: int, most: int) -> Iterator[list[int]]:
    """Yield rows to run together: all, as far as the engine accepts them, else each pair."""
    together = [[*range(rows), 0][-most:]] if most > 2 else [[index - 1, index] for index in range(1, rows)]
    for group in together:
        yield group
        yield group[::-1]


def _rest(inputs: Arrays) -> dict[str, tuple[int, ...]]:
    return {name: array.shape[1:] for name, array in inputs.items()}


def _different_rows(inputs: Iterable[Arrays]) -> list[Arrays]:
    """Return a few different rows, each as inputs with one row."""
    rows: list[Arrays] = []
    for each in inputs:
        for index in range(min((array.shape[0] for array in each.values() if array.ndim), default=0)):
            row = {name: array[index : index + 1] for name, array in each.items()}
            if len(rows) < _MAX_ROWS and not _is_one_of(rows, row):
                rows.append(row)
    if rows:
        faint = {name: _scaled_down(array) for name, array in rows[0].items()}
        if not _is_one_of(rows, faint):
            rows.append(faint)
    if len(rows) == 1:
        rotated = {name: np.roll(array, 1, -1) if array.ndim > 1 else array for name, array in rows[0].items()}
        if not _is_one_of(rows, rotated):
            rows.append(rotated)
    return rows


def _scaled_down(array: Array) -> Array:
    return (array * _FAINT).astype(array.dtype) if is_float(array) else array


def _is_one_of(rows: Sequence[Arrays], row: Arrays) -> bool:
    return any(all(_is_equal(other[name], row[name]) for name in row) for other in rows)


def _is_equal(one: Array, other: Array) -> bool:
    return np.array_equal(one, other, equal_nan=is_float(one))


def _difference(group: Sequence[int], alone: Sequence[Arrays], together: Arrays, limit: float) -> str:
    """Describe a difference between the rows of `group`, of which `alone` has the outputs of one row each, and the same
    rows run `together`."""
    for name, array in together.items():
        own = [outputs[name] for outputs in alone]
        for place, index in enumerate(group):
            if own[index].shape[:1] != (1,):
                return f"output {name} has the shape {list(own[index].shape)} for one row"
            if array.shape != (len(group), *own[index].shape[1:]):
                return f"output {name} has the shape {list(array.shape)} for {len(group)} rows"
            if not _is_near(own[index], array[place : place + 1], own, limit):
                return f"output {name} of a row depends on the rows beside it{_HINT}"
    return ""


def _is_near(expected: Array, actual: Array, rows: Sequence[Array], limit: float) -> bool:
    if not is_float(expected):
        return bool(np.array_equal(expected, actual))
    exact, other = expected.astype(np.float64), actual.astype(np.float64)
    finite = np.isfinite(exact)
    if not np.array_equal(finite, np.isfinite(other)) or not _is_equal(exact[~finite], other[~finite]):
        return False
    size = max(_norm(expected), _SMALL * max(map(_norm, rows)))
    return float(np.linalg.norm(exact[finite] - other[finite])) <= limit * size


def _norm(array: Array) -> float:
    exact = array.astype(np.float64)
    return float(np.linalg.norm(exact[np.isfinite(exact)]))
