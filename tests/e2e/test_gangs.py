"""A function on two nodes: its ranks run each call together, and end together."""

from __future__ import annotations

import functools
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Platform, running_platform
from tests.e2e.node import Node
from tests.e2e.test_durable import wait_for
from tests.waiting import until

pytestmark = pytest.mark.e2e

APPS = Path(__file__).parent / "apps"


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Platform, Node]]:
    folder = tmp_path_factory.mktemp("gangs")
    with (
        running_platform(folder / "home", environ={"GPUFN_NODE": "one"}) as platform,
        Node(folder / "home", folder / "two", "two") as other,
    ):
        until(lambda: {node["node"] for node in nodes(platform)} == {"one", "two"})
        platform.gpufn("deploy", APPS / "gangs.py", "--no-check")
        yield platform, other


@pytest.fixture
def cluster(both: tuple[Platform, Node]) -> Platform:
    return both[0]


def nodes(platform: Platform) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = platform.client.get("/v1/nodes").json()["nodes"]
    return listed


def processes(platform: Platform, function: str) -> list[tuple[str, int]]:
    """Return node and pid of each process of a function."""
    return [
        (node["node"], process["pid"])
        for node in nodes(platform)
        for process in node["processes"]
        if process["function"] == function
    ]


def pid_of(platform: Platform, role: str) -> int:
    """Return the pid of a process of `gpufn up`; 0 while it is down."""
    pid: int = json.loads((platform.home / "up.json").read_bytes())["pids"].get(role, 0)
    return pid


def is_back(platform: Platform, role: str, killed: int) -> bool:
    return pid_of(platform, role) not in (0, killed)


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter if it ends while its entry is read
        return True


def test_both_ranks_run_the_call_on_different_nodes_and_scale_to_zero_together(cluster: Platform) -> None:
    assert cluster.invoke("total", {"value": 5}) == {"total": 15, "world": "2", "rank": "0"}
    assert "2 per worker" in cluster.gpufn("describe", "total")

    def reported() -> list[tuple[str, int]] | None:
        """Return the processes once both nodes have reported theirs. A call keeps them from ending before."""
        assert cluster.invoke("total", {"value": 1}) == {"total": 3, "world": "2", "rank": "0"}
        ranks = {each["rank"] for node in nodes(cluster) for each in node["processes"] if each["function"] == "total"}
        return processes(cluster, "total") if ranks == {0, 1} and cluster.ready_workers("total") == 1 else None

    both = until(reported)
    assert {node for node, _ in both} == {"one", "two"}
    until(lambda: all(has_ended(pid) for _, pid in both))
    until(lambda: not processes(cluster, "total"))


def test_a_rank_that_is_killed_costs_no_call_which_resumes_from_its_checkpoint(
    cluster: Platform, tmp_path: Path
) -> None:
    accepted = cluster.client.post("/v1/functions/train/submit", json={"folder": str(tmp_path), "steps": 4}).json()
    hangs = tmp_path / "worker"
    worker = until(lambda: hangs.exists() and hangs.read_text())
    first = until(lambda: len(found := processes(cluster, "train")) == 2 and found)
    (pid,) = (each["pid"] for node in nodes(cluster) for each in node["processes"] if each["worker"] == worker)
    os.kill(pid, signal.SIGKILL)
    assert wait_for(cluster, accepted["id"]).json() == [0, 2]
    until(lambda: all(has_ended(pid) for _, pid in first))
    attempts = cluster.client.get(f"/v1/invocations/{accepted['id']}").json()["attempts"]
    assert [attempt["reason"] for attempt in attempts] == ["first", "worker_lost"]
    assert (attempts[0]["code"], "rank 1 on " in attempts[0]["message"]) == ("worker_lost", True)


def test_agents_and_runners_that_die_during_a_call_cost_it_nothing(both: tuple[Platform, Node], tmp_path: Path) -> None:
    platform, other = both
    accepted = platform.client.post("/v1/functions/patient/submit", json={"folder": str(tmp_path)}).json()
    until(lambda: {path.name for path in tmp_path.iterdir()} == {"0", "1"})
    running = until(lambda: len(found := processes(platform, "patient")) == 2 and sorted(found))
    for role in ("agent", "runner"):
        pid = pid_of(platform, role)
        os.kill(pid, signal.SIGKILL)
        other.kill(role)
        other.start(role)
        until(functools.partial(is_back, platform, role, pid))
    restarted_at = time.time()
    until(lambda: min(node["sent_at"] for node in nodes(platform)) > restarted_at)
    assert sorted(processes(platform, "patient")) == running
    (tmp_path / "go").touch()
    assert wait_for(platform, accepted["id"]).json() == 2
    attempts = platform.client.get(f"/v1/invocations/{accepted['id']}").json()["attempts"]
    assert [attempt["outcome"] for attempt in attempts] == ["succeeded"]
    until(lambda: not processes(platform, "patient"))


def test_an_error_of_rank_1_reaches_the_caller_with_its_name_and_ends_the_gang(cluster: Platform) -> None:
    answer = cluster.post("raises", {"value": 3})
    assert answer.status_code == 500
    assert [part for part in ("ValueError", "rank 1 on ", "rank 1 got 3") if part not in answer.text] == []
    until(lambda: not processes(cluster, "raises"))


def test_more_nodes_than_the_cluster_has_are_named_and_start_nothing(cluster: Platform) -> None:
    cluster.client.post("/v1/functions/huge/submit", json={})
    why = until(lambda: "9 nodes" in (text := cluster.gpufn("why", "huge")) and text)
    assert "2 are up" in why
    assert processes(cluster, "huge") == []
    assert cluster.invoke("single") == "served"
    warned = cluster.try_gpufn("deploy", APPS / "gangs.py", "--no-check", "--force")
    assert "9 nodes" in warned.stdout + warned.stderr


def test_a_rank_that_dies_at_its_start_fails_the_deploy_and_is_named(cluster: Platform) -> None:
    failed = cluster.try_gpufn("deploy", APPS / "broken_gang.py")
    assert failed.returncode != 0
    assert [part for part in ("rank 1 on ", "code 7") if part not in failed.stdout + failed.stderr] == []
    until(lambda: not processes(cluster, "broken"))
    assert cluster.invoke("single") == "served"
