from __future__ import annotations

import math
import re
from typing import Any

import msgspec
import numpy as np
import pytest

from gpufn_builder.checks.verify import check, compare
from gpufn_builder.onnx_model.tensors import BF16
from gpufn_builder.report.report import Element, OutputRow
from gpufn_core.domain.devices.engine import Accuracy
from gpufn_core.errors import BuildFailed
from gpufn_core.spec.model_spec import TOLERANCES, Precision, Tolerance

INF, NAN = math.inf, math.nan
FP32 = TOLERANCES[Precision.FP32]


def row(wanted: Any, found: Any, dtype: Any = np.float32, *, limits: Tolerance = FP32, floor: float = 0.0) -> OutputRow:
    comparison = compare(
        ["case"],
        [{"y": np.array(wanted, dtype)}],
        [{"y": np.array(found, dtype)}],
        limits,
        rounding_floors=[{"y": floor}],
    )
    return comparison.outputs[0]


def passes(wanted: Any, found: Any, *, limits: Tolerance = FP32, floor: float = 0.0) -> bool:
    comparison = compare(
        ["case"], [{"y": np.array(wanted)}], [{"y": np.array(found)}], limits, rounding_floors=[{"y": floor}]
    )
    try:
        check(comparison, limits)
    except BuildFailed:
        return False
    return True


def test_equal_outputs_have_no_distance() -> None:
    same = row([[1.0, -2.0]], [[1.0, -2.0]])
    assert (same.dtype, same.shape, same.accuracy, same.argmax) == ("float32", (1, 2), Accuracy(0.0, 0.0, 1.0), 1.0)


# --- the limit of each element --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "found", "passed"),
    [
        (0.0, 0.9e-5, True),
        (0.0, 1.1e-5, False),
        (100.0, 100.0 + 0.009, True),
        (100.0, 100.0 + 0.011, False),
    ],
)
def test_fp32_allows_an_absolute_and_a_relative_difference_of_each_element(
    wanted: float, found: float, passed: bool
) -> None:
    assert passes([wanted, 1e4], [found, 1e4]) is passed


def test_outputs_near_zero_pass_fp32_though_their_relative_distance_is_large() -> None:
    """A detector returns such outputs for an image without objects."""
    wanted, found = [1e-6, 0.0], [0.95e-6, 0.9e-7]
    assert row(wanted, found).rel_l2 > 0.1
    assert passes(wanted, found)


@pytest.mark.parametrize("preset", TOLERANCES.values(), ids=map(str, TOLERANCES))
def test_an_output_that_passes_fp32_passes_every_preset(preset: Tolerance) -> None:
    wanted, found = [1e-6] + [0.0] * 100, [1e-6] + [0.9e-7] * 100
    assert row(wanted, found).cosine < 0.9
    assert passes(wanted, found, limits=preset)
    assert not passes(wanted, found, limits=Tolerance(rel_l2=0.1))
    assert not passes([1.0, 0.0], [0.5, 1.0], limits=preset)


@pytest.mark.parametrize("preset", TOLERANCES.values(), ids=map(str, TOLERANCES))
def test_other_values_as_small_as_the_reference_pass_no_preset(preset: Tolerance) -> None:
    """Regression: with an atol of 1e-5 and a reference below it, zeros and every order of the values passed."""
    wanted = np.linspace(0, 1e-5, 200_000, dtype=np.float32)
    assert not passes(wanted, np.zeros_like(wanted), limits=preset)
    assert not passes(wanted, wanted[::-1], limits=preset)
    assert passes(wanted, wanted, limits=preset)


def test_an_own_limit_applies_to_small_outputs_as_it_is_and_that_of_a_preset_to_zeros() -> None:
    assert passes([1e-6, 0.0], [0.0, 1e-6], limits=Tolerance(atol=1e-5))
    assert passes([0.0, 0.0], [1e-6, 0.0])
    assert not passes([0.0, 0.0], [1e-6, 1e-4])


def test_one_wrong_element_among_large_ones_fails_fp32_though_the_relative_distance_is_small() -> None:
    wanted = np.full(10_000, 1e3)
    wanted[7] = 0.0
    found = wanted.copy()
    found[7] = 0.1
    assert row(wanted, found, np.float64).rel_l2 < 1e-5
    assert not passes(wanted, found)


