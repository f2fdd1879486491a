"""Parts of GPUs on the whole platform, on a machine with two simulated GPUs.

Stand-ins of NVIDIA's programs on the agent's PATH, and of libcuda in the workers, follow the rules of MPS and keep its
state. Everything else is real.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from gpufn_core.home import Home
from tests.conftest import ROOT, Platform, running_platform
from tests.runtime.agent.mps.machine import Machine
from tests.waiting import until

pytestmark = pytest.mark.e2e

GPUS = [
    {"uuid": f"GPU-{n}", "type": "gpu", "kind": "NVIDIA L4", "memory_bytes": 24 << 30, "multiprocessors": 58}
    for n in range(2)
]
APP = """
import os, time
from gpufn import gpu_function

ENV = {env!r}
PART = {{"gpu": "any", "share": "mps", "vram": "10Gi", "sm": 25, "env": ENV, "max_workers": 1}}

def environment() -> dict[str, str]:
    found = {{name: value for name, value in os.environ.items() if name.startswith("CUDA")}}
    return found | {{"pid": str(os.getpid())}}

@gpu_function(**PART)
def part() -> dict[str, str]:
    return environment()

@gpu_function(**PART)
def neighbour() -> dict[str, str]:
    return environment()

@gpu_function(**PART, trust_domain="others")
def stranger() -> dict[str, str]:
    return environment()

@gpu_function(gpu="any", share="mps", vram="20Gi", env=ENV)
def large() -> dict[str, str]:
    return environment()

@gpu_function(**PART)
def interrupted(mark: str) -> str:
    if not os.path.exists(mark):
        with open(mark, "w") as file:
            file.write(str(os.getpid()))
        time.sleep(60)
    return "done"
"""


class Node(NamedTuple):
    platform: Platform
    machine: Machine
    env: dict[str, str]  # of the functions

    def pipes(self) -> list[Path]:
        """Return the pipe folders of the running daemons."""
        return [folder / "pipe" for folder in Home(self.platform.home).mps.iterdir()]

    def clients(self) -> list[tuple[Path, int]]:
        """Return the pipe folder and the pid of each worker that uses a daemon."""
        return [(pipe, pid) for pipe in self.pipes() for pid in self.machine.clients(pipe) if alive(pid)]


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("shares")
    machine = Machine(folder / "bin")
    environ = {
        "PATH": f"{machine.folder}:{os.environ['PATH']}",
        "GPUFN_DEVICES": json.dumps(GPUS),
        "GPUFN_TEMPLATES": "0",  # the stand-in reads the function's variables when the interpreter starts
        "GPUFN_ISOLATION": "off",  # a sandboxed worker gets the PYTHONPATH of the stand-in too late
        "GPUFN_SANDBOX_FOLDERS": f"{os.environ['GPUFN_SANDBOX_FOLDERS']},{ROOT}",  # modules of the stand-in
    }
    search = [ROOT / "tests/e2e/gpu_stand_in", ROOT, ROOT / "sdk", ROOT / "runtime"]
    env = {"PYTHONPATH": ":".join(map(str, search)), "PLAYED_MPS_CONTROL": f"{machine.folder}/nvidia-cuda-mps-control"}
    try:
        with running_platform(folder / "home", environ=environ) as platform:
            yield Node(platform, machine, env)
        assert machine.rests()  # the platform ends its daemons
    finally:
        machine.end()


@pytest.fixture
def node(own: Node, tmp_path: Path) -> Iterator[Node]:
    """The node with functions whose workers end before the next test. Their daemons go on for half a minute."""
    app = tmp_path / "app.py"
    app.write_text(APP.format(env=own.env))
    names = [view["name"] for view in json.loads(own.platform.gpufn("deploy", app, "--no-check", "--json"))]
    yield own
    for name in names:
        own.platform.client.delete(f"/v1/functions/{name}").raise_for_status()
    until(lambda: not own.clients(), own.clients)


def test_functions_share_a_gpu_within_their_limits_and_their_trust_domain(node: Node) -> None:
    first, second, third = (node.platform.invoke(name) for name in ("part", "neighbour", "stranger"))
    assert first["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=10240M"
    assert first["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"
    assert second["CUDA_VISIBLE_DEVICES"] == first["CUDA_VISIBLE_DEVICES"] != third["CUDA_VISIBLE_DEVICES"]
    assert second["CUDA_MPS_PIPE_DIRECTORY"] == first["CUDA_MPS_PIPE_DIRECTORY"]
    clients = node.machine.server(Path(first["CUDA_MPS_PIPE_DIRECTORY"]))["clients"]
    assert sorted(clients) == sorted([int(first["pid"]), int(second["pid"])])
    assert len(node.machine.running()) == 4
    shown = node.platform.gpufn("top")
    assert "MPS v2" in shown
    assert "mps, 25 %" in shown


def test_a_share_that_no_gpu_has_left_waits_with_the_reason(node: Node) -> None:
    for name in ("part", "stranger"):
        node.platform.invoke(name)
    waiting = threading.Thread(target=node.platform.post, args=("large",), daemon=True)
    waiting.start()
    found = until(lambda: node.platform.client.get("/v1/functions/large/why").json().get("waiting"))
    # Idle workers of other functions make room. Until then, the reason is no_capacity.
    assert found["reason"] in ("no_capacity", "starting")
    waiting.join(30)
    assert not waiting.is_alive()


def test_a_call_on_a_gpu_that_fails_runs_again_on_the_other(node: Node, tmp_path: Path) -> None:
    mark = tmp_path / "begun"
    answers: list[str] = []
    caller = threading.Thread(
        target=lambda: answers.append(node.platform.invoke("interrupted", {"mark": str(mark)})), daemon=True
    )
    caller.start()
    until(lambda: mark.exists() and mark.read_text())
    client = int(mark.read_text())
    [pipe] = [pipe for pipe, pid in node.clients() if pid == client]
    node.machine.fault(pipe)
    caller.join(60)
    assert answers == ["done"]
    assert not alive(client)
