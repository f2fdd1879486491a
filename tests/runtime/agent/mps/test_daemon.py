"""Control daemon of one GPU, with fakes of NVIDIA's programs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from gpufn_core.errors import DeviceFailed
from gpufn_runtime.agent.mps import daemon as daemon_module
from gpufn_runtime.agent.mps.condition import Condition
from gpufn_runtime.agent.mps.control import Control
from gpufn_runtime.agent.mps.daemon import ContainerFolders, Daemon, read_daemon_file
from tests.runtime.agent.mps.machine import Machine

GPU = "GPU-1"
Work = Callable[[Daemon], Coroutine[Any, Any, None]]


def _on_daemon(tmp_path: Path, work: Work, **options: Any) -> None:
    daemon = Daemon(GPU, tmp_path / "mps", **{"uid": os.getuid(), "start_timeout_s": 30.0, **options})
    daemon.control = Control(daemon.pipe, timeout_s=30.0)

    async def main() -> None:
        try:
            await work(daemon)
        finally:
            await daemon.stop()

    asyncio.run(main())


def test_a_daemon_is_active_after_start_and_absent_after_stop(machine: Machine, tmp_path: Path) -> None:
    async def work(daemon: Daemon) -> None:
        await daemon.start()
        state = machine.state(daemon.pipe)
        assert (state["gpu"], state["log"]) == (GPU, str(tmp_path / "mps" / "log"))
        assert machine.server(daemon.pipe)["uid"] == os.getuid()
        assert await daemon.observe() is Condition.ACTIVE
        assert daemon.folder.stat().st_mode & 0o077 == 0 or daemon.pipe.stat().st_mode & 0o077 == 0
        await daemon.stop()
        assert machine.rests()
        assert not daemon.folder.exists()
        assert await daemon.observe() is Condition.DOWN
        await daemon.stop()

    _on_daemon(tmp_path, work)
    assert machine.modes == {}  # it is not permitted


def test_a_daemon_finds_the_drivers_libraries_and_knows_nothing_else_of_ours(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/usr/local/nvidia/lib64")
    monkeypatch.setenv("GPUFN_NATS_URL", "nats://secret")

    async def work(daemon: Daemon) -> None:
        await daemon.start()
        assert machine.state(daemon.pipe)["environ"].keys() - {"LC_CTYPE"} == {"PATH", "LD_LIBRARY_PATH"}

    _on_daemon(tmp_path, work)


def test_the_folders_of_a_daemon_for_containers_are_labelled(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SELinux would keep the clients from the pipes."""
    labelled: list[Path] = []
    monkeypatch.setattr(daemon_module, "label_for_containers", lambda *folders: labelled.extend(folders))
    folders = ContainerFolders(tmp_path / "shared" / "mps", tmp_path / "memory" / "mps")
    for container_folders, expected in ((None, []), (folders, [*folders])):
        Daemon(GPU, tmp_path / "mps", uid=os.getuid(), container_folders=container_folders)._make_folders()
        assert labelled == expected


def test_a_daemon_that_cannot_start_reports_the_reason_and_leaves_nothing(machine: Machine, tmp_path: Path) -> None:
    machine.set(broken=True)

    async def work(daemon: Daemon) -> None:
        why = r"GPU-1: its MPS daemon has ended: control\.log: .*driver and library do not match; server\.log: .*CUDA"
        with pytest.raises(DeviceFailed, match=why):
            await daemon.start()
        assert not daemon.folder.exists()

    _on_daemon(tmp_path, work)


def test_a_server_that_does_not_become_active_is_abandoned(machine: Machine, tmp_path: Path) -> None:
    machine.set(slow=True)

    async def work(daemon: Daemon) -> None:
        with pytest.raises(DeviceFailed, match=r"within 0\.3 s"):
            await daemon.start()

    _on_daemon(tmp_path, work, start_timeout_s=0.3)


def test_without_nvidias_program_there_is_no_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    async def work(daemon: Daemon) -> None:
        with pytest.raises(DeviceFailed, match="cannot run nvidia-cuda-mps-control"):
            await daemon.start()

    _on_daemon(tmp_path, work)


