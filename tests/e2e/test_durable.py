"""Accepted calls have exactly one outcome after kill -9 of any process. Tests count their side effects."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from gpufn_core.ids import new_invocation_id
from tests.conftest import Platform, http_client
from tests.e2e.test_survival import pids_of
from tests.waiting import until

pytestmark = pytest.mark.e2e

APP = Path(__file__).parent / "apps" / "durable.py"


@pytest.fixture(scope="module")
def own(platform: Platform) -> Platform:
    platform.gpufn("deploy", APP)
    return platform


def wait_for(platform: Platform, invocation: str, within_s: float = 60.0) -> httpx.Response:
    give_up = time.monotonic() + within_s
    while True:
        try:
            answer = platform.client.get(f"/v1/invocations/{invocation}/result?wait=10")
            if answer.status_code not in (202, 503):
                return answer
        except httpx.TransportError:  # a restart of the bus breaks waiting requests
            pass
        assert time.monotonic() < give_up, f"{invocation} has not ended"


class Submitters:
    """Clients that choose the ids of their calls and repeat each PUT until it is accepted."""

    def __init__(self, platform: Platform, path: Path) -> None:
        self._url = platform.url
        self._path = path
        self._stop = threading.Event()
        self.accepted: dict[str, int] = {}
        self.wrong: list[str] = []
        self._threads = [threading.Thread(target=self._submit, args=(caller,), daemon=True) for caller in range(3)]

    def __enter__(self) -> Submitters:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def wait_for(self, more: int) -> None:
        goal = len(self.accepted) + more
        until(lambda: len(self.accepted) >= goal, "more calls are accepted")

    def _submit(self, caller: int) -> None:
        number = caller * 1_000_000
        with http_client(self._url, timeout_s=30) as client:
            while not self._stop.is_set():
                number += 1
                invocation = new_invocation_id()
                while not self._put(client, invocation, number):
                    time.sleep(0.02)
                self.accepted[invocation] = number
                time.sleep(0.05)  # a limit to the calls, because the test reads each of them at the end

    def _put(self, client: httpx.Client, invocation: str, number: int) -> bool:
        body = {"path": str(self._path), "number": number}
        try:
            answer = client.put(f"/v1/functions/count/invocations/{invocation}", json=body)
        except httpx.TransportError:
            return False
        if answer.status_code >= 400 and not answer.json().get("retryable"):
            self.wrong.append(f"{number} was refused for good: {answer.text}")
        return answer.status_code == 202


def kill(platform: Platform, victim: str) -> int:
    """Wait for processes of that name and kill them. Return their number."""
    give_up = time.monotonic() + 30
    while time.monotonic() < give_up:
        with contextlib.suppress(KeyError, OSError, ValueError, httpx.HTTPError):  # the process restarts
            if pids := pids_of(platform, victim):
                for pid in pids:
                    os.kill(pid, signal.SIGKILL)
                return len(pids)
        time.sleep(0.01)
    pytest.fail(f"{victim} did not restart")


@pytest.mark.parametrize("victim", ["runner", "worker", "nats", "gateway"])
def test_kill_9_while_calls_are_submitted_leaves_one_outcome_each(own: Platform, tmp_path: Path, victim: str) -> None:
    path, kills = tmp_path / "runs", 0
    with Submitters(own, path) as submitters:
        for _ in range(2):
            submitters.wait_for(30)
            kills += kill(own, victim)
        submitters.wait_for(30)
    assert submitters.wrong == []
    for invocation, number in submitters.accepted.items():
        answer = wait_for(own, invocation)
        assert (answer.status_code, answer.json()) == (200, number), answer.text
    runs = Counter(int(line) for line in path.read_text().splitlines())
    assert set(runs) == set(submitters.accepted.values())
    # A kill repeats the calls that ran on at most two workers with one slot, and the calls in their queues.
    assert sum(runs.values()) - len(runs) <= 64 * kills, runs.most_common(5)


@pytest.mark.parametrize("how", ["invoke", "submit"])
def test_a_running_call_survives_kill_9_of_its_runner(own: Platform, tmp_path: Path, how: str) -> None:
    path = tmp_path / "runs"
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        body = {"path": str(path), "seconds": 4.0}
        called = pool.submit(own.client.post, f"/v1/functions/sleeper/{how}", json=body, timeout=60)
        until(path.exists)
        kill(own, "runner")
        answer = called.result()
    if how == "submit":
        here = f"/v1/invocations/{answer.json()['id']}"
        answer = wait_for(own, answer.json()["id"])
        assert [each["outcome"] for each in own.client.get(here).json()["attempts"]] == ["succeeded"]
    assert (answer.status_code, answer.json()) == (200, "slept")
    assert path.read_text().split() == ["began", "ended"]


def test_a_running_call_that_cannot_be_interrupted_is_cancelled_with_its_worker(own: Platform, tmp_path: Path) -> None:
    path = tmp_path / "runs"
    body = {"path": str(path), "seconds": 60}
    here = own.client.post("/v1/functions/sleeper/submit", json=body).headers["location"]
    until(lambda: own.client.get(here).json()["state"] == "running")
    assert [own.client.delete(here).json()["cancelled"] for _ in range(2)] == [True, False]
    assert own.client.get(f"{here}/result").json()["code"] == "invocation_cancelled"
    # The platform replaces the worker within the grace period, so the next call runs at once.
    body["seconds"] = 0
    answer = own.client.post("/v1/functions/sleeper/invoke", json=body, timeout=40)
    assert (answer.status_code, answer.json()) == (200, "slept")
    assert path.read_text().split() == ["began", "began", "ended"]


def test_a_queued_call_that_is_cancelled_never_runs(own: Platform, tmp_path: Path) -> None:
    first, second, gate = tmp_path / "first", tmp_path / "second", tmp_path / "gate"
    running = own.client.post("/v1/functions/held/submit", json={"path": str(first), "gate": str(gate)})
    queued = own.client.post("/v1/functions/held/submit", json={"path": str(second), "gate": str(gate)})
    status = own.client.get(queued.headers["location"]).json()
    assert (status["state"], bool(status["waiting"]["detail"])) == ("queued", True)
    assert own.client.delete(queued.headers["location"]).json()["cancelled"] is True
    gate.touch()
    assert wait_for(own, running.json()["id"]).status_code == 200
    assert not second.exists()


def test_a_failed_call_is_a_dead_letter_that_can_be_replayed(own: Platform) -> None:
    dead = own.client.post("/v1/functions/picky/submit", json={"number": -1}).json()["id"]
    assert wait_for(own, dead).json()["error_type"] == "ValueError"
    until(lambda: dead in [each["id"] for each in own.client.get("/v1/dlq").json()["letters"]])
    letters = {each["id"]: each["error"]["message"] for each in json.loads(own.gpufn("dlq", "ls", "picky", "--json"))}
    assert letters[dead] == "-1 is below 0"
    again = own.gpufn("dlq", "replay", "picky", dead).strip()
    assert wait_for(own, again).json()["error_type"] == "ValueError"
    assert json.loads(own.gpufn("calls", "picky", "--state", "failed", "--json"))[0]["id"] == again


def test_an_invoke_with_a_key_runs_once_though_its_client_left(own: Platform, tmp_path: Path) -> None:
    path = tmp_path / "runs"
    body, headers = {"path": str(path), "seconds": 1.0}, {"idempotency-key": str(tmp_path)}
    with pytest.raises(httpx.ReadTimeout):
        own.client.post("/v1/functions/sleeper/invoke", json=body, headers=headers, timeout=0.5)
    answer = own.client.post("/v1/functions/sleeper/invoke", json=body, headers=headers, timeout=30)
    assert (answer.status_code, answer.json()) == (200, "slept")
    assert path.read_text().split() == ["began", "ended"]
    other = own.client.post("/v1/functions/sleeper/invoke", json=body | {"seconds": 2}, headers=headers)
    assert (other.status_code, other.json()["code"]) == (409, "idempotency_mismatch")


def test_a_large_result_is_kept(own: Platform) -> None:
    size = 24 << 20
    headers = {"accept": "application/octet-stream"}
    made: dict[str, Any] = own.client.post("/v1/functions/large/submit", json={"size": size}, headers=headers).json()
    answer = wait_for(own, made["id"])
    assert (answer.status_code, len(answer.content)) == (200, size)
    assert answer.content == bytes(range(256)) * (size // 256)
