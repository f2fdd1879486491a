from __future__ import annotations

import io
import re
import struct
import zipfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from gpufn_builder.checks.samples import Case, generate, have_rows, read_samples, sample_shapes, stretch
from gpufn_builder.onnx_model.tensors import BF16
from gpufn_core.errors import BuildFailed
from gpufn_core.spec.model_spec import ShapeProfile, ShapeRange, TensorSpec

X = TensorSpec("x", "FP32", (-1, 2))
NAMES = TensorSpec("names", "BYTES", (-1,))


def npz(folder: Path, **arrays: Any) -> Path:
    np.savez_compressed(folder / "samples.npz", **arrays)
    return folder / "samples.npz"


def safetensors(folder: Path, head: dict[str, Any], body: bytes = b"") -> Path:
    header = msgspec.json.encode(head)
    (folder / "samples.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + body)
    return folder / "samples.safetensors"


def tensor(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def refusal(path: Path, *inputs: TensorSpec, max_bytes: int = 1 << 20) -> str:
    with pytest.raises(BuildFailed) as caught:
        read_samples(path, inputs or (X,), max_bytes=max_bytes)
    assert caught.value.stage == "ingest"
    return caught.value.message


def test_bytes_of_a_bool_that_are_neither_0_nor_1_are_refused(tmp_path: Path) -> None:
    mask = TensorSpec("mask", "BOOL", (-1,))
    bad = np.frombuffer(b"\x00\x01\x02", np.bool_).reshape(1, 3)
    message = "the samples of mask have the byte 2 in a BOOL tensor, where 0 and 1 are allowed"
    assert refusal(npz(tmp_path, mask=bad), mask) == message
    head = {"mask": tensor("BOOL", [1, 3], 0, 3)}
    assert refusal(safetensors(tmp_path, head, b"\x00\x01\x02"), mask) == message


def test_each_row_of_an_npz_is_a_case(tmp_path: Path) -> None:
    first, second = read_samples(npz(tmp_path, x=np.arange(12, dtype=np.float32).reshape(2, 3, 2)), [X])
    assert (first.name, second.name, second.is_user_sample) == ("sample 0", "sample 1", True)
    assert second.inputs["x"].tolist() == [[6, 7], [8, 9], [10, 11]]
    assert sample_shapes([first, second]) == {"x": [(3, 2), (3, 2)]}


@pytest.mark.parametrize(
    ("rows", "have"),
    [([(2, 2)], True), ([(2, 2), (1, 1)], True), ([(2, 3)], False), ([(2, 2), (2, 0)], False), ([(0, 0)], False)],
)
def test_the_rows_of_samples_are_the_same_in_all_inputs_or_are_none(rows: list[tuple[int, int]], have: bool) -> None:
    cases = [Case("c", {"x": np.zeros((x, 3)), "y": np.zeros(y)}) for x, y in rows]
    assert have_rows(cases) is have
    assert not have_rows([*cases, Case("scalar", {"x": np.zeros(()), "y": np.zeros(1)})])


def test_safetensors_are_read(tmp_path: Path) -> None:
    x = np.array([[[1, 2]]], np.float32)
    path = safetensors(
        tmp_path,
        {"__metadata__": {"made": "by hand"}, "x": tensor("F32", [1, 1, 2], 2, 10), "h": tensor("BF16", [1], 0, 2)},
        np.array([1.5], BF16).tobytes() + x.tobytes(),
    )
    (case,) = read_samples(path, [X, TensorSpec("h", "BF16", ())])
    assert case.inputs["x"].tolist() == [[1, 2]]
    assert (case.inputs["h"].dtype, float(case.inputs["h"]), case.inputs["h"].shape) == (BF16, 1.5, ())


def test_texts_of_an_npz_are_str_objects(tmp_path: Path) -> None:
    (case,) = read_samples(npz(tmp_path, names=np.array([["ada", "éva"]])), [NAMES])
    assert case.inputs["names"].dtype == np.object_
    assert case.inputs["names"].tolist() == ["ada", "éva"]
    (case,) = read_samples(npz(tmp_path, names=np.array([[b"ada", "éva".encode()]])), [NAMES])
    assert case.inputs["names"].tolist() == ["ada", "éva"]


def test_bf16_survives_npz_which_has_no_name_for_it(tmp_path: Path) -> None:
    (case,) = read_samples(npz(tmp_path, h=np.array([[1.5]], BF16)), [TensorSpec("h", "BF16", (1,))])
    assert case.inputs["h"].tolist() == [1.5]


def test_objects_are_never_unpickled(tmp_path: Path) -> None:
    path = npz(tmp_path, names=np.array([["ada"]], np.object_))
    message = refusal(path, NAMES)
    assert "samples.npz" in message
    assert message.endswith("names.npy holds Python objects")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (
            {"y": np.zeros((1, 1, 2), np.float32)},
            "the samples have an array y, and the model's inputs are x FP32[-1,2]",
        ),
        ({}, "the samples have no array for the input x FP32[-1,2]"),
        ({"x": np.zeros((1, 1, 2))}, "the samples of x FP32[-1,2] are float64: use .astype('float32')"),
        (
            {"x": np.zeros((5, 2), np.float32)},
            "the samples of x FP32[-1,2] have the shape [5, 2]: stack the inputs along a first axis of "
            "samples in one array",
        ),
        (
            {"x": np.zeros((1, 1, 3), np.float32)},
            "the samples of x FP32[-1,2] have the shape [1, 1, 3]: stack the inputs along a first axis of "
            "samples in one array",
        ),
        ({"x": np.zeros((0, 1, 2), np.float32)}, "there is no sample in samples.npz"),
        ({"x": np.zeros((4097, 0, 2), np.float32)}, "4097 samples are more than the 4096 allowed"),
    ],
)
def test_samples_are_held_against_the_models_inputs(arrays: dict[str, Any], message: str, tmp_path: Path) -> None:
    assert refusal(npz(tmp_path, **arrays)) == message