def test_a_difference_up_to_the_floor_passes() -> None:
    assert not passes([1.0, 0.0], [1.0, 0.01])
    assert passes([1.0, 0.0], [1.0, 0.01], floor=0.011)
    assert not passes([1.0, 0.0], [1.0, 0.012], floor=0.011)
    assert not passes([1.0, 0.0], [1.0, 0.01], floor=0.011, limits=Tolerance(max_abs=1e-3))


def test_a_limit_of_elements_may_have_one_part_only() -> None:
    assert passes([100.0, 0.0], [101.0, 0.0], limits=Tolerance(rtol=0.02))
    assert not passes([100.0, 0.0], [100.0, 1e-9], limits=Tolerance(rtol=0.02))
    assert not passes([100.0, 0.0], [101.0, 0.0], limits=Tolerance(atol=0.5))


def test_the_worst_element_exceeds_its_own_limit_the_most() -> None:
    found = row([[1000.0, 0.0], [5.0, 1.0]], [[1000.05, 0.001], [5.0, 1.0]], np.float64)
    assert found.worst_element is not None
    assert (found.worst_element.index, found.worst_element.value, found.worst_element.reference) == (
        (0, 1),
        "0.001",
        "0",
    )
    assert found.worst_element.difference == pytest.approx(1e-3)
    assert found.worst_element.limit == pytest.approx(1e-5)
    assert found.max_abs == pytest.approx(0.05)


def test_without_a_limit_of_elements_the_worst_element_has_the_largest_difference() -> None:
    found = row([[1000.0, 0.0]], [[1000.05, 0.001]], np.float64, limits=Tolerance(rel_l2=0.1))
    assert found.worst_element is not None
    assert (found.worst_element.index, found.worst_element.value, found.worst_element.limit) == (
        (0, 0),
        "1000.05",
        None,
    )
    assert found.worst_element.difference == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("wanted", "found", "dtype", "expected"),
    [
        ([1, 2], [1, 3], np.int64, Element((1,), "3", "2", INF, 0.0)),
        (["a", "b"], ["a", "c"], np.object_, Element((1,), "c", "b", INF, 0.0)),
        ([0.0, INF], [0.0, 1.0], np.float32, Element((1,), "1", "inf", INF, 0.0)),
        (1.0, 2.0, np.float32, Element((), "2", "1", 1.0, 1e-5 + 1e-4)),
    ],
)
def test_the_worst_element_has_its_values_in_each_type(wanted: Any, found: Any, dtype: Any, expected: Element) -> None:
    assert row(wanted, found, dtype).worst_element == expected
    assert not passes(np.array(wanted, dtype), np.array(found, dtype))


def test_each_figure_has_its_meaning() -> None:
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
def test_squares_beyond_the_range_of_floats_are_compared(size: float) -> None:
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
def test_values_other_than_floats_are_equal_or_infinitely_far(wanted: Any, found: Any, dtype: Any) -> None:
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
def test_values_that_cannot_be_compared_are_refused(found: Any, message: str) -> None:
    with pytest.raises(BuildFailed) as caught:
        compare(["case"], [{"y": np.zeros((2, 2), np.float32)}], [{"y": found}], FP32)
    assert (caught.value.stage, caught.value.node, caught.value.message) == ("verify", "y", message)


def test_a_missing_output_is_refused() -> None:
    with pytest.raises(BuildFailed, match=r"no output y for case$"):
        compare(["case"], [{"y": np.zeros(1)}], [{}], FP32)


def test_the_worst_is_taken_over_outputs_and_cases() -> None:
    wanted = [{"a": np.array([1.0]), "b": np.array([1.0])}] * 2
    found = [{"a": np.array([1.5]), "b": np.array([1.0])}, {"a": np.array([1.0]), "b": np.array([-1.0])}]
    assert compare(["one", "two"], wanted, found, FP32).worst_accuracy == Accuracy(2.0, 2.0, -1.0)


