from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto

from gpufn_builder.checks.cpu_session import CpuSession
from gpufn_builder.checks.row_independence import why_alone
from gpufn_builder.checks.samples import generate
from gpufn_builder.onnx_model.ingest import IngestLimits, ingest
from gpufn_builder.onnx_model.normalise import normalise
from gpufn_builder.onnx_model.profiles import resolve_profiles
from gpufn_builder.onnx_model.tensors import Array, Arrays
from gpufn_core.domain.devices.engine import BuildStage
from gpufn_core.errors import BuildFailed
from gpufn_core.spec.model_spec import TOLERANCES, Precision, ShapeProfile, ShapeRange, Tolerance
from tests.builder import models
from tests.builder.models import constant, model, node, put, spec_of, value, weights

EXACT = TOLERANCES[Precision.FP32]
ROWS = {"x": np.array([[1.0, 2.0], [3.0, 5.0]], np.float32)}
DEPENDS = "output y of a row depends on the rows beside it; set samples= (--samples) if only generated inputs do this"


def _profiles(most: int = 8, **width: int) -> tuple[ShapeProfile, ...]:
    sizes = width or {"x": 2}
    return (ShapeProfile({name: ShapeRange((1, size), (most, size), (most, size)) for name, size in sizes.items()}),)


def _why(run: Callable[[Arrays], Arrays], *cases: Arrays, most: int = 8, tolerance: Tolerance = EXACT) -> str:
    return why_alone(run, cases[:-1], cases[-1], _profiles(most), tolerance)


def _x(compute: Callable[[Array], Array]) -> Callable[[Arrays], Arrays]:
    return lambda inputs: {"y": compute(inputs["x"])}


def _fails_for_one_row(inputs: Arrays) -> Arrays:
    if len(inputs["x"]) == 1:
        raise BuildFailed("not this shape")
    return {"y": inputs["x"]}


def _quantised_together(x: Array) -> Array:
    """Like DynamicQuantizeLinear: one scale for all rows of a run."""
    scale = np.abs(x).max() / 127
    return np.asarray(np.round(x / scale) * scale)


@pytest.mark.parametrize(
    ("run", "why"),
    [
        (lambda inputs: {"y": inputs["x"] * 2, "label": inputs["x"].argmax(-1)}, ""),
        (_x(lambda x: x - x.mean(0)), DEPENDS),
        (_x(lambda x: x + x.mean(0) / 200), DEPENDS),
        (_x(lambda x: x.cumsum(0)), DEPENDS),
        (_x(lambda x: np.sort(x, 0)), DEPENDS),
        (_x(lambda x: np.maximum.accumulate(x, 0)), DEPENDS),
        (_x(_quantised_together), DEPENDS),
        (_x(lambda x: np.unique(x, axis=0)), "output y has the shape [1, 2] for 5 rows"),
        (_x(lambda x: x[sorted({tuple(row): index for index, row in enumerate(x)}.values())]), "[1, 2] for 5 rows"),
        (_x(lambda x: x if len(x) < 3 else x - x[2]), DEPENDS),
        (_x(lambda x: x + np.arange(len(x))[:, None]), DEPENDS),
        (_x(lambda x: np.concatenate([x, x])), "output y has the shape [2, 2] for one row"),
        (_x(lambda x: x.sum()), "output y has the shape [] for one row"),
        (_x(lambda x: x[x[:, 0] > 2]), "output y has the shape [0, 2] for one row"),
        (_x(lambda x: x[:1]), "output y has the shape [1, 2] for 5 rows"),
        (lambda inputs: {"y": inputs["x"], "n": np.array([len(inputs["x"])])}, "output n has the shape [1] for 5 rows"),
        (_fails_for_one_row, "it does not run with other numbers of rows: not this shape"),
    ],
)
def test_rows_may_share_a_run_if_their_results_are_the_same_alone_and_together(
    run: Callable[[Arrays], Arrays], why: str
) -> None:
    found = _why(run, ROWS, {"x": np.array([[9.0, -1.0]], np.float32)})
    assert found.endswith(why)
    assert bool(found) is bool(why)


def test_a_row_that_is_dropped_beside_its_like_is_found_in_runs_of_two_as_well() -> None:
    assert _why(_x(lambda x: np.unique(x, axis=0)), ROWS, most=2) == "output y has the shape [1, 2] for 2 rows"


def test_runs_have_no_more_rows_than_the_engine_accepts() -> None:
    for most in (2, 3, 4, 8):
        sizes: set[int] = set()

        def run(inputs: Arrays, sizes: set[int] = sizes) -> Arrays:
            sizes.add(len(inputs["x"]))
            return {"y": inputs["x"]}

        assert _why(run, {"x": np.arange(8, dtype=np.float32).reshape(4, 2)}, most=most) == ""
        assert max(sizes) == min(most, 5)


def test_each_call_runs_alone_if_no_rows_were_checked_together() -> None:
    def run(inputs: Arrays) -> Arrays:
        return {"y": inputs["x"]}

    assert _why(run, {"x": np.ones((1, 2), np.int64)}).endswith("set samples= (--samples)")
    assert _why(run, {"x": np.ones((2, 2), np.int64)}).endswith("set samples= (--samples)")
    assert "max_batch is 1" in _why(run, ROWS, most=1)
    assert "max_batch is 1" in why_alone(run, [], {}, (), EXACT)


def test_of_a_single_row_of_integers_another_is_made_that_has_the_same_in_it() -> None:
    seen: list[list[int]] = []

    def run(inputs: Arrays) -> Arrays:
        seen.extend(inputs["x"].tolist())
        return {"y": inputs["x"]}

    assert _why(run, {"x": np.array([[7, 8, 9]])}) == ""
    assert sorted({tuple(row) for row in seen}) == [(7, 8, 9), (9, 7, 8)]


