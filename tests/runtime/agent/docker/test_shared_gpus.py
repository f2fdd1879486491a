"""Workers that share a GPU by MPS, in containers of a real Docker daemon. NVIDIA's programs, hook and library are
fakes; the daemon's namespace, the mounts, the user and the check of the share are real."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpufn_core.errors import PlatformError
from gpufn_core.home import Home
from gpufn_runtime.agent.launchers.containers.docker_client import Docker
from gpufn_runtime.agent.launchers.containers.sandbox import Sandbox
from gpufn_runtime.agent.workers import processes
from tests.conftest import Platform
from tests.runtime.agent.docker.conftest import APPS, BASE, PROGRAMS, Daemon, platform_with
from tests.runtime.agent.mps.machine import Machine
from tests.waiting import until

pytestmark = pytest.mark.e2e

GPU = {"uuid": "GPU-0", "type": "gpu", "kind": "NVIDIA L4", "memory_bytes": 24 << 30, "multiprocessors": 58}


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path / "bin")
    yield made
    left = made.running()
    made.end()
    assert left == []


@pytest.fixture
def shared(daemon: Daemon, machine: Machine, tmp_path: Path) -> Iterator[Platform]:
    environ = {"PATH": f"{machine.folder}:{PROGRAMS}:{os.environ['PATH']}", "GPUFN_DEVICES": json.dumps([GPU])}
    with platform_with(daemon, tmp_path / "home", **environ) as platform:
        platform.gpufn("deploy", APPS / "shared.py", "--no-check")
        yield platform
    home = Home(platform.home)
    assert not [left for folder in (home.shared_mps, home.mps_memory) for left in folder.glob("*")]


def _workers(daemon: Daemon) -> list[int]:
    """Return the workers' pids on this host."""
    return [child for container in daemon.awake() for child in processes.children(daemon.pid(container))]


def test_containers_share_a_gpu_within_their_limits_and_end_together_at_a_fault(
    shared: Platform, daemon: Daemon, machine: Machine
) -> None:
    joined: list[int] = []

    def answer_of(function: str) -> dict[str, Any]:
        """Call the function, and register its worker as a client before the agent detects that it is none."""
        answer: dict[str, Any] = shared.invoke(function)
        new = [worker for worker in _workers(daemon) if worker not in joined]
        machine.connect(next(Home(shared.home).shared_mps.iterdir()) / "pipe", *new)
        joined.extend(new)
        return answer

    first, second = answer_of("part"), answer_of("neighbour")
    assert first["environ"] == {
        "CUDA_VISIBLE_DEVICES": "GPU-0",
        "CUDA_MPS_PIPE_DIRECTORY": "/gpufn/mps",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=10240M",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25",
        "NVIDIA_VISIBLE_DEVICES": "GPU-0",
        "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
    }
    assert first["uid"] == second["uid"] != 0
    assert (second["pipes"], second["pipes_are_ours"]) == (["control"], False)
    assert second["memory"] == ["of-neighbour", "of-part", "of-the-daemon"]
    assert len(joined) == 2
    pipe = next(Home(shared.home).shared_mps.iterdir()) / "pipe"
    machine.fault(pipe)
    until(lambda: not set(joined) & set(_workers(daemon)))
    assert sorted(machine.state(pipe)["terminated"]) == sorted(joined)
    assert until(lambda: shared.post("part").status_code == 200)


def test_a_runtime_for_gpus_that_docker_lacks_is_named(daemon: Daemon) -> None:
    gpus = [{"Driver": "another", "DeviceIDs": ["GPU-0"], "Capabilities": [["gpu"]]}]
    sandbox = Sandbox({"command": ["true"]}, {"device_requests": gpus})

    async def start() -> None:
        asks = Docker(daemon.host)
        container = await asks.create("gpufn-test-gpu", BASE, sandbox, {})
        try:
            await asks.start(container)
        finally:
            await asks.remove(container)

    with pytest.raises(PlatformError, match="no GPU runtime"):
        asyncio.run(start())


def test_a_node_whose_containers_cannot_have_gpus_gets_no_gpu_worker(daemon: Daemon, tmp_path: Path) -> None:
    environ = {"PATH": os.environ["PATH"], "GPUFN_DEVICES": json.dumps([GPU])}
    with platform_with(daemon, tmp_path / "home", **environ) as platform:
        platform.gpufn("deploy", APPS / "shared.py", "--no-check")
        until(lambda: platform.client.get("/v1/nodes").json()["nodes"][0]["gpu_container_trouble"])
        platform.gpufn("submit", "part")
        until(lambda: "its containers cannot have GPUs" in platform.gpufn("why", "part"))