def test_the_worst_is_stored_as_json_which_has_no_infinities() -> None:
    worst = compare(["case"], [{"label": np.array([1, 2])}], [{"label": np.array([1, 3])}], FP32).worst_accuracy
    assert msgspec.json.decode(msgspec.json.encode(worst), type=Accuracy) == worst
    assert worst.max_abs > 1e300


def test_a_model_without_outputs_to_compare_is_exact() -> None:
    assert compare([], [], [], FP32).worst_accuracy == Accuracy(0.0, 0.0, 1.0)


@pytest.mark.parametrize(
    ("limits", "measured", "remedy"),
    [
        (FP32, "atol 1e-05 and rtol 0.0001", "--tolerance atol=0.0105"),
        (Tolerance(rel_l2=1e-3), "rel_l2 is 0.01, .*0.001", "--tolerance rel_l2=0.0105"),
        (Tolerance(rel_l2=1e-3, cosine=0.5), "rel_l2 is 0.01", "--tolerance rel_l2=0.0105 --tolerance cosine=0.5"),
        (Tolerance(max_abs=1e-3), "max_abs is 0.01", "--tolerance max_abs=0.0105"),
    ],
    ids=str,
)
def test_an_output_beyond_the_tolerance_is_named_with_its_case_its_worst_element_and_the_remedy(
    limits: Tolerance, measured: str, remedy: str
) -> None:
    wanted = {"near": np.array([1.0]), "far": np.array([1.0])}
    found = {"near": np.array([1.00001]), "far": np.array([1.01])}
    comparison = compare(["sample 3"], [wanted], [found], limits)
    with pytest.raises(BuildFailed) as caught:
        check(comparison, limits)
    assert caught.value.node == "far"
    assert re.search(rf"output far .*sample 3: .*{measured}", caught.value.message)
    assert "element [0] is 1.01 instead of 1" in caught.value.message
    assert "max_abs" in caught.value.message
    assert remedy in caught.value.message
    assert "--samples" in caught.value.message


def test_the_remedy_is_enough() -> None:
    wanted, found = np.array([1.0, 2.0, 0.0]), np.array([1.1, 2.7, -0.3])
    for limits in (FP32, Tolerance(rel_l2=1e-3, cosine=0.9999), Tolerance(max_abs=1e-9)):
        comparison = compare(["case"], [{"y": wanted}], [{"y": found}], limits)
        with pytest.raises(BuildFailed) as caught:
            check(comparison, limits)
        proposed = re.findall(r"--tolerance (\w+)=([-+.\de]+)", caught.value.message)
        raised = Tolerance(**{name: float(limit) for name, limit in proposed})
        assert raised != Tolerance()
        check(compare(["case"], [{"y": wanted}], [{"y": found}], raised), raised)


def test_the_proposed_cosine_is_a_valid_tolerance() -> None:
    wanted, limits = np.array([1.0, 2.0]), TOLERANCES[Precision.INT8]
    with pytest.raises(BuildFailed) as caught:
        check(compare(["case"], [{"y": wanted}], [{"y": -wanted}], limits), limits)
    (proposed,) = re.findall(r"--tolerance cosine=(\S+?)\)", caught.value.message)
    assert Tolerance(cosine=float(proposed)).cosine == -1


def test_a_failure_of_a_model_that_draws_other_random_numbers_proposes_no_verification_and_no_tolerance() -> None:
    with pytest.raises(BuildFailed, match="--no-verify") as caught:
        check(compare(["case"], [{"y": np.ones(2)}], [{"y": np.zeros(2)}], FP32), FP32, draws_other_numbers=True)
    assert "--tolerance" not in caught.value.message


def test_labels_that_differ_are_reported_and_no_tolerance_is_proposed() -> None:
    limits = TOLERANCES[Precision.FP16]
    comparison = compare(["case"], [{"label": np.array([1, 2, 3, 4])}], [{"label": np.array([1, 2, 3, 5])}], limits)
    with pytest.raises(BuildFailed, match=r"75\.0% .*equal") as caught:
        check(comparison, limits)
    assert "--tolerance" not in caught.value.message
    assert "--samples" in caught.value.message
    check(comparison, Tolerance())
