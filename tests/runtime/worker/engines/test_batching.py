"""Which inputs fit, which calls share a run, and how rows are distributed."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest

from gpufn_core.errors import InvalidInput
from gpufn_core.spec.model_spec import ShapeProfile, TensorSpec
from gpufn_runtime.worker.engines import batching
from gpufn_runtime.worker.engines.base import Arrays
from gpufn_runtime.worker.engines.batching import Batching, Fitted
from tests.runtime.worker.engines.engines import manifest, profile, rows, tensor


def _f32(*shape: int) -> Any:
    return np.zeros(shape, np.float32)


_TEXT_AND_MASK = [tensor("text", "INT64", -1, -1), tensor("mask", "BOOL", -1, -1)]


@pytest.mark.parametrize(
    ("given", "field", "message"),
    [
        ({"x": _f32(1, 2), "z": _f32(1)}, "z", "z: the model has no such input; it takes x FP32[-1,2]"),
        ({}, "x", "x: missing; the model takes x FP32[-1,2]"),
        ({"x": np.zeros((1, 2))}, "x", "x: the model takes x FP32[-1,2], not float64"),
        ({"x": _f32(2)}, "x", "x: the model takes x FP32[-1,2], not [2]"),
        ({"x": _f32(1, 3)}, "x", "x: the model takes x FP32[-1,2], not [1, 3]"),
        ({"x": _f32(0, 2)}, "x", "x: there are no rows"),
    ],
)
def test_a_mismatch_is_named(given: Arrays, field: str, message: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        Batching(manifest()).fit(given)
    assert (refused.value.field, refused.value.message) == (field, message)


@pytest.mark.parametrize(("shape", "batched"), [((2, 2), True), ((2, 2), False), ((4,), True), ((), False)])
def test_bytes_of_a_bool_that_are_neither_0_nor_1_are_refused(shape: tuple[int, ...], batched: bool) -> None:
    rules = Batching(manifest([TensorSpec("mask", "BOOL", (-1,) * len(shape))], batched=batched))
    size = int(np.prod(shape))
    good = np.frombuffer(bytes([0, 1, 1, 0][:size]), np.bool_).reshape(shape)
    assert rules.fit({"mask": good}).inputs["mask"] is good
    bad = np.frombuffer(bytes([0, 1, 2, 255][-size:]), np.bool_).reshape(shape)
    with pytest.raises(InvalidInput) as refused:
        rules.fit({"mask": bad})
    assert refused.value.field == "mask"
    assert refused.value.message.endswith("255")


def test_the_inputs_of_a_call_have_as_many_rows() -> None:
    rules = Batching(manifest(_TEXT_AND_MASK))
    with pytest.raises(InvalidInput, match="mask: 2 rows, but text has 1"):
        rules.fit({"mask": np.zeros((2, 3), np.bool_), "text": np.zeros((1, 3), np.int64)})


def test_fitted_inputs_are_in_the_models_order() -> None:
    fitted = Batching(manifest(_TEXT_AND_MASK)).fit(
        {"mask": np.zeros((1, 3), np.bool_), "text": np.zeros((1, 3), np.int64)}
    )
    assert list(fitted.inputs) == ["text", "mask"]


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 2, 64), "x: the engine accepts [1, 2, 1] to [4, 2, 16], tuned for [2, 2, 8], not [1, 2, 64]"),
        ((9, 2, 17), "x: the engine accepts [1, 2, 1] to [4, 2, 16], tuned for [2, 2, 8], not [9, 2, 17]"),
    ],
)
def test_the_error_of_a_shape_that_no_profile_accepts_has_the_profile(shape: tuple[int, ...], message: str) -> None:
    rules = Batching(
        manifest([tensor("x", "FP32", -1, 2, -1)], profiles=[profile(x=((1, 2, 1), (2, 2, 8), (4, 2, 16)))])
    )
    with pytest.raises(InvalidInput) as refused:
        rules.fit({"x": _f32(*shape)})
    assert refused.value.message == message
    assert rules.fit({"x": _f32(9, 2, 16)}).most_rows == 4, "more rows than a run accepts are run in parts"


def test_without_rows_the_whole_shape_has_to_fit() -> None:
    rules = Batching(
        manifest(
            [tensor("x", "FP32", -1)], batched=False, profiles=[profile(x=([1], [2], [4])), profile(x=([8], [8], [8]))]
        )
    )
    assert rules.fit({"x": _f32(8)}).rows is None
    with pytest.raises(InvalidInput, match=r"x: the engine accepts \[1\] to \[4\], .*; \[8\] to \[8\], .*, not \[5\]"):
        rules.fit({"x": _f32(5)})


def test_shapes_that_no_one_profile_accepts_together_are_refused() -> None:
    specs = [tensor("a", "FP32", -1), tensor("b", "FP32", -1)]
    rules = Batching(
        manifest(specs, batched=False, profiles=[profile(a=([1], [1], [1]), b=([1], [1], [1])),
                                                 profile(a=([2], [2], [2]), b=([2], [2], [2]))])
    )  # fmt: skip
    assert rules.fit({"a": _f32(2), "b": _f32(2)})
    with pytest.raises(InvalidInput, match=r"^a: .*\[1\].* other inputs"):
        rules.fit({"a": _f32(1), "b": _f32(2)})


def test_a_profile_may_require_a_least_number_of_rows() -> None:
    rules = Batching(manifest(profiles=[profile(x=((4, 2), (4, 2), (8, 2)))]))
    with pytest.raises(InvalidInput, match=r"accepts \[4, 2\] to \[8, 2\].*, not \[3, 2\]"):
        rules.fit({"x": _f32(3, 2)})


@pytest.mark.parametrize(
    ("calls", "taken", "left"),
    [
        # "2a" is a call of two rows and trailing shape a; max_batch is 4, and a run accepts 6
        ("1a 1a 1a", "1a 1a 1a", ""),
        ("1a 2a 2a 1a", "1a 2a 1a", "2a"),
        ("1a 1b 1a", "1a 1a", "1b"),
        ("4a 1a", "4a", "1a"),
        ("5a 1a", "5a", "1a"),
        ("9a 1a", "9a", "1a"),
        ("2a 2b 3a 2a 1b", "2a 2a", "2b 3a 1b"),
    ],
)
def test_calls_of_one_shape_are_taken_together_oldest_first(calls: str, taken: str, left: str) -> None:
    spec = tensor("x", "FP32", -1, -1)
    rules = Batching(manifest([spec], max_batch=4, profiles=[profile(x=((1, 1), (4, 2), (6, 9)))]))

    def fitted(call: str) -> Fitted:
        return rules.fit({"x": _f32(int(call[0]), ord(call[1]) - ord("a") + 1)})

    first, *others = calls.split()
    waiting = deque(others)
    assert rules.take(first, waiting, fitted) == taken.split()
    assert list(waiting) == left.split()


@pytest.mark.parametrize(
    ("rows", "most", "runs"),
    [
        # profiles of 1 to 2, of 4 to 6 and of exactly 8 rows
        (1, 2, [1]), (2, 2, [2]), (4, 6, [4]), (6, 6, [6]), (8, 8, [8]), (16, 8, [8, 8]),
        (9, 6, [5, 4]), (11, 6, [6, 5]), (3, 2, [2, 1]), (7, 2, [2, 2, 2, 1]),
    ],
)  # fmt: skip
def test_each_run_of_a_call_has_the_rows_of_one_profile(rows: int, most: int, runs: list[int]) -> None:
    bounds = [((1, 2), (2, 2), (2, 2)), ((4, 2), (4, 2), (6, 2)), ((8, 2), (8, 2), (8, 2))]
    rules = Batching(manifest(profiles=[profile(x=each) for each in bounds], max_batch=64))
    for _ in range(2):  # by then the same is known about a shape
        fitted = rules.fit({"x": _f32(rows, 2)})
        assert fitted.most_rows == most
        assert [len(part["x"]) for part in batching.parts(fitted)] == runs


def test_calls_that_share_a_run_stay_within_one_profile() -> None:
    bounds = [((1, 2), (2, 2), (2, 2)), ((8, 2), (8, 2), (8, 2))]
    rules = Batching(manifest(profiles=[profile(x=each) for each in bounds], max_batch=64))
    waiting = deque([1, 1, 1, 8])
    assert rules.take(1, waiting, lambda count: rules.fit({"x": _f32(count, 2)})) == [1, 1]
    assert list(waiting) == [1, 1, 8]


def test_rows_that_no_profile_accepts_in_equal_parts_are_refused() -> None:
    rules = Batching(manifest(profiles=[profile(x=((4, 2), (4, 2), (4, 2)))], max_batch=64))
    with pytest.raises(InvalidInput, match=r"accepts \[4, 2\] to \[4, 2\].*, not \[5, 2\]"):
        rules.fit({"x": _f32(5, 2)})
    assert [len(part["x"]) for part in batching.parts(rules.fit({"x": _f32(8, 2)}))] == [4, 4]


@pytest.mark.parametrize("profiles", [[], [profile(x=((1, 0), (8, 0), (8, 4)))]])
def test_rows_without_elements_stay_within_the_limit_of_a_run(profiles: list[ShapeProfile]) -> None:
    rules = Batching(manifest([tensor("x", "FP32", -1, -1)], profiles=profiles, max_batch=8))
    assert rules.fit({"x": _f32(8, 0)}).rows == 8
    with pytest.raises(InvalidInput) as refused:
        rules.fit({"x": np.empty((1_000_000_000, 0), np.float32)})
    assert refused.value.field == "x"
    assert "1000000000 rows" in refused.value.message
    assert refused.value.message.endswith(" 8")


def test_calls_without_rows_run_alone() -> None:
    rules = Batching(manifest(batched=False))
    waiting = deque([1, 2])
    assert rules.take(0, waiting, lambda _: rules.fit({"x": _f32(1, 2)})) == [0]
    assert list(waiting) == [1, 2]


def test_each_call_gets_its_own_rows_back() -> None:
    rules = Batching(manifest())
    calls = [rules.fit({"x": rows(*values)}) for values in ([1], [2, 3], [4])]
    joined = batching.join(calls)
    assert joined.rows == 4
    given = batching.split({"y": -joined.inputs["x"]}, calls)
    assert [one["y"][:, 0].tolist() for one in given] == [[-1], [-2, -3], [-4]]


def test_an_output_with_a_wrong_number_of_rows_reaches_no_caller() -> None:
    rules = Batching(manifest())
    calls = [rules.fit({"x": rows(value)}) for value in (1, 2)]
    with pytest.raises(ValueError, match=r"y .*\[3, 2\].* 2 rows"):
        batching.split({"y": rows(1, 2, 3)}, calls)


def test_one_call_is_neither_copied_nor_cut() -> None:
    array = rows(1, 2)
    call = Batching(manifest()).fit({"x": array})
    assert batching.parts(batching.join([call]))[0]["x"] is array


def test_more_rows_than_a_run_accepts_are_run_in_parts_of_like_size() -> None:
    call = Batching(manifest(max_batch=4)).fit({"x": rows(*range(9))})
    pieces = batching.parts(call)
    assert [len(piece["x"]) for piece in pieces] == [3, 3, 3]
    assert batching.whole(pieces)["x"][:, 0].tolist() == list(range(9))
