"""`load_safetensors` on the CPU; `scripts/gpu-check --steps loaders` runs it on a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpufn.weights import load_safetensors
from gpufn_core.errors import ArtifactUnavailable
from gpufn_core.weights.staging import Plan


def _write(path: Path, tensors: dict[str, tuple[str, list[int], bytes]], extra: str = "") -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    encoded = json.dumps(header).encode() + extra.encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)


def test_tensors_have_their_types_shapes_and_contents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(Plan, "default", lambda threads: Plan(threads, chunk_bytes=8))
    floats = torch.arange(12, dtype=torch.float32)
    _write(
        tmp_path / "a.safetensors",
        {
            "mask": ("BOOL", [3], bytes([1, 0, 1])),
            "unaligned": ("F32", [3, 4], floats.numpy().tobytes()),
            "empty": ("F16", [0, 2], b""),
        },
    )
    _write(tmp_path / "b.safetensors", {"scalar": ("I64", [], (7).to_bytes(8, "little"))})
    (tmp_path / "config.json").write_text("{}")
    loaded = load_safetensors(tmp_path, "cpu", threads=3)
    assert {name: (each.dtype, list(each.shape)) for name, each in loaded.items()} == {
        "mask": (torch.bool, [3]),
        "unaligned": (torch.float32, [3, 4]),
        "empty": (torch.float16, [0, 2]),
        "scalar": (torch.int64, []),
    }
    assert torch.equal(loaded["unaligned"], floats.view(3, 4))
    assert loaded["mask"].tolist() == [True, False, True]
    assert loaded["scalar"].item() == 7


def test_a_folder_without_safetensors_is_an_error(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    with pytest.raises(ArtifactUnavailable):
        load_safetensors(tmp_path)


@pytest.mark.parametrize("name", ["cut", "absent"])
def test_a_file_that_is_damaged_or_absent_is_an_error(tmp_path: Path, name: str) -> None:
    pytest.importorskip("torch")
    path = tmp_path / f"{name}.safetensors"
    if name == "cut":
        _write(path, {"w": ("F32", [2], bytes(8))})
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ArtifactUnavailable, match=name):
        load_safetensors(path, "cpu")
