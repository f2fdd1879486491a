"""MPS daemons of a node: workers join and leave, and daemons fail."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from gpufn_core.domain.devices.device import DeviceShare, Health, Share
from gpufn_core.errors import DeviceFailed, FunctionStartFailed
from gpufn_core.spec.priority import Priority
from gpufn_platform.process.clock import SystemClock
from gpufn_runtime.agent.devices.base import HealthCondition
from gpufn_runtime.agent.mps.base import Joining
from gpufn_runtime.agent.mps.condition import Condition
from gpufn_runtime.agent.mps.daemon import ContainerFolders, Daemon
from gpufn_runtime.agent.mps.daemon_factory import DaemonFactory
from gpufn_runtime.agent.mps.daemons import MpsDaemons
from gpufn_runtime.agent.mps.logs import MAX_BYTES
from tests.runtime.agent.mps.machine import Machine

PART = DeviceShare("cpu", 0.1, 1, ("GPU-1",), Share.MPS, 6 << 30, 25)
WHOLE = DeviceShare("cpu", 0.1, 1, ("GPU-1",), Share.EXCLUSIVE)
F, G = ("f", 1), ("g", 1)


class Clock(SystemClock):
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Node:
    """`ended` are the workers that had to be ended; they leave at once, unless they are `stubborn`."""

    def __init__(self, root: Path, machine: Machine) -> None:
        self.machine = machine
        self.clock = Clock()
        self.ended: list[tuple[str, str]] = []
        self.stubborn: set[str] = set()
        self.told = asyncio.Event()
        self.root = root
        self.container_folders = ContainerFolders(root.with_name("elsewhere"), root.with_name("memory"))
        self.shares = self.agent()

    def agent(self, *, checks_clients: bool = True) -> MpsDaemons:
        daemon_factory = DaemonFactory(self.root, self.container_folders, self._make)
        return MpsDaemons(daemon_factory, self.clock, linger_s=30.0, leave_s=0.2, checks_clients=checks_clients)

    async def check(self) -> None:
        await self.shares.check("GPU-1", self._end)

    def _make(self, gpu: str, folder: Path, *, uid: int, container_folders: ContainerFolders | None) -> Daemon:
        daemon = Daemon(
            gpu, folder, uid=uid, container_folders=container_folders, start_timeout_s=30.0, stop_timeout_s=0.3
        )
        daemon.control = self.machine.control(daemon.pipe)
        return daemon

    def _end(self, worker: str, reason: str) -> None:
        self.ended.append((worker, reason))
        self.told.set()
        if worker not in self.stubborn:
            self.shares.worker_ended(worker)

    async def prepare(self, key: tuple[str, int], share: DeviceShare, *, contained: bool = False) -> Joining:
        async with self.shares.joining(key, share, priority=Priority.NORMAL, contained=contained) as joining:
            return joining

    async def start(self, worker: str, key: tuple[str, int] = F, pid: int = 101) -> Path:
        """Let a worker join and become READY. Return its pipe directory."""
        joining = await self.prepare(key, PART)
        pipe = Path(joining.environment["CUDA_MPS_PIPE_DIRECTORY"])
        self.shares.worker_joined(worker, key, PART, pid)
        self.machine.connect(pipe, pid)
        self.shares.worker_ready(worker)
        return pipe


@pytest.fixture
def on_node(machine: Machine, tmp_path: Path) -> Callable[[Callable[[Node], Coroutine[Any, Any, None]]], None]:
    def run(work: Callable[[Node], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            node = Node(tmp_path / "mps", machine)
            try:
                await work(node)
            finally:
                await node.shares.stop()

        asyncio.run(main())

    return run


def test_the_logs_of_a_daemon_that_is_in_use_are_kept_small(on_node: Any) -> None:
    async def work(node: Node) -> None:
        pipe = await node.start("w-1")
        log = pipe.with_name("log") / "control.log"
        log.write_bytes(os.urandom(MAX_BYTES + 1))
        await node.check()
        assert log.stat().st_size < MAX_BYTES

    on_node(work)


def test_workers_of_one_gpu_share_one_daemon_until_all_have_left(on_node: Any, machine: Machine) -> None:
    async def work(node: Node) -> None:
        pipes = [await node.start("w-1", pid=101), await node.start("w-2", G, 102)]
        assert pipes[0] == pipes[1]
        assert len(machine.running()) == 2  # a daemon and its server
        assert len(node.shares.pids) == 1
        node.shares.worker_ended("w-1")
        node.clock.now += 31
        await node.check()
        assert len(machine.running()) == 2
        node.shares.worker_ended("w-2")
        await node.check()
        assert len(machine.running()) == 2  # another worker may join soon
        node.clock.now += 31
        await node.check()
        assert machine.rests()

    on_node(work)


def test_a_daemon_waits_for_a_slow_launch(on_node: Any, machine: Machine) -> None:
    """Like a launch that waits for the build of an image."""

    async def work(node: Node) -> None:
        async with node.shares.joining(F, PART, priority=Priority.NORMAL, contained=False):
            node.clock.now += 600
            await node.check()
            assert len(machine.running()) == 2
            with pytest.raises(DeviceFailed, match="still share it"):
                await node.prepare(G, WHOLE)
            with pytest.raises(DeviceFailed, match="outside containers"):
                await node.prepare(G, PART, contained=True)
        node.clock.now += 31
        await node.check()
        assert machine.rests()

    on_node(work)


def test_the_gpu_is_released_when_a_worker_needs_it_alone(on_node: Any, machine: Machine) -> None:
    async def work(node: Node) -> None:
        await node.start("w-1")
        with pytest.raises(DeviceFailed, match=r"GPU-1: .*still share it"):
            await node.prepare(G, WHOLE)
        node.shares.worker_ended("w-1")
        assert await node.prepare(G, WHOLE) == Joining()
        assert machine.rests()

    on_node(work)


def test_after_a_fault_all_are_ended_and_the_server_is_active_again(on_node: Any, machine: Machine) -> None:
    async def work(node: Node) -> None:
        pipe = await node.start("w-1", pid=101)
        await node.start("w-2", G, 102)
        daemon = machine.state(pipe)["daemon"]
        machine.fault(pipe)
        await node.shares.evict("w-1", [101])
        await node.shares.evict("w-2", [102])
        machine.fault(pipe)
        machine.connect(pipe, 103)  # an unknown client keeps the server in FAULT
        await node.check()
        reason = "GPU-1: its MPS server is in FAULT"
        assert node.ended == [("w-1", reason), ("w-2", reason)]
        assert machine.state(pipe)["daemon"] != daemon  # so it was restarted
        assert node.shares.trouble("GPU-1") is None
        await node.start("w-3")

    on_node(work)


def test_a_server_that_recovers_by_itself_is_kept(on_node: Any, machine: Machine) -> None:
    async def work(node: Node) -> None:
        pipe = await node.start("w-1", pid=101)
        daemon = machine.state(pipe)["daemon"]
        machine.fault(pipe)
        node.stubborn.add("w-1")

        async def leave() -> None:
            await node.told.wait()
            assert node.shares.trouble("GPU-1") == HealthCondition(Health.DEGRADED, Condition.FAULT.value)
            await node.shares.evict("w-1", [101])
            node.shares.worker_ended("w-1")

        node.shares._leave_s = 30.0
        await asyncio.gather(node.check(), leave())
        assert machine.state(pipe)["daemon"] == daemon
        assert machine.state(pipe)["terminated"] == [101]
        assert machine.server(pipe)["status"] == "ACTIVE"
        assert node.shares.trouble("GPU-1") is None

    on_node(work)


@pytest.mark.parametrize("how", ["hang", "kill_daemon"])
def test_a_useless_daemon_is_restarted(how: str, on_node: Any, machine: Machine) -> None:
    async def work(node: Node) -> None:
        pipe = await node.start("w-1")
        before = machine.state(pipe)
        getattr(machine, how)(pipe)
        for _ in range(2 if how == "hang" else 1):
            assert node.ended == []
            await node.check()
        assert len(node.ended) == 1
        assert machine.state(pipe)["daemon"] != before["daemon"]
        assert machine.state(pipe)["servers"].keys() != before["servers"].keys()
        assert node.shares.suspects.quarantined == set()

    on_node(work)


def test_a_daemon_that_is_silent_once_loses_no_client(on_node: Any, machine: Machine) -> None:
    async def work(node: Node) -> None:
        pipe = await node.start("w-1")
        daemon = machine.state(pipe)["daemon"]
        for hangs in (True, False, True, False):
            machine.hang(pipe, hangs)
            await node.check()
        assert (node.ended, machine.state(pipe)["daemon"]) == ([], daemon)
        assert node.shares.trouble("GPU-1") is None

    on_node(work)


class SlowStop:
    """Replaces a daemon's `stop`: waits for a signal to continue."""

    def __init__(self, daemon: Daemon) -> None:
        self.begun, self.may_continue = asyncio.Event(), asyncio.Event()
        self._stop = daemon.stop
        daemon.stop = self  # type: ignore[method-assign]

    async def __call__(self) -> None:
        self.begun.set()
        await self.may_continue.wait()
        await self._stop()

    async def meanwhile(self, stopping: Coroutine[Any, Any, Any], other: Coroutine[Any, Any, Any]) -> None:
        """Run `other` while `stopping` is stopping the daemon."""
        tasks = [asyncio.create_task(stopping)]
        await self.begun.wait()
        tasks.append(asyncio.create_task(other))
        await asyncio.sleep(0)
        self.may_continue.set()
        await asyncio.gather(*tasks)


