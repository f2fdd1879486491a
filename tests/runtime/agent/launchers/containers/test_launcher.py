"""Container launcher with a fake daemon: which standbys it keeps. For tests with a real daemon, see docker/."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import select
import subprocess
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpufn_core.errors import PlatformError
from gpufn_core.home import Home
from gpufn_core.protocol.launch import CONTROL_NAME, ForkRequest, TemplateReady, WorkerConfig
from gpufn_core.spec.function_spec import EntryPoint, FunctionSpec, MethodSpec
from gpufn_core.spec.image_spec import ImageSpec
from gpufn_runtime.agent.cache.images import Images
from gpufn_runtime.agent.decide.template_choice import ContainerUse
from gpufn_runtime.agent.launchers.base import ContainerEnd, DaemonUnavailable, LaunchOrder
from gpufn_runtime.agent.launchers.containers import launcher as containers_launcher
from gpufn_runtime.agent.launchers.containers.gpu_access import NO_GPU_ACCESS
from gpufn_runtime.agent.launchers.containers.launcher import ContainerLauncher
from gpufn_runtime.agent.launchers.containers.sandbox import Limits, Sandbox
from gpufn_runtime.agent.launchers.fork_channel import Control
from gpufn_runtime.agent.workers import processes
from gpufn_runtime.agent.workers.environment import import_environment
from tests.waiting import until_async

MIB = 1 << 20


class Egress:
    """Fake network of containers with `egress`."""

    has_child_processes = False

    async def ready(self) -> str:
        return "own-network"

    def forget(self) -> None: ...

    async def remove(self) -> None: ...


class Daemon:
    """Fake daemon. Its containers' processes report ready and sleep. Their size depends on the function's module."""

    def __init__(self) -> None:
        self.folders: dict[str, tuple[Path, int]] = {}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.made = 0
        self.there: set[str] = set()
        self.asked_for_one = asyncio.Event()
        self.is_slow = False
        self.is_away = False
        self.goes_away = False  # on the next removal
        self.left: set[str] = set()  # orphaned containers
        self.stuck: set[str] = set()  # orphans that cannot be removed
        self.cannot_pause = False
        self.cdi_devices: list[str] = []
        self.device_requests: list[Any] = []
        self.networks: list[str] = []
        self.runtimes: dict[str, Any] = {}
        self.egress = Egress()
        self.killed: set[str] = set()  # killed while paused: they end when they continue
        self._open: dict[str, asyncio.StreamWriter] = {}

    async def create(self, name: str, image: str, sandbox: Sandbox, labels: Mapping[str, str]) -> str:
        self.made += 1
        self.device_requests.append(sandbox.host_config["device_requests"])
        self.networks.append(sandbox.host_config["network_mode"])
        folder = Path(sandbox.host_config["mounts"][0]["Source"])
        (module,) = sandbox.container_config["entrypoint"][5:]
        self.folders[name] = folder, int(module.removeprefix("mib"))
        self.asked_for_one.set()
        await asyncio.shield(self._make(name))  # even if the caller was cancelled
        return name

    def _make(self, name: str) -> asyncio.Task[None]:
        async def make() -> None:
            try:
                for _ in range(9 if self.is_slow else 0):
                    await asyncio.sleep(0)
            finally:
                self.there.add(name)

        return asyncio.create_task(make())

    async def start(self, container: str) -> int:
        folder, _ = self.folders[container]
        _, writer = await asyncio.open_unix_connection(folder / CONTROL_NAME)
        writer.write(msgspec.json.encode(TemplateReady()) + b"\n")
        self._open[container] = writer
        process = self.processes[container] = subprocess.Popen(["sleep", "60"])  # noqa: ASYNC220  it takes no time
        return process.pid

    async def pause(self, container: str) -> None:
        if self.cannot_pause:
            raise PlatformError(f"Docker cannot pause container {container}: not supported.")

    async def unpause(self, container: str) -> None:
        if container in self.killed:
            self._open[container].close()
            for _ in range(9):  # until its id is known
                await asyncio.sleep(0)

    async def end_of(self, container: str) -> ContainerEnd:
        return ContainerEnd(0)

    async def output_of(self, container: str) -> str:
        return ""

    async def remove(self, container: str) -> None:
        if self.goes_away:
            self.is_away = True
            raise DaemonUnavailable("Docker does not answer.")
        if container in self.stuck:
            raise PlatformError(f"Docker cannot remove container {container}: device or resource busy.")
        if container in self.left:
            self.left.remove(container)
            return
        self.there.remove(container)
        if container not in self.processes:
            return
        process = self.processes.pop(container)
        process.kill()
        process.wait()
        writer = self._open.pop(container)
        writer.close()
        await writer.wait_closed()

    async def containers(self, labels: Mapping[str, str]) -> set[str]:
        if self.is_away:
            raise DaemonUnavailable("Docker does not answer.")
        return self.processes.keys() | self.left

    async def info(self) -> dict[str, Any]:
        devices = [{"Source": "cdi", "ID": name} for name in self.cdi_devices]
        return {"DiscoveredDevices": devices, "Runtimes": self.runtimes}

    async def has_image(self, tag: str) -> bool:
        return True

    async def build(self, *_: Any) -> None: ...

    async def images(self, label: str) -> set[str]:
        return set()

    async def remove_image(self, tag: str) -> bool:
        return True

    def resident_bytes(self, pid: int) -> int:
        found = [name for name, process in self.processes.items() if process.pid == pid]
        return sum(self.folders[name][1] for name in found) * MIB


@pytest.fixture
def on_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def run(test: Callable[[Daemon, ContainerLauncher], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            daemon = Daemon()
            monkeypatch.setattr(processes, "resident_bytes", daemon.resident_bytes)
            launcher = ContainerLauncher(
                daemon,
                Images(daemon, name="test", bases="base", worker_needs=()),
                home=Home(tmp_path),
                owner={"owner": "test"},
                limit=9,
                packages=["/gpufn"],
                log_line=lambda *_: None,
                has_gpus=True,
                egress=daemon.egress,
            )
            running = asyncio.create_task(launcher.run())
            try:
                async with asyncio.timeout(20):
                    await test(daemon, launcher)
            finally:
                running.cancel()
                await asyncio.wait([running])
                Home(tmp_path).remove_runtime_folders()
                assert not daemon.processes

        (tmp_path / "run").mkdir()
        asyncio.run(main())

    return run


def _uses(*sizes: int) -> list[ContainerUse]:
    """Return uses; the first was used last."""
    image = ImageSpec(base="base")
    limits = Limits(999 * MIB, 0.1, env=frozenset(import_environment(0.1, {}).items()))
    return [
        ContainerUse(f"f{size}", 1, image, "", limits, frozenset({f"mib{size}"}), -float(place))
        for place, size in enumerate(sizes)
    ]


def _order(home: Path) -> LaunchOrder:
    """Return the order of a worker that matches the standby of `_uses(100)`."""
    folder, bundle = home / "run" / "w" / "w-1", home / "bundle"
    folder.mkdir(parents=True)
    bundle.mkdir()
    (bundle / "app.py").write_text("")
    told = WorkerConfig(
        worker="w-1",
        function="f100",
        revision=1,
        spec=FunctionSpec(name="f100", entry=EntryPoint("app", "f"), methods=(MethodSpec(),)),
        bundle_dir=os.fspath(bundle),
        socket="",
        shared_bodies=os.fspath(Home(home).shared_bodies / "w-1"),
        launched_at=1.0,
        memory_limit_bytes=999 * MIB,
    )
    config, output = folder / "config.json", folder / "output"
    return LaunchOrder("w-1", folder, config, output, {}, told, frozenset({"mib100"}), image=ImageSpec(base="base"))


def _standing(launcher: ContainerLauncher) -> list[str]:
    return [name.partition(" ")[2] for name in launcher.standbys]


def test_standbys_are_kept_within_unleased_memory(on_launcher: Any) -> None:
    async def test(daemon: Daemon, launcher: ContainerLauncher) -> None:
        launcher.set_standby_memory(1000 * MIB)
        launcher.set_uses(_uses(300, 200, 100))
        await launcher.settled()
        assert _standing(launcher) == ["mib300", "mib200", "mib100"]
        launcher.set_standby_memory(450 * MIB)
        await launcher.settled()
        assert _standing(launcher) == ["mib300", "mib100"]
        launcher.set_standby_memory(0)
        await launcher.settled()
        assert (_standing(launcher), len(daemon.processes)) == ([], 0)

    on_launcher(test)


def test_a_worker_that_ends_at_once_is_launched_nevertheless(
    on_launcher: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(daemon: Daemon, launcher: ContainerLauncher) -> None:
        ended: list[int] = []

        def send(control: Control, request: ForkRequest) -> None:
            (process,) = daemon.processes.values()
            process.kill()
            process.wait()
            ended.append(process.pid)

        monkeypatch.setattr(Control, "send", send)
        launched = await launcher.launch(_order(tmp_path))
        assert ended == [launched.pid]
        assert launched.handle is not None
        assert select.select([launched.handle.pidfd], [], [], 0)[0], "it belongs to the process that has ended"
        os.close(launched.handle.pidfd)
        await daemon.remove(launched.container)

    on_launcher(test)


def test_a_standby_that_is_too_large_is_made_once(on_launcher: Any) -> None:
    async def test(daemon: Daemon, launcher: ContainerLauncher) -> None:
        launcher.set_standby_memory(150 * MIB)
        launcher.set_uses(_uses(300, 100))
        await launcher.settled()
        assert (_standing(launcher), daemon.made) == (["mib100"], 2)
        launcher.set_uses(_uses(300, 100, 10))
        await launcher.settled()
        assert (sorted(_standing(launcher)), daemon.made) == (["mib10", "mib100"], 3)

    on_launcher(test)


def test_a_container_that_cannot_be_removed_holds_up_nothing_else(on_launcher: Any) -> None:
    async def test(daemon: Daemon, launcher: ContainerLauncher) -> None:
        daemon.left = {"old-1", "old-2", "old-3"}
        daemon.stuck = {"old-2"}
        launcher.take_over([])
        launcher.set_uses(_uses(100))
        await launcher.settled()
        assert (daemon.left, _standing(launcher)) == ({"old-2"}, ["mib100"])
        daemon.stuck = set()
        launcher.take_over([])
        await launcher.settled()
        assert daemon.left == set()

    on_launcher(test)


def test_a_container_that_is_being_made_when_the_agent_ends_is_removed(on_launcher: Any) -> None:
    daemons: list[Daemon] = []

    async def test(daemon: Daemon, launcher: ContainerLauncher) -> None:
        daemons.append(daemon)
        daemon.is_slow = True
        launcher.set_uses(_uses(100))
        await daemon.asked_for_one.wait()

    on_launcher(test)
    assert daemons[0].made == 1
    assert daemons[0].there == set()


def test_without_a_freezer_standbys_are_abandoned(on_launcher: Any) -> None:
    async def test(daemon: Daemon, launcher: ContainerLauncher) -> None:
        daemon.cannot_pause = True
        launcher.take_over([])
        launcher.set_uses(_uses(100))
        await launcher.settled()
        assert (_standing(launcher), daemon.made, len(daemon.processes)) == ([], 3, 0)

    on_launcher(test)


def test_a_worker_whose_standby_has_died_starts_from_nothing(on_launcher: Any, tmp_path: Path) -> None:
    async def test(daemon: Daemon, launcher: ContainerLauncher) -> None:
        launcher.set_uses(_uses(100))
        await launcher.settled()
        daemon.killed = set(daemon.processes)
        launched = await launcher.launch(_order(tmp_path))
        assert not launched.is_standby
        assert launched.container not in daemon.killed
        assert launched.handle is not None
        os.close(launched.handle.pidfd)
        left = set(os.listdir(tmp_path / "run" / "w" / "w-1")) - {CONTROL_NAME}  # newer Python versions remove it
        assert left == {"bundle", "config.json"}
        await daemon.remove(launched.container)

    on_launcher(test)


def test_a_daemon_that_disconnects_during_a_removal_is_reported_at_once(on_launcher: Any) -> None:
    async def test(daemon: Daemon, launcher: ContainerLauncher) -> None:
        daemon.left, daemon.goes_away = {"old"}, True
        launcher.take_over([])
        await until_async(lambda: launcher.trouble or launcher._settled.is_set())
        assert launcher.trouble == "Docker does not answer"

    on_launcher(test)


def test_a_daemon_that_does_not_answer_is_reported_until_it_does(on_launcher: Any) -> None:
    async def test(daemon: Daemon, launcher: ContainerLauncher) -> None:
        daemon.is_away = True
        launcher.take_over([])
        await until_async(lambda: launcher.trouble)
        assert launcher.trouble == "Docker does not answer"
        daemon.is_away = False
        launcher.take_over([])
        await launcher.settled()
        assert not launcher.trouble

    on_launcher(test)


def test_containers_have_gpus_as_soon_as_docker_reports_them(
    on_launcher: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(containers_launcher, "has_hook", lambda: False)

    async def test(daemon: Daemon, launcher: ContainerLauncher) -> None:
        launcher.take_over([])
        await launcher.settled()
        assert launcher.gpu_trouble == NO_GPU_ACCESS
        daemon.cdi_devices = ["nvidia.com/gpu=GPU-1"]
        launcher.take_over([])
        await launcher.settled()
        assert launcher.gpu_trouble == ""
        launched = await launcher.launch(dataclasses.replace(_order(tmp_path), gpus=("GPU-1",)))
        assert daemon.device_requests == [[{"Driver": "cdi", "DeviceIDs": ["nvidia.com/gpu=GPU-1"]}]]
        assert launched.handle is not None
        os.close(launched.handle.pidfd)
        await daemon.remove(launched.container)

    on_launcher(test)
