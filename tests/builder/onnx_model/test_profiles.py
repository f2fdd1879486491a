from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import pytest

from gpufn_builder.onnx_model.profiles import Shape, resolve_profiles
from gpufn_core.errors import BuildFailed
from gpufn_core.spec.model_spec import ModelFile, ModelSpec, ShapeProfile, ShapeRange, TensorSpec

IMAGE = TensorSpec("image", "FP32", (-1, 3, 8, 8))
TOKENS = TensorSpec("tokens", "INT64", (-1, -1))
FIXED = TensorSpec("scale", "FP32", (1,))


def profile(**ranges: tuple[Shape, Shape, Shape]) -> ShapeProfile:
    return ShapeProfile({name: ShapeRange(*shapes) for name, shapes in ranges.items()})


def resolve(
    inputs: Sequence[TensorSpec],
    *given: ShapeProfile,
    max_batch: int = 1,
    seen: Mapping[str, Sequence[Shape]] | None = None,
    batched: bool = True,
) -> tuple[ShapeProfile, ...]:
    spec = ModelSpec(
        parameter="m", files=(ModelFile("m.onnx", "0" * 64, 1),), profiles=tuple(given), max_batch=max_batch
    )
    return resolve_profiles(inputs, spec, seen or {}, batched=batched)


def test_rows_go_up_to_max_batch_and_the_engine_is_tuned_for_that() -> None:
    expected = profile(image=((1, 3, 8, 8), (32, 3, 8, 8), (32, 3, 8, 8)))
    assert resolve([IMAGE, FIXED], max_batch=32) == (expected,)


def test_fixed_sizes_need_no_profile() -> None:
    assert resolve([FIXED]) == ()
    assert resolve([]) == ()


def test_several_rows_of_a_model_with_a_fixed_number_are_refused() -> None:
    for given in ((), (profile(scale=((1,), (1,), (1,))),)):
        with pytest.raises(BuildFailed) as caught:
            resolve([FIXED], *given, max_batch=8)
        assert (caught.value.stage, caught.value.node) == ("ingest", "scale")
        assert re.match(r"max_batch is 8, .* scale FP32\[1\] is fixed", caught.value.message)


@pytest.mark.parametrize(
    ("inputs", "given"),
    [
        ([TensorSpec("x", "FP32", (1 << 40, 1 << 40))], ()),
        ([TensorSpec("x", "FP32", (-1, -1))], (profile(x=((1, 2), (1, 2), (1 << 24, 1 << 24))),)),
        ([TensorSpec("x", "FP32", (-1, 1 << 30))], ()),
    ],
)
def test_shapes_that_no_array_has_are_refused(inputs: list[TensorSpec], given: tuple[ShapeProfile, ...]) -> None:
    with pytest.raises(BuildFailed, match=r"^x .*\d+ elements; 17179869184 ") as caught:
        resolve(inputs, *given, max_batch=64 if inputs[0].shape[0] == -1 else 1)
    assert caught.value.node == "x"


def test_other_sizes_come_from_the_samples() -> None:
    seen = {"tokens": [(1, 40), (1, 7), (1, 9)]}
    assert resolve([TOKENS], max_batch=4, seen=seen) == (profile(tokens=((1, 7), (4, 9), (4, 40))),)


def test_a_first_dimension_without_rows_is_taken_from_the_samples() -> None:
    audio = TensorSpec("audio", "FP32", (-1,))
    assert resolve([audio], seen={"audio": [(16_000,)]}, batched=False) == (profile(audio=((16_000,),) * 3),)


def test_declared_profiles_ignore_fixed_inputs() -> None:
    wanted = profile(tokens=((1, 1), (8, 64), (8, 512)))
    with_fixed = ShapeProfile({**wanted.inputs, "scale": ShapeRange((1,), (1,), (1,))})
    assert resolve([TOKENS, FIXED], wanted, with_fixed) == (wanted, wanted)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (profile(words=((1,), (1,), (1,))), "shapes= (--shape) names words, and the model's inputs are image, tokens"),
        (profile(image=((1, 3, 8, 8),) * 3), "shapes= (--shape) has no entry for tokens, which has dynamic sizes"),
        (profile(tokens=((1,), (1,), (1,))), "shapes= (--shape) has 1 dimensions for tokens, which has 2"),
        (
            profile(image=((1, 3, 8, 8), (1, 3, 8, 9), (1, 3, 8, 9))),
            "dimension 3 of image is always 8, and shapes= (--shape) has 8 to 9 for it",
        ),
    ],
)
def test_declared_profiles_are_compared_with_the_model(given: ShapeProfile, message: str) -> None:
    with pytest.raises(BuildFailed) as caught:
        resolve([IMAGE, TOKENS], given)
    assert (caught.value.stage, caught.value.message) == ("ingest", message)


def test_samples_outside_the_declared_profiles_are_refused() -> None:
    given = profile(tokens=((1, 1), (1, 8), (1, 16)))
    with pytest.raises(BuildFailed, match=r"sample 1 .*\[1, 17\] for tokens, .*\[1, 1\] to \[1, 16\]"):
        resolve([TOKENS], given, seen={"tokens": [(1, 16), (1, 17)]})


def test_a_dynamic_size_without_a_source_is_refused() -> None:
    with pytest.raises(BuildFailed) as caught:
        resolve([TOKENS, IMAGE, TensorSpec("state", "FP32", (2, -1, 128))], max_batch=8)
    assert caught.value.node == "tokens"
    assert "(--shape tokens=1x? --shape state=2x?x128)" in caught.value.message
    assert caught.value.message.endswith("samples= (--samples)")


def test_samples_of_more_rows_than_max_batch_name_the_needed_value() -> None:
    with pytest.raises(
        BuildFailed,
        match=r"8 rows of image, .*max_batch is 4: set max_batch=8 \(--max-batch 8\) or shapes= \(--shape\)$",
    ):
        resolve([IMAGE], max_batch=4, seen={"image": [(8, 3, 8, 8)]})
