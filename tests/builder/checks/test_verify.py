from __future__ import annotations

import math
import re
from typing import Any

import msgspec
import numpy as np
import pytest

from gpufn_builder.checks.verify import check, compare
from gpufn_builder.onnx_model.tensors import BF16
from gpufn_builder.report.report import OutputRow
from gpufn_core.domain.engine import Accuracy
from gpufn_core.errors import BuildFailed
from gpufn_core.spec.model_spec import TOLERANCES, Precision, Tolerance

INF, NAN = math.inf, math.nan


def row(wanted: Any, found: Any, dtype: Any = np.float32) -> OutputRow:
    (only,) = compare(["case"], [{"y": np.array(wanted, dtype)}], [{"y": np.array(found, dtype)}]).outputs
    return only


def test_equal_outputs_are_as_near_as_can_be() -> None:
    assert row([[1.0, -2.0]], [[1.0, -2.0]]) == OutputRow("case", "y", "float32", (1, 2))


def test_each_figure_is_what_it_says() -> None:
    found = row([[3.0, 4.0], [0.0, 0.0]], [[3.0, 3.0], [0.0, 1.0]])
    assert found.max_abs == 1.0
    assert found.rel_l2 == pytest.approx(math.sqrt(2) / 5)
    assert found.cosine == pytest.approx(21 / (5 * math.sqrt(19)))
    assert found.argmax == 0.0


def test_the_argmax_is_counted_along_the_last_axis() -> None:
    assert row([[1.0, 2.0], [1.0, 2.0]], [[1.0, 2.0], [2.0, 1.0]]).argmax == 0.5


def test_one_outlier_among_thousands_is_in_the_maximum_and_not_in_the_quantile() -> None:
    wanted = np.ones(10_000)
    found = wanted.copy()
    found[0] = 9
    assert (row(wanted, found).max_abs, row(wanted, found).p999_abs) == (8.0, 0.0)


def test_zeros_have_a_difference_and_no_direction() -> None:
    assert row([0.0, 0.0], [3.0, 4.0]).accuracy == Accuracy(4.0, 5.0, 1.0)
    assert row([3.0, 4.0], [0.0, 0.0]).accuracy == Accuracy(4.0, 1.0, 0.0)


@pytest.mark.parametrize("dtype", [np.float16, BF16, np.float32, np.float64])
def test_every_float_is_compared(dtype: Any) -> None:
    assert row([1.0, 2.0], [1.0, 2.5], dtype).max_abs == 0.5


def test_large_numbers_of_half_precision_do_not_overflow_while_they_are_compared() -> None:
    assert row([60_000.0] * 8, [59_968.0] * 8, np.float16).rel_l2 == pytest.approx(32 / 60_000)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("size", [1e308, 1e155, 1e-200])
def test_squares_that_no_float_holds_are_compared_all_the_same(size: float) -> None:
    found = row([size, size], [0.9 * size, size], np.float64)
    assert found.rel_l2 == pytest.approx(0.1 / math.sqrt(2))
    assert found.cosine == pytest.approx(1.9 / math.sqrt(2 * 1.81))
    assert row([size, 0.0], [-size, 0.0], np.float64).rel_l2 == pytest.approx(2.0)


@pytest.mark.parametrize("wanted", [[], np.zeros((0, 3)), 1.0])
def test_empty_tensors_and_scalars_are_compared(wanted: Any) -> None:
    assert row(wanted, wanted).accuracy == Accuracy(0.0, 0.0, 1.0)


@pytest.mark.parametrize(
    ("wanted", "found", "dtype"),
    [([1, 2], [1, 3], np.int64), ([True, False], [True, True], np.bool_), (["a", "b"], ["a", "c"], np.object_)],
)
def test_what_is_no_float_is_equal_or_infinitely_far(wanted: Any, found: Any, dtype: Any) -> None:
    assert row(wanted, wanted, dtype).accuracy == Accuracy(0.0, 0.0, 1.0)
    differs = row(wanted, found, dtype)
    assert differs.accuracy == Accuracy(INF, INF, 0.0)
    assert differs.argmax == 0.5


def test_nans_at_the_same_places_are_counted_and_left_out() -> None:
    found = row([NAN, 1.0, NAN], [NAN, 1.0, NAN])
    assert (found.nans, found.max_abs) == (2, 0.0)


def test_infinities_that_both_have_are_left_out_and_others_are_infinitely_far() -> None:
    assert row([INF, -INF, 1.0], [INF, -INF, 1.0]).accuracy == Accuracy(0.0, 0.0, 1.0)
    for found in ([INF, INF, 1.0], [INF, 1.0, 1.0]):
        assert row([INF, -INF, 1.0], found).accuracy == Accuracy(INF, INF, 0.0)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (np.zeros((2, 2), np.float64), "output y has the type float64 for case, not float32"),
        (np.zeros((2, 1), np.float32), "output y has the shape [2, 1] for case, not [2, 2]"),
        (
            np.array([[0, NAN], [0, 0]], np.float32),
            "output y and its reference have NaNs at different places for case, 1 of 4",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused(found: Any, message: str) -> None:
    with pytest.raises(BuildFailed) as caught:
        compare(["case"], [{"y": np.zeros((2, 2), np.float32)}], [{"y": found}])
    assert (caught.value.stage, caught.value.node, caught.value.message) == ("verify", "y", message)


def test_a_missing_output_is_refused() -> None:
    with pytest.raises(BuildFailed, match=r"no output y for case$"):
        compare(["case"], [{"y": np.zeros(1)}], [{}])


def test_the_worst_is_taken_over_outputs_and_cases() -> None:
    wanted = [{"a": np.array([1.0]), "b": np.array([1.0])}] * 2
    found = [{"a": np.array([1.5]), "b": np.array([1.0])}, {"a": np.array([1.0]), "b": np.array([-1.0])}]
    assert compare(["one", "two"], wanted, found).worst == Accuracy(2.0, 2.0, -1.0)


def test_the_worst_survives_json_which_has_no_infinities_and_is_beyond_what_is_allowed() -> None:
    worst = compare(["case"], [{"label": np.array([1, 2])}], [{"label": np.array([1, 3])}]).worst
    assert msgspec.json.decode(msgspec.json.encode(worst), type=Accuracy) == worst
    assert worst.beyond(Tolerance(max_abs=1e9))
    assert worst.beyond(Tolerance(rel_l2=1e9))


def test_a_model_without_outputs_to_compare_is_exact() -> None:
    assert compare([], [], []).worst == Accuracy(0.0, 0.0, 1.0)


def test_an_output_beyond_the_tolerance_is_named_with_its_case() -> None:
    wanted = {"near": np.array([1.0]), "far": np.array([1.0])}
    found = {"near": np.array([1.0001]), "far": np.array([1.01])}
    comparison = compare(["sample 3"], [wanted], [found])
    with pytest.raises(BuildFailed) as caught:
        check(comparison, TOLERANCES[Precision.FP32])
    assert caught.value.node == "far"
    assert re.search(r"output far .*sample 3: rel_l2 is 0\.01, .*1e-05", caught.value.message)
    check(comparison, Tolerance(rel_l2=0.1))


def test_labels_that_differ_are_told_as_such() -> None:
    comparison = compare(["case"], [{"label": np.array([1, 2, 3, 4])}], [{"label": np.array([1, 2, 3, 5])}])
    with pytest.raises(BuildFailed, match=r"75\.0% .*equal"):
        check(comparison, TOLERANCES[Precision.FP16])
    check(comparison, Tolerance())
