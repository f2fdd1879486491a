"""Torch in a worker that is parked and resumed on a real GPU."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import Platform
from tests.gpu.conftest import APPS
from tests.waiting import until

pytestmark = [pytest.mark.gpu, pytest.mark.e2e]


def _until_parked(platform: Platform, function: str) -> dict[str, Any]:
    """Wait until the worker is parked. Return the process as the agent reports it."""

    def parked() -> dict[str, Any] | None:
        nodes = platform.client.get("/v1/nodes").json()["nodes"]
        processes = [each for node in nodes for each in node["processes"] if each["function"] == function]
        return processes[0]["parked"] if processes else None

    found: dict[str, Any] = until(parked)
    return found


@pytest.fixture(scope="module")
def parked_app(torch_app: Platform) -> Platform:
    torch_app.gpufn("deploy", APPS / "parked.py")
    return torch_app


def test_a_module_releases_its_gpu_memory_and_computes_the_same_afterwards(parked_app: Platform) -> None:
    before = parked_app.invoke("net.run")
    held = _until_parked(parked_app, "net")
    assert held["host_bytes"] >= 4 * 4096 * 4096
    assert held["device_bytes"] < 1 << 30
    answer = parked_app.post("net.run")
    assert answer.json() == before
    assert "resume;dur=" in answer.headers["server-timing"]


def test_a_plain_functions_global_is_moved_as_well(parked_app: Platform) -> None:
    before = parked_app.invoke("looked_up", {"index": 21})
    assert before[1] == 42
    _until_parked(parked_app, "looked-up")
    assert parked_app.invoke("looked_up", {"index": 21}) == before
