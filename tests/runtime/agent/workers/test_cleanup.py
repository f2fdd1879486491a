"""Cleanup after workers."""

from __future__ import annotations

import asyncio
import errno
import subprocess
from pathlib import Path
from typing import Any

from gpufn_core.domain.devices.device import DeviceShare
from gpufn_core.domain.worker import Assignment
from gpufn_runtime.agent.decide.fleet import Fleet, WorkerRecord
from gpufn_runtime.agent.workers import cleanup, processes, worker_folder
from gpufn_runtime.agent.workers.cgroups import MemoryGroup, MemoryGroups
from gpufn_runtime.agent.workers.cleanup import Cleanup
from gpufn_runtime.agent.workers.worker_folder import WorkerFolder


def clean_up(folder: WorkerFolder, assignments: Any) -> None:
    """Clean up after a worker that has an Assignment and no memory cgroup."""
    share = DeviceShare(cpu_device="cpu", cores=0.1, memory_bytes=1 << 20)
    assignment = Assignment(worker="w-1", node="a", function="f", revision=1, share=share, epoch=1, created_at=0.0)

    async def run() -> None:
        made = Cleanup(
            Fleet(), node="a", assignments=assignments, groups=MemoryGroups(None), on_done=lambda: None, retry_s=0.001
        )
        made.clean_up(WorkerRecord("w-1", "f", 1, assignment), folder, None)
        await made.tasks.done()

    asyncio.run(run())


def test_processes_that_are_found_in_an_old_group_later_are_killed_then(tmp_path: Path) -> None:
    """A fast fork bomb survived the rounds of kills, and was not killed after them."""
    group = MemoryGroup(tmp_path / "gpufn-w-1")
    group.path.mkdir()
    group.procs.write_text("")
    nobody: Any = None

    async def run() -> None:
        made = Cleanup(
            Fleet(), node="a", assignments=nobody, groups=MemoryGroups(tmp_path), on_done=nobody, retry_s=1.0
        )
        made.sweep(WorkerFolder(tmp_path / "w-1"), None)
        with subprocess.Popen(["sleep", "60"]) as late:  # noqa: ASYNC220
            group.procs.write_text(f"{late.pid}\n")
            made.step()
            assert late.wait(30) == -9
        await made.tasks.done()

    asyncio.run(run())


def test_a_cleanup_without_a_free_file_descriptor_is_retried(tmp_path: Path, monkeypatch: Any) -> None:
    """Its lease was held forever."""
    tries = iter([OSError(errno.EMFILE, "Too many open files"), RuntimeError("can't start new thread"), None])

    def kill_worker(output: Path, scratch: Path) -> bool:
        if (error := next(tries)) is not None:
            raise error
        return False

    monkeypatch.setattr(processes, "kill_worker", kill_worker)
    nobody: Any = None
    fleet = Fleet()
    record = WorkerRecord("w-1", "f", 1, None)
    folder = WorkerFolder(tmp_path / "w-1")
    folder.path.mkdir()

    async def run() -> None:
        made = Cleanup(
            fleet, node="a", assignments=nobody, groups=MemoryGroups(None), on_done=lambda: None, retry_s=0.001
        )
        made.clean_up(record, folder, None)
        await made.tasks.done()

    asyncio.run(run())
    assert fleet.has_ended("w-1")
    assert not folder.path.exists()


def test_a_folder_that_cannot_be_removed_for_want_of_a_file_is_removed_later(tmp_path: Path, monkeypatch: Any) -> None:
    tries = iter([OSError(errno.EMFILE, "Too many open files"), None])
    monkeypatch.setattr(worker_folder, "remove_tree", lambda path: next(tries))
    nobody: Any = None
    fleet = Fleet()
    record = WorkerRecord("w-1", "f", 1, None)

    async def run() -> None:
        made = Cleanup(
            fleet, node="a", assignments=nobody, groups=MemoryGroups(None), on_done=lambda: None, retry_s=0.001
        )
        made.clean_up(record, WorkerFolder(tmp_path / "w-1"), None)
        await made.tasks.done()

    asyncio.run(run())
    assert next(tries, "both tried") == "both tried"
    assert fleet.has_ended("w-1")


def test_a_lease_is_held_until_leftovers_of_the_worker_are_removed(tmp_path: Path, monkeypatch: Any) -> None:
    """A process with a model on a GPU takes seconds to end: the next worker found the memory in use."""
    looks = iter([True, True, False])
    monkeypatch.setattr(processes, "kill_worker", lambda output, scratch: next(looks))
    monkeypatch.setattr(cleanup, "_KILL_PAUSE_S", 0.001)
    deleted_after: list[object] = []

    class Assignments:
        async def delete(self, key: str) -> None:
            deleted_after.append(next(looks, "all were gone"))

    clean_up(WorkerFolder(tmp_path / "w-1"), Assignments())
    assert deleted_after == ["all were gone"]


def test_a_lease_is_not_held_forever_for_an_unkillable_process(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(processes, "kill_worker", lambda output, scratch: True)
    monkeypatch.setattr(cleanup, "_KILL_PAUSE_S", 0.0)
    deleted: list[str] = []

    class Assignments:
        async def delete(self, key: str) -> None:
            deleted.append(key)

    clean_up(WorkerFolder(tmp_path / "w-1"), Assignments())
    assert deleted == ["a.w-1"]


def test_the_folder_of_a_worker_stays_until_its_assignment_is_deleted(tmp_path: Path) -> None:
    """If an agent dies between the two, an Assignment without a folder is left: the next agent launched it again."""
    folder = WorkerFolder(tmp_path / "w-1")
    folder.path.mkdir()
    there: list[bool] = []

    class Assignments:
        async def delete(self, key: str) -> None:
            there.append(folder.path.exists())

    clean_up(folder, Assignments())
    assert there == [True]
    assert not folder.path.exists()