def test_faults_hangs_and_deaths_of_a_daemon_are_different_conditions(machine: Machine, tmp_path: Path) -> None:
    async def work(daemon: Daemon) -> None:
        await daemon.start()
        machine.fault(daemon.pipe)
        assert await daemon.observe() is Condition.FAULT
        daemon.control = machine.control(daemon.pipe)
        machine.hang(daemon.pipe)
        assert await daemon.observe() is Condition.HUNG
        machine.kill_daemon(daemon.pipe)
        assert await daemon.observe() is Condition.DOWN

    _on_daemon(tmp_path, work, stop_timeout_s=0.2)
    assert machine.rests()  # a killed daemon's server is found, too


def test_a_server_of_another_user_is_noticed_for_ours_would_wait_behind_it(machine: Machine, tmp_path: Path) -> None:
    uids = {"of": os.getuid()}

    async def work(daemon: Daemon) -> None:
        await daemon.start()
        uids["of"] += 1
        assert await daemon.observe() is Condition.FOREIGN
        uids["of"] -= 1

    _on_daemon(tmp_path, work, uid_of=lambda pid: uids["of"])


def test_only_clients_are_terminated(machine: Machine, tmp_path: Path) -> None:
    async def work(daemon: Daemon) -> None:
        await daemon.start()
        machine.connect(daemon.pipe, 101, 102)
        await daemon.terminate([102, 103])
        assert await daemon.clients() == {101}
        assert machine.state(daemon.pipe)["terminated"] == [102]

    _on_daemon(tmp_path, work)


def test_a_hung_daemon_is_restarted(machine: Machine, tmp_path: Path) -> None:
    async def work(daemon: Daemon) -> None:
        await daemon.start()
        first = daemon.process
        daemon.control = machine.control(daemon.pipe)
        machine.hang(daemon.pipe)
        await daemon.restart()
        assert daemon.process != first
        assert await daemon.observe() is Condition.ACTIVE

    _on_daemon(tmp_path, work, stop_timeout_s=0.2)


def test_the_compute_mode_is_changed_with_consent_and_set_back(machine: Machine, tmp_path: Path) -> None:
    async def work(daemon: Daemon) -> None:
        await daemon.start()
        assert machine.modes == {GPU: "Exclusive_Process"}
        await daemon.restart()
        assert machine.modes == {GPU: "Exclusive_Process"}
        await daemon.stop()
        assert machine.modes == {GPU: "Default"}

    _on_daemon(tmp_path, work, may_set_compute_mode=True)


def test_a_compute_mode_that_cannot_be_set_is_no_daemon(machine: Machine, tmp_path: Path) -> None:
    machine.forbid_modes()

    async def work(daemon: Daemon) -> None:
        with pytest.raises(DeviceFailed, match=r"GPU-1: .*compute mode: .*Insufficient Permis"):
            await daemon.start()
        (daemon.folder / "daemon.json").unlink()  # the daemon changed no setting, so its end restores none

    _on_daemon(tmp_path, work, may_set_compute_mode=True)


def test_a_daemon_whose_record_cannot_be_written_runs_and_ends(machine: Machine, tmp_path: Path) -> None:
    """Like on a full disk; earlier files stay intact."""
    (tmp_path / "mps" / "daemon.json").mkdir(parents=True)

    async def work(daemon: Daemon) -> None:
        await daemon.start()
        assert await daemon.observe() is Condition.ACTIVE
        await daemon.stop()
        assert machine.rests()
        assert not daemon.folder.exists()

    _on_daemon(tmp_path, work)


def test_a_compute_mode_that_cannot_be_written_down_is_not_changed(machine: Machine, tmp_path: Path) -> None:
    """If the agent died, the mode would not be restored."""
    (tmp_path / "mps" / "daemon.json").mkdir(parents=True)

    async def work(daemon: Daemon) -> None:
        with pytest.raises(DeviceFailed, match=r"GPU-1: .*compute mode .*recorded"):
            await daemon.start()
        assert not daemon.folder.exists()

    _on_daemon(tmp_path, work, may_set_compute_mode=True)
    assert machine.modes == {}


def test_a_daemon_of_an_earlier_agent_is_found_and_the_mode_restored(machine: Machine, tmp_path: Path) -> None:
    async def work(daemon: Daemon) -> None:
        await daemon.start()
        file = read_daemon_file(daemon.folder)
        assert file is not None
        machine.kill_daemon(daemon.pipe)
        later = Daemon(GPU, daemon.folder, uid=os.getuid())
        later.file = file
        assert not later.is_running()
        await later.stop()
        assert machine.modes == {GPU: "Default"}
        assert read_daemon_file(daemon.folder) is None

    _on_daemon(tmp_path, work, may_set_compute_mode=True)
