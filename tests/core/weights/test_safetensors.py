"""Layouts of safetensors files."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from gpufn_core.weights.safetensors import damage_of


def _file(tensors: dict[str, Any], data: int) -> bytes:
    header = json.dumps(tensors).encode()
    return len(header).to_bytes(8, "little") + header + bytes(data)


def _tensor(begin: int, end: int) -> dict[str, Any]:
    return {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}


_WHOLE = _file({"b": _tensor(4, 10), "a": _tensor(0, 4), "__metadata__": {"format": "pt"}}, 10)


@pytest.mark.parametrize("data", [_WHOLE, _file({}, 0), _file({"empty": _tensor(0, 0), "a": _tensor(0, 4)}, 4)])
def test_a_complete_file_has_no_damage(data: bytes) -> None:
    assert damage_of(io.BytesIO(data), len(data)) is None


@pytest.mark.parametrize(
    "data",
    [
        *(_WHOLE[:length] for length in range(len(_WHOLE))),
        _WHOLE + b"x",
        _file({"a": _tensor(0, 4), "b": _tensor(5, 10)}, 10),
        _file({"a": _tensor(0, 6), "b": _tensor(5, 10)}, 10),
        _file({"a": _tensor(4, 0)}, 0),
        _file({"a": [0, 4]}, 4),
        (3).to_bytes(8, "little") + b"[1]",
        (8).to_bytes(8, "little") + b'{"\xff": 1}',
        (100_000).to_bytes(8, "little") + b'{"a": ' + b"[" * (100_000 - 6),
        (1 << 60).to_bytes(8, "little") + bytes(100),
        (25_000_001).to_bytes(8, "little") + b"{}".ljust(25_000_001),
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
    ],
)
def test_any_other_file_is_damaged(data: bytes) -> None:
    assert damage_of(io.BytesIO(data), len(data))
