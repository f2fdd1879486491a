"""What is taken over from an earlier agent, without processes."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any, cast

import pytest

from gpufn_runtime.agent import processes
from gpufn_runtime.agent.burials import Burials
from gpufn_runtime.agent.cgroups import MemoryGroups
from gpufn_runtime.agent.fleet import Fleet
from gpufn_runtime.agent.folders import ProcessFile, WorkerFolder
from gpufn_runtime.agent.inheritance import Inheritance


def test_nothing_is_left_of_a_worker_of_nobody_that_ends_while_it_is_adopted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process ends between the look at it and its pidfd."""
    monkeypatch.setattr(processes, "open_pidfd", lambda process: None)
    folder = WorkerFolder(tmp_path / "w1")
    folder.path.mkdir()
    os.mkfifo(folder.output)
    own = processes.identify(os.getpid())
    assert own is not None
    folder.write_process(ProcessFile(worker="w1", function="f", revision=1, process=own, started_at=1.0))
    fleet = Fleet()

    async def run() -> None:
        burials = Burials(
            fleet, node="n", assignments=cast("Any", None), groups=MemoryGroups(None), buried=lambda: None, retry_s=1.0
        )
        Inheritance(fleet, cast("Any", None), burials, cast("Any", None)).take_over([folder], {})
        await burials.done()

    asyncio.run(run())
    assert not folder.path.exists()
    assert not fleet.records
