"""Takeover from an earlier agent, without processes."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpufn_core.domain.device import DeviceShare
from gpufn_core.domain.worker import Assignment
from gpufn_runtime.agent.decide.fleet import Fleet
from gpufn_runtime.agent.workers import processes
from gpufn_runtime.agent.workers.cgroups import MemoryGroups
from gpufn_runtime.agent.workers.cleanup import Cleanup
from gpufn_runtime.agent.workers.takeover import Takeover
from gpufn_runtime.agent.workers.worker_folder import ProcessFile, WorkerFolder


def test_nothing_is_left_of_a_worker_of_nobody_that_ends_while_it_is_adopted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process ends between the check and the opening of its pidfd."""
    monkeypatch.setattr(processes, "open_pidfd", lambda process: None)
    folder = WorkerFolder(tmp_path / "w1")
    folder.path.mkdir()
    os.mkfifo(folder.output)
    own = processes.identify(os.getpid())
    assert own is not None
    folder.write_process(ProcessFile(worker="w1", function="f", revision=1, process=own, started_at=1.0))
    fleet = Fleet()

    async def run() -> None:
        cleanup = Cleanup(
            fleet, node="n", assignments=cast("Any", None), groups=MemoryGroups(None), on_done=lambda: None, retry_s=1.0
        )
        Takeover(fleet, cast("Any", None), cleanup, cast("Any", None)).take_over([folder], {})
        await cleanup.done()

    asyncio.run(run())
    assert not folder.path.exists()
    assert not fleet.records


def test_an_exit_is_reported_after_what_was_left_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the report, the calls start again. An agent that dies during a launch has not recorded the worker."""
    folder = WorkerFolder(tmp_path / "w1")
    folder.path.mkdir()
    os.mkfifo(folder.output)
    assert folder.was_begun
    share = DeviceShare(cpu_device="cpu", cores=0.1, memory_bytes=1 << 20)
    assignment = Assignment(worker="w1", node="n", function="f", revision=1, share=share, epoch=1, created_at=0.0)
    done: list[str] = []
    monkeypatch.setattr(processes, "kill_worker", lambda output, scratch: done.append("killed"))
    reports = SimpleNamespace(send_event=lambda record, kind, **what: done.append(kind.value))
    cleanup = SimpleNamespace(
        find_group=lambda worker, file: None, clean_up=lambda record, folder, group: done.append("buried")
    )
    inheritance = Takeover(Fleet(), cast("Any", None), cast("Any", cleanup), cast("Any", reports))
    inheritance.take_over([folder], {"w1": assignment})
    assert done == ["killed", "exited", "buried"]
