from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpufn_platform.sandbox.enter import MAX_PROCESSES
from gpufn_runtime.agent.workers.cgroups import MemoryGroup, MemoryGroups


@pytest.mark.parametrize(
    ("name", "text", "has_killed"),
    [
        ("memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n", True),
        ("memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 0\n", False),
        ("memory.events", "low 0\nhigh 0\nmax 12\noom 1\noom_kill 1\n", True),
        ("memory.events", "low 0\nhigh 0\nmax 12\noom 0\noom_kill 0\n", False),
        ("nothing", "", False),
    ],
)
def test_both_kinds_of_group_report_whether_they_killed(tmp_path: Path, name: str, text: str, has_killed: bool) -> None:
    (tmp_path / name).write_text(text)
    assert MemoryGroup(tmp_path).has_killed() is has_killed


def test_a_group_is_made_found_again_and_removed(memory_groups: Any) -> None:
    group = memory_groups.create("w-cgrouptest", 64 << 20)
    try:
        assert memory_groups.find_existing("w-cgrouptest") == group
        assert (group.pids(), group.has_killed()) == ([], False)
    finally:
        assert group.remove()
    assert memory_groups.find_existing("w-cgrouptest") is None


def test_without_a_place_for_groups_there_are_none() -> None:
    groups = MemoryGroups(None)
    assert (groups.create("w", 1 << 20), groups.find_existing("w")) == (None, None)


def test_all_of_a_group_is_killed_by_the_kernels_switch_where_there_is_one(tmp_path: Path) -> None:
    group = MemoryGroup(tmp_path)
    group.procs.write_text("")
    group.kill()
    (tmp_path / "cgroup.kill").write_text("")
    group.kill()
    assert (tmp_path / "cgroup.kill").read_text() == "1"


def test_a_group_of_v2_limits_memory_and_processes(tmp_path: Path) -> None:
    path = tmp_path / "gpufn-w"
    path.mkdir()
    (path / "memory.max").write_text("max")
    assert MemoryGroups(tmp_path).create("w", 1 << 20) == MemoryGroup(path)
    assert [(path / name).read_text() for name in ("memory.max", "pids.max")] == [str(1 << 20), str(MAX_PROCESSES)]
