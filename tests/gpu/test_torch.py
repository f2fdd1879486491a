from __future__ import annotations

import pytest

from tests.conftest import Platform
from tests.waiting import until

pytestmark = [pytest.mark.gpu, pytest.mark.e2e]


def test_a_torch_function_runs_on_the_gpu_that_it_was_granted(torch_app: Platform) -> None:
    assert torch_app.invoke("multiply", {"size": 256}) == {"device": "cuda:0", "mean": 256.0}


def test_a_spoilt_cuda_context_ends_with_its_worker(torch_app: Platform) -> None:
    assert torch_app.invoke("spoil", {"broken": False}) == 64.0
    assert torch_app.post("spoil", {"broken": True}).status_code >= 400
    answer = until(lambda: (found := torch_app.post("spoil", {"broken": False})).status_code == 200 and found)
    assert answer.json() == 64.0


def test_a_broken_cuda_context_does_not_affect_neighbours(torch_app: Platform) -> None:
    torch_app.invoke("multiply", {"size": 8})
    assert torch_app.post("spoil", {"broken": True}).status_code >= 400
    assert torch_app.invoke("multiply", {"size": 8})["mean"] == 8.0
