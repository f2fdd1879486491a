"""kill -9 of each process under load: the platform loses no accepted call, and recovers by itself.

The load consists of clients that wait for results and clients that submit calls and read the results later. Each test
kills one process; the next test uses the restarted platform. Every accepted call ends exactly once. Waiting clients
receive a result or a retryable error. The platform serves calls again without a person.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import Platform, http_client, running_platform

pytestmark = pytest.mark.e2e

APP = Path(__file__).parent / "apps" / "steady.py"
WHOLE_AGAIN_S = 60.0  # recovery takes a few seconds on an idle machine
# Between two calls of a client. A call takes 0.02 s, so that calls run and wait at any time. More calls prove no more.
PAUSE_S = 0.03


@pytest.fixture(scope="module")
def own(platform: Platform) -> Platform:
    platform.gpufn("deploy", APP)
    platform.gpufn("deploy", APP.with_name("nested.py"))
    assert platform.invoke("steady", {"number": 1}) == 1
    return platform


class Load:
    """Callers in threads, which record accepted calls, answers, and the errors of refused calls."""

    def __init__(self, platform: Platform, function: str = "steady") -> None:
        self._url = platform.url
        self._function = function
        self._stop = threading.Event()
        self.accepted: dict[str, int] = {}
        self.answered = 0
        self.refused: list[str] = []
        self.wrong: list[str] = []
        self._lock = threading.Lock()
        work = [self._submit, self._submit, self._call, self._call]
        self._threads = [
            threading.Thread(target=caller, args=(number,), daemon=True) for number, caller in enumerate(work)
        ]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def wait_for_answers(self, more: int, within_s: float) -> float:
        """Wait for `more` answers. Return the seconds that it took."""
        goal, began = self.answered + more, time.monotonic()
        while self.answered < goal:
            assert time.monotonic() - began < within_s, f"too few answers in {within_s} s: {self.refused[-3:]}"
            time.sleep(0.01)
        return time.monotonic() - began

    def _submit(self, caller: int) -> None:
        number = caller * 1_000_000
        with http_client(self._url, timeout_s=30) as client:
            while not self._stop.is_set():
                number += 1
                answer = self._try(client, "submit", number)
                if answer is not None and answer.status_code == 202:
                    with self._lock:
                        self.accepted[answer.json()["id"]] = number
                time.sleep(PAUSE_S)

    def _call(self, caller: int) -> None:
        number = caller * 1_000_000
        with http_client(self._url, timeout_s=30) as client:
            while not self._stop.is_set():
                number += 1
                answer = self._try(client, "invoke", number)
                if answer is not None and answer.status_code == 200:
                    if answer.json() == number:
                        self.answered += 1
                    else:
                        self.wrong.append(f"{number} gave {answer.text}")
                time.sleep(PAUSE_S)

    def _try(self, client: httpx.Client, verb: str, number: int) -> httpx.Response | None:
        try:
            answer = client.post(f"/v1/functions/{self._function}/{verb}", json={"number": number})
        except httpx.TransportError as error:
            self.refused.append(type(error).__name__)  # the gateway restarts
            return None
        if answer.status_code >= 400:
            problem: dict[str, Any] = answer.json()
            self.refused.append(problem["code"])
            if not problem.get("retryable"):
                self.wrong.append(f"{number} was refused for good: {answer.text}")
            return None
        return answer


def pids_of(platform: Platform, name: str) -> list[int]:
    if name != "worker":
        return [json.loads((platform.home / "up.json").read_bytes())["pids"][name]]
    nodes = platform.client.get("/v1/nodes").json()["nodes"]
    return [process["pid"] for node in nodes for process in node["processes"]]


@pytest.mark.parametrize("victim", ["worker", "runner", "agent", "gateway", "nats"])
def test_kill_9_under_load_loses_no_accepted_call(own: Platform, victim: str) -> None:
    with Load(own) as load:
        load.wait_for_answers(20, WHOLE_AGAIN_S)
        for pid in pids_of(own, victim):
            with contextlib.suppress(ProcessLookupError):  # a worker of a function that another file has deleted
                os.kill(pid, signal.SIGKILL)
        load.wait_for_answers(25, WHOLE_AGAIN_S)
        load.stop()
    assert load.wrong == []
    assert load.accepted, "calls were accepted"
    ends = {}
    for invocation, number in load.accepted.items():
        answer = own.client.get(f"/v1/invocations/{invocation}/result", params={"wait": 30})
        ends[invocation] = (answer.status_code, answer.text, number)
    lost = {key: end for key, end in ends.items() if end[0] not in (200, 502, 503, 500)}
    assert lost == {}
    for invocation, (status, text, number) in ends.items():
        if status == 200:
            assert json.loads(text) == number, invocation
        else:
            # Only a call that ran in the killed worker may end without a result; its error has to be worker_lost.
            assert victim == "worker", text
            assert json.loads(text)["code"] == "worker_lost", text
    again = {invocation: own.client.get(f"/v1/invocations/{invocation}/result").text for invocation in list(ends)[:20]}
    assert again == {invocation: ends[invocation][1] for invocation in again}, "the outcome of a call changed"


def test_a_restart_of_the_bus_fails_no_nested_calls(own: Platform) -> None:
    with Load(own, "outer") as load:
        load.wait_for_answers(20, WHOLE_AGAIN_S)
        for _ in range(3):
            os.kill(pids_of(own, "nats")[0], signal.SIGKILL)
            load.wait_for_answers(25, WHOLE_AGAIN_S)
        load.stop()
    assert load.wrong == []
    assert "function_raised" not in load.refused
    for invocation, number in load.accepted.items():
        answer = own.client.get(f"/v1/invocations/{invocation}/result", params={"wait": 30})
        assert (answer.status_code, answer.text) == (200, str(number))


@pytest.mark.parametrize(("frozen", "for_s"), [("nats", 1.0), ("runner", 3.0)])
def test_a_frozen_process_loses_no_call(own: Platform, frozen: str, for_s: float) -> None:
    """A process after SIGSTOP keeps its connections but does not respond."""
    with Load(own) as load:
        load.wait_for_answers(20, WHOLE_AGAIN_S)
        [pid] = pids_of(own, frozen)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(for_s)
        os.kill(pid, signal.SIGCONT)
        load.wait_for_answers(25, WHOLE_AGAIN_S)
        load.stop()
    assert load.wrong == []
    for invocation in load.accepted:
        assert own.client.get(f"/v1/invocations/{invocation}/result", params={"wait": 30}).status_code == 200


def test_a_killed_up_ends_all_processes_and_the_next_up_serves_all_calls(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with running_platform(home) as first:
        first.gpufn("deploy", APP)
        assert first.invoke("steady", {"number": 1}) == 1
        with Load(first) as load:
            load.wait_for_answers(20, WHOLE_AGAIN_S)
            platform = [
                os.pidfd_open(pid) for name in ("nats", "gateway", "agent", "runner") for pid in pids_of(first, name)
            ]
            workers = [os.pidfd_open(pid) for pid in pids_of(first, "worker")]
            first.process.kill()
            first.process.wait()
            assert [has_ended(pidfd) for pidfd in platform] == [True] * len(platform)
            load.stop()
    with running_platform(home) as again:
        assert again.invoke("steady", {"number": 2}) == 2
        for invocation, number in load.accepted.items():
            answer = again.client.get(f"/v1/invocations/{invocation}/result", params={"wait": 30})
            # A call that ran may be reported as lost, because it may have had its effect.
            assert (answer.status_code, answer.text) == (200, str(number)) or answer.json()["code"] == "worker_lost"
    assert [has_ended(pidfd) for pidfd in workers] == [True] * len(workers)
    for pidfd in platform + workers:
        os.close(pidfd)


def has_ended(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], WHOLE_AGAIN_S)[0])
