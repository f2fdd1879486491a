"""Workers in containers of a real Docker daemon, from the point of view of functions and callers."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from gpufn_core.home import Home
from gpufn_runtime.agent.workers.profiler import find_program
from tests.conftest import Platform, missing
from tests.runtime.agent.docker.conftest import APPS, Daemon, platform_with
from tests.waiting import until

pytestmark = pytest.mark.e2e


def pids(platform: Platform) -> dict[str, int]:
    found: dict[str, int] = json.loads(Home(platform.home).up_file.read_bytes())["pids"]
    return found


def standbys(platform: Platform) -> list[str]:
    node: dict[str, Any] = platform.client.get("/v1/nodes").json()["nodes"][0]
    return [name for name in node["templates"] if name.startswith("gpufn-")]


def workers(platform: Platform, function: str) -> int:
    return sum(platform.client.get(f"/v1/functions/{function}").json()["workers"].values())


def test_a_worker_is_confined(contained: Platform) -> None:
    seen = contained.invoke("look")
    assert seen["uid"] >= 1_900_000_000
    assert set(seen["capabilities"].values()) == {"0000000000000000"}
    assert (seen["no_new_privileges"], seen["seccomp"]) == ("1", "2")
    assert (seen["interfaces"], seen["reachable"]) == (["lo"], [])
    assert seen["mounts"] == [
        "/gpufn/lib/gpufn",
        "/gpufn/lib/gpufn_core",
        "/gpufn/lib/gpufn_platform",
        "/gpufn/lib/gpufn_runtime",
        "/gpufn/shared_bodies",
        "/gpufn/worker",
    ]
    assert seen["shm"] == ["nodev", "noexec", "nosuid"]
    assert set(seen["write"].values()) == {"OSError Read-only file system"}
    assert seen["write_tmp"] == "written"
    assert (seen["pids"], seen["memory"]) == ("1024", str(96 << 20))
    assert not [name for name in seen["environ"] if name.startswith(("GPUFN", "NATS"))]
    assert seen["first"] == ["python3", "-P", "-m", "gpufn_runtime.worker"]


def test_only_a_function_that_requests_it_has_a_network(contained: Platform) -> None:
    assert contained.invoke("outward") == ["eth0", "lo"]


def test_no_two_workers_are_the_same_user(contained: Platform) -> None:
    first = contained.invoke("look")["uid"]
    until(lambda: workers(contained, "look") == 0)
    assert contained.invoke("look")["uid"] != first


@pytest.mark.parametrize("size", [10, 3 << 20])
def test_bodies_are_passed_to_a_container_and_back_inline_or_by_reference(contained: Platform, size: int) -> None:
    body = os.urandom(size)
    answer = contained.post("echo", body, headers={"content-type": "application/octet-stream"})
    assert (answer.status_code, answer.content == body) == (200, True)


def test_a_worker_in_a_container_is_profiled(contained: Platform) -> None:
    if find_program() is None:
        missing("py-spy is not installed")
    call = json.loads(contained.gpufn("submit", "busy", "--json"))["id"]
    until(lambda: contained.client.get(f"/v1/invocations/{call}").json()["state"] == "running")
    shown = json.loads(contained.gpufn("profile", "busy", "--seconds", "1", "--call", call, "--json"))
    assert shown["top"][0]["frame"].startswith("spin (")
    assert shown["top"][0]["own"] > 0.9, "neither the init nor threads that wait are in it"
    memory = json.loads(contained.gpufn("profile", "busy", "--memory", "--seconds", "1", "--json"))
    assert memory["worker"] == shown["worker"]
    contained.gpufn("cancel", call)
    until(lambda: workers(contained, "busy") == 0)  # the next tests count containers


def test_a_worker_beyond_its_memory_is_killed_and_its_caller_gets_the_reason(contained: Platform) -> None:
    answer = contained.post("eat")
    assert answer.status_code == 502, answer.text
    assert "its 96 MiB of memory" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("segv", "was killed by SIGSEGV, or exited with code 139"),
        ("exit", "exited with code 7"),
        ("orphan", "exited with code 0"),
    ],
)
def test_the_error_of_a_call_has_the_reason_of_its_workers_end(contained: Platform, how: str, said: str) -> None:
    answer = contained.post("end", {"how": how})
    assert answer.status_code == 502, answer.text
    assert said in answer.json()["detail"]


def test_a_cold_start_uses_the_paused_standby_container(contained: Platform, daemon: Daemon) -> None:
    # One per difference between the functions: memory, egress, none.
    waiting = set(until(lambda: len(found := daemon.frozen()) == 3 and found))
    until(lambda: workers(contained, "who") == 0)
    contained.invoke("who")
    assert len(waiting & set(daemon.awake())) == 1


def test_of_a_worker_that_ended_nothing_is_left(contained: Platform, daemon: Daemon) -> None:
    contained.invoke("who")
    home = Home(contained.home)
    until(lambda: not any((home.run / "w").iterdir()), "no workers' folders")
    until(lambda: not daemon.awake(), "no container runs")
    until(lambda: not daemon.containers(status="exited"), "no containers that ended")
    folders = until(
        lambda: len(left := sorted(path.name for path in home.shared_bodies.glob("[wc]-*"))) <= 4 and (left or ["none"])
    )
    assert not [name for name in folders if name.startswith("w-")]


def test_a_container_that_is_killed_from_outside_costs_its_call_and_is_replaced(
    contained: Platform, daemon: Daemon
) -> None:
    container = contained.invoke("stays")
    [running] = daemon.awake()
    daemon.docker("kill", running)
    until(lambda: running not in daemon.containers())
    assert contained.invoke("stays") != container


def test_a_restarted_agent_adopts_containers_and_removes_orphans(contained: Platform, daemon: Daemon) -> None:
    container = contained.invoke("stays")
    stranger = standbys(contained)
    running = set(daemon.awake())
    paused = set(until(daemon.frozen))
    agent = pids(contained)["agent"]
    os.kill(agent, signal.SIGKILL)
    until(lambda: pids(contained).get("agent", agent) != agent)
    until(lambda: not paused & set(daemon.containers()), "no standbys of the dead agent")
    assert running <= set(daemon.awake())
    assert contained.invoke("stays") == container
    until(lambda: standbys(contained) and stranger)


def test_an_image_has_the_requested_contents(contained: Platform, daemon: Daemon) -> None:
    contained.gpufn("deploy", APPS / "imaged.py", "--no-check")
    assert contained.invoke("greet") == "Good morning"
    assert "image: Step 1/" in contained.gpufn("logs", "greet")
    assert len(daemon.images()) == 2


def test_an_image_that_does_not_build_names_the_failed_line(contained: Platform) -> None:
    contained.gpufn("deploy", APPS / "imaged.py", "--no-check")
    answer = contained.post("never")
    assert answer.status_code == 503
    assert "ERROR: Could not install" in answer.json()["detail"]
    assert "ERROR: Could not install" in contained.gpufn("logs", "never")


def test_a_base_image_that_is_not_there_is_named(contained: Platform) -> None:
    contained.gpufn("deploy", APPS / "imaged.py", "--no-check")
    answer = contained.post("no-base")
    assert answer.status_code == 503
    assert "gpufn-test-nothing:1" in answer.json()["detail"]


def test_an_image_that_was_removed_is_built_again(contained: Platform, daemon: Daemon) -> None:
    contained.gpufn("deploy", APPS / "imaged.py", "--no-check")
    contained.invoke("greet")
    for tag in daemon.images():
        daemon.docker("tag", tag, "gpufn-test-kept:1")  # an image that a container uses cannot lose its last tag
        daemon.docker("rmi", tag)
    for container in daemon.containers():
        daemon.remove(container)
    until(lambda: contained.ready_workers("greet") == 0)
    assert contained.invoke("greet") == "Good morning"


def test_images_that_nothing_uses_are_removed(contained: Platform, daemon: Daemon) -> None:
    contained.gpufn("deploy", APPS / "imaged.py", "--no-check")
    contained.invoke("greet")
    for name in ("greet", "never", "no-base"):
        contained.gpufn("rm", name, "--yes")
    until(lambda: len(daemon.images()) == 1, "no images besides that of functions without one of their own")


def test_the_platform_reports_a_stopped_docker_daemon_and_recovers(contained: Platform, daemon: Daemon) -> None:
    answers: list[Any] = []
    caller = threading.Thread(target=lambda: answers.append(contained.post("long")))
    caller.start()
    until(lambda: "under way" in contained.gpufn("logs", "long"))
    daemon.stop()
    try:
        caller.join(60)
        waiting = threading.Thread(target=lambda: until(lambda: contained.post("who").status_code == 200))
        waiting.start()
        until(lambda: "it cannot start containers: Docker at" in contained.gpufn("why", "who"))
    finally:
        daemon.start()
    waiting.join(60)
    # Docker kills its containers when it ends, and may or may not report that in time.
    assert "SIGKILL" in answers[0].text or "does not answer" in answers[0].text
    until(lambda: contained.ready_workers("who") == 1)  # a report of the controller, later than the answer
    home = Home(contained.home)
    until(lambda: not any((home.run / "w").iterdir()), "no workers' folders")
    until(lambda: not daemon.containers(status="exited"), "no containers that ended")


def test_an_exit_that_docker_cannot_report_is_explained(contained: Platform, daemon: Daemon) -> None:
    answers: list[Any] = []
    caller = threading.Thread(target=lambda: answers.append(contained.post("long")))
    caller.start()
    until(lambda: contained.client.get("/v1/functions/long").json()["running"] == 1)
    processes = [daemon.pid(container) for container in daemon.awake()]
    with daemon.hung():
        for pid in processes:
            os.kill(pid, signal.SIGKILL)
        caller.join(60)
    assert "does not answer" in answers[0].json()["detail"]


def test_when_the_platform_ends_nothing_of_it_is_left(daemon: Daemon, tmp_path: Path) -> None:
    own = f"gpufn-{hashlib.sha256(os.fsencode(tmp_path / 'home')).hexdigest()[:12]}"  # others get standbys meanwhile
    with platform_with(daemon, tmp_path / "home") as platform:
        platform.gpufn("deploy", APPS / "confined.py", "--no-check")
        platform.invoke("stays")
        assert daemon.containers(owner=own)
    assert daemon.containers(owner=own) == []
    assert not list((Home(tmp_path / "home").run / "c").glob("*"))


def test_a_container_reads_the_nodes_weights_and_cannot_change_them(contained: Platform) -> None:
    contained.gpufn("deploy", APPS / "weighed.py")
    seen = contained.invoke("weigh")
    assert seen["text"] == (APPS / "greeting.txt").read_text()
    assert seen["chmod"] in ("OSError", "PermissionError")
    assert seen["links"] == 3, "the file, its name in the weights, and in the worker's folder"
