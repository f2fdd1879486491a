"""Declarations of weights."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from gpufn import Weights, gpu_function
from gpufn.declare import weights as module
from gpufn_core.errors import ArtifactUnavailable, InvalidSpec

LLAMA = Weights("hf://org/llama@v1", include=["*.safetensors"])


@pytest.fixture
def in_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_installed", None)
    module.install({LLAMA.declaration: "/cache/llama"})


def test_a_function_declares_one_or_several() -> None:
    other = Weights("s3://bucket/other")

    @gpu_function(weights=LLAMA)
    def one() -> None: ...

    @gpu_function(weights=[LLAMA, other])
    def two() -> None: ...

    assert one.settings.declared_weights == (LLAMA,)
    assert two.settings.declared_weights == (LLAMA, other)


@pytest.mark.parametrize("value", ["hf://org/llama", [LLAMA, LLAMA], [LLAMA, "x"], {"w": LLAMA}, 3])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(InvalidSpec):
        gpu_function(weights=value)


@pytest.mark.parametrize("options", [{"include": "*.bin"}, {"exclude": [""]}, {"include": [3]}])
def test_patterns_are_a_list_of_texts(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidSpec):
        Weights("hf://org/llama", **options)


def test_a_path_object_is_a_source() -> None:
    weights: Any = Weights(Path("weights"))  # type: ignore[arg-type]
    assert weights.source == "weights"


def test_a_local_path_starts_at_the_file_of_the_declaration() -> None:
    assert Weights("./weights").path == Path(__file__).parent / "weights"


def test_weights_of_a_hub_have_no_path_outside_of_a_worker() -> None:
    with pytest.raises(ArtifactUnavailable):
        _ = LLAMA.path


@pytest.mark.usefixtures("in_worker")
def test_in_a_worker_the_path_is_that_of_the_node() -> None:
    assert Weights("hf://org/llama@v1", include=["*.safetensors"]).path == Path("/cache/llama")
    assert pickle.loads(pickle.dumps(LLAMA)).path == Path("/cache/llama")
    with pytest.raises(ArtifactUnavailable, match="weights="):
        _ = Weights("hf://org/llama@v1").path