@pytest.mark.parametrize("why", ["somebody wants the GPU alone", "the agent stops"])
def test_a_look_starts_no_daemon_that_was_stopped_meanwhile(why: str, on_node: Any, machine: Machine) -> None:
    async def work(node: Node) -> None:
        await node.prepare(F, PART)
        daemon = node.shares._gpus["GPU-1"].daemon
        stopping = node.shares.stop() if why == "the agent stops" else node.prepare(G, WHOLE)
        await SlowStop(daemon).meanwhile(stopping, node.check())
        assert not daemon.is_running()
        assert machine.rests()

    on_node(work)


def test_a_worker_that_arrives_while_its_unused_daemon_stops_gets_another(on_node: Any, machine: Machine) -> None:
    async def work(node: Node) -> None:
        await node.prepare(F, PART)
        node.clock.now += 31
        slow = SlowStop(node.shares._gpus["GPU-1"].daemon)
        await slow.meanwhile(node.check(), node.start("w-1"))
        await node.check()
        assert node.ended == []
        assert len(machine.running()) == 2
        assert len(node.shares.pids) == 1

    on_node(work)


def test_a_revision_present_at_four_faults_in_a_row_starts_no_more(on_node: Any, machine: Machine) -> None:
    async def work(node: Node) -> None:
        for number in range(4):
            pipe = await node.start(f"w-{number}")
            if number == 1:
                await node.start("w-other", G, 102)
            machine.fault(pipe)
            await node.check()
        with pytest.raises(FunctionStartFailed, match=r"f@1 no longer starts"):
            await node.start("w-9")
        await node.start("w-9", ("f", 2))
        await node.start("w-g", G, 103)
        assert await node.prepare(F, DeviceShare("cpu", 0.1, 1, ("GPU-2",))) == Joining()

    on_node(work)