def test_rows_of_other_shapes_are_left_out_and_samples_are_taken_first() -> None:
    seen: list[list[float]] = []

    def run(inputs: Arrays) -> Arrays:
        seen.extend(inputs["x"].tolist())
        return {"y": inputs["x"]}

    assert _why(run, {"x": np.ones((2, 3))}, {"x": np.array([[7.0, 7.0]])}, ROWS) == ""
    assert seen[:4] == [[7.0, 7.0], [1.0, 2.0], [3.0, 5.0], [0.875, 0.875]]


@pytest.mark.parametrize(
    ("tolerance", "off", "near"),
    [
        (EXACT, 5e-4, True),
        (EXACT, 5e-3, False),
        (TOLERANCES[Precision.BF16], 5e-3, True),
        (TOLERANCES[Precision.INT8], 5e-3, True),
        (Tolerance(rel_l2=0.5), 5e-2, False),
    ],
)
def test_a_row_may_depend_on_its_neighbours_within_the_precision(tolerance: Tolerance, off: float, near: bool) -> None:
    rounded = _x(lambda x: x * (1 + off * (len(np.unique(x, axis=0)) > 1)))
    assert (_why(rounded, ROWS, tolerance=tolerance) == "") is near


@pytest.mark.parametrize(("off", "near"), [(2e-2, True), (0.1, False)])
def test_kernels_for_several_rows_may_differ_more_if_the_neighbours_make_no_difference(off: float, near: bool) -> None:
    rounded = _x(lambda x: x * (1 + off * (len(x) > 1)))
    assert (_why(rounded, ROWS) == "") is near


def test_the_remaining_difference_is_compared_with_the_norms_of_the_other_rows() -> None:
    def run(inputs: Arrays) -> Arrays:  # a row of size 1e-4 among rows of size 1, with an error of 1e-5
        return {"y": inputs["x"] + 1e-5 * (len(inputs["x"]) > 1)}

    assert _why(run, {"x": np.array([[1e-4, 0.0], [1.0, 1.0]])}) == ""


def test_nans_and_infinities_are_the_same_at_the_same_places() -> None:
    odd = {"x": np.array([[np.nan, np.inf], [1.0, -np.inf]], np.float32)}
    assert _why(_x(lambda x: x), odd) == ""
    assert _why(_x(lambda x: np.where(np.isnan(x), len(x), x)), odd) == DEPENDS
    assert _why(_x(lambda x: x if len(x) < 2 else np.abs(x)), odd) == DEPENDS


def _sorting() -> ModelProto:
    return model(
        [node("TopK", "x rows", "top place", axis=0), node("Identity", "top", "y")],
        [value("x", ["N", 1])],
        [value("y", ["N", 1])],
        [constant("rows", [1], np.int64)],
    )


def _sorting_all() -> ModelProto:
    return model(
        [
            node("Shape", "x", "rows", start=0, end=1),
            node("TopK", "x rows", "y place", axis=0),
        ],
        [value("x", ["N", 2])],
        [value("y", ["N", 2])],
    )


def _dynamically_quantised() -> ModelProto:
    return model(
        [
            node("DynamicQuantizeLinear", "x", "q scale zero"),
            node("DequantizeLinear", "q scale zero", "back"),
            node("MatMul", "back w", "y"),
        ],
        [value("x", ["N", 8])],
        [value("y", ["N", 4])],
        [weights("w", 8, 4)],
    )


def _joined_with_constants() -> ModelProto:
    return model(
        [node("Concat", "x first", "y", axis=0)],
        [value("x", ["N", 2])],
        [value("y", ["M", 2])],
        [constant("first", [[1.0, 2.0]])],
    )


def _picking() -> ModelProto:
    """Rows whose first value is above zero."""
    return model(
        [
            node("Gather", "x zero", "firsts", axis=1),
            node("Greater", "firsts bound", "above"),
            node("Compress", "x above", "y", axis=0),
        ],
        [value("x", ["N", 2])],
        [value("y", ["M", 2])],
        [constant("zero", 0, np.int64), constant("bound", 0.0)],
    )


@pytest.mark.parametrize(
    ("make", "independent"),
    [
        (models.mlp, True),
        (models.cnn, True),
        (models.encoder, True),
        (models.several_outputs, True),
        (models.texts, True),
        (models.products_of_integers, True),
        (models.over_rows, False),
        (_sorting, False),
        (_sorting_all, False),
        (_dynamically_quantised, False),
        (_joined_with_constants, False),
        (_picking, False),
    ],
)
def test_rows_are_distinguished_on_real_models(
    make: Callable[[], ModelProto], independent: bool, tmp_path: Path
) -> None:
    proto = make()
    put(proto, tmp_path / "upload")
    length = ShapeRange((1, 2), (2, 5), (4, 9))
    tokens = (ShapeProfile({"tokens": length, "mask": length}),) if proto.graph.input[0].name == "tokens" else ()
    spec = spec_of(tmp_path / "upload", max_batch=4, profiles=tokens)
    (tmp_path / "normal").mkdir()
    found = normalise(ingest(tmp_path / "upload", spec, IngestLimits()), tmp_path / "normal")
    profiles = resolve_profiles(found.inputs, spec, {})
    session = CpuSession(found.path, found.outputs, BuildStage.VERIFY, has_integer_products=found.has_integer_products)
    cases = [case.inputs for case in generate(found.inputs, profiles, 0)]
    assert found.batched
    assert (why_alone(session.run, cases, cases[1], profiles, EXACT) == "") is independent
