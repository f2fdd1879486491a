"""Workers that park and resume, on the whole platform without a GPU. Their hooks move no memory; the rest is real."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.conftest import Platform, running_platform
from tests.waiting import until

pytestmark = pytest.mark.e2e

GPU = {"uuid": "GPU-0", "type": "gpu", "kind": "NVIDIA L4", "memory_bytes": 24 << 30}
APP = """
import uuid
from pathlib import Path
from gpufn import enter, gpu_function, method, park, resume

PROCESS = uuid.uuid4().hex

class Holder:
    @enter
    def load(self) -> None:
        self.device, self.host, self.times = "weights", None, 0

    @park
    def move_out(self) -> None:
        self.device, self.host = None, self.device
        Path({folder!r}, PROCESS).write_text(str(self.times + 1))

    @resume
    def move_in(self) -> None:
        if Path({folder!r}, "trouble").exists():
            raise RuntimeError("CUDA out of memory")
        self.device, self.host = self.host, None
        self.times += 1

    @method
    def look(self) -> dict[str, object]:
        return {{"process": PROCESS, "times": self.times, "device": self.device}}

@gpu_function(idle_timeout=0.2, park_timeout=600, max_workers=1)
class Swapped(Holder): ...

@gpu_function(gpu="any", idle_timeout=600, max_workers=1)
class First(Holder): ...

@gpu_function(gpu="any", idle_timeout=600, max_workers=1)
class Second(Holder): ...

@gpu_function(idle_timeout=0.2, park_timeout=600, max_workers=1)
def plain() -> str:
    return PROCESS
"""


class Parking(NamedTuple):
    platform: Platform
    folder: Path  # a file per worker, named by its process, with its number of parks

    def look(self, function: str) -> dict[str, Any]:
        """Return the report of the function's worker about itself."""
        answer = self.platform.post(f"{function}.look")
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json() | {"timing": answer.headers["server-timing"]}
        return found

    def until_parked(self, function: str, looked: dict[str, Any]) -> None:
        """Wait until the worker of the report `looked` has parked again.

        The view of the function is not enough: it may be a second old, and show the park before the report.
        """
        parks = self.folder / looked["process"]
        until(lambda: parks.exists() and int(parks.read_text() or 0) > looked["times"])
        until(lambda: self.workers(function)["parked"] == 1)

    def workers(self, function: str) -> dict[str, int]:
        found: dict[str, int] = self.platform.client.get(f"/v1/functions/{function}").json()["workers"]
        return found

    def why(self, function: str) -> str:
        reason: str = self.platform.client.get(f"/v1/functions/{function}/why").json()["reason"]
        return reason


@pytest.fixture(scope="module")
def parking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parking]:
    folder = tmp_path_factory.mktemp("parking")
    app = folder / "app.py"
    app.write_text(APP.format(folder=str(folder)))
    with running_platform(folder / "home", environ={"GPUFN_DEVICES": json.dumps([GPU])}) as platform:
        platform.gpufn("deploy", app, "--no-check")
        yield Parking(platform, folder)


def test_an_idle_worker_parks_and_the_next_call_resumes_it(parking: Parking) -> None:
    first = parking.look("swapped")
    assert "launch;dur=" in first["timing"]
    parking.until_parked("swapped", first)
    until(lambda: "1 parked for at most 600 s" in parking.why("swapped"))
    until(lambda: "parked" in parking.platform.gpufn("top"))
    second = parking.look("swapped")
    assert (second["process"], second["times"], second["device"]) == (first["process"], first["times"] + 1, "weights")
    assert "resume;dur=" in second["timing"]
    assert "launch;dur=" not in second["timing"]


@pytest.mark.parametrize("victim", ["agent", "runner"])
def test_a_parked_worker_outlives_the_processes_around_it(parking: Parking, victim: str) -> None:
    before = parking.look("swapped")
    parking.until_parked("swapped", before)
    killed = _pid_of(parking.platform, victim)
    os.kill(killed, signal.SIGKILL)
    until(lambda: _pid_of(parking.platform, victim) not in (0, killed))
    after = parking.look("swapped")
    assert (after["process"], after["times"]) == (before["process"], before["times"] + 1)


def test_a_parked_worker_that_is_killed_is_replaced_by_a_new_one(parking: Parking) -> None:
    before = parking.look("swapped")
    parking.until_parked("swapped", before)
    (node,) = parking.platform.client.get("/v1/nodes").json()["nodes"]
    (pid,) = (each["pid"] for each in node["processes"] if each["function"] == "swapped")
    os.kill(pid, signal.SIGKILL)
    after = parking.look("swapped")
    assert after["times"] == 0
    assert after["process"] != before["process"]


def test_a_worker_that_cannot_be_parked_ends_and_the_platform_reports_the_reason(parking: Parking) -> None:
    parking.platform.invoke("plain")
    until(lambda: not any(parking.workers("plain").values()))
    until(lambda: "none is parked: a worker did not park: it has no known GPU memory" in parking.why("plain"))
    until(lambda: "not parked: it has no known GPU memory" in parking.platform.gpufn("logs", "plain"))


def test_two_functions_alternate_on_one_gpu_and_both_processes_live(parking: Parking) -> None:
    first, second = parking.look("first"), parking.look("second")
    assert "launch;dur=" in second["timing"]
    parking.until_parked("first", first)
    again = parking.look("first")
    assert (again["process"], again["times"]) == (first["process"], 1)
    other = parking.look("second")
    assert (other["process"], other["times"]) == (second["process"], 1)


def test_a_worker_that_cannot_be_resumed_is_replaced_and_its_function_stops_parking(parking: Parking) -> None:
    before = parking.look("swapped")
    parking.until_parked("swapped", before)
    (parking.folder / "trouble").touch()
    after = parking.look("swapped")
    assert after["process"] != before["process"]
    assert "launch;dur=" in after["timing"]
    until(lambda: "none is parked: a worker did not resume: CUDA out of memory" in parking.why("swapped"))
    until(lambda: "CUDA out of memory" in parking.platform.gpufn("logs", "swapped"))


def _pid_of(platform: Platform, process: str) -> int:
    """Return the pid of a process of `gpufn up`; 0 while it is down."""
    pid: int = json.loads((platform.home / "up.json").read_bytes())["pids"].get(process, 0)
    return pid
