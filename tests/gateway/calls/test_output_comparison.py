from __future__ import annotations

import json
import struct
from typing import Any

import msgspec
import pytest

from gpufn_core.encoding import media
from gpufn_gateway.calls.output_comparison import first_difference


def packed(dtype: str, shape: list[int], data: bytes) -> bytes:
    """An array in the SDK's encoding."""
    return msgspec.msgpack.encode(msgspec.msgpack.Ext(20, msgspec.msgpack.encode([dtype, shape, data])))


@pytest.mark.parametrize(
    ("left", "right", "path"),
    [
        ({"a": [1, 2.0]}, {"a": [1, 2.0000001]}, None),
        ([1.0, 2.0], [1.0, 2.1], "[1]"),
        ({"a": {"b": "x"}}, {"a": {"b": "y"}}, ".a.b"),
        ({"a": 1}, {"b": 1}, ""),
        ([1], [1, 2], ""),
        ([True], [1], "[0]"),
        ([None], [0], "[0]"),
        (0.0, 1e-13, None),
        (10**400, 10**400 + 1, ""),
    ],
)
def test_values_of_json_are_compared_with_a_tolerance(left: Any, right: Any, path: str | None) -> None:
    found = first_difference((media.JSON, json.dumps(left).encode()), (media.JSON, json.dumps(right).encode()), 1e-5)
    assert (None if found is None else found.path) == path


def test_arrays_of_the_sdk_are_compared_by_their_numbers() -> None:
    one, near, far = (struct.pack("<3f", 1.0, 2.0, last) for last in (3.0, 3.00001, 3.5))
    left = media.NATIVE, packed("<f4", [3], one)
    assert first_difference(left, (media.NATIVE, packed("<f4", [3], near)), 1e-5) is None
    found = first_difference(left, (media.NATIVE, packed("<f4", [3], far)), 1e-5)
    assert found is not None
    assert (found.path, found.left, found.right) == ("[1][2]", "3.0", "3.5")
    assert first_difference(left, (media.NATIVE, packed("<f4", [1, 3], one)), 1e-5) is not None
    two, three = ((media.NATIVE, packed("<i4", [2], struct.pack("<2i", 1, last))) for last in (2, 3))
    assert first_difference(two, three, 1e-5) is not None


@pytest.mark.parametrize("body", [b"\xff\xff", b"[[[[", b"{", b'{"a": NaN}'])
def test_a_result_that_cannot_be_read_is_compared_by_its_bytes(body: bytes) -> None:
    for kind in (media.JSON, media.MSGPACK, media.NATIVE, "image/png"):
        assert first_difference((kind, body), (kind, body), 0.0) is None
        assert first_difference((kind, body), (kind, b"1"), 0.0) is not None


def test_another_type_of_result_is_a_difference() -> None:
    found = first_difference((media.JSON, b"1"), (media.MSGPACK, b"1"), 0.0)
    assert found is not None
    assert (found.left, found.right) == (media.JSON, media.MSGPACK)