def test_every_input_has_as_many_samples(tmp_path: Path) -> None:
    path = npz(tmp_path, x=np.zeros((3, 1, 2), np.float32), s=np.zeros(2, np.float32))
    assert re.search(r"\b2 samples of s, .*\b3\b", refusal(path, X, TensorSpec("s", "FP32", ())))


def test_a_zip_bomb_is_not_unpacked(tmp_path: Path) -> None:
    path = npz(tmp_path, x=np.zeros((1, 1 << 18, 2), np.float32))
    assert path.stat().st_size < 1 << 14
    assert "they unpack to 2097" in refusal(path)


def test_a_header_that_claims_more_than_is_there_is_not_believed(tmp_path: Path) -> None:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (1 << 40, 1, 2)})
    with zipfile.ZipFile(tmp_path / "samples.npz", "w") as archive:
        archive.writestr("x.npy", file.getvalue())
    assert re.search(r"x\.npy .*shape \[1099511627776, 1, 2\]", refusal(tmp_path / "samples.npz"))


@pytest.mark.parametrize(
    ("descr", "shape", "words"),
    [
        ("<U0", (2, 1 << 30), "x.npy has elements without bytes"),
        ("|S0", (2, 3), "x.npy has elements without bytes"),
        ("<f4", (-1, -1, -2), "x.npy has an invalid shape: [-1, -1, -2]"),
        ("<f4", (True, 1, 2), "x.npy has an invalid shape: [True, 1, 2]"),
        ("<f4", (1,) * 65, "x.npy has 65 dimensions, and at most 64 are allowed"),
    ],
)
def test_a_header_that_is_none_is_refused(descr: str, shape: tuple[int, ...], words: str, tmp_path: Path) -> None:
    head = repr({"descr": descr, "fortran_order": False, "shape": shape}).encode()
    head += b" " * (-(len(head) + 11) % 64) + b"\n"
    with zipfile.ZipFile(tmp_path / "samples.npz", "w") as archive:
        archive.writestr("x.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head + bytes(8))
    assert words in refusal(tmp_path / "samples.npz", TensorSpec("x", "BYTES", (-1,)), max_bytes=1 << 33)


@pytest.mark.parametrize(
    ("head", "words"),
    [
        ({"x": tensor("F32", [1] * 65, 0, 4)}, "x has 65 dimensions, and at most 64 are allowed"),
        ({"x": tensor("F32", [1, 1, 2], 0, 9)}, "x lies outside of the file"),
        ({"x": tensor("F32", [1, 1, 2], -8, 0)}, "x lies outside of the file"),
        ({"x": tensor("F32", [1, -1, -2], 0, 8)}, "x has an invalid shape: [1, -1, -2]"),
        ({"x": tensor("F32", [1, 1 << 60, 2], 0, 8)}, "x does not have the bytes of its shape"),
        ({"x": tensor("F8_E4M3", [1, 1, 8], 0, 8)}, "x has elements of type F8_E4M3"),
        ({"x": {"dtype": "F32"}}, "missing required field"),
        ({"x": 1}, "Expected `object`"),
    ],
)
def test_safetensors_are_not_believed_either(head: dict[str, Any], words: str, tmp_path: Path) -> None:
    assert words in refusal(safetensors(tmp_path, head, bytes(8)))


@pytest.mark.parametrize(
    "data", [b"", b"PK", b"PK\x03\x04" + bytes(40), b"\xff" * 40, b"\x10" + bytes(7) + b"not json at all!"]
)
def test_other_files_are_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "samples").write_bytes(data)
    assert ".npz or .safetensors" in refusal(tmp_path / "samples")


def test_a_damaged_npz_is_refused(tmp_path: Path) -> None:
    path = npz(tmp_path, x=np.random.default_rng(0).standard_normal((4, 8, 2)).astype(np.float32))
    data = bytearray(path.read_bytes())
    data[200:260] = bytes(60)
    path.write_bytes(data)
    assert ".npz or .safetensors" in refusal(path)


# --- generated -------------------------------------------------------------------------------------------------------


