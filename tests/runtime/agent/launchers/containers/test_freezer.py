"""Freezers of cgroup v1 and v2, and never the agent's own. For tests with Docker, see docker/."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpufn_runtime.agent.launchers.containers.freezer import Freezer

V1 = "9:name=systemd:/docker/c1\n6:freezer:/docker/c1\n4:cpu,cpuacct:/docker/c1\n0::/docker/c1\n"
V2 = "0::/system.slice/docker-c1.scope\n"


def _machine(folder: Path, theirs: str, ours: str, *switches: str) -> tuple[Path, Path]:
    for name, text in (("7", theirs), ("self", ours)):
        (folder / "proc" / name).mkdir(parents=True)
        (folder / "proc" / name / "cgroup").write_text(text)
    for switch in switches:
        (folder / "cgroup" / switch).parent.mkdir(parents=True, exist_ok=True)
        (folder / "cgroup" / switch).write_text("")
    return folder / "cgroup", folder / "proc"


@pytest.mark.parametrize(
    ("theirs", "switch", "words"),
    [
        (V1, "freezer/docker/c1/freezer.state", ("FROZEN", "THAWED")),
        (V2, "system.slice/docker-c1.scope/cgroup.freeze", ("1", "0")),
    ],
)
def test_the_switch_of_a_containers_group_is_found_and_used(
    tmp_path: Path, theirs: str, switch: str, words: tuple[str, str]
) -> None:
    freezer = Freezer.of(7, *_machine(tmp_path, theirs, "0::/init\n", switch))
    assert freezer == Freezer(tmp_path / "cgroup" / switch)
    freezer.freeze()
    assert freezer.file.read_text() == words[0]
    freezer.thaw()
    assert freezer.file.read_text() == words[1]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [(V2, V2), ("0::/\n", "0::/\n"), ("0::/../c1\n", "0::/\n"), ("", "0::/\n"), (V2, "0::/\n")],
    ids=["ours", "all", "outside", "gone", "no switch"],
)
def test_no_switch_but_a_containers_own_is_used(tmp_path: Path, theirs: str, ours: str) -> None:
    switches = ["system.slice/docker-c1.scope/cgroup.freeze", "cgroup.freeze"] if theirs != V2 or ours == V2 else []
    assert Freezer.of(7, *_machine(tmp_path, theirs, ours, *switches)) is None


def test_an_ended_process_has_no_cgroups(tmp_path: Path) -> None:
    assert Freezer.of(8, *_machine(tmp_path, V2, "0::/\n")) is None