def test_a_worker_that_is_no_client_is_ended_at_the_second_look(on_node: Any, machine: Machine) -> None:
    async def work(node: Node) -> None:
        await node.start("w-1", pid=101)
        await node.prepare(G, PART)
        node.shares.worker_joined("w-2", G, PART, 102)
        await node.check()
        await node.check()
        assert node.ended == []  # it is still loading
        node.shares.worker_ready("w-2")
        await node.check()
        assert node.ended == []
        await node.check()
        reason = "GPU-1: it is not a client of the MPS daemon, so its share does not limit it"
        assert node.ended == [("w-2", reason)]

    on_node(work)


def test_an_agent_with_pids_of_its_own_ends_no_worker_for_its_pid(on_node: Any) -> None:
    """The daemon's list has the pids of the host, so no worker would be in it."""

    async def work(node: Node) -> None:
        node.shares = node.agent(checks_clients=False)
        await node.prepare(G, PART)
        node.shares.worker_joined("w-2", G, PART, 102)
        node.shares.worker_ready("w-2")
        for _ in range(3):
            await node.check()
        assert node.ended == []

    on_node(work)


@pytest.mark.skipif(os.getuid() != 0, reason="a mount namespace takes root")
def test_containers_share_a_daemon_of_their_own_user_and_its_memory(on_node: Any, machine: Machine) -> None:
    async def work(node: Node) -> None:
        joining = await node.prepare(F, PART, contained=True)
        mounts = joining.mounts
        assert mounts is not None
        assert joining.environment["CUDA_MPS_PIPE_DIRECTORY"] == "/gpufn/mps"
        assert os.listdir(mounts.memory) == ["of-the-daemon"]
        assert machine.server(Path(mounts.pipe))["uid"] == mounts.uid != os.getuid()
        owners = [(path.stat().st_uid, path.stat().st_mode & 0o777) for path in map(Path, (mounts.pipe, mounts.memory))]
        assert owners == [(0, 0o755), (mounts.uid, 0o700)]
        assert Path(mounts.pipe).parent.stat().st_mode & 0o077 == 0
        assert (await node.prepare(G, PART, contained=True)).mounts == mounts
        await node.shares.stop()
        assert not [left for path in node.container_folders for left in path.iterdir()]

    on_node(work)


