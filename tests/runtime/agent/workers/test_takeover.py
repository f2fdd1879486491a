"""Takeover from an earlier agent, without processes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpufn_core.domain.devices.device import DeviceShare
from gpufn_core.domain.worker import Assignment
from gpufn_core.errors import SecretNotFound
from gpufn_core.protocol.launch import WorkerConfig
from gpufn_core.spec.function_spec import EntryPoint, FunctionSpec, MethodSpec
from gpufn_platform.secrets.redaction import redact
from gpufn_runtime.agent.decide.fleet import Fleet
from gpufn_runtime.agent.workers import processes
from gpufn_runtime.agent.workers.cgroups import MemoryGroups
from gpufn_runtime.agent.workers.cleanup import Cleanup
from gpufn_runtime.agent.workers.takeover import Takeover, secret_patterns_of
from gpufn_runtime.agent.workers.worker_folder import ProcessFile, WorkerFolder

_SHARE = DeviceShare(cpu_device="cpu", cores=0.1, memory_bytes=1 << 20)
ASSIGNMENT = Assignment(worker="w1", node="n", function="f", revision=1, share=_SHARE, epoch=1, created_at=0.0)


def test_nothing_is_left_of_an_unassigned_worker_that_ends_during_its_adoption(
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
        Takeover(fleet, cast("Any", None), cleanup, cast("Any", None)).take_over([folder], {}, {})
        await cleanup.tasks.done()

    asyncio.run(run())
    assert not folder.path.exists()
    assert not fleet.records


@pytest.mark.parametrize(
    ("runs", "was_begun", "is_assigned", "reaction"),
    [
        (True, True, True, "adopted"),
        (True, True, False, "adopted, ended"),
        (False, True, True, "exited, cleaned up"),
        (False, True, False, "swept"),
        (None, True, True, "exited, cleaned up"),
        (None, False, True, ""),
        (None, False, False, "swept"),
    ],
)
def test_a_folder_of_an_earlier_agent(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    runs: bool | None,
    was_begun: bool,
    is_assigned: bool,
    reaction: str,
) -> None:
    """`runs` is None if no process is recorded."""
    folder = WorkerFolder(tmp_path / "w1")
    folder.path.mkdir()
    if was_begun:
        os.mkfifo(folder.output)
    own = processes.identify(os.getpid())
    assert own is not None
    process = own if runs else processes.Process(own.pid, own.start_time + 1)
    if runs is not None:
        folder.write_process(ProcessFile(worker="w1", function="f", revision=1, process=process, started_at=1.0))
    done: list[str] = []
    monkeypatch.setattr(processes, "kill_worker", lambda output, scratch: False)
    reports = SimpleNamespace(send_event=lambda record, kind, **what: done.append(kind.value))
    cleanup = SimpleNamespace(
        find_group=lambda worker, file: None,
        clean_up=lambda record, folder, group: done.append("cleaned up"),
        sweep=lambda folder, file: done.append("swept"),
    )

    def supervise(record: Any, handle: processes.Handle, folder: Any, group: None, fifo: int, **options: str) -> None:
        os.close(handle.pidfd)
        os.close(fifo)
        done.append("adopted")

    supervisor = SimpleNamespace(supervise=supervise, end=lambda record, signum, reason: done.append("ended"))
    fleet = Fleet()
    takeover = Takeover(fleet, cast("Any", supervisor), cast("Any", cleanup), cast("Any", reports))
    takeover.take_over([folder], {"w1": ASSIGNMENT} if is_assigned else {}, {})
    assert ", ".join(done) == reaction
    assert list(fleet.records) == (["w1"] if "adopted" in reaction or "cleaned up" in reaction else [])


def test_an_exit_is_reported_after_leftover_processes_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the report, the calls start again. An agent that dies during a launch has not recorded the worker."""
    folder = WorkerFolder(tmp_path / "w1")
    folder.path.mkdir()
    os.mkfifo(folder.output)
    assert folder.was_begun
    done: list[str] = []
    monkeypatch.setattr(processes, "kill_worker", lambda output, scratch: done.append("killed"))
    reports = SimpleNamespace(send_event=lambda record, kind, **what: done.append(kind.value))
    cleanup = SimpleNamespace(
        find_group=lambda worker, file: None, clean_up=lambda record, folder, group: done.append("cleaned up")
    )
    inheritance = Takeover(Fleet(), cast("Any", None), cast("Any", cleanup), cast("Any", reports))
    inheritance.take_over([folder], {"w1": ASSIGNMENT}, {})
    assert done == ["killed", "exited", "cleaned up"]


def test_the_output_of_adopted_workers_is_masked_by_the_secrets_that_their_configs_name(tmp_path: Path) -> None:
    class Values:
        async def values(self, spec: FunctionSpec, widest: Mapping[str, str]) -> dict[str, str]:
            if "GONE" in spec.secrets:
                raise SecretNotFound
            return dict.fromkeys(spec.secrets, "swordfish")

    folders = []
    for worker, names in (("w1", ("TOKEN",)), ("w2", ()), ("w3", ("GONE",))):
        spec = FunctionSpec(name="f", entry=EntryPoint("app", "f"), methods=(MethodSpec(),), secrets=names)
        folders.append(folder := WorkerFolder(tmp_path / worker))
        folder.create(
            WorkerConfig(worker=worker, function="f", revision=1, spec=spec, bundle_dir="", socket="", launched_at=1.0)
        )
    patterns = asyncio.run(secret_patterns_of(folders, Values()))
    assert list(patterns) == ["w1"]
    assert "swordfish" not in redact(patterns["w1"], "a swordfish")
