"""Where the time of a container start goes: Docker, Python, and what a template container saves.

    GPUFN_BASE_IMAGE=... python benchmarks/container_start.py [--rounds 9]

The agent's Docker settings select the daemon and the base image. For comparison: the same imports in a process of this
machine, and a container that runs only `sleep`, which is Docker's minimum.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import measure
from gpufn_core.home import Home
from gpufn_core.spec.image_spec import ImageSpec
from gpufn_runtime.agent.cache.images import Images
from gpufn_runtime.agent.launchers.containers.container import Container, Kind
from gpufn_runtime.agent.launchers.containers.docker_client import DEFAULT_HOST, Docker
from gpufn_runtime.agent.launchers.containers.freezer import Freezer
from gpufn_runtime.agent.launchers.containers.gpu_access import GpuDriver
from gpufn_runtime.agent.launchers.containers.sandbox import Limits, Sandbox
from gpufn_runtime.agent.workers.environment import worker_packages

_OWNER = {"gpufn.owner": "benchmark"}
_IMPORTS = (
    "from gpufn_runtime.worker import lifecycle, template; from gpufn_runtime.worker.arguments import loader; "
    "template.prepare_decoders()"
)


class _Timed:
    """A Docker client that records how long each request took, in ms by its name."""

    def __init__(self, docker: Docker) -> None:
        self._docker = docker
        self.taken: dict[str, list[float]] = {}

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        async def request(*arguments: Any, **options: Any) -> Any:
            started = time.perf_counter()
            result = await getattr(self._docker, name)(*arguments, **options)
            self.note(name, started)
            return result

        return request

    def note(self, name: str, started: float) -> None:
        self.taken.setdefault(name, []).append((time.perf_counter() - started) * 1e3)


def main() -> None:
    options = measure.arguments("A container's start.", rounds=9)
    about = measure.machine()
    with tempfile.TemporaryDirectory(prefix="gpufn-") as folder:
        home = Home(Path(folder))
        try:
            taken = asyncio.run(_measured(home, options.rounds))
        finally:
            home.remove_runtime_folders()
    result = {phase: _summary(taken[phase]) for phase in _PHASES}
    rows = [
        [_PHASES[phase], each["median_ms"], f"{each['min_ms']} to {each['max_ms']}"] for phase, each in result.items()
    ]
    tables = f"{options.rounds} rounds in turns.\n\n" + measure.table(["phase", "ms, median", "least to most"], rows)
    measure.write("container-start", result, tables, about)


_PHASES = {
    "sleep": "a container of `sleep`: create and start",
    "create": "ours: create",
    "start": "start, until its process runs",
    "python": "Python and our imports, until it waits for its worker",
    "imports": "the same imports in a process of this machine",
    "pause": "pause by Docker",
    "unpause": "unpause by Docker",
    "freeze": "freeze by the kernel's cgroup freezer",
    "thaw": "thaw by the kernel's cgroup freezer",
    "remove": "remove",
}


async def _measured(home: Home, rounds: int) -> dict[str, list[float]]:
    home.ensure()
    home.claim_shared_bodies()
    environ = os.environ
    network = environ.get("GPUFN_BUILD_NETWORK", "")
    docker: Any = _Timed(Docker(environ.get("GPUFN_DOCKER_HOST", DEFAULT_HOST), build_network=network))
    bases = environ.get("GPUFN_BASE_IMAGE", "python:{python}-slim")
    images = Images(docker, name="gpufn-benchmark", bases=bases, worker_needs=["msgspec", "cloudpickle"])
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    image = await images.get(ImageSpec(python=python), "", lambda line: None)
    kind = Kind(image, Limits(256 << 20, 0.1))
    for _ in range(rounds):
        started = time.perf_counter()
        minimal = await docker._docker.create("gpufn-benchmark-sleep", image, _SLEEP, _OWNER)
        await docker._docker.start(minimal)
        docker.note("sleep", started)
        await docker._docker.remove(minimal)
        await _one(docker, home, kind)
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", _IMPORTS], check=True)  # noqa: ASYNC221
        docker.note("imports", started)
    images.keep([])
    await images.collect()
    taken: dict[str, list[float]] = docker.taken
    return taken


_SLEEP = Sandbox({"entrypoint": ["sleep", "60"]}, {"network_mode": "none"})


async def _one(docker: Any, home: Home, kind: Kind) -> None:
    container = Container(docker, home, kind, frozenset())
    try:
        started = time.perf_counter()
        await container.start(_OWNER, worker_packages(), GpuDriver.HOOK, "")
        docker.note("made", started)
        before = (docker.taken[phase][-1] for phase in ("create", "start"))
        docker.taken.setdefault("python", []).append(docker.taken["made"][-1] - sum(before))
        await docker.pause(container.id)
        await docker.unpause(container.id)
        freezer = Freezer.of(container.pid)
        for phase in ("freeze", "thaw"):
            started = time.perf_counter()
            if freezer is not None:
                getattr(freezer, phase)()
            docker.note(phase, started)
    finally:
        await container.remove()


def _summary(taken: list[float]) -> dict[str, Any]:
    in_ms = [round(each, 2) for each in taken]
    return {"median_ms": round(statistics.median(in_ms), 1), "min_ms": min(in_ms), "max_ms": max(in_ms)}


if __name__ == "__main__":
    main()