@pytest.mark.skipif(os.getuid() != 0, reason="a mount namespace takes root")
def test_workers_in_and_out_of_containers_share_a_gpu_one_after_the_other(on_node: Any, machine: Machine) -> None:
    async def work(node: Node) -> None:
        await node.start("w-1")
        with pytest.raises(DeviceFailed, match=r"GPU-1: .*outside containers"):
            await node.prepare(G, PART, contained=True)
        node.shares.worker_ended("w-1")
        contained = await node.prepare(G, PART, contained=True)
        assert contained.mounts is not None
        node.shares.worker_joined("w-2", G, PART, 102)
        with pytest.raises(DeviceFailed, match=r"GPU-1: .* in containers"):
            await node.prepare(F, PART)
        assert len(machine.running()) == 2

    on_node(work)


@pytest.mark.skipif(os.getuid() != 0, reason="a mount namespace takes root")
def test_the_client_of_a_container_is_a_child_of_its_first_process(on_node: Any, machine: Machine) -> None:
    async def work(node: Node) -> None:
        joining = await node.prepare(F, PART, contained=True)
        assert joining.mounts is not None
        node.shares.worker_joined("w-1", F, PART, os.getpid())
        node.shares.worker_ready("w-1")
        (child, *_) = node.shares.pids  # the daemon is a child of ours
        machine.connect(Path(joining.mounts.pipe), child)
        for _ in range(3):
            await node.check()
        assert node.ended == []

    on_node(work)


@pytest.mark.skipif(os.getuid() != 0, reason="a mount namespace takes root")
def test_a_container_made_during_a_restart_of_its_daemon_finds_the_new_one(on_node: Any, machine: Machine) -> None:
    async def work(node: Node) -> None:
        async with node.shares.joining(F, PART, priority=Priority.LOW, contained=True) as joining:
            mounts = joining.mounts
            assert mounts is not None
            mounted = [os.open(path, os.O_RDONLY) for path in (mounts.pipe, mounts.memory)]
            machine.kill_daemon(Path(mounts.pipe))
            await node.check()
            found = [os.listdir(folder) for folder in mounted]
            for folder in mounted:
                os.close(folder)
        assert found == [["control"], ["of-the-daemon"]]

    on_node(work)


@pytest.mark.skipif(os.getuid() != 0, reason="a mount namespace takes root")
def test_a_daemon_for_containers_is_taken_over_with_its_user(on_node: Any, machine: Machine) -> None:
    async def work(node: Node) -> None:
        before = await node.prepare(F, PART, contained=True)
        node.shares = node.agent()
        await node.shares.take_over()
        assert (await node.prepare(F, PART, contained=True)).mounts == before.mounts
        assert len(machine.running()) == 2

    on_node(work)


def test_an_agent_that_is_not_root_shares_no_gpu_among_containers(tmp_path: Path) -> None:
    daemon_factory = DaemonFactory(tmp_path / "mps", ContainerFolders(tmp_path, tmp_path), own_uid=lambda: 1000)
    with pytest.raises(DeviceFailed, match="root"):
        daemon_factory.make("GPU-1", contained=True)


def test_a_daemon_that_does_not_start_keeps_workers_away_until_it_does(on_node: Any, machine: Machine) -> None:
    async def work(node: Node) -> None:
        machine.set(broken=True)
        with pytest.raises(DeviceFailed, match=Condition.DOWN.value):
            await node.start("w-1")
        trouble = node.shares.trouble("GPU-1")
        assert trouble is not None
        assert (trouble.health, trouble.reason.partition(":")[0]) == (Health.DEGRADED, Condition.DOWN.value)
        machine.set()
        await node.check()
        assert node.shares.trouble("GPU-1") is None
        await node.start("w-1")

    on_node(work)


def test_an_agent_adopts_the_daemons_of_the_previous_one(on_node: Any, machine: Machine) -> None:
    async def work(node: Node) -> None:
        pipe = await node.start("w-1")
        daemon = machine.state(pipe)["daemon"]
        node.shares = node.agent()
        await node.shares.take_over()
        node.shares.worker_joined("w-1", F, PART, 101)
        assert await node.start("w-2", G, 102) == pipe
        assert machine.state(pipe)["daemon"] == daemon
        machine.kill_daemon(pipe)
        node.shares = node.agent()
        await node.shares.take_over()
        assert machine.rests()

    on_node(work)


def test_evicting_a_worker_never_fails(on_node: Any, machine: Machine) -> None:
    async def work(node: Node) -> None:
        await node.shares.evict("w-0", [1])
        pipe = await node.start("w-1")
        machine.kill_daemon(pipe)
        await node.shares.evict("w-1", [101])

    on_node(work)