def made(*inputs: TensorSpec, profiles: tuple[ShapeProfile, ...] = (), seed: int = 0) -> list[Case]:
    return generate(inputs, profiles, seed)


def test_there_is_a_case_at_each_end_and_where_it_is_tuned() -> None:
    ranges = ShapeRange((1, 2), (4, 2), (8, 2))
    cases = made(X, profiles=(ShapeProfile({"x": ranges}),))
    assert [(case.name, case.inputs["x"].shape) for case in cases] == [
        ("min shapes", (1, 2)), ("opt shapes", (4, 2)), ("max shapes", (8, 2)),
    ]  # fmt: skip
    assert not any(case.is_user_sample for case in cases)


def test_equal_shapes_are_generated_once() -> None:
    one = ShapeProfile({"x": ShapeRange((1, 2), (1, 2), (4, 2))})
    other = ShapeProfile({"x": ShapeRange((4, 2), (4, 2), (8, 2))})
    names = [case.name for case in made(X, profiles=(one, other))]
    assert names == ["profile 1, min shapes", "profile 1, max shapes", "profile 2, max shapes"]


def test_fixed_shapes_have_one_case_and_no_inputs_an_empty_one() -> None:
    assert [case.inputs["x"].shape for case in made(TensorSpec("x", "FP32", (3, 2)))] == [(3, 2)]
    assert [case.inputs for case in made()] == [{}]


def test_the_same_seed_makes_the_same_inputs() -> None:
    x = TensorSpec("x", "FP32", (64,))
    one, same, other = (made(x, seed=seed)[0].inputs["x"] for seed in (1, 1, 2))
    assert one.tolist() == same.tolist() != other.tolist()


@pytest.mark.parametrize("datatype", ["INT16", "INT32", "INT64", "UINT16", "UINT32", "UINT64"])
def test_integers_are_valid_as_an_index_and_as_a_mask(datatype: str) -> None:
    values = made(TensorSpec("x", datatype, (64, 3)))[0].inputs["x"]
    assert set(values.ravel().tolist()) == {0, 1}
    assert values[:, 0].tolist() == [1] * 64


@pytest.mark.parametrize(
    ("datatype", "limit", "largest"), [("INT64", 30522, 30521), ("INT8", 257, 126), ("INT32", 1, 0)]
)
def test_integers_that_select_from_a_table_are_below_its_limit(datatype: str, limit: int, largest: int) -> None:
    x = TensorSpec("x", datatype, (64, 64))
    values = generate([x], (), 0, {"x": limit})[0].inputs["x"]
    assert 0.9 * largest <= values.max() <= largest
    assert values.min() >= 0


@pytest.mark.parametrize(
    ("datatype", "dtype"),
    [
        ("BOOL", np.bool_), ("UINT8", np.uint8), ("INT8", np.int8), ("FP16", np.float16), ("BF16", BF16),
        ("FP32", np.float32), ("FP64", np.float64), ("BYTES", np.object_),
    ],
)  # fmt: skip
def test_other_types_vary(datatype: str, dtype: Any) -> None:
    values = made(TensorSpec("x", datatype, (64,)))[0].inputs["x"]
    assert values.dtype == np.dtype(dtype)
    assert len(set(values.tolist())) > 1


@pytest.mark.parametrize("datatype", ["FP32", "INT64", "BYTES", "BOOL", "UINT8"])
def test_scalars_and_empty_tensors_are_made(datatype: str) -> None:
    for shape in ((), (0, 2)):
        assert made(TensorSpec("x", datatype, shape))[0].inputs["x"].shape == shape


@pytest.mark.parametrize(
    ("batched", "shape", "found"),
    [
        (True, (2, 2), [[1, 2], [3, 4]]),
        (True, (1, 2), [[1, 2]]),
        (True, (3, 3), [[1, 2, 1], [3, 4, 3], [1, 2, 1]]),
        (False, (1, 1), [[1]]),
        (False, (2, 5), [[1, 2, 1, 2, 1], [1, 2, 1, 2, 1]]),
    ],
)
def test_samples_are_stretched_to_a_shape_with_nothing_in_it_but_theirs(
    batched: bool, shape: tuple[int, ...], found: list[list[int]]
) -> None:
    cases = [Case("a", {"x": np.array([[1, 2]]), "fixed": np.zeros(3)}), Case("b", {"x": np.array([[3, 4]])})]
    case = stretch(cases, {"x": shape}, batched=batched)
    assert case is not None
    assert (case.inputs["x"].tolist(), case.inputs["fixed"].shape) == (found, (3,))


def test_texts_are_stretched_and_empty_values_are_not() -> None:
    case = stretch([Case("a", {"names": np.array(["b"], np.object_)})], {"names": (2,)}, batched=True)
    assert case is not None
    assert case.inputs["names"].tolist() == ["b", "b"]
    empty = [Case("a", {"past": np.zeros((1, 0))})]
    assert stretch(empty, {"past": (1, 3)}, batched=True) is None
    still = stretch(empty, {"past": (4, 0)}, batched=True)
    assert still is not None
    assert still.inputs["past"].shape == (4, 0)
