"""Agent with real processes and the real bus."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import select
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from gpufn_core.domain.devices.device import NO_MPS, DeviceType, Health
from gpufn_core.domain.worker import NODE_PHASE, Desired, WorkerState
from gpufn_core.protocol.launch import EXIT_GPU_FAULT
from gpufn_core.spec.resources import Resources
from gpufn_local.nats_process import EmbeddedServer
from gpufn_runtime.agent.launchers.base import Launched, LaunchOrder
from gpufn_runtime.agent.launchers.process import ProcessLauncher
from gpufn_runtime.agent.workers import processes
from gpufn_runtime.agent.workers.supervise import may_concern_cuda


async def ended(pid: int) -> None:
    """Wait until the process is gone."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        readable, _, _ = await asyncio.to_thread(select.select, [descriptor], [], [], 10.0)
        assert readable, f"process {pid} still runs"
    finally:
        os.close(descriptor)


def test_an_assignment_becomes_a_process_and_a_started_event(on_node: Any) -> None:
    async def run(node: Any) -> None:
        await node.deploy()
        await node.start()
        worker = await node.assign()
        event = await node.event(worker, "started")
        assert event.cold_start is not None
        assert event.cold_start.standby is False
        assert 0 < event.cold_start.launch_s < 1
        assert 0 < event.cold_start.fetch_s < 1
        os.kill(await node.pid(worker), 0)
        assert await node.line("hello") == f"hello from {worker}"
        report = await node.until(lambda: [r for r in node.reports if r.processes])
        assert report[0].processes[0].worker == worker
        assert report[0].processes[0].resident_bytes > 0

    on_node(run)


