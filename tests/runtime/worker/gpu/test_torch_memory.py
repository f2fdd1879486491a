"""Torch's GPU memory, moved to the host and back, with a fake torch."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from gpufn_runtime.worker.gpu import torch_memory as torch_memory_module
from gpufn_runtime.worker.gpu.torch_memory import NotMovable, TorchMemory, torch_memory
from tests.runtime.worker.fake_torch import FakeTorch, Storage


def test_tensors_in_any_container_move_to_pinned_memory_and_return_unchanged() -> None:
    torch = FakeTorch()
    weights = torch.Tensor(b"weights")
    kept: dict[str, Any] = {"model": [weights], "tied": weights, "view": weights[2:5], "other": torch.Tensor(b"bias")}
    memory = TorchMemory(torch)
    assert memory.find() == 2 * 512
    memory.park()
    assert (torch.allocated(), torch.cached, memory.remaining_bytes(), len(torch.pinned)) == (0, 0, 0, 1)
    memory.resume()
    assert memory.release is not None
    memory.release.join()
    assert [kept["model"][0].content, kept["view"].content, kept["other"].content] == [b"weights", b"igh", b"bias"]
    assert (torch.allocated(), torch.pinned) == (11, set())


def test_large_tensors_are_copied_in_the_pieces_that_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_memory_module, "_PIECE_BYTES", 1024)
    torch = FakeTorch()
    contents = [bytes(range(256)) * 3, bytes(reversed(range(256))) * 9, b"small"]
    tensors = [torch.Tensor(content) for content in contents]
    memory = TorchMemory(torch)
    assert memory.find() == 1024 + 2560 + 512
    memory.park()
    assert len(torch.pinned) == 4
    memory.resume()
    assert [tensor.content for tensor in tensors] == contents
    assert memory.release is not None
    memory.release.join()
    assert torch.pinned == set()


def test_memory_that_cannot_be_pinned_is_moved_nevertheless() -> None:
    torch = FakeTorch()
    torch.can_pin = False
    weights = torch.Tensor(b"weights")
    memory = TorchMemory(torch)
    memory.find()
    memory.park()
    assert not torch.is_spoilt
    memory.resume()
    assert weights.content == b"weights"


def test_it_is_parked_as_often_as_wanted() -> None:
    torch = FakeTorch()
    weights = torch.Tensor(b"weights")
    for _ in range(2):
        memory = TorchMemory(torch)
        memory.find()
        memory.park()
        memory.resume()
    assert weights.content == b"weights"


def test_memory_that_python_does_not_see_is_not_left_behind_in_silence() -> None:
    torch = FakeTorch()
    torch.stray = 300 << 20
    with pytest.raises(NotMovable, match="300 MiB"):
        TorchMemory(torch).find()


def test_a_cuda_graph_is_tied_to_its_addresses() -> None:
    torch = FakeTorch()
    graph = torch.cuda.CUDAGraph()
    graph.self = graph  # empty objects are not searched
    with pytest.raises(NotMovable, match="a CUDA graph"):
        TorchMemory(torch).find()


def test_memory_of_another_library_stays_where_it_is() -> None:
    torch = FakeTorch()
    borrowed = torch.Tensor(Storage(torch, bytearray(b"borrowed"), "cuda:0", is_own=False))
    with pytest.raises(NotMovable, match="another library"):
        TorchMemory(torch).find()
    assert borrowed.content == b"borrowed"


def test_without_torch_or_its_gpu_there_is_nothing_to_look_at(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = FakeTorch()
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert isinstance(torch_memory(), TorchMemory)
    torch.cuda.is_initialized = lambda: False
    assert torch_memory() is None
    monkeypatch.delitem(sys.modules, "torch")
    assert torch_memory() is None
