"""What is left of workers that are gone."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from gpufn_runtime.agent.burials import Burials
from gpufn_runtime.agent.cgroups import MemoryGroup, MemoryGroups
from gpufn_runtime.agent.folders import WorkerFolder


def test_processes_that_are_found_in_an_old_group_later_are_killed_then(tmp_path: Path) -> None:
    """Who forks fast enough outlived those rounds in which all were killed, and after them nobody was."""
    group = MemoryGroup(tmp_path / "gpufn-w-1")
    group.path.mkdir()
    group.procs.write_text("")
    nobody: Any = None
    burials = Burials(node="a", assignments=nobody, groups=MemoryGroups(tmp_path), buried=nobody, retry_s=1.0)
    burials.sweep(WorkerFolder(tmp_path / "w-1"), None)
    with subprocess.Popen(["sleep", "60"]) as late:
        group.procs.write_text(f"{late.pid}\n")
        burials.step()
        assert late.wait(30) == -9