def test_a_worker_gets_an_environment_made_from_nothing(on_node: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("GPUFN_NATS_URL", "nats://s3cret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3cret")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/usr/local/nvidia/lib64")

    async def run(node: Any) -> None:
        await node.deploy("env", env={"MODE": "fast"}, resources=Resources(cpu=2.5))
        await node.start(open_files=1000)
        worker = await node.assign(gpu="GPU-1234")
        environment = json.loads((await node.line("ENV ")).removeprefix("ENV "))
        folder = node.home.worker(worker)
        assert environment["HOME"] == str(folder / "tmp")
        assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-1234"
        assert environment["CUDA_MPS_PIPE_DIRECTORY"] == NO_MPS["CUDA_MPS_PIPE_DIRECTORY"]
        assert environment["ORT_DISABLE_TELEMETRY"] == "1"
        assert environment["LD_LIBRARY_PATH"] == "/usr/local/nvidia/lib64"
        assert (environment["OMP_NUM_THREADS"], environment["MODE"]) == ("3", "fast")
        assert "s3cret" not in json.dumps(environment)
        assert not [name for name in environment if name.startswith("GPUFN")]
        config = json.loads((await node.line("CONFIG ")).removeprefix("CONFIG "))
        assert config["socket"] == str(folder / "s")
        assert config["memory_limit_bytes"] == 1 << 30  # a quarter of the node's
        assert config["open_files"] == 1000
        assert os.listdir(config["bundle_dir"]) == ["app.py"]
        assert await node.line("CWD ") == f"CWD {folder}"

    on_node(run)


def test_a_secret_is_neither_in_the_environment_nor_in_the_config_at_the_start(on_node: Any) -> None:
    async def run(node: Any) -> None:
        node.secrets.known["TOKEN"] = "swordfish"
        await node.deploy("env", secrets=("TOKEN",))
        await node.start()
        worker = await node.assign()
        environment, config = await node.line("ENV "), await node.line("CONFIG ")
        assert "swordfish" not in environment + config
        assert "[redacted]" not in environment + config
        path = json.loads(config.removeprefix("CONFIG "))["secrets_socket"]
        assert path == str(node.home.worker(worker) / "k")

    on_node(run)


def test_without_its_secret_a_worker_does_not_start(on_node: Any) -> None:
    async def run(node: Any) -> None:
        await node.deploy("sleep", secrets=("TOKEN",))
        await node.start()
        event = await node.event(await node.assign(), "start_failed")
        assert event.failure.error.code == "secret_not_found"

    on_node(run)


def test_an_exit_is_reported_with_code_and_tail_before_all_files_are_removed(on_node: Any) -> None:
    async def run(node: Any) -> None:
        await node.deploy("exit 7")
        await node.start()
        worker = await node.assign()
        event = await node.event(worker, "exited")
        assert (event.exit.code, event.exit.signal, event.exit.out_of_memory) == (7, None, False)
        assert event.exit.tail == f"hello from {worker}\nlast words"
        await node.until_buried(worker)
        assert [e.kind for e in node.events] == ["started", "exited"]

    on_node(run)


def test_a_crash_is_reported_with_its_signal(on_node: Any) -> None:
    async def run(node: Any) -> None:
        await node.deploy("segv")
        await node.start()
        event = await node.event(await node.assign(), "exited")
        assert event.exit.signal == signal.SIGSEGV

    on_node(run)


def test_memory_above_the_limit_is_reported_as_such(on_node: Any, memory_groups: Any) -> None:
    async def run(node: Any) -> None:
        await node.deploy("eat", resources=Resources(memory_bytes=64 << 20))
        await node.start(groups=memory_groups)
        worker = await node.assign()
        event = await node.event(worker, "exited")
        assert event.exit.memory_limit_bytes == 64 << 20
        assert event.exit.out_of_memory
        await node.until_deleted(worker)

    on_node(run)


def test_memory_above_the_limit_is_reported_as_such_despite_a_kill_order(on_node: Any, memory_groups: Any) -> None:
    async def run(node: Any) -> None:
        await node.deploy("child-eats", resources=Resources(memory_bytes=64 << 20))
        await node.start(groups=memory_groups)
        worker = await node.assign()
        with contextlib.suppress(TimeoutError):  # a v2 cgroup is killed as a whole, without output
            await node.until(lambda: [e for e in node.events if e.kind == "exited"] or node.lines[1:], 10)
        node.kill(worker)  # ordered by the runner when the socket closed, before the agent has read the counter
        event = await node.event(worker, "exited")
        assert (event.exit.out_of_memory, event.exit.memory_limit_bytes) == (True, 64 << 20)

    on_node(run)


def test_a_memory_group_ends_with_its_worker_and_its_stray_processes(on_node: Any, memory_groups: Any) -> None:
    async def run(node: Any) -> None:
        await node.deploy("runaway")
        await node.start(groups=memory_groups)
        worker = await node.assign()
        pid = int((await node.line("runaway ")).split()[1])
        await node.event(worker, "exited")
        await ended(pid)
        await node.until_deleted(worker)

    on_node(run)


def test_a_gigabyte_of_output_does_not_reach_the_log_stream(on_node: Any) -> None:
    async def run(node: Any) -> None:
        await node.deploy("flood 1000")  # 100 MB, read at the same pace as a gigabyte would be
        await node.start()
        event = await node.event(await node.assign(), "exited")
        assert event.exit.code == 0
        assert event.exit.tail.endswith("flood over")
        assert len(event.exit.tail) <= 8 << 10
        assert sum(len(line.text) for line in node.lines) < 3 << 20
        assert [line.text for line in node.lines if "128 KiB/s" in line.text]

    on_node(run)


def test_a_worker_that_ends_right_after_its_launch_has_ended_and_did_not_fail_to_start(on_node: Any) -> None:
    """In a container it is not a child of the agent: no trace is left after its end."""

    async def launch(order: LaunchOrder) -> Launched:
        process = subprocess.Popen(["true"])  # noqa: ASYNC220  it takes no time
        handle = processes.open_handle(process.pid)
        process.wait()
        return Launched(process.pid, handle=handle)

    async def run(node: Any) -> None:
        await node.deploy()
        await node.start()
        node.launcher.launch = launch
        worker = await node.assign()
        await node.event(worker, "exited")
        assert [event.kind.value for event in node.events if event.worker == worker] == ["started", "exited"]

    on_node(run)


def test_the_rest_of_a_group_ends_with_its_worker(on_node: Any) -> None:
    async def run(node: Any) -> None:
        await node.deploy("child")
        await node.start()
        worker = await node.assign()
        event = await node.event(worker, "exited")
        assert event.exit.code == 0
        await node.until_deleted(worker)

    on_node(run)


def test_a_runaway_session_ends_with_its_worker_even_without_a_memory_group(on_node: Any) -> None:
    async def run(node: Any) -> None:
        await node.deploy("runaway")
        await node.start()
        worker = await node.assign()
        pid = int((await node.line("runaway ")).split()[1])
        await node.until_deleted(worker)
        await ended(pid)

    on_node(run)


def test_a_server_that_a_worker_left_behind_ends_with_it_though_it_writes_elsewhere(on_node: Any) -> None:
    """`Popen([...], start_new_session=True, stdout=DEVNULL, stderr=DEVNULL)` lived on, and kept its GPU's memory."""

    async def run(node: Any) -> None:
        await node.deploy("leaves-server")
        await node.start()
        worker = await node.assign()
        pid = int((await node.line("server ")).split()[1])
        await node.until_deleted(worker)
        await ended(pid)

    on_node(run)


def test_a_kill_order_ends_a_worker_at_once(on_node: Any) -> None:
    async def run(node: Any) -> None:
        await node.deploy("stubborn")
        await node.start()
        worker = await node.assign()
        await node.line("no")
        node.kill(worker)
        event = await node.event(worker, "exited")
        assert (event.exit.signal, event.exit.killed_for) == (signal.SIGKILL, "it took too long")

    on_node(run)


def test_a_worker_that_its_runner_considers_lost_ends_although_the_kill_order_was_lost(on_node: Any) -> None:
    async def run(node: Any) -> None:
        await node.deploy("stubborn")
        await node.start(kill_after_s=0.2)
        lost, serving = await node.assign(), await node.assign()
        await node.until(lambda: [line.text for line in node.lines].count("no") == 2)
        node.runner_says({lost: WorkerState.FAILED, serving: WorkerState.READY})
        event = await node.event(lost, "exited")
        assert event.exit.signal == signal.SIGKILL
        assert "runner" in event.exit.killed_for
        assert [e.worker for e in node.events if e.kind == "exited"] == [lost]

    on_node(run)


def test_a_worker_with_a_deleted_assignment_gets_sigterm(on_node: Any) -> None:
    async def run(node: Any) -> None:
        await node.deploy()
        await node.start()
        worker = await node.assign()
        await node.line("hello")
        await node.unassign(worker)
        event = await node.event(worker, "exited")
        assert event.exit.signal == signal.SIGTERM

    on_node(run)


def test_a_worker_that_ignores_sigterm_is_killed_after_the_grace(on_node: Any) -> None:
    async def run(node: Any) -> None:
        await node.deploy("stubborn")
        await node.start(kill_after_s=0.1)
        worker = await node.assign()
        await node.line("no")
        await node.unassign(worker)
        event = await node.event(worker, "exited")
        assert event.exit.signal == signal.SIGKILL
        assert "0.1 s of SIGTERM" in event.exit.killed_for

    on_node(run)


def test_a_drained_worker_that_does_not_end_is_ended(on_node: Any) -> None:
    async def run(node: Any) -> None:
        await node.deploy(timeout_s=0.05)
        await node.start(drain_grace_s=0.1)
        worker = await node.assign()
        await node.line("hello")
        await node.assign(worker, desired=Desired.DRAIN)
        event = await node.event(worker, "exited")
        assert event.exit.signal == signal.SIGTERM
        await node.until_deleted(worker)

    on_node(run)


def test_an_assignment_of_a_replaced_controller_is_refused(on_node: Any) -> None:
    async def run(node: Any) -> None:
        await node.deploy()
        await node.start()
        first = await node.assign(epoch=5)
        await node.event(first, "started")
        late = await node.assign(epoch=4)
        await node.until_deleted(late)
        assert [e.worker for e in node.events if e.kind == "started"] == [first]

    on_node(run)


def test_a_bundle_that_cannot_be_had_is_a_failed_start(on_node: Any) -> None:
    async def run(node: Any) -> None:
        revision = await node.deploy()
        node.bundles[revision.bundle] = b"something else"
        await node.start()
        worker = await node.assign()
        event = await node.event(worker, "start_failed")
        assert event.failure.phase == "launch"
        assert event.failure.error.code == "artifact_unavailable"
        assert "arrived damaged" in event.failure.error.message
        await node.until_buried(worker)

    on_node(run)


def test_a_node_that_can_start_no_process_reports_it_before_the_failed_start(on_node: Any, monkeypatch: Any) -> None:
    begin = ProcessLauncher.launch

    async def no_file(self: Any, order: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    async def run(node: Any) -> None:
        await node.deploy()
        await node.start()
        monkeypatch.setattr(ProcessLauncher, "launch", no_file)
        worker = await node.assign()
        event = await node.event(worker, "start_failed")
        assert event.failure.phase == NODE_PHASE
        assert event.failure.error.message.endswith(os.strerror(errno.EMFILE) + ".")
        pool = node.reports[-1].devices[0]
        assert pool.health is Health.DEGRADED
        assert pool.health_reason.endswith(os.strerror(errno.EMFILE))
        await node.until_deleted(worker)
        monkeypatch.setattr(ProcessLauncher, "launch", begin)
        await node.event(await node.assign(), "started")  # a controller that does not know it yet is not refused

    on_node(run)


def test_a_process_that_cannot_be_looked_after_is_ended_at_once(on_node: Any, monkeypatch: Any) -> None:
    """Without a descriptor for its pidfd it lived on until the cleanup had one, and lost the calls that it took."""
    begin, kill_worker = ProcessLauncher.launch, processes.kill_worker
    pids: list[int] = []
    is_lacking = threading.Event()
    is_lacking.set()

    async def launch(self: Any, order: Any) -> Any:
        launched = await begin(self, order)
        pids.append(launched.pid)
        return launched

    def open_pidfd(process: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    def kill_later(output: Path, scratch: Path) -> bool:
        if is_lacking.is_set():
            raise OSError(errno.EMFILE, "Too many open files")
        return kill_worker(output, scratch)

    async def run(node: Any) -> None:
        await node.deploy()
        await node.start()
        monkeypatch.setattr(ProcessLauncher, "launch", launch)
        monkeypatch.setattr(processes, "open_pidfd", open_pidfd)
        monkeypatch.setattr(processes, "kill_worker", kill_later)
        worker = await node.assign()
        event = await node.event(worker, "start_failed")
        assert event.failure.phase == NODE_PHASE
        await ended(pids[0])
        is_lacking.clear()
        await node.until_buried(worker)

    on_node(run)


def test_an_unknown_revision_is_a_failed_start(on_node: Any) -> None:
    async def run(node: Any) -> None:
        await node.start()
        event = await node.event(await node.assign(revision=9), "start_failed")
        assert event.failure.error.code == "revision_not_found"

    on_node(run)


def test_a_later_agent_adopts_live_workers_and_cleans_up_dead_ones(on_node: Any) -> None:
    async def run(node: Any) -> None:
        await node.deploy()
        await node.start()
        alive, dead, unwanted = [await node.assign() for _ in range(3)]
        pids = {worker: await node.pid(worker) for worker in (alive, dead, unwanted)}
        await node.until(lambda: len(node.lines) == 3)
        await node.vanish()
        os.kill(pids[dead], signal.SIGKILL)
        await asyncio.to_thread(os.waitpid, pids[dead], 0)
        await node.unassign(unwanted)
        node.events.clear()
        node.reports.clear()
        await node.start()
        event = await node.event(dead, "exited")
        assert (event.exit.code, event.exit.signal) == (None, None)
        event = await node.event(unwanted, "exited")
        assert event.exit.signal == signal.SIGTERM
        await node.until_deleted(dead)
        report = await node.until(lambda: [r for r in node.reports if len(r.processes) == 1])
        assert [(p.worker, p.pid) for p in report[-1].processes] == [(alive, pids[alive])]
        node.kill(alive)
        event = await node.event(alive, "exited")
        assert (event.exit.signal, event.exit.killed_for) == (signal.SIGKILL, "it took too long")
        assert "started" not in {e.kind for e in node.events}

    on_node(run)


def test_a_stopping_agent_ends_its_workers_and_deletes_their_assignments(on_node: Any) -> None:
    async def run(node: Any) -> None:
        await node.deploy("sleep")
        await node.deploy("stubborn", number=2)
        await node.start(grace_s=0.2)
        polite, stubborn = await node.assign(), await node.assign(revision=2)
        await node.line("no")
        await node.line(f"hello from {polite}")
        await node.stop()
        assert (await node.event(polite, "exited")).exit.signal == signal.SIGTERM
        end = (await node.event(stubborn, "exited")).exit
        assert end.stopping, "its calls are to run again"
        assert end.signal == signal.SIGKILL
        assert "within 0.2 s" in end.killed_for
        pools = [device for device in node.reports[-1].devices if device.type is DeviceType.CPU]
        assert [(pool.health, pool.health_reason) for pool in pools] == [(Health.DEGRADED, "its node stops")]
        assert await node.assigned() == []
        assert not list(node.home.worker("x").parent.iterdir())

    on_node(run)


def test_workers_of_one_bundle_cost_one_fetch(on_node: Any) -> None:
    async def run(node: Any) -> None:
        await node.deploy()
        await node.start()
        workers = [await node.assign() for _ in range(5)]
        for worker in workers:
            await node.event(worker, "started")
        assert node.fetches == 1

    on_node(run)


def test_when_a_worker_does_not_get_ready_its_bundle_is_made_good_before_the_next(on_node: Any) -> None:
    async def run(node: Any) -> None:
        revision = await node.deploy("exit 3")
        await node.start()
        file = node.home.bundles / revision.bundle / "app.py"
        await node.until(file.exists)
        content = file.read_text()
        file.unlink()  # like a function that deletes the files in its folder
        await node.event(await node.assign(), "exited")
        await node.event(await node.assign(), "exited")
        assert file.read_text() == content

    on_node(run)


def test_a_folder_that_only_the_runner_made_is_launched_at_start(on_node: Any) -> None:
    async def run(node: Any) -> None:
        await node.deploy()
        worker = await node.assign()
        node.home.worker(worker).mkdir(parents=True)
        node.home.worker_socket(worker).touch()
        await node.start()
        await node.event(worker, "started")
        assert node.home.worker_socket(worker).exists()

    on_node(run)


def test_a_bus_that_reconnects_receives_the_missed_events(tmp_path: Path, on_node: Any) -> None:
    async def run(node: Any) -> None:
        await node.deploy()
        await node.start()
        worker = await node.assign()
        pid = await node.pid(worker)
        node.server.kill()
        await node.until_disconnected()
        os.kill(pid, signal.SIGKILL)
        await ended(pid)
        assert not [event for event in node.events if event.kind == "exited"]
        with EmbeddedServer.start(node.server.directory):
            event = await node.event(worker, "exited")
            assert event.exit.signal == signal.SIGKILL
            await node.until_deleted(worker)
            await node.stop()

    with EmbeddedServer.start(tmp_path / "own") as server:
        on_node(run, server)


def test_cuda_is_proven_where_a_worker_did_not_start(on_node: Any) -> None:
    async def run(node: Any) -> None:
        proven: list[str] = []
        await node.deploy()
        await node.start(prove_cuda=proven.extend)
        other = await node.assign(gpu="GPU-7")
        worker = await node.assign(gpu="GPU-7")
        await node.pid(other)
        os.kill(await node.pid(worker), signal.SIGKILL)
        await node.event(worker, "exited")
        assert proven == [], "a context would take memory from the other worker"
        os.kill(await node.pid(other), signal.SIGKILL)
        await node.event(other, "exited")
        assert proven == ["GPU-7"]

    on_node(run)


@pytest.mark.parametrize(
    ("was_ready", "code", "result"),
    [(True, EXIT_GPU_FAULT, True), (True, 1, False), (True, None, False), (False, 1, False), (False, None, True)],
)
def test_the_end_of_a_worker_may_concern_cuda(was_ready: bool, code: int | None, result: bool) -> None:
    assert may_concern_cuda(was_ready=was_ready, code=code) is result
