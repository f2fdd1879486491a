"""Bodies of the Open Inference Protocol, as clients send and receive them."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpufn_core.encoding.media import TENSORS
from gpufn_core.errors import InvalidInput
from gpufn_core.spec.model_spec import DATATYPES, TensorSpec
from gpufn_runtime.worker.engines import oip
from gpufn_runtime.worker.engines.base import Array
from gpufn_runtime.worker.engines.tensors import BF16, dtype_of
from tests.runtime.worker.engines.engines import rows, tensor

X, Y = (tensor("x"),), (tensor("y"),)


def _body(head: dict[str, Any], *blobs: bytes) -> tuple[str, bytes]:
    text = json.dumps(head).encode()
    return (f"{TENSORS};header-bytes={len(text)}" if blobs else TENSORS), b"".join((text, *blobs))


def _input(name: str = "x", datatype: str = "FP32", shape: Any = (1, 2), **rest: Any) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": list(shape), **rest}


def _decode(head: dict[str, Any], *blobs: bytes, inputs: Any = X, outputs: Any = Y) -> oip.Request:
    return oip.decode(*_body(head, *blobs), inputs, outputs)


def _encode(*answer: Any) -> tuple[str, bytes]:
    kind, parts = oip.encode(*answer)
    return kind, b"".join(parts)


def _sample(datatype: str) -> Array:
    if datatype == "BYTES":
        return np.array([["", "a"], ["é\0", "longer"]], np.object_)
    if datatype == "BF16":
        return np.array([[0x3F80, 0xC000], [0, 0x7F80]], np.uint16).view(BF16)
    dtype = dtype_of(datatype)
    if dtype.kind in "iu":
        bounds = np.iinfo(dtype)
        return np.array([[0, bounds.max], [1, bounds.min]], dtype)
    return np.array([[0, 1], [1, 0]]).astype(dtype)


@pytest.mark.parametrize("datatype", DATATYPES)
def test_every_datatype_is_sent_and_received_as_bytes(datatype: str) -> None:
    specs = (TensorSpec("t", datatype, (-1, 2)),)
    array = _sample(datatype)
    asked = oip.Request("", {}, {"t": True})
    kind, body = _encode(asked, {"t": array}, specs, "m", "1")
    head = json.loads(body[: int(kind.partition("header-bytes=")[2])])
    (described,) = head["outputs"]
    assert (described["datatype"], described["shape"]) == (datatype, [2, 2])
    again = oip.decode(
        *_body({"inputs": [described]}, body[-described["parameters"]["binary_data_size"] :]), specs, specs
    )
    assert again.inputs["t"].dtype == array.dtype
    assert again.inputs["t"].tolist() == array.tolist()


@pytest.mark.parametrize("datatype", sorted(DATATYPES.keys() - {"BF16"}))
@pytest.mark.parametrize("flat", [True, False])
def test_every_datatype_is_read_from_json_flat_or_nested(datatype: str, flat: bool) -> None:
    array = _sample(datatype)
    data = array.reshape(-1).tolist() if flat else array.tolist()
    head = {"inputs": [_input("t", datatype, (2, 2), data=data)]}
    found = _decode(head, inputs=(TensorSpec("t", datatype, (-1, 2)),)).inputs["t"]
    assert (found.dtype, found.tolist()) == (array.dtype, array.tolist())


def test_bf16_is_answered_in_json_as_numbers() -> None:
    _, body = _encode(oip.Request("", {}, {"t": False}), {"t": _sample("BF16")}, (tensor("t", "BF16"),), "m", "1")
    assert json.loads(body)["outputs"][0]["data"] == [1.0, -2.0, 0.0, "Infinity"]


def test_binary_tensors_are_views_of_the_body() -> None:
    first, second = rows(1, 2), rows(3)
    head = {
        "id": "abc",
        "inputs": [
            _input("x", shape=(2, 2), parameters={"binary_data_size": 16}),
            _input("z", "INT64", (1,), data=[7]),
            _input("y", shape=(1, 2), parameters={"binary_data_size": 8}),
        ],
    }
    kind, body = _body(head, first.tobytes(), second.tobytes())
    held = memoryview(body)
    request = oip.decode(kind, held, (tensor("x"), tensor("y"), tensor("z", "INT64", -1)), Y)
    assert request.id == "abc"
    assert np.array_equal(request.inputs["x"], first)
    assert np.array_equal(request.inputs["y"], second)
    assert request.inputs["z"].tolist() == [7]
    assert np.shares_memory(request.inputs["x"], np.frombuffer(held, np.uint8))


@pytest.mark.parametrize(
    ("head", "wanted"),
    [
        ({}, {"y": False, "z": False}),
        ({"parameters": {"binary_data_output": True}}, {"y": True, "z": True}),
        ({"outputs": [{"name": "z"}]}, {"z": False}),
        ({"outputs": [{"name": "z", "parameters": {"binary_data": True}}, {"name": "y"}]}, {"z": True, "y": False}),
        (
            {
                "outputs": [{"name": "y", "parameters": {"binary_data": False}}],
                "parameters": {"binary_data_output": True},
            },
            {"y": False},
        ),
    ],
)
def test_outputs_are_the_requested_ones_in_the_requested_form(head: dict[str, Any], wanted: dict[str, bool]) -> None:
    request = _decode({"inputs": [], **head}, outputs=(tensor("y"), tensor("z")))
    assert list(request.outputs.items()) == list(wanted.items())


def test_optional_fields_may_be_null() -> None:
    """Like clients that are based on data classes, which write unset fields."""
    head = {
        "id": None,
        "parameters": None,
        "inputs": [_input(data=[1, 2], parameters=None)],
        "outputs": [{"name": "y", "parameters": None}],
    }
    request = _decode(head)
    assert (request.id, request.inputs["x"].tolist(), request.outputs) == ("", [[1, 2]], {"y": False})
    assert _decode(head | {"outputs": None}).outputs == {"y": False}


def test_the_answer_names_model_version_and_id() -> None:
    kind, body = _encode(oip.Request("7", {}, {"y": False}), {"y": rows(1)}, Y, "resnet", "3")
    assert kind == TENSORS
    assert json.loads(body) == {
        "model_name": "resnet", "model_version": "3", "id": "7",
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [1, 2], "data": [1.0, 1.0]}],
    }  # fmt: skip


def test_an_output_without_elements_has_empty_data() -> None:
    empty = np.empty((0, 2), np.float32)
    assert b'"data":[]' in _encode(oip.Request("", {}, {"y": False}), {"y": empty}, Y, "m", "1")[1]
    assert b'"binary_data_size":0' in _encode(oip.Request("", {}, {"y": True}), {"y": empty}, Y, "m", "1")[1]
    head = {"inputs": [_input(shape=(0, 2), parameters={"binary_data_size": 0})]}
    assert _decode(head, b"").inputs["x"].shape == (0, 2)


_BINARY: dict[str, Any] = {"parameters": {"binary_data_size": 8}}


@pytest.mark.parametrize(
    ("head", "blob", "message"),
    [
        ({"inputs": [_input("a", data=[1, 2])]}, b"", "a: the model has no such input; it takes x"),
        ({"inputs": [_input(data=[1, 2]), _input(data=[1, 2])]}, b"", "x: given twice"),
        ({"inputs": [_input(datatype="FP64", data=[1, 2])]}, b"", "x: the model takes FP32, not FP64"),
        ({"inputs": [_input(data=[1, 2, 3])]}, b"", r"x: 3 elements do not make FP32\[1, 2\], which has 2 elements"),
        ({"inputs": [_input(data=["a", "b"])]}, b"", "x: cannot be converted to FP32"),
        ({"inputs": [_input(data=[[1], [2, 3]])]}, b"", "x: cannot be converted to FP32"),
        ({"inputs": [_input()]}, b"", "x: has neither data nor binary_data_size"),
        ({"inputs": [_input(data=[1, 2], **_BINARY)]}, b"12345678", "x: has both data and binary_data_size"),
        ({"inputs": [_input(shape=(-1, 2), data=[1, 2])]}, b"", r"x: \[-1, 2\] is not a valid shape"),
        ({"inputs": [_input(shape=(0, 1 << 40), data=[])]}, b"", r"x: \[0, 1099511627776\] is not a valid shape"),
        ({"inputs": [_input(**_BINARY)]}, b"1234", "x: binary_data_size 8, but 4 bytes remain"),
        ({"inputs": [_input(shape=(2, 2), **_BINARY)]}, b"12345678", r"x: 8 bytes do not make FP32\[2, 2\]"),
        ({"inputs": [_input(**_BINARY)]}, b"123456789", "1 bytes after the head belong to no input"),
        ({"inputs": [_input(parameters={"binary_data_size": -8})]}, b"12345678", "x: binary_data_size -8"),
        ({"inputs": [_input(parameters={"binary_data_size": True})]}, b"1", "x: binary_data_size True"),
        ({"inputs": [_input(parameters={"shared_memory_region": "r"})]}, b"", "x: its shared memory region"),
        ({"inputs": [], "outputs": [{"name": "z"}]}, b"", "z: the model has no such output; it has y"),
        (
            {"inputs": [], "outputs": [{"name": "y", "parameters": {"classification": 3}}]},
            b"",
            "y: classification is not",
        ),
        ({"inputs": [_input(shape=[1] * 64 + [2], data=[1, 2])]}, b"", r"inference request: .*length <= 64 .*shape"),
        (
            {"inputs": [_input(shape=[0] + [1 << 30] * 3, data=[])]},
            b"",
            r"x: \[0, 1073741824, .*\] is not a valid shape",
        ),
        ({"inputs": [_input("x" * 5000, data=[1, 2])]}, b"", "inference request: .*length <= 1000 .*name"),
        ({"inputs": [_input(parameters={"binary_data_size": "8" * 5000})]}, b"", "x: binary_data_size '8{39}, but 0"),
        ({"inputs": [_input(data=None)]}, b"", "x: has neither data nor binary_data_size"),
        ({"inputs": [_input(data=[1, None])]}, b"", "x: cannot be converted to FP32"),
        ({"inputs": [_input(data={"1": 2})]}, b"", "x: "),
        ({"inputs": [{"name": "x", "datatype": "FP32", "shape": None, "data": [1, 2]}]}, b"", "got `null` .*shape"),
        ({"inputs": None}, b"", "got `null` .*inputs"),
        ({"inputs": [None]}, b"", "got `null`"),
        ({"inputs": [], "outputs": [None]}, b"", "got `null`"),
        ({}, b"", "this is not an inference request: Object missing required field `inputs`"),
        ({"inputs": [{"name": "x"}]}, b"", "this is not an inference request: .*datatype"),
    ],
)
def test_a_mismatch_is_named(head: dict[str, Any], blob: bytes, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        _decode(head, *([blob] if blob else []))


_TENSOR = '{"inputs":[{"name":"x","datatype":"FP32","shape":[1,2],"data":%s}]}'


@pytest.mark.parametrize(
    ("request_", "depth"),
    [
        (_TENSOR, 65),
        (_TENSOR, 1_000_000),
        ('{"inputs":%s}', 1_000_000),
        ('{"inputs":[],"parameters":{"a":%s}}', 1_000_000),
        ('{"inputs":[],"more":%s}', 1_000_000),
        ("%s", 1_000_000),
    ],
)
def test_too_deep_nesting_is_refused(request_: str, depth: int) -> None:
    text = request_ % ("[" * depth + "1" + "]" * depth)
    with pytest.raises(InvalidInput) as refused:
        oip.decode(TENSORS, text.encode(), X, Y)
    assert len(refused.value.message) < 500


@pytest.mark.parametrize("length", ["99999", "-1", "x", ""])
def test_a_head_longer_than_the_body_is_refused(length: str) -> None:
    with pytest.raises(InvalidInput, match="a head of"):
        oip.decode(f"{TENSORS};header-bytes={length}", b"{}", X, Y)


def _texts(*elements: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(element)) + element for element in elements)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (_texts(b"a", b"b", b"c"), "3 elements do not make"),
        (_texts(b"a") + b"\x01", "a truncated element"),
        (_texts(b"a") + struct.pack("<I", 9) + b"b", "a truncated element"),
        (_texts(b"a", b"\xff"), "element 1 is not UTF-8"),
    ],
)
def test_texts_that_are_cut_off_or_no_text_are_refused(data: bytes, message: str) -> None:
    head = {"inputs": [_input("t", "BYTES", (2,), parameters={"binary_data_size": len(data)})]}
    with pytest.raises(InvalidInput, match=f"t: .*{message}"):
        _decode(head, data, inputs=(tensor("t", "BYTES", -1),))


@pytest.mark.parametrize(
    ("datatype", "data", "message"),
    [
        ("UINT8", [300], "t: cannot be converted to UINT8"),
        ("UINT8", [-1], "t: cannot be converted to UINT8"),
        ("INT64", [1.5], "t: cannot be converted to INT64: float64 values"),
        ("UINT64", [1.5], "t: cannot be converted to UINT64: float64 values"),
        ("UINT64", [2**64], "t: cannot be converted to UINT64: object values"),
        ("BOOL", [2.0], "t: cannot be converted to BOOL"),
        ("FP32", [None], "t: cannot be converted to FP32"),
        ("BYTES", [1], "t: element 0 of a BYTES tensor must be text, not int"),
    ],
)
def test_numbers_that_would_change_are_refused(datatype: str, data: list[Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        _decode({"inputs": [_input("t", datatype, (1,), data=data)]}, inputs=(tensor("t", datatype, -1),))


def test_a_binary_tensor_is_answered_with_its_own_memory() -> None:
    array = rows(1, 2)
    _, (_, blob) = oip.encode(oip.Request("", {}, {"y": True}), {"y": array}, Y, "m", "1")
    assert np.shares_memory(np.frombuffer(blob, np.uint8), array)


_WORDS = st.sampled_from(["x", "y", "FP32", "BYTES", "BF16", "data", ""])
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 5) | st.integers() | st.floats() | _WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_WORDS, inner, max_size=2),
    max_leaves=5,
)
_PARAMETERS = st.fixed_dictionaries(
    {}, optional={"binary_data_size": _VALUES, "binary_data": _VALUES, "shared_memory_region": _VALUES}
)
_INPUT = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["x", "text"]) | _VALUES,
        "datatype": st.sampled_from(["FP32", "BYTES"]) | _VALUES,
        "shape": st.lists(st.integers(0, 2), min_size=1, max_size=3) | _VALUES,
    },
    optional={"parameters": _PARAMETERS | _VALUES, "data": _VALUES},
)
_HEAD = st.fixed_dictionaries(
    {"inputs": st.lists(_INPUT, max_size=3) | _VALUES},
    optional={"outputs": st.lists(_INPUT, max_size=2) | _VALUES, "id": _VALUES, "parameters": _PARAMETERS | _VALUES},
)


@given(
    st.one_of(_HEAD.map(lambda head: json.dumps(head).encode()), st.binary(max_size=40)),
    st.binary(max_size=24),
    st.one_of(st.none(), st.integers(-3, 3), st.text(max_size=4)),
)
def test_any_request_is_decoded_or_is_invalid_input(head: bytes, blob: bytes, length: int | str | None) -> None:
    """`length` in the header is off by this, or some text; None means that the request has none."""
    told = f";header-bytes={len(head) + length if isinstance(length, int) else length}"
    specs = (tensor("x"), TensorSpec("text", "BYTES", (-1,)))
    try:
        request = oip.decode(TENSORS + ("" if length is None else told), head + blob, specs, Y)
    except InvalidInput:
        return
    assert set(request.inputs) <= {"x", "text"}
    assert set(request.outputs) <= {"y"}
